"""The ops that communicate: with a dim cut over ranks, the same lines match one device.

The rule alone determines a rank's inputs and results: inputs that have the dim are sliced; an output
(or gradient) that has it is a slice, one that lacks it is Partial, or whole if the op completes the dim.
"""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from simparallel import ops
from simparallel.arrays.seam import kernels_of
from simparallel.autograd import Context, Plan, Spec, Tensor
from simparallel.autograd.ops.dropout import mask
from simparallel.errors import LabelError
from simparallel.layout import rule as rules
from simparallel.layout.sharding import Sharding
from simparallel.parallel.operator.explain import rehearse


def cut_context(dim, rank, parts):
    """Make a Context under which `dim` is cut into `parts` equal slices."""

    class CutContext(Context):
        def sum_over(self, dims, x, group_size=None):
            return self._exchange(dims, x, "sum")

        def max_over(self, dims, x):
            return self._exchange(dims, x, "max")

        def min_over(self, dims, x):
            return self._exchange(dims, x, "min")

        def _exchange(self, dims, x, how):
            return sp.all_reduce(np.array(x), how) if dim in dims.split() else x

        def offset(self, name):
            return self.plan.sizes[name] * rank if name == dim else 0

        def size(self, name):
            return self.plan.sizes[name] * (parts if name == dim else 1)

    return CutContext


def axis_of(dims, name):
    """Return the position of a dim, from the right; None if the tensor lacks it."""
    axes = [i - len(dims) for i, dim in enumerate(dims) if dim.names == (name,)]
    return axes[0] if axes else None


def sliced(array, axis, rank, parts):
    return array if axis is None else np.split(array, parts, axis)[rank]


def run(make_op, inputs, dy, context=None):
    op = make_op()
    if context is not None:
        op.context_type = context
    leaves = [Tensor(x.copy(), requires_grad=x.dtype.kind == "f") for x in inputs]
    y = op(*leaves)
    y.backward(dy)
    return y.numpy(), [None if leaf.grad is None else leaf.grad.numpy() for leaf in leaves]


def together(parts, axis, summed):
    if axis is not None:
        return np.concatenate(parts, axis)
    if summed:
        return sum(parts)
    np.testing.assert_array_equal(parts[0], parts[-1])
    return parts[0]


def check(make_op, inputs, dim, parts=2):
    rule = rules.parse(make_op().rule_for(*(x.shape for x in inputs)))
    rng = np.random.default_rng(3)
    y_axis = axis_of(rule.output, dim)
    shape = make_op()(*map(Tensor, inputs)).shape
    dy = np.asarray(rng.standard_normal(shape))
    serial, serial_grads = run(make_op, inputs, dy)

    def device():
        rank = sp.get_rank()
        mine = [sliced(x, axis_of(d, dim), rank, parts) for x, d in zip(inputs, rule.inputs, strict=True)]
        return run(make_op, mine, sliced(dy, y_axis, rank, parts), cut_context(dim, rank, parts))

    results = sp.launch(device, world_size=parts, transport="inline")
    is_summed = y_axis is None and any(dim in d.names for dims in rule.inputs for d in dims if d.kind != "completed")
    whole = together([y for y, _ in results], y_axis, is_summed)
    np.testing.assert_allclose(whole, serial, rtol=1e-10, atol=1e-12)
    for i, (expected, dims) in enumerate(zip(serial_grads, rule.inputs, strict=True)):
        if expected is not None:
            found = together([grads[i] for _, grads in results], axis_of(dims, dim), True)
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-11)


def floats(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape)


LABELS = np.array([0, 5, 3, 2])
IGNORING = np.array([0, -1, 3, 2])
X = 5 * floats(4, 6)
BATCH = (3 + floats(4, 6, 2, 2), floats(6), floats(6, seed=1))
HEADS = [floats(2, 4, 3), floats(2, 4, 3, seed=1), floats(2, 4, 2), floats(4, 4)]
CASES = {
    **{
        f"matmul {a:d}{b:d}, {dim}": (
            lambda a=a, b=b: ops.MatMul(transpose_a=a, transpose_b=b),
            [floats(*((2, 4, 6) if a else (2, 6, 4))), floats(*((2, 4) if b else (4, 2)))],
            dim,
        )
        for a in (False, True)
        for b in (False, True)
        for dim in "mkn"
    },
    "softmax, its dim": (lambda: ops.Softmax(-1), [X], "d1"),
    "softmax, first dim": (lambda: ops.Softmax(0), [X], "d0"),
    "softmax, another dim": (lambda: ops.Softmax(0), [X], "d1"),
    "log_softmax": (lambda: ops.LogSoftmax(1), [X], "d1"),
    "batch norm, n": (lambda: ops.BatchNorm(), BATCH, "n"),
    "batch norm, h": (lambda: ops.BatchNorm(), BATCH, "d0"),
    "batch norm, c": (lambda: ops.BatchNorm(), BATCH, "c"),
    "layer norm": (lambda: ops.LayerNorm(), [X, floats(6), floats(6)], "e0"),
    "layer norm, two dims": (lambda: ops.LayerNorm(2), [X, X, X], "e1"),
    "rms norm": (lambda: ops.RMSNorm(), [X, floats(6)], "e0"),
    "group norm": (lambda: ops.GroupNorm(3), BATCH, "d1"),
    "group norm, n": (lambda: ops.GroupNorm(3), BATCH, "n"),
    "global average, h": (lambda: ops.AdaptiveAvgPool2d(1), [floats(2, 3, 4, 2)], "h"),
    "average to 3 x 2, n": (lambda: ops.AdaptiveAvgPool2d((3, 2)), [floats(2, 4, 5, 3)], "n"),
    "average to 3 x 2, c": (lambda: ops.AdaptiveAvgPool2d((3, 2)), [floats(2, 4, 5, 3)], "c"),
    "average to 1 x 3, h": (lambda: ops.AdaptiveAvgPool2d((1, 3)), [floats(2, 4, 6, 4)], "h"),
    "average to 2 x 1, w": (lambda: ops.AdaptiveAvgPool2d((2, 1)), [floats(2, 4, 3, 6)], "w"),
    "embedding, rows": (lambda: ops.Embedding(1), [LABELS.reshape(2, 2), X[:, :3].repeat(2, 0)], "v"),
    "embedding, columns": (lambda: ops.Embedding(), [LABELS, floats(6, 4)], "e"),
    "dropout, rows": (lambda: ops.Dropout(0.5, 7), [X, np.array(2)], "d0"),
    "dropout, columns": (lambda: ops.Dropout(0.5, 7), [X, np.array(2)], "d1"),
    "attention, queries": (lambda: ops.ScaledDotProductAttention(True), HEADS, "t"),
    "attention, features": (lambda: ops.ScaledDotProductAttention(True), HEADS[:3], "e"),
    "mse": (lambda: ops.MSE(), [X, X[::-1]], "d1"),
    "bce": (lambda: ops.BinaryCrossEntropyWithLogits(), [X, X[::-1]], "d0"),
}
for reduction in ("mean", "sum", "none"):
    CASES |= {
        f"cross-entropy {reduction}, {dim}{', all settings' if full else ''}": (
            lambda r=reduction, full=full: ops.CrossEntropy(r, -1 if full else None, 0.2 if full else 0.0),
            [X, IGNORING, np.arange(1, 7)] if full else [X, LABELS],
            dim,
        )
        for dim in ("n", "v")
        for full in (False, True)
    }
    CASES |= {
        f"{name} {reduction}, {dim}": (lambda r=reduction, make=make: make(r), inputs, dim)
        for dim in ("n", "v")
        for name, make, inputs in (
            ("nll", lambda r: ops.NLL(r, -1), [X, IGNORING, np.arange(1, 7)]),
            ("dense", lambda r: ops.SoftmaxCrossEntropyWithLogits(r), [X, X[::-1] ** 2]),
        )
    }


@pytest.mark.parametrize(("make_op", "inputs", "dim"), CASES.values(), ids=CASES)
def test_cut_dim_matches_one_device(make_op, inputs, dim):
    check(make_op, list(inputs), dim)


def test_missing_exchange_is_found():
    """Red control: an op that does not ask its context must fail the comparison."""

    class Alone(ops.Softmax):
        def forward(self, ctx, x):
            ctx.sum_over = lambda dims, x: x
            return super().forward(ctx, x)

    del ops.Op.registry["Alone"]
    with pytest.raises(AssertionError):
        check(lambda: Alone(-1), [X], "d1")


def test_one_hot_makes_its_slice():
    ids = np.array([[0, 3], [2, 5]])
    op = ops.OneHot(6)
    parts = []
    for rank in range(2):
        plan = Plan(
            (Spec(ids.shape, ids.dtype),), Spec((2, 2, 3), op.dtype), {"v": 3}, op.work(Spec(ids.shape, ids.dtype))
        )
        parts.append(op.forward(cut_context("v", rank, 2)(kernels_of[np], (False,), plan), ids))

    np.testing.assert_array_equal(np.concatenate(parts, -1), np.eye(6)[ids])


def test_label_outside_all_slices_is_refused():
    def device():
        op = ops.CrossEntropy()
        op.context_type = cut_context("v", sp.get_rank(), 2)
        with refused(LabelError):
            op(Tensor(np.zeros((1, 3))), Tensor(np.array([6])))
        return True

    assert all(sp.launch(device, world_size=2, transport="inline"))


@pytest.mark.parametrize("size", [(), (7,), (4, 6), (4, 3, 5)])
def test_slice_of_mask_matches_the_whole(size):
    whole = mask(1, "s", 4, 0.5, size, (0,) * len(size), size)
    offset = tuple(s // 3 for s in size)
    shape = tuple(s - o - 1 for s, o in zip(size, offset, strict=True))
    part = mask(1, "s", 4, 0.5, size, offset, shape)

    np.testing.assert_array_equal(part, whole[tuple(slice(o, o + s) for o, s in zip(offset, shape, strict=True))])


MORE = {
    f"{make.__name__} {dtype}": (make, [X.astype(dtype)], "d1")
    for dtype in ("f2", "f4", "f8", "i2")
    for make in (ops.Max, ops.Min, ops.ArgMax, ops.ArgMin, ops.LogSumExp, ops.Var, ops.Std, ops.Softmax, ops.LogSoftmax)
    if dtype[0] == "f" or make in (ops.Max, ops.Min, ops.ArgMax, ops.ArgMin)
}


@pytest.mark.parametrize(("make_op", "inputs"), [case[:2] for case in (CASES | MORE).values()], ids=CASES | MORE)
@pytest.mark.parametrize("dtype", ["f2", "f8"])
def test_op_declares_its_exchanges(make_op, inputs, dtype):
    """The declared exchanges are those that the op makes when it runs; a plan of a billion rows takes no memory."""
    inputs = [x.astype(dtype) if x.dtype == np.float64 else x for x in inputs]
    op = make_op(1) if make_op in (ops.Max, ops.Min, ops.ArgMax, ops.ArgMin) else make_op()
    plan = op._plan(inputs)
    shapes = tuple(x.shape for x in inputs)
    uncut = Sharding(op.rule_for(*shapes), shapes, sp.Mesh((1,), ("rank",)), {})
    asked, said = rehearse(op, plan, uncut), op.exchanges(plan)

    def sizes(side):
        return [(a.dims, a.reduce_op, a.size_bytes, a.dtype) for a in side]

    if said is None:
        assert asked == ((), ())
    else:
        assert sizes(said.forward) == sizes(asked.forward)
        if inputs[0].dtype.kind == "f":  # others have no backward
            assert sizes(said.backward) == sizes(asked.backward)
