"""Redistribution: every pair of layouts, exact values, and not a byte more than each rank lacks."""

from __future__ import annotations

from itertools import permutations, product
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st

import simparallel as sp
from simparallel.errors import LayoutError
from simparallel.layout import Layout, from_strategy
from simparallel.parallel import distribute_tensor
from simparallel.parallel.sharded import carry, sharder
from simparallel.plan import plan_redistribution
from simparallel.plan.boxes import box_of, meet, size_of
from simparallel.sharding import placement

SHAPE = (8, 8)


def layouts_over(sizes):
    """Every layout of a matrix over a mesh: each axis cuts a dim or none, in any order on it."""
    names = "abc"[: len(sizes)]
    mesh = Layout(sizes, tuple(names))
    found = {}
    for dims in product((None, 0, 1), repeat=len(names)):
        for order in permutations(names):
            entries = [tuple(n for n in order if dims[names.index(n)] == d) for d in (0, 1)]
            layout = mesh(*(entry or "None" for entry in entries))
            found[layout.axes_by_dim] = layout
    return list(found.values())


def lacking(source, target, rank, shape=SHAPE):
    """Elements that the rank needs and does not hold."""
    need, have = box_of(target, rank, shape), box_of(source, rank, shape)
    return size_of(need) - size_of(meet(need, have))


@pytest.mark.parametrize("sizes", [(2,), (4,), (2, 2), (2, 4), (2, 2, 2)])
def test_every_plan_receives_just_what_is_lacking(sizes):
    layouts = layouts_over(sizes)
    total = 0
    for source, target in product(layouts, layouts):
        plan = plan_redistribution(source, target, SHAPE)
        expected = tuple(4 * lacking(source, target, rank) for rank in source.mesh.ranks)
        assert plan.received_bytes(4) == expected
        assert plan.is_free == (not any(expected))
        total += sum(expected) // 4
    if sizes == (2, 2, 2):
        assert (len(layouts), total) == (49, 195_648)  # the known lower bound over these pairs


def test_between_meshes_of_different_shape():
    """Rows over 8, to columns over 4 that repeat: the planner has no common axes to go by."""
    for a, b in product([(8, 1), (1, 8), (2, 4), (4, 1), (2, 2), (1, 1)], repeat=2):
        source, target = from_strategy(a, 8), from_strategy(b, 8, "left")
        plan = plan_redistribution(source, target, SHAPE)
        assert plan.received_bytes(1) == tuple(lacking(source, target, rank) for rank in range(8))


def run_all(sizes, pairs):
    x = np.arange(prod(SHAPE), dtype=np.float64).reshape(SHAPE)
    sent = 0
    for source, target in pairs:
        whole = placement(target, SHAPE)
        mine = x[source.slices(sp.get_rank(), SHAPE)].copy()
        y = carry(mine, placement(source, SHAPE), whole)
        np.testing.assert_array_equal(y, x[target.slices(sp.get_rank(), SHAPE)])
        sent += lacking(source, target, sp.get_rank())
    return sent


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 2, 2)])
def test_every_pair_moves_the_right_values_and_the_bytes_of_the_bound(sizes):
    layouts = layouts_over(sizes)
    pairs = list(product(layouts, layouts))
    if len(pairs) > 400:
        pairs = pairs[:: len(pairs) // 400]  # every sixth; the plans of all are checked above
    results = sp.launch(run_all, (sizes, pairs), world_size=prod(sizes), transport="inline")
    counted = [0] * prod(sizes)
    for event in results.trace.events:
        if event.kind in ("collective", "p2p"):
            counted[event.rank] += event.sent_bytes
    assert sum(counted) == 8 * sum(results)  # what all send is what all receive


@pytest.mark.parametrize(
    ("source", "target", "text", "size_bytes"),
    [
        (from_strategy((8, 1), 8), Layout((2, 4), ("m", "k"))("m", "k"), "all_to_all", 9408),
        (Layout((2, 4), ("m", "k"))("m", "None").with_partial("k"), from_strategy((4, 1), 8), "all_reduce + slice", 0),
        (Layout((8,), ("k",))("None", "None").with_partial("k"), from_strategy((8, 1), 8), "reduce_scatter", 21952),
        (from_strategy((8, 1), 8), Layout((8,), ("a",))("None", "None"), "all_gather", 87808 // 4),
        (Layout((8,), ("a",))("None", "None"), from_strategy((8, 1), 8), "slice", 0),
        (from_strategy((2, 1), 8), Layout((2, 4), ("d0", "r"))("d0", "None"), "nothing", 0),
    ],
)  # fmt: skip
def test_plans_are_named_after_what_they_are(source, target, text, size_bytes):
    plan = plan_redistribution(source, target, (32, 784) if "all_to_all" in text else (32, 196))

    assert str(plan) == text
    if text in ("all_to_all", "reduce_scatter", "slice", "nothing"):
        assert plan.received_bytes(4)[0] == size_bytes


def test_a_scattered_sum_goes_in_the_order_of_the_layout():
    """The group's order is the chunk order of the target, not that of the ranks."""
    layout = Layout((2, 2, 2), ("dp", "sp", "mp"))
    plan = plan_redistribution(
        layout("mp", "None").with_partial(("sp", "dp")), layout(("mp", "sp", "dp"), "None"), (32, 512)
    )

    (step,) = plan.steps
    assert (step.kind, step.groups) == ("reduce_scatter", ((0, 4, 2, 6), (1, 5, 3, 7)))


def test_sums_are_not_split_again():
    layout = Layout((2, 2), ("a", "b"))
    with pytest.raises(LayoutError, match="never split into addends"):
        plan_redistribution(layout("a"), layout("a").with_partial("b"), (4,))
    with pytest.raises(LayoutError, match="different ranks"):
        plan_redistribution(layout("a"), Layout((8,), ("a",))("a"), (8,))
    with pytest.raises(LayoutError, match="does not divide"):
        plan_redistribution(layout("a"), layout(("a", "b")), (6,))


@given(
    st.sampled_from(layouts_over((2, 2))),
    st.sampled_from(layouts_over((2, 2))),
    st.sampled_from((0, 1, 2, 3)),
)
def test_unfinished_sums_come_out_right(source, target, which):
    """Addends that differ and alternate in sign: a reduction left out or done twice cannot pass."""
    used = {axis for axes in source.axes_by_dim for axis in axes}
    partial = tuple(axis for i, axis in enumerate("ab") if which >> i & 1 and axis not in used)
    summed = source.with_partial(partial)
    x = np.arange(prod(SHAPE), dtype=np.float64).reshape(SHAPE)

    def device():
        rank = sp.get_rank()
        coordinate = dict(zip("ab", summed.mesh.coordinate(rank), strict=True))
        addend = x.copy()
        for i, axis in enumerate(partial):  # 3 x and -2 x add up to x
            addend = addend * (3 - 5 * coordinate[axis]) + 7 * (i + 1) * (1 - 2 * coordinate[axis])
        y = carry(
            addend[source.slices(rank, SHAPE)].copy(), placement(summed, SHAPE), placement(target, SHAPE)
        )
        return np.array_equal(
            y,
            x[target.slices(rank, SHAPE)] if partial != ("a", "b") else _both(x)[target.slices(rank, SHAPE)],
        )

    assert all(sp.launch(device, world_size=4, transport="inline"))


def _both(x):
    """What the four addends of the test above come to, worked out one by one."""
    total = np.zeros_like(x)
    for a, b in product((0, 1), repeat=2):
        total += (x * (3 - 5 * a) + 7 * (1 - 2 * a)) * (3 - 5 * b) + 14 * (1 - 2 * b)
    return total


def test_gradients_go_the_way_back():
    layout = Layout((2, 2), ("a", "b"))

    def device():
        x = distribute_tensor(np.arange(16.0).reshape(4, 4), layout("a", "b"), requires_grad=True)
        y = x.redistribute(layout("None", ("b", "a")))
        assert y.layout == layout("None", ("b", "a"))
        (y.full_tensor() * np.arange(16.0).reshape(4, 4)).sum().backward()
        return x.grad.layout == x.layout and np.array_equal(
            x.grad.full_tensor().numpy(), np.arange(16.0).reshape(4, 4)
        )

    assert all(sp.launch(device, world_size=4, transport="inline"))


@pytest.mark.process
def test_the_same_between_processes():
    layouts = layouts_over((2, 2))
    pairs = list(product(layouts, layouts))[::7]
    assert sp.launch(run_all, ((2, 2), pairs), world_size=4)


def test_a_mesh_of_many_axes_has_all_its_groups():
    """One for each position on the other axes: 80 of them for the axes and the pairs of axes of 16 ranks."""
    mesh = Layout((2, 2, 2, 2), ("a", "b", "c", "d")).mesh

    def device():
        groups = sharder().groups
        mine = [groups.mine(mesh.groups(axes)) for n in (1, 2) for axes in permutations("abcd", n)]
        return [(group.ranks, sp.all_reduce(np.ones(1), group=group)[0]) for group in mine]

    for rank, found in enumerate(sp.launch(device, world_size=16, transport="inline")):
        wanted = [mesh.group(axes, rank) for n in (1, 2) for axes in permutations("abcd", n)]
        assert found == [(ranks, len(ranks)) for ranks in wanted]
