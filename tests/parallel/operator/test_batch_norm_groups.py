"""Batch norm whose statistics are shared by `group_size` neighbouring slices of the batch."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel import AutoParallel, nn, ops
from simparallel.clock.recorder import current_recorder
from simparallel.compat import mindspore as ms
from simparallel.errors import InputError, RunFailedError, StrategyError
from simparallel.parallel import distribute_tensor

EPS = 0.5


def parts(x: np.ndarray, cuts: tuple[int, ...], group_size: int) -> list[np.ndarray]:
    """Return the elements of each group as rows of channels: slices in order, n outermost."""
    slices = [s for n in np.split(x, cuts[0]) for h in np.split(n, cuts[2], 2) for s in np.split(h, cuts[3], 3)]
    rows = [np.moveaxis(s, 1, -1).reshape(-1, x.shape[1]) for s in slices]
    return [np.concatenate(rows[i : i + group_size]) for i in range(0, len(rows), group_size)]


@st.composite
def cases(draw: Any) -> tuple[Any, ...]:
    cuts = draw(
        st.sampled_from(
            [(2, 1, 1, 1), (4, 1, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1), (2, 1, 2, 2), (2, 2, 1, 1), (3, 1, 2, 1)]
        )
    )
    num_slices = prod(cuts) // cuts[1]
    group_size = draw(st.sampled_from([None, *(g for g in range(1, num_slices + 1) if num_slices % g == 0)]))
    repeats = draw(st.sampled_from([1, 2])) if prod(cuts) < 4 else 1
    sizes = tuple(cut * draw(st.integers(1, 2)) for cut in cuts)
    return cuts, group_size, prod(cuts) * repeats, (sizes[0] * 2, *sizes[1:]), draw(st.integers(0, 99))


@given(cases())
def test_each_group_equals_one_device(case):
    """Forward, backward and running statistics; the traffic is the plan's."""
    cuts, group_size, device_num, shape, seed = case
    c = shape[1]
    rng = np.random.default_rng(seed)
    x, dy = rng.standard_normal((2, *shape))
    w, b = rng.standard_normal((2, c))
    size = group_size or prod(cuts) // cuts[1]
    strategy = (cuts, (cuts[1],), (cuts[1],))

    def program():
        seen = []
        op = ops.BatchNorm(EPS, lambda *found: seen.append(found), group_size).shard(strategy)
        plan = op.plan(shape, (c,), (c,), device_num=device_num, dtype=np.float64)
        leaves = [
            distribute_tensor(a, layout, requires_grad=True)
            for a, layout in zip((x, w, b), plan.layouts["inputs"], strict=True)
        ]
        recorder = current_recorder()
        y = op(*leaves)
        y.backward(distribute_tensor(dy, y.layout))
        sent = [(e.name, e.sent_bytes) for e in recorder.events if e.kind == "collective" and e.sent_bytes]
        told = [(e.collective, e.bytes_per_rank) for e in (*plan.forward, *plan.backward_inside)]
        assert sent[: len(told)] == told
        assert len(sent) == len(told) + 1  # the gradients of w and b, in one collective
        return (
            [t.full_tensor().numpy() for t in (y, *(leaf.grad for leaf in leaves))],
            seen,
            leaves[1].layout.slices(sp.get_rank(), (c,)),
        )

    results = sp.launch(program, world_size=device_num, transport="inline")
    ys, dys = parts(x, cuts, size), parts(dy, cuts, size)
    count = len(ys[0])
    means, variances = ([f(rows, axis=0) for rows in ys] for f in (np.mean, np.var))
    serial = [sp.Tensor(rows, requires_grad=True) for rows in ys]
    weight, bias = sp.Tensor(w, requires_grad=True), sp.Tensor(b, requires_grad=True)
    outputs = [ops.BatchNorm(EPS)(rows, weight, bias) for rows in serial]
    for out, grad in zip(outputs, dys, strict=True):
        out.backward(grad)
    for (y, dx, dw, db), [(mean, var, number)], channels in results:
        for found, expected in ((y, outputs), (dx, [rows.grad for rows in serial])):
            for rows, t in zip(parts(found, cuts, size), expected, strict=True):
                np.testing.assert_allclose(rows, t.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(dw, weight.grad.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(db, bias.grad.numpy(), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(mean, np.mean(means, axis=0)[channels], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(var, np.mean(variances, axis=0)[channels], rtol=1e-9, atol=1e-9)
        assert number == count


def test_groups_of_neighbours_are_planned():
    bn = ops.BatchNorm(group_size=2).shard(((2, 1, 2, 1), (1,), (1,)))
    plan = bn.plan((4, 3, 4, 4), (3,), (3,), device_num=8)
    assert [e.groups for e in plan.forward] == [((0, 2), (4, 6), (1, 3), (5, 7))] * 2
    assert [e.bytes_per_rank for e in plan.forward] == [12, 12]
    alone = ops.BatchNorm(group_size=1).shard(((8, 1), (1,)))
    assert alone.plan((16, 3), (3,), device_num=8).forward.total_bytes == 0


@pytest.mark.parametrize("group_size", [3, 8])
def test_group_size_must_divide_the_slices(group_size):
    bn = ops.BatchNorm(group_size=group_size).shard(((4, 1), (1,)))
    with refused(StrategyError):
        bn.plan((16, 3), (3,), device_num=4)

    def program():
        layer = nn.BatchNorm1d(3, group_size=group_size)
        AutoParallel(layer)(np.ones((8, 3), np.float32))

    with refused(RunFailedError):
        sp.launch(program, world_size=4, transport="inline")


def test_group_size_0_is_refused():
    with refused(InputError):
        nn.BatchNorm2d(3, group_size=0)
    assert "group_size=2" in repr(nn.BatchNorm2d(3, group_size=2))


def test_running_statistics_are_equal_on_every_rank():
    """The mean over groups of each group's mean and unbiased variance; after `eval()` they normalise."""
    x = np.random.default_rng(0).standard_normal((8, 3))

    def program():
        layer = nn.BatchNorm1d(3, momentum=1.0, group_size=2, dtype=np.float64)
        run = AutoParallel(layer)
        run(x)
        run(x)
        layer.eval()
        return [b.numpy().copy() for b in (layer.running_mean, layer.running_var)], run(x).numpy()

    halves = x[:4], x[4:]
    mean = np.mean([half.mean(0) for half in halves], axis=0)
    var = np.mean([half.var(0, ddof=1) for half in halves], axis=0)
    for (running_mean, running_var), y in sp.launch(program, world_size=4, transport="inline"):
        np.testing.assert_allclose(running_mean, mean)
        np.testing.assert_allclose(running_var, var)
        np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-5))


def test_process_groups_of_mindspore():
    x = np.random.default_rng(0).standard_normal((10, 3)).astype(np.float32)

    def program():
        layers = [ms.nn.SyncBatchNorm(3, process_groups=[[0, 1], [2, 3]], gamma_init="zeros") for _ in range(40)]
        assert not layers[0].weight.numpy().any()
        layer = ms.nn.SyncBatchNorm(3, momentum=0.0, process_groups=[[0, 1], [2, 3]])
        y = layer(sp.Tensor(x[2 * sp.get_rank() :][:2])).numpy()
        everybody = ms.nn.SyncBatchNorm(3)
        assert everybody.process_group is None
        return y, layer.running_mean.numpy().copy()

    def normalized(rows):
        return (rows - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-5)

    results = sp.launch(program, world_size=5, transport="inline")  # rank 4 is in no group
    y = np.concatenate([y for y, _ in results])
    groups = np.split(x, [4, 8])
    np.testing.assert_allclose(y, np.concatenate([normalized(rows) for rows in groups]), rtol=1e-4, atol=1e-5)
    for (_, mean), rows in zip(results, [groups[0]] * 2 + [groups[1]] * 2 + [groups[2]], strict=True):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-5)


@pytest.mark.parametrize("groups", [[[0], [0, 1]], [0, 1], ((0, 1),), [[0, 7]]])
def test_process_groups_are_checked(groups):
    with refused(InputError):
        ms.nn.SyncBatchNorm(3, process_groups=groups)
