"""Redistribution: every pair of layouts, exact values, and only the bytes that each rank lacks."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import LayoutError, ShapeError
from simparallel.layout.boxes import Moves, box_of, intersection, size_of
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import plan_redistribution
from simparallel.layout.sharding import placement
from simparallel.layout.strategy import layout_of_cuts
from simparallel.parallel import distribute_tensor, from_local
from simparallel.parallel.operator.interpreter import sharder

SHAPE = (8, 8)
UNEVEN = [(5, 3), (7, 9), (1, 2), (3, 3)]  # no size divisible into four slices


def layouts_over(sizes, nests=False):
    """Return every layout of a matrix over a mesh: each axis cuts a dim or none, in any order on it.

    With `nests` also those in which the last axis of a dim cuts the slices of the others.
    """
    names = "abc"[: len(sizes)]
    mesh = Layout(sizes, tuple(names))
    found = {}
    for dims in product((None, 0, 1), repeat=len(names)):
        for order in permutations(names):
            entries = [tuple(n for n in order if dims[names.index(n)] == d) for d in (0, 1)]
            layout = mesh(*(entry or "None" for entry in entries))
            found[layout.axes_by_dim] = layout
            for dim in (0, 1):
                if nests and len(entries[dim]) > 1:
                    outer = [entry[:-1] if d == dim else entry for d, entry in enumerate(entries)]
                    nested = mesh(*(entry or "None" for entry in outer)).cut_slices(entries[dim][-1], dim)
                    found[layout.axes_by_dim, dim] = nested
    return list(found.values())


def lacking(source, target, rank, shape=SHAPE):
    """Count the elements that the rank needs and lacks."""
    need, have = box_of(target, rank, shape), box_of(source, rank, shape)
    return size_of(need) - size_of(intersection(need, have))


@pytest.mark.parametrize("shape", [SHAPE, *UNEVEN], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)])
def test_plans_receive_only_missing_bytes(sizes, shape):
    layouts = layouts_over(sizes, shape in UNEVEN)
    total = 0
    for source, target in list(product(layouts, layouts))[:: 1 if shape == SHAPE else 11]:
        plan = plan_redistribution(source, target, shape)
        expected = tuple(4 * lacking(source, target, rank, shape) for rank in source.mesh.ranks)
        assert plan.received_bytes(4) == expected
        assert plan.is_free == (not any(expected))
        total += sum(expected) // 4
    if sizes == (2, 2, 2) and shape == SHAPE:
        assert (len(layouts), total) == (49, 195_648)  # the known lower bound over these pairs


@pytest.mark.parametrize("shape", [(24, 24), (5, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(2,), (2, 2), (3, 2), (2, 2, 2)])
def test_moves_of_a_rank_match_the_list_of_all_moves(sizes, shape):
    """Groups, counts and a rank's own moves come from arithmetic; the oracle is the list of all moves."""
    layouts = layouts_over(sizes, nests=True)
    for source, target in list(product(layouts, layouts))[:: 1 if len(layouts) < 40 else 11]:
        needs = {rank: box_of(target, rank, shape) for rank in target.mesh.ranks}
        moves = Moves(source, needs, shape)
        everything = moves.all()
        linked = {rank: {rank} for rank in needs}
        for giver, taker, _ in everything:
            joined = linked[giver] | linked[taker]
            for rank in joined:
                linked[rank] = joined
        groups = {tuple(sorted(ranks)) for ranks in linked.values() if len(ranks) > 1}
        assert groups == set(moves.groups)
        for rank in needs:
            others = [move for move in everything if move.target == rank != move.source]
            assert sorted(moves.of(rank)) == sorted(move for move in everything if rank in move[:2])
            assert moves.num_sources(rank) == len(others)
            assert moves.sizes(rank) == {size_of(move.box) for move in others}
            assert moves.received[rank] == sum(size_of(move.box) for move in others)


def test_plan_for_many_ranks_lists_no_pairs(monkeypatch):
    """An all-to-all of 1024 ranks has a million moves; the plan, and one rank's part of it, need not list them."""
    asked = []
    gets = Moves._incoming
    monkeypatch.setattr(Moves, "_incoming", lambda self, rank: asked.append(rank) or gets(self, rank))
    rows, columns = layout_of_cuts((1024, 1), 1024), layout_of_cuts((1, 1024), 1024)
    plan = plan_redistribution(rows, columns, (1024, 2048))

    assert str(plan.steps[0]).startswith("all_to_all dim 1, 0 over [0, 1, 2,")
    assert plan.received_bytes(4) == (1023 * 2 * 4,) * 1024
    assert len(plan.steps[0].exchange.of(7)) == 2 * 1024 - 1
    assert asked == [7]


def test_between_meshes_of_different_shape():
    """Rows over 8 to columns over 4 that repeat: the meshes have no common axes."""
    for a, b in product([(8, 1), (1, 8), (2, 4), (4, 1), (2, 2), (1, 1)], repeat=2):
        source, target = layout_of_cuts(a, 8), layout_of_cuts(b, 8, "left")
        plan = plan_redistribution(source, target, SHAPE)
        assert plan.received_bytes(1) == tuple(lacking(source, target, rank) for rank in range(8))


def run_all(shape, pairs):
    x = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    sent = 0
    for source, target in pairs:
        whole = placement(target, shape)
        mine = x[source.slices(sp.get_rank(), shape)].copy()
        y = sharder().carry(mine, placement(source, shape), whole)
        np.testing.assert_array_equal(y, x[target.slices(sp.get_rank(), shape)])
        sent += lacking(source, target, sp.get_rank(), shape)
    return sent


@pytest.mark.matrices
@pytest.mark.parametrize(
    ("sizes", "shape", "step"),
    [((2,), SHAPE, 1), ((2, 2), SHAPE, 1), ((2, 2, 2), SHAPE, 1), *[((2, 2), shape, 1) for shape in UNEVEN],
     ((2,), (3, 3), 1), ((5,), (7, 9), 1), ((2, 2, 2), (7, 9), 13)],
)  # fmt: skip
def test_every_pair_moves_right_values_and_bytes(sizes, shape, step):
    """Between every pair of layouts the values are right, and the bytes are the lower bound."""
    layouts = layouts_over(sizes, shape in UNEVEN)
    pairs = list(product(layouts, layouts))[::step]
    results = sp.launch(run_all, (shape, pairs), world_size=prod(sizes), transport="inline")
    counted = [0] * prod(sizes)
    for event in results.trace.events:
        if event.kind in ("collective", "p2p"):
            counted[event.rank] += event.sent_bytes
    assert sum(counted) == 8 * sum(results)  # total bytes sent = total bytes received


@pytest.mark.parametrize(
    ("source", "target", "text", "size_bytes"),
    [
        (layout_of_cuts((8, 1), 8), Layout((2, 4), ("m", "k"))("m", "k"), "all_to_all", 9408),
        (Layout((2, 4), ("m", "k"))("m", "None").with_partial("k"), layout_of_cuts((4, 1), 8), "all_reduce + slice", 0),
        (Layout((8,), ("k",))("None", "None").with_partial("k"), layout_of_cuts((8, 1), 8), "reduce_scatter", 21952),
        (layout_of_cuts((8, 1), 8), Layout((8,), ("a",))("None", "None"), "all_gather", 87808 // 4),
        (Layout((8,), ("a",))("None", "None"), layout_of_cuts((8, 1), 8), "slice", 0),
        (layout_of_cuts((2, 1), 8), Layout((2, 4), ("d0", "r"))("d0", "None"), "nothing", 0),
    ],
)  # fmt: skip
def test_plans_are_named_after_their_steps(source, target, text, size_bytes):
    plan = plan_redistribution(source, target, (32, 784) if "all_to_all" in text else (32, 196))

    assert str(plan) == text
    if text in ("all_to_all", "reduce_scatter", "slice", "nothing"):
        assert plan.received_bytes(4)[0] == size_bytes


def test_reduce_scatter_follows_the_layout_order():
    """The group's order is the chunk order of the target, not the order of the ranks."""
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    plan = plan_redistribution(
        layout("mp", "None").with_partial(("sp", "dp")), layout(("mp", "sp", "dp"), "None"), (32, 512)
    )

    (step,) = plan.steps
    assert (step.kind, step.groups) == ("reduce_scatter", ((0, 4, 2, 6), (1, 5, 3, 7)))


def test_sums_are_not_split_again():
    layout = Layout((2, 2), ("a", "b"))
    with refused(LayoutError):
        plan_redistribution(layout("a"), layout("a").with_partial("b"), (4,))
    with refused(LayoutError):
        plan_redistribution(layout("a").with_partial("b"), Layout((8,), ("b",))("None").with_partial("b"), (8,))


@given(
    st.sampled_from(layouts_over((2, 2))),
    st.sampled_from(layouts_over((2, 2))),
    st.sampled_from((0, 1, 2, 3)),
    st.sampled_from([SHAPE, *UNEVEN]),
)
def test_partial_sums_are_reduced_once(source, target, which, shape):
    """Addends differ and alternate in sign, so a reduction left out or done twice cannot pass."""
    used = {axis for axes in source.axes_by_dim for axis in axes}
    partial = tuple(axis for i, axis in enumerate("ab") if which >> i & 1 and axis not in used)
    summed = source.with_partial(partial)
    x = np.arange(prod(shape), dtype=np.float64).reshape(shape)

    def device():
        rank = sp.get_rank()
        coordinate = dict(zip("ab", summed.mesh.coordinate(rank), strict=True))
        addend = x.copy()
        for i, axis in enumerate(partial):  # 3 x and -2 x add up to x
            addend = addend * (3 - 5 * coordinate[axis]) + 7 * (i + 1) * (1 - 2 * coordinate[axis])
        y = sharder().carry(
            addend[source.slices(rank, shape)].copy(), placement(summed, shape), placement(target, shape)
        )
        return np.array_equal(
            y, x[target.slices(rank, shape)] if partial != ("a", "b") else _both(x)[target.slices(rank, shape)]
        )

    assert all(sp.launch(device, world_size=4, transport="inline"))


def _both(x):
    """Return the sums of the four addends of the test above, worked out one by one."""
    total = np.zeros_like(x)
    for a, b in product((0, 1), repeat=2):
        total += (x * (3 - 5 * a) + 7 * (1 - 2 * a)) * (3 - 5 * b) + 14 * (1 - 2 * b)
    return total


def test_gradients_are_redistributed_back():
    layout = Layout((2, 2), ("a", "b"))

    def device():
        x = distribute_tensor(np.arange(16.0).reshape(4, 4), layout("a", "b"), requires_grad=True)
        y = x.redistribute(layout("None", ("b", "a")))
        assert y.layout == layout("None", ("b", "a"))
        (y.full_tensor() * np.arange(16.0).reshape(4, 4)).sum().backward()
        return x.grad.layout == x.layout and np.array_equal(x.grad.full_tensor().numpy(), np.arange(16.0).reshape(4, 4))

    assert all(sp.launch(device, world_size=4, transport="inline"))


@pytest.mark.process
def test_every_pair_between_processes(processes):
    layouts = layouts_over((2, 2))
    pairs = list(product(layouts, layouts))[::7]
    assert processes.run(4, run_all, SHAPE, pairs)
    assert processes.run(4, run_all, (5, 3), pairs)


def test_mesh_of_many_axes_has_all_groups():
    """One group for each position on the other axes: 80 for the axes and the pairs of axes of 16 ranks."""
    mesh = Layout((2, 2, 2, 2), ("a", "b", "c", "d")).mesh

    def device():
        groups = sharder().groups
        mine = [groups.mine(mesh.groups(axes)) for n in (1, 2) for axes in permutations("abcd", n)]
        return [(group.ranks, sp.all_reduce(np.ones(1), group=group)[0]) for group in mine]

    for rank, found in enumerate(sp.launch(device, world_size=16, transport="inline")):
        wanted = [mesh.group(axes, rank) for n in (1, 2) for axes in permutations("abcd", n)]
        assert found == [(ranks, len(ranks)) for ranks in wanted]


# --- between different ranks --------------------------------------------------------------------------------


def placed_over(ranks):
    """Layouts of a matrix over these ranks."""
    size = len(ranks)
    mesh = Layout((size,), ("a",), list(ranks))
    return [mesh(*dims) for dims in (("None", "None"), ("a", "None"), ("None", "a"))]


SUBSETS = [(0,), (2,), (0, 1), (3, 1), (2, 3), (0, 1, 2, 3), (3, 0, 2, 1)]


def run_between_ranks(pairs, shape=SHAPE):
    x = np.arange(prod(shape), dtype=np.float64).reshape(shape)
    rank, kinds = sp.get_rank(), []
    for source, target in pairs:
        laid = distribute_tensor(x, source, requires_grad=True)
        held = x[source.slices(rank, shape)] if rank in source.mesh.ranks else np.zeros(0)
        assert laid.data.size == held.size
        moved = laid.redistribute(target)
        if rank in target.mesh.ranks:
            np.testing.assert_array_equal(moved.data, x[target.slices(rank, shape)])
        else:
            assert moved.data.size == 0
            with refused(LayoutError):
                moved.numpy()
        whole = moved.full_tensor()
        np.testing.assert_array_equal(whole.numpy(), x)
        (whole * (x + 1)).sum().backward()
        assert laid.grad.layout == source
        np.testing.assert_array_equal(laid.grad.full_tensor().numpy(), x + 1)
        kinds.append(str(plan_redistribution(source, target, shape)))
    return kinds


@pytest.mark.parametrize("shape", [SHAPE, (5, 1)], ids=str)
def test_redistribution_between_some_ranks(shape):
    """Values, gradients and bytes between all pairs of layouts over some of four ranks."""
    pairs = [(a, b) for s, t in product(SUBSETS, SUBSETS) for a in placed_over(s) for b in placed_over(t)]
    for source, target in pairs:
        plan = plan_redistribution(source, target, shape)
        expected = []
        for rank in plan.ranks:
            if rank not in target.mesh.ranks:
                expected.append(0)
            elif rank in source.mesh.ranks:
                expected.append(lacking(source, target, rank, shape))
            else:
                expected.append(size_of(box_of(target, rank, shape)))
        assert plan.received_bytes(1) == tuple(expected)
        assert set(plan.ranks) == {*source.mesh.ranks, *target.mesh.ranks}

    kinds = sp.launch(run_between_ranks, (pairs[::2], shape), world_size=4, transport="inline")
    named = {"broadcast", "slice", "messages", "nothing"} | ({"all_gather"} if shape == SHAPE else set())
    assert named <= set(kinds[0])


def test_one_rank_broadcasts_to_all():
    one, all_of_them = Layout((1,), ("a",), [0]), Layout((4,), ("r",))
    plan = plan_redistribution(one("None", "None"), all_of_them("None", "None"), SHAPE)

    assert (str(plan.steps[0]), plan.received_bytes(8)) == ("broadcast over [0, 1, 2, 3]", (0, 512, 512, 512))
    back = plan_redistribution(all_of_them("None", "None"), one("None", "None"), SHAPE)
    assert (str(back), back.is_free) == ("slice", True)
    scattered = plan_redistribution(one("None", "None"), all_of_them("r", "None"), SHAPE)
    assert (str(scattered), scattered.received_bytes(8)) == ("messages", (0, 128, 128, 128))


def test_sum_over_some_ranks_is_reduced_among_them():
    half, other = Layout((2,), ("a",), [1, 3]), Layout((2,), ("b",), [2, 0])

    def device():
        rank = sp.get_rank()
        addend = np.full(SHAPE, 10.0**rank) if rank in (1, 3) else np.zeros((0, 0))
        source = half("None", "None").with_partial("a")
        y = sharder().carry(addend, placement(source, SHAPE), placement(other("b", "None"), SHAPE))
        return y.tolist() == ([[1010.0] * 8] * 4 if rank in (0, 2) else [])

    assert all(sp.launch(device, world_size=4, transport="inline"))


def test_scalars_and_empty_tensors():
    one, two = Layout((1,), ("a",), [1]), Layout((2,), ("b",), [0, 2])

    def device():
        rank = sp.get_rank()
        x = distribute_tensor(np.float64(7), one()).redistribute(two())
        empty = distribute_tensor(np.zeros((0, 3)), one("None", "None")).redistribute(two("b", "None"))
        held = float(x.data[()]) if rank in (0, 2) else x.data.size
        return held, float(x.full_tensor().numpy()), empty.full_tensor().numpy().shape

    assert list(sp.launch(device, world_size=3, transport="inline")) == [
        (7.0, 7.0, (0, 3)),
        (0, 7.0, (0, 3)),
        (7.0, 7.0, (0, 3)),
    ]


def test_ops_refuse_tensors_on_some_ranks():
    some = Layout((2,), ("a",), [0, 1])

    def device():
        x = distribute_tensor(np.ones((4, 4)), some("a", "None"))
        with refused(LayoutError):
            x * 2.0
        with refused(LayoutError):
            x.redistribute(Layout((1,), ("a",), [9])("None", "None"))
        return float((x.full_tensor() * 2.0).sum())

    assert list(sp.launch(device, world_size=3, transport="inline")) == [32.0] * 3


@pytest.mark.process
def test_redistribution_between_some_processes(processes):
    pairs = [(a, b) for s, t in product(SUBSETS, SUBSETS) for a in placed_over(s)[:2] for b in placed_over(t)[:2]]
    assert processes.run(4, run_between_ranks, pairs[::5])


def test_replicated_scalar_does_not_move():
    a, b = Layout((2,), ("a",)), Layout((2,), ("b",))
    assert plan_redistribution(a(), b(), ()).steps == ()
    assert [step.kind for step in plan_redistribution(a().with_partial("a"), b(), ()).steps] == ["all_reduce"]


def test_sharded_tensors_accept_whole_values():
    """backward, .grad, .data and hooks take an array of the tensor's shape, or of this rank's slice's."""
    whole = np.arange(1.0, 9.0).reshape(4, 2)
    layout = Layout((2,), ("a",))

    def program():
        mine = slice(2 * sp.get_rank(), 2 * sp.get_rank() + 2)

        def make():
            return distribute_tensor(np.ones((4, 2)), layout("a", "None"), requires_grad=True)

        seeds = (whole, sp.Tensor(whole), whole[mine], sp.Tensor(whole[mine]))
        for seed in seeds:
            x = make()
            (x * 2).backward(seed)
            np.testing.assert_array_equal(x.grad.full_tensor().numpy(), 2 * whole)
            x.grad = seed
            assert x.grad.layout == x.layout
            np.testing.assert_array_equal(x.grad.full_tensor().numpy(), whole)
            x.data = seed
            np.testing.assert_array_equal(x.full_tensor().numpy(), whole)
        x = make()
        (x * 2).full_tensor().backward(sp.Tensor(whole))
        np.testing.assert_array_equal(x.grad.full_tensor().numpy(), 2 * whole)
        for of in (lambda x: x, lambda x: x * 1):  # a leaf, and a tensor on the tape
            x = make()
            y = of(x)
            y.register_hook(lambda g: sp.Tensor(3 * whole))
            (y * 1).sum().backward()
            np.testing.assert_array_equal(x.grad.full_tensor().numpy(), 3 * whole)
        for bad in (np.ones((3, 2)), np.ones((2, 4)), np.ones(8)):
            with refused(ShapeError):
                (make() * 2).backward(bad)
            with refused(ShapeError):
                make().grad = bad
            with refused(ShapeError):
                make().data = bad
        with refused(LayoutError):
            (make() * 2).backward(distribute_tensor(whole, layout("None", "a")))

    sp.launch(program, world_size=2, transport="inline")


LOCAL = Layout((2, 2), ("dp", "tp"))
LAYOUTS = [LOCAL("dp", "tp"), LOCAL(("tp", "dp"), "None"), LOCAL("None", "tp"), LOCAL("None", "None")]


@pytest.mark.parametrize("shape", [(4, 4), (5, 3), (1, 6)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_local_slices_have_gradients(layout, shape):
    """Elementwise computation with the slices of a sharded tensor gives one device's values and gradients."""
    whole = np.arange(float(prod(shape))).reshape(shape)
    seed = whole[::-1, ::-1].copy()

    def program():
        x = distribute_tensor(whole, layout, requires_grad=True)
        local = x.to_local()
        assert (local.layout, local.shape) == (None, layout.local_shape(shape, sp.get_rank()))
        y = from_local(local * local, layout, shape)
        assert (y.shape, y.layout) == (x.shape, x.layout)
        np.testing.assert_array_equal(y.full_tensor().numpy(), whole**2)
        (y * 3).backward(seed)
        np.testing.assert_array_equal(x.grad.full_tensor().numpy(), 6 * whole * seed)
        leaf = sp.Tensor(x.data.copy(), requires_grad=True)
        from_local(leaf, layout, shape).backward(whole)
        np.testing.assert_array_equal(leaf.grad.numpy(), whole[layout.slices(sp.get_rank(), shape)])
        plain = sp.Tensor(whole)
        assert plain.to_local() is plain

    sp.launch(program, world_size=4, transport="inline")


def test_partial_from_local_addends_is_summed():
    """A matrix product by rows of w: the addends of y are local, and x's gradient is declared partial as well."""
    rng = np.random.default_rng(1)
    x, w = rng.integers(-3, 4, (3, 4)).astype(float), rng.integers(-3, 4, (4, 2)).astype(float)
    flat = Layout((2,), ("tp",))

    def program():
        a = distribute_tensor(x, flat("None", "tp"), requires_grad=True)
        b = distribute_tensor(w, flat("tp", "None"), requires_grad=True)
        y = from_local(a.to_local() @ b.to_local(), flat("None", "None").with_partial("tp"))
        np.testing.assert_array_equal(y.full_tensor().numpy(), x @ w)
        y.sum().backward()
        np.testing.assert_array_equal(a.grad.full_tensor().numpy(), np.ones((3, 2)) @ w.T)
        np.testing.assert_array_equal(b.grad.full_tensor().numpy(), x.T @ np.ones((3, 2)))
        # Columns of w: each rank's gradient of the whole x is an addend.
        a = distribute_tensor(x, flat("None", "None"), requires_grad=True)
        b = distribute_tensor(w, flat("None", "tp"), requires_grad=True)
        part = a.to_local(flat("None", "None").with_partial("tp")) @ b.to_local()
        from_local(part, flat("None", "tp")).sum().backward()
        np.testing.assert_array_equal(a.grad.numpy(), np.ones((3, 2)) @ w.T)

    sp.launch(program, world_size=2, transport="inline")


def test_bad_local_slices_are_refused():
    flat = Layout((2,), ("tp",))

    def program():
        x = distribute_tensor(np.ones((4, 2)), flat("tp", "None"))
        for make in (
            lambda: from_local(x, flat("tp", "None")),
            lambda: from_local(np.ones(4), flat("tp", "None")),
            lambda: from_local(np.ones((4, 2)), Layout((1,), ("a",))("a", "None")),
            lambda: x.to_local(flat("None", "tp")),
            lambda: from_local(np.ones((4, 2)), flat("tp", "None"), (5, 2)),
            lambda: sp.AutoParallel(lambda: x.to_local())(),
        ):
            with refused(LayoutError):
                make()

    sp.launch(program, world_size=2, transport="inline")
