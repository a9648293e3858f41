"""Softmax and its logarithm over one dim, which may be cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

from simparallel.arrays.host.sums import exponentials, extreme, wider
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Plan, Spec, Work, as_int, check_float, instance
from simparallel.autograd.ops.along import AbstractAlong
from simparallel.autograd.ops.promotion import at_least_1d
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array, fused
from simparallel.errors import ShapeError
from simparallel.layout.rule import dim_names


class AbstractSoftmax(AbstractAlong):
    """A softmax along one dim.

    Args:
        dim: the softmax sums to 1 along this dim.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__(dim)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        return f"{' '.join(self._names(shape, '[{}]'))} -> {' '.join(dim_names(len(shape)))}"

    def infer(self, x: Spec) -> Spec:
        check_float(x=x)
        if x.shape[self._axis(len(x.shape))] == 0:
            raise ShapeError(f"dim={self.dim} of x, shape {x.shape}, has no elements; it needs at least one.")
        return Spec(x.shape, x.dtype)

    def _exponentials(self, ctx: Context, x: Array, keeps_shifted: bool) -> tuple[list[Array], Array]:
        """Return [x - its maximum along the dim,] e ** that, and the sum of these exponentials."""
        axis = self._axis(x.ndim)
        name = f"d{axis}"
        largest = ctx.max_over(name, extreme(ctx.xp, x, axis))
        settings = {"dtype": wider(x.dtype), "keeps_shifted": keeps_shifted}
        arrays = fused(ctx.xp, exponentials, **settings)(x, largest)
        return list(arrays), ctx.sum_over(name, arrays[-1].sum(axis=axis, keepdims=True))

    def exchanges(self, plan: Plan) -> Exchanges:
        (x,) = plan.inputs
        axis = self._axis(len(x.shape))
        rows = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
        total = Asked(f"d{axis}", "sum", rows, wider(x.dtype))
        return Exchanges((Asked(f"d{axis}", "max", rows, x.dtype), total), (total,))

    def work(self, x: Spec) -> Work:
        # Per element: maximum, subtraction, exponential (10 by convention), sum, division.
        return Work(14 * prod(x.shape), 5 * x.size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.flops // 14 * 4 * sum(needs), work.size_bytes * sum(needs))

    def eager_work(self, plan: Plan) -> Work:
        # A row stays in on-chip memory: it is read once and written once.
        return Work(plan.work.flops, 2 * plan.inputs[0].size_bytes)

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # Reads y and dy, writes dx.
        return Work(self.work_backward(needs, plan.work).flops, 3 * plan.inputs[0].size_bytes * sum(needs))


class Softmax(AbstractSoftmax):
    """y = e ** (x - max x) / sum of e ** (x - max x), along `dim`

    The maximum is subtracted first, so that nothing overflows. Where the dim is cut, ranks exchange
    the maximum and the sum, and one more sum in backward: dx = y * (dy - sum of dy * y).
    """

    def forward(self, ctx: Context, x: Array) -> Array:
        (y,), total = self._exponentials(ctx, x, False)
        y /= total
        ctx.y = y
        return y.astype(x.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        y, axis = ctx.y, self._axis(dy.ndim)
        dx = dy * y
        total = ctx.sum_over(f"d{axis}", dx.sum(axis=axis, keepdims=True))
        return (fused(ctx.xp, _softmax_gradient)(dy, y, total, ctx.arrays.reusable(dx)),)


class LogSoftmax(AbstractSoftmax):
    """y = x - max x - ln sum of e ** (x - max x), along `dim`

    It never takes the logarithm of 0, so y is finite for all finite x. Where the dim is cut, ranks
    exchange as in `Softmax`. Backward: dx = dy - e ** y * sum of dy.
    """

    def forward(self, ctx: Context, x: Array) -> Array:
        # Kept for backward: the exponentials cost more than all other steps.
        (y, ctx.exps), ctx.total = self._exponentials(ctx, x, True)
        fused(ctx.xp, _minus_log)(y, ctx.total)
        return y.astype(x.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        axis = self._axis(dy.ndim)
        total = ctx.sum_over(f"d{axis}", dy.sum(axis=axis, keepdims=True, dtype=ctx.exps.dtype))
        return (fused(ctx.xp, _log_softmax_gradient)(dy, ctx.exps, total, ctx.total),)


def _softmax_gradient(xp: ModuleType, dy: Array, y: Array, total: Array, work: Array | None) -> Array:
    dx = xp.subtract(dy, total, out=work)
    dx *= y
    return dx


def _minus_log(xp: ModuleType, y: Array, total: Array) -> None:
    y -= xp.log(total)


def _log_softmax_gradient(xp: ModuleType, dy: Array, exps: Array, sum_dy: Array, total: Array) -> Array:
    dx = exps * (sum_dy / total)
    return xp.subtract(dy, dx, out=dx)


@function("softmax")
def softmax(x: Any, dim: int = -1) -> Tensor:
    """Return e ** x divided by its sum along `dim`."""
    return at_least_1d(instance(Softmax, as_int("softmax: dim", dim)), x, dim)


@function("log_softmax")
def log_softmax(x: Any, dim: int = -1) -> Tensor:
    """Return the logarithm of softmax, finite also where softmax underflows to 0.

    Args:
        x: any shape, floating point.
        dim: the dim over which the exponentials add up to 1.
    """
    return at_least_1d(instance(LogSoftmax, as_int("log_softmax: dim", dim)), x, dim)
