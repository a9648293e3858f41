"""Reshapes of sharded tensors: the elements move once, to the layout of the next op, without an extra byte."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import AutoParallel, nn, ops
from simparallel.clock.recorder import current_recorder
from simparallel.errors import AutogradError, StrategyError
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import plan_redistribution
from simparallel.layout.reshaped import common_shape
from simparallel.parallel import distribute_tensor, implicit_redistributions, quick_redistribution


@st.composite
def shapes(draw: Any, size: int) -> tuple[int, ...]:
    """Draw a shape of `size` elements."""
    left, shape = size, []
    while left > 1 and len(shape) < 3:
        shape.append(draw(st.sampled_from([n for n in range(1, left + 1) if left % n == 0])))
        left //= shape[-1]
    return (*shape, left)


@st.composite
def layouts(draw: Any, shape: tuple[int, ...], device_num: int) -> Layout:
    """Draw axes that cut divisible dims, in any order."""
    sizes = draw(st.sampled_from([s for s in ((2,), (4,), (2, 2), (3, 2), (2, 3), (6,)) if prod(s) == device_num]))
    mesh, left = Layout(sizes, tuple("ab"[: len(sizes)])), list(shape)
    dims: list[tuple[str, ...]] = [()] * len(shape)
    for axis, size in draw(st.permutations(list(zip(mesh.alias_name, sizes, strict=True)))):
        d = draw(st.sampled_from([None, *(d for d, n in enumerate(left) if n and n % size == 0)]))
        if d is not None:
            dims[d], left[d] = (*dims[d], axis), left[d] // size
    return mesh(*(axes or "None" for axes in dims))


def elements(layout: Layout, shape: tuple[int, ...], rank: int) -> np.ndarray:
    """Return row-major numbers of the rank's elements, in order."""
    return np.arange(prod(shape)).reshape(shape)[layout.slices(rank, shape)].ravel()


@given(st.data())
def test_common_shape_has_the_slices_of_both(data):
    size, device_num = data.draw(st.sampled_from([0, 1, 6, 24, 48])), data.draw(st.sampled_from([2, 4, 6]))
    shape = data.draw(shapes(size)) if size else (0, 2)
    new_shape = data.draw(shapes(size)) if size else (3, 0)
    source, target = data.draw(layouts(shape, device_num)), data.draw(layouts(new_shape, device_num))
    common = common_shape(source, shape, target, new_shape)
    if common is None:
        return
    plan = plan_redistribution(*common)
    for rank, received in zip(range(device_num), plan.received_bytes(1), strict=True):
        have, need = elements(source, shape, rank), elements(target, new_shape, rank)
        np.testing.assert_array_equal(elements(common.source, common.shape, rank), have)
        np.testing.assert_array_equal(elements(common.target, common.shape, rank), need)
        assert received == len(np.setdiff1d(need, have))


def test_slices_without_a_common_shape():
    mesh = Layout((2,), ("a",))
    rows, columns = mesh("a", "None"), mesh("None", "a")
    assert common_shape(columns, (4, 6), columns, (6, 4)) is None
    assert common_shape(columns, (2, 12), columns, (2, 3 * 4)).shape == (2, 12)
    assert common_shape(rows, (4, 6), rows, (6, 4)).shape == (24,)
    # Quarters of 6 * 4 columns end inside a sixth: three of (6, 2) are in it, cut along the 4.
    four = Layout((2, 2), ("a", "b"))
    assert common_shape(four("None", "None", "a"), (1, 6, 4), four("None", ("a", "b")), (1, 24)) is None


class Reshaped(nn.Module):
    """A parameter used by an op that is cut one way, reshaped, and used by an op that is cut another way."""

    def __init__(self, shape: Any, first: Any, views: list[Any], second: Any) -> None:
        super().__init__()
        self.x = nn.Parameter(np.arange(prod(shape), dtype=np.float64).reshape(shape) % 7 - 3)
        self.scale = ops.Mul().shard((first, ()))
        self.views = views
        self.last = ops.ReLU().shard((second,))

    def forward(self, factor: Any) -> Any:
        y = self.scale(self.x, factor)
        for view in self.views:
            y = view(y)
        return self.last(y)


def trained(make: Any, device_num: int) -> tuple[list[tuple[str, int]], int]:
    """Compare a step with NumPy; return this rank's collectives with bytes, and the message bytes of all ranks."""

    def program():
        net, ys = make(), []

        def step(factor):
            y = net(factor)
            y.backward(np.arange(float(y.size)).reshape(y.shape))
            ys.append(y)

        run = AutoParallel(step)
        run(np.float64(2))
        x, y, grad = (t.full_tensor().numpy() for t in (net.x, ys[0], net.x.grad))
        np.testing.assert_array_equal(y, np.maximum(2 * x, 0).reshape(y.shape))
        np.testing.assert_array_equal(grad, np.arange(float(y.size)).reshape(x.shape) * 2 * (x > 0))
        recorder = current_recorder()
        before = len(recorder.events)
        run(np.float64(2))
        events = recorder.events[before:]
        return (
            sorted((e.name, e.sent_bytes) for e in events if e.kind == "collective" and e.sent_bytes),
            sum(e.sent_bytes for e in events if e.kind == "p2p"),
        )

    found = sp.launch(program, world_size=device_num, transport="inline")
    assert all(collectives == found[0][0] for collectives, _ in found)
    return found[0][0], sum(sent for _, sent in found)


# Elements that a rank receives in forward: by the reshape's rule, then cut again by the following op, as without
# the deferred view; and across the reshape.
PROGRAMS = {
    "rows of images, to samples": (
        (8, 4, 8, 8), (1, 1, 2, 1), lambda: [ops.Flatten()], (8, 1), 1024, 128,
    ),
    "rows of images, to features": (
        (8, 4, 8, 8), (1, 1, 2, 2), lambda: [ops.Flatten()], (1, 8), 1536, 256,
    ),
    "samples and rows, to both": (
        (8, 4, 8, 8), (2, 1, 2, 1), lambda: [ops.Flatten()], (2, 4), 512, 128,
    ),
    "columns, merged and split": (
        (6, 128), (1, 8), lambda: [ops.Reshape((2, 384))], (2, 1), 672, 336,
    ),
    "two reshapes, one with a strategy": (
        (8, 4, 8, 8), (1, 1, 8, 1), lambda: [ops.Reshape((8, 256)).shard(((1, 1, 1, 1),)), ops.Reshape((16, 128))],
        (8, 1), 1792, 224,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_elements_move_once_across_a_reshape(name):
    shape, first, views, second, before, after = PROGRAMS[name]
    make = partial(Reshaped, shape, first, views(), second)
    explained = make().explain((), device_num=8, dtype=np.float64)
    whole = [(r.exchange.collective, r.exchange.bytes_per_rank) for r in explained.rows]
    collectives, sent = trained(make, 8)

    (row,) = [r for r in explained.rows if r.phase == "forward"]
    assert row.exchange.bytes_per_rank == 8 * after < 8 * before
    assert row.where.startswith("input 0 of ReLU")
    assert len(whole) == 2
    if row.exchange.collective == "messages":
        assert sent > 0
    else:
        assert (collectives, sent) == (sorted(whole), 0)


@pytest.mark.filterwarnings("ignore:AutoParallel. ops without a strategy redistribute")
@pytest.mark.parametrize("name", PROGRAMS)
def test_reshape_rule_moves_more(name):
    """Red control: a program that reads the view first has its elements in the reshape's own layout, at higher cost."""
    shape, first, views, second, before, _ = PROGRAMS[name]

    class Looked(Reshaped):
        def forward(self, factor):
            y = self.scale(self.x, factor)
            for view in self.views:
                y = view(y)
                y.data  # noqa: B018
            return self.last(y)

    explained = Looked(shape, first, views(), second).explain((), device_num=8, dtype=np.float64)
    rows = [r.exchange.bytes_per_rank for r in explained.rows if r.phase == "forward"]
    assert sum(rows) == 8 * before
    collectives, sent = trained(partial(Looked, shape, first, views(), second), 8)
    whole = [(r.exchange.collective, r.exchange.bytes_per_rank) for r in explained.rows]
    assert sorted(collectives) == sorted(row for row in whole if row[0] != "messages")
    assert bool(sent) == any(name == "messages" for name, _ in whole)


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    size, device_num = draw(st.sampled_from([6, 24, 48])), draw(st.sampled_from([2, 4, 6]))
    all_shapes = [draw(shapes(size)) for _ in range(draw(st.integers(2, 3)))]
    ends = [draw(layouts(shape, device_num)) for shape in (all_shapes[0], all_shapes[-1])]
    return device_num, all_shapes, *ends


@given(cases(), st.booleans())
def test_any_cuts_before_and_after(case, quick):
    device_num, all_shapes, source, target = case

    def program():
        with quick_redistribution() if quick else nullcontext():
            x = distribute_tensor(np.arange(float(prod(all_shapes[0]))).reshape(all_shapes[0]), source, True)
            y = x
            for shape in all_shapes[1:]:
                y = y.reshape(*shape)
            z = ops.ReLU().shard((target,))(y)
            np.testing.assert_array_equal(z.data, elements(target, z.shape, sp.get_rank()).reshape(z.data.shape))
            z.backward(distribute_tensor(np.arange(float(z.size)).reshape(z.shape) + 1, target))
            mine = elements(source, x.shape, sp.get_rank())
            np.testing.assert_array_equal(x.grad.data.ravel(), (mine + 1) * (mine > 0))

    sp.launch(program, world_size=device_num, transport="inline")


def test_deferred_view_is_a_tensor():
    """It has a shape, dtype and layout; reading its elements computes them, and then it is an ordinary tensor."""

    def program():
        mesh = Layout((2,), ("a",))
        X = np.arange(24.0).reshape(2, 3, 4)
        x = distribute_tensor(X, mesh("None", "None", "a"), requires_grad=True)
        with implicit_redistributions() as noted:
            y = x.reshape(6, 4).reshape(2, 12)
            assert (y.shape, y.ndim, y.dtype, y.is_leaf, y.device) == ((2, 12), 2, X.dtype, False, x.device)
            assert "not moved yet" in repr(y)
            assert not noted
            kept = y.detach()
            assert noted
            assert "not moved yet" not in repr(y)
        np.testing.assert_array_equal(kept.full_tensor().numpy(), X.reshape(2, 12))
        with sp.no_grad():
            np.testing.assert_array_equal(copy.deepcopy(x.detach().reshape(2, 12)).data, kept.data)
            z = x.reshape(2, 12)
        assert not z.requires_grad
        w = x.reshape(2, 12)
        with sp.no_grad():
            w.data  # noqa: B018
        w.sum().backward()  # on the tape, because it was made there
        np.testing.assert_array_equal(x.grad.data, np.ones((2, 3, 2)))

    sp.launch(program, world_size=2, transport="inline")


def test_hooks_of_a_deferred_view():
    """A hook registered before the view is used sees the gradient; a later one is refused."""

    def program():
        mesh = Layout((2,), ("a",))
        x = distribute_tensor(np.ones((2, 6)), mesh("None", "a"), requires_grad=True)
        relu, seen = ops.ReLU().shard((mesh("a"),)), []
        y = x.reshape(12)
        y.register_hook(lambda g: seen.append(g.full_tensor().numpy()))
        relu(y).sum().backward()
        np.testing.assert_array_equal(seen, [np.ones(12)])

        y = x.reshape(12)
        relu(y)
        with refused(AutogradError):
            y.register_hook(print)

    sp.launch(program, world_size=2, transport="inline")


def test_strict_mode_names_the_op_that_moves_a_view():
    def program():
        net = Reshaped((4, 6), (1, 2), [ops.Reshape((3, 8))], (1, 2))
        with refused(StrategyError):
            AutoParallel(net, strict=True)(np.float64(1))
        net = Reshaped((2, 3, 4), (1, 1, 2), [ops.Reshape((2, 12))], (2, 1))
        with refused(StrategyError):
            AutoParallel(net, strict=True)(np.float64(1))

    sp.launch(program, world_size=2, transport="inline")
