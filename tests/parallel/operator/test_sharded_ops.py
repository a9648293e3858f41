"""Every registered op, with any drawn legal cut, matches one device: forward, gradients and one optimizer step.

Equal to the bit where the op only adds, multiplies and moves small integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from op_records import EXACT, op_calls
from refusals import refused

import simparallel as sp
from simparallel.autograd import Op, Tensor
from simparallel.clock.recorder import current_recorder
from simparallel.errors import StrategyError
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh
from simparallel.layout.rule import places
from simparallel.layout.sharding import Sharding
from simparallel.parallel import distribute_tensor
from simparallel.parallel.operator import op_call
from simparallel.testing.strategies import layouts

MESHES = ((2, 2), (4,), (2,), (2, 2, 2), (3,))


@st.composite
def shardings(draw: Any, op: Op, shapes: tuple[tuple[int, ...], ...]) -> Sharding:
    """Draw a mesh and legal cuts of the op's dims; every axis cuts a dim if possible."""
    sizes = draw(st.sampled_from(MESHES))
    mesh = Mesh(sizes, tuple("abc"[: len(sizes)]))
    rule = op.rule_for(*shapes)
    inputs, _ = places(rule, shapes)
    names = list(dict.fromkeys(name for tensor in inputs for place in tensor for name in place.names))
    cuts: dict[str, tuple[str, ...]] = {}
    for axis in draw(st.permutations(mesh.axis_names)):
        for name in draw(st.permutations(names)):
            wider = cuts | {name: (*cuts.get(name, ()), axis)}
            try:
                Sharding(rule, shapes, mesh, wider)
            except StrategyError:
                continue
            cuts = wider
            break
    return Sharding(rule, shapes, mesh, cuts)


def run_serial(op: Op, inputs: list[np.ndarray], dy: np.ndarray | None) -> tuple[Any, ...]:
    leaves = [Tensor(x.copy(), requires_grad=x.dtype.kind == "f") for x in inputs]
    y = op(*leaves)
    if y.requires_grad:
        assert dy is not None
        y.backward(dy)
    return (y.numpy().copy(), [None if leaf.grad is None else leaf.grad.numpy() for leaf in leaves], step(leaves))


def step(leaves: list[Tensor]) -> list[np.ndarray]:
    """Make an optimizer's step on the leaves that have a gradient."""
    trained = [leaf for leaf in leaves if leaf.grad is not None]
    if trained:
        sp.optim.SGD(trained, lr=0.5, weight_decay=0.25).step()
    return [leaf.full_tensor().numpy() for leaf in trained]


def run_sharded(
    op: Op, inputs: list[np.ndarray], dy: np.ndarray | None, strategy: tuple[Layout, ...] | None, start: list[Layout]
) -> Any:
    leaves = [
        distribute_tensor(x, layout, requires_grad=x.dtype.kind == "f")
        if x.ndim
        else Tensor(x.copy(), x.dtype.kind == "f")
        for x, layout in zip(inputs, start, strict=True)
    ]
    cut = type(op).__new__(type(op))
    cut.__dict__.update({k: v for k, v in vars(op).items() if k != "_plans"})
    y = (cut if strategy is None else cut.shard(strategy))(*leaves)
    whole = y.full_tensor()
    if whole.requires_grad:
        whole.backward(None if dy is None else Tensor(dy))
    grads = [None if leaf.grad is None else leaf.grad.full_tensor().numpy() for leaf in leaves]
    return whole.numpy().copy(), grads, step(leaves), y.layout is not None and y.layout.partial


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(set(Op.registry) - {"Redistribute", "Replicate", "ToDevice"}))
@settings(max_examples=10)
@given(data=st.data())
def test_every_op_cut_equals_the_whole(name: str, data: Any) -> None:
    """With a strategy or with the inputs' layouts, in slices of unequal size, empty ones included."""
    exact = name in EXACT
    op, inputs = data.draw(op_calls(name, exact=exact))
    shapes = tuple(x.shape for x in inputs)
    sharding = data.draw(shardings(op, shapes))
    start = [
        data.draw(layouts(shape, sharding.mesh.shape, names=sharding.mesh.axis_names, permuted=False))
        for shape in shapes
    ]
    strategy = sharding.input_layouts if all(map(divides, sharding.input_layouts, shapes)) else None
    if strategy is None or data.draw(st.booleans()):
        start, strategy = data.draw(st.sampled_from((start, list(sharding.input_layouts)))), None
    y = op(*map(Tensor, inputs)).numpy()
    dy = np.random.default_rng(1).integers(-4, 5, y.shape).astype(y.dtype) if y.dtype.kind == "f" else None
    y, grads, stepped = run_serial(op, inputs, dy)
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-8, "atol": 1e-8}

    for found, found_grads, found_stepped, partial in sp.launch(
        run_sharded, (op, inputs, dy, strategy, start), world_size=sharding.mesh.size, transport="inline"
    ):
        assert strategy is None or not partial
        np.testing.assert_allclose(found, y, **tolerance)
        for gradient, expected in zip(found_grads, grads, strict=True):
            assert (gradient is None) == (expected is None)
            if expected is not None:
                np.testing.assert_allclose(gradient, expected, **tolerance)
        for leaf, expected in zip(found_stepped, stepped, strict=True):
            np.testing.assert_allclose(leaf, expected, **tolerance)


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(set(Op.registry) - {"Redistribute", "Replicate", "ToDevice"}))
@settings(max_examples=2)
@given(data=st.data())
def test_every_cut_op_on_device_equals_numpy(arrays: Any, name: str, data: Any) -> None:
    """Redistributions of the inputs, gradients and an optimizer's step included."""
    op, inputs = data.draw(op_calls(name, np.float32, exact=name in EXACT))
    shapes = tuple(x.shape for x in inputs)
    sharding = data.draw(shardings(op, shapes))
    start = [
        data.draw(layouts(shape, sharding.mesh.shape, names=sharding.mesh.axis_names, permuted=False))
        for shape in shapes
    ]
    y = op(*map(Tensor, inputs))
    dy = np.random.default_rng(1).integers(-4, 5, y.shape).astype(y.dtype) if y.dtype.kind == "f" else None
    on_host, on_device = (
        list(
            sp.launch(
                run_sharded,
                (op, inputs, dy, None, start),
                world_size=sharding.mesh.size,
                transport="inline",
                **given_settings,
            )
        )
        for given_settings in ({}, arrays.run_settings)
    )
    arrays.after(10).assert_all_equal(on_device, on_host, name)


def divides(layout: Layout, shape: tuple[int, ...]) -> bool:
    return not any(size % cut for size, cut in zip(shape, layout.cuts, strict=True))


def check_clone(layout: Layout, automatic: bool) -> None:
    x = distribute_tensor(np.arange(16.0).reshape(4, 4), layout, requires_grad=True)
    w = distribute_tensor(np.ones((4, 4)), layout) if layout.mesh.size == sp.get_world_size() else None
    for z in (x,) if w is None else (x, x.T @ w):  # the product may be a partial sum
        op_call.mode.automatic = automatic
        y = z.clone()
        op_call.mode.automatic = False
        assert y.placement is z.placement
        assert not np.shares_memory(y.data, z.data)
        np.testing.assert_array_equal(y.data, z.data)
    x.clone().backward(np.full(x.data.shape, 3.0))
    np.testing.assert_array_equal(x.grad.data, np.full(x.data.shape, 3.0))
    assert x.grad.placement is x.placement


@pytest.mark.parametrize("automatic", [False, True])
@given(data=st.data())
def test_clone_keeps_the_layout(automatic: bool, data: Any) -> None:
    """Also where ops have a default strategy, and over some of the ranks, where nothing can be computed."""
    layout = data.draw(layouts((4, 4), (2, 2), names=("a", "b"), permuted=False))
    for each in (layout, Layout((2,), ("a",), [2, 0])("a", "None")):
        sp.launch(check_clone, (each, automatic), world_size=4, transport="inline")


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 5))
def test_each_rank_has_the_work_of_its_own_slice(m: int, k: int, parts: int) -> None:
    flat = Layout((parts,), ("a",))

    def program() -> tuple[int, int]:
        x, w = distribute_tensor(np.ones((m, k)), flat("a", "None")), np.ones((k, 3))
        with sp.parallel.implicit_replication():
            y = x @ w
        flops = [e.flops for e in current_recorder().events if e.name == "MatMul"]
        assert y.to_local().shape == (len(x.data), 3)
        return len(x.data), sum(flops)

    found = sp.launch(program, world_size=parts, transport="inline")
    whole = sp.ops.MatMul().work(*(sp.autograd.Spec(s, np.dtype("f8")) for s in ((m, k), (k, 3)))).flops
    assert [flops for _, flops in found] == [whole * rows // m for rows, _ in found]
    assert sum(rows for rows, _ in found) == m


GRID = Layout((2, 2), ("a", "b"))
NEW_DIMS = {
    "classes": (lambda: sp.ops.OneHot(6), (4,), ((2,),), (2, 2)),
    "classes of two dims": (lambda: sp.ops.OneHot(4), (2, 3), ((2, 1),), ((2, 1, 2),)),
    "classes, layouts": (lambda: sp.ops.OneHot(8), (4,), (GRID("b"),), GRID("b", "a")),
    "repeats": (lambda: sp.ops.Tile((4, 1)), (3, 4), ((1, 2),), (2, 2)),
    "repeats of a new dim": (lambda: sp.ops.Tile((2, 1, 3)), (4, 2), ((2, 1),), (2, 2, 1)),
    "repeats, layouts": (lambda: sp.ops.Tile((4, 1)), (3, 2), (GRID("None", "b"),), GRID("a", "b")),
    "broadcast": (lambda: sp.ops.BroadcastTo((4, 6, 2)), (6, 1), ((2, 1),), (2, 2, 1)),
    "broadcast of size 1": (lambda: sp.ops.BroadcastTo((6, 4)), (6, 1), ((2, 1),), (2, 2)),
}


@pytest.mark.parametrize(("make", "shape", "cuts", "out"), NEW_DIMS.values(), ids=NEW_DIMS)
def test_output_strategy_cuts_new_dims(make, shape, cuts, out):
    """Each rank makes its part of the new dims, and the gradient of repeated elements is summed."""
    rng = np.random.default_rng(0)
    is_ids = make().name == "OneHot"
    x = rng.integers(0, 4, shape) if is_ids else rng.integers(-4, 5, shape).astype(np.float64)
    leaf = Tensor(x, requires_grad=not is_ids)
    y = make()(leaf)
    dy = rng.integers(-4, 5, y.shape).astype(y.dtype)

    def program():
        lies = Layout((4,), ("all",))(*["None"] * x.ndim)
        whole = distribute_tensor(x, lies, requires_grad=not is_ids)
        op = make().shard(cuts, out)
        cut = op(whole)
        assert cut.layout.cuts == op.plan(shape, device_num=4, dtype=x.dtype).layouts["output"].cuts
        assert np.prod(cut.layout.cuts) == 4
        found = cut.full_tensor()
        if not is_ids:
            found.backward(dy)
        return found.numpy(), None if is_ids else whole.grad.full_tensor().numpy()

    if not is_ids:
        y.backward(dy)
    for found, gradient in sp.launch(program, world_size=4, transport="inline"):
        np.testing.assert_array_equal(found, y.numpy())
        if not is_ids:
            np.testing.assert_array_equal(gradient, leaf.grad.numpy())


INDEXED = {
    "rows": ((0,), (8, 3), [(5,)]),
    "rows by a matrix": ((0,), (8, 2), [(2, 3)]),
    "columns": ((1,), (2, 8, 3), [(4,)]),
    "pairs": ((0, 1), (4, 4, 3), [(5,), (5,)]),
    "separate pairs": ((0, 2), (4, 3, 4), [(2, 1), (3,)]),
    "one number": ((0,), (8, 3), [()]),
    "one number of a vector": ((0,), (8,), [()]),
}


@pytest.mark.parametrize(("dims", "shape", "counts"), INDEXED.values(), ids=INDEXED)
@pytest.mark.parametrize("dtype", ["f8", "i4", "?"])
def test_indexed_dim_may_be_cut(dims, shape, counts, dtype):
    """x does not move: elements of other slices count as 0, also those indexed from the end, infinite or twice."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, shape).astype(dtype)
    indices = [rng.integers(-shape[d], shape[d], count) for d, count in zip(dims, counts, strict=True)]
    if dtype == "f8":
        x.flat[0] = np.inf
    leaf = Tensor(x, requires_grad=dtype == "f8")
    y = sp.ops.Index(dims)(leaf, *map(Tensor, indices))
    dy = rng.integers(-4, 5, y.shape).astype(float)
    lies = Layout((2, 2), ("a", "b"))
    axes = iter(("a", "b"))
    cut = lies(*(next(axes) if d in dims else "None" for d in range(len(shape))))

    def program():
        held = distribute_tensor(x, cut, requires_grad=dtype == "f8")
        given = [distribute_tensor(i, lies(*["None"] * i.ndim)) if i.ndim else Tensor(i) for i in indices]
        found = sp.ops.Index(dims)(held, *given)
        assert found.layout.partial == (cut.mesh.axis_names[: len(dims)] if found.shape else ())
        found = found.full_tensor()
        if dtype == "f8":
            found.backward(dy)
        return found.numpy(), None if held.grad is None else held.grad.full_tensor().numpy()

    if dtype == "f8":
        y.backward(dy)
    for found, gradient in sp.launch(program, world_size=4, transport="inline"):
        np.testing.assert_array_equal(found, y.numpy())
        if dtype == "f8":
            np.testing.assert_array_equal(gradient, leaf.grad.numpy())


def test_index_outside_all_slices_is_refused():
    def program():
        x = distribute_tensor(np.ones((8, 2)), Layout((2,), ("a",))("a", "None"))
        with refused(sp.errors.OutOfRangeError):
            sp.ops.Index((0,))(x, distribute_tensor(np.array([8, 1]), Layout((2,), ("a",))("None")))

    sp.launch(program, world_size=2, transport="inline")
