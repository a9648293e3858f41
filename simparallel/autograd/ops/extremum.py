"""Reductions that the op completes itself: over a cut dim it exchanges through `ctx`, and y is never Partial."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from simparallel.arrays.host.sums import extreme, wider
from simparallel.autograd.dims import Dims, as_dims
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import deviation, function, reduction
from simparallel.autograd.op import AbstractConstant, Context, Plan, Spec, Work, check_float, instance
from simparallel.autograd.ops.promotion import floating
from simparallel.autograd.ops.reduce import AbstractReduce
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import ShapeError
from simparallel.layout.rule import dim_names


class AbstractCompleted(AbstractReduce):
    """A reduction with its dims marked `[d]` in the rule: each rank reduces its slice, then ranks exchange."""

    mark = "[{}]"

    def _asked(self, plan: Plan, reduce_op: str, dtype: Any) -> Asked:
        """Describe an exchange of one value for each element of y."""
        return Asked(self._names_of(len(plan.inputs[0].shape)), reduce_op, plan.output.shape, np.dtype(dtype))

    def _refuse_empty(self, shape: tuple[int, ...]) -> None:
        if 0 in [shape[i] for i in self._dims(len(shape))]:
            raise ShapeError(
                f"no elements to reduce over dim={self.dim!r} of shape {shape}; every reduced dim needs at least one."
            )


class AbstractExtremum(AbstractCompleted):
    """The largest or smallest element. Equal elements share the gradient equally."""

    reduce_op: ClassVar[str]  # "max" or "min"

    def infer(self, x: Spec) -> Spec:
        self._refuse_empty(x.shape)
        return super().infer(x)

    def _extreme(self, ctx: Context, x: Array) -> Array:
        raise TypeError(f"{self.name} does not define _extreme")

    def exchanges(self, plan: Plan) -> Exchanges:
        extreme = self._asked(plan, self.reduce_op, plan.inputs[0].dtype)
        return Exchanges((extreme,), (self._asked(plan, "sum", np.int64),))

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x
        ctx.y = self._extreme(ctx, x)  # reduced dims have size 1
        return ctx.y.reshape(ctx.plan.output.shape)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        chosen = ctx.x == ctx.y
        count = chosen.sum(axis=self._dims(chosen.ndim), keepdims=True)
        # The count is 0 where the extreme is NaN, as NaN == NaN is False.
        count = ctx.sum_over(self._names(ctx), count).clip(1)
        share = (dy.reshape(ctx.y.shape) / count).astype(dy.dtype)
        return (ctx.arrays.masked(ctx.xp.broadcast_to(share, chosen.shape), chosen),)


class Max(AbstractExtremum):
    """y = largest x over `dim`; NaN if any x is NaN

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    reduce_op = "max"

    def _extreme(self, ctx: Context, x: Array) -> Array:
        return ctx.max_over(self._names(ctx), extreme(ctx.xp, x, self._dims(x.ndim)))


class Min(AbstractExtremum):
    """y = smallest x over `dim`; NaN if any x is NaN

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    reduce_op = "min"

    def _extreme(self, ctx: Context, x: Array) -> Array:
        return ctx.min_over(self._names(ctx), extreme(ctx.xp, x, self._dims(x.ndim), "min"))


class ArgMax(AbstractCompleted, AbstractConstant):
    """y = position of the largest x along `dim`, int64; the lowest position of equal elements

    Where the dim is cut, ranks exchange the maximum, then the lowest global position that holds it.

    Args:
        dim: one dim; None compares all elements and gives the row-major position.
        keepdim: keep the reduced dim with size 1.
    """

    def __init__(self, dim: int | None = None, keepdim: bool = False) -> None:
        super().__init__(dim, keepdim)

    def infer(self, x: Spec) -> Spec:
        self._refuse_empty(x.shape)
        return Spec(super().infer(x).shape, np.dtype(np.int64))

    def forward(self, ctx: Context, x: Array) -> Array:
        xp, dims, names, wide = ctx.xp, self._dims(x.ndim), self._names(ctx), self._wide(x.shape)
        nowhere = ctx.sizes(names)
        candidate = xp.full(wide, nowhere, "int64")
        value = extreme(xp, x, dims)
        largest = ctx.max_over(names, value)
        if x.size:
            axis = dims[0] if self.dim is not None and dims else None
            position = self._global(ctx, xp.argmax(x, axis=axis).reshape(wide), x.shape)
            # NaN counts as the largest, and is the only value that differs from itself.
            holds = (value == largest) | (value != value)
            candidate = xp.where(holds, position, candidate)
        return ctx.min_over(names, candidate).reshape(ctx.plan.output.shape)

    def exchanges(self, plan: Plan) -> Exchanges:
        return Exchanges((self._asked(plan, "max", plan.inputs[0].dtype), self._asked(plan, "min", plan.output.dtype)))

    def _global(self, ctx: Context, local: Array, shape: tuple[int, ...]) -> Array:
        """Convert a row-major position among the reduced dims of the slice to one of the whole tensor."""
        position, stride = ctx.xp.zeros_like(local), 1
        names = dim_names(len(shape))
        for i in reversed(self._dims(len(shape))):
            local, index = local // shape[i], local % shape[i]
            position = position + (index + ctx.offset(names[i])) * stride
            stride *= ctx.size(names[i])
        return position


class ArgMin(ArgMax):
    """y = position of the smallest x along `dim`, int64; the lowest position of equal elements

    Args:
        dim: one dim; None compares all elements and gives the row-major position.
        keepdim: keep the reduced dim with size 1.
    """

    def forward(self, ctx: Context, x: Array) -> Array:
        # ~ reverses the order of integers within their dtype; - may overflow.
        return super().forward(ctx, ~x if x.dtype.kind in "biu" else -x)


class LogSumExp(AbstractCompleted):
    """y = ln sum of e ** x over `dim`; dx = dy e ** (x - y)

    The largest x is subtracted before the exponential, so that nothing overflows. Where the dims are cut, ranks
    exchange the maximum and the sum, and nothing in backward. Where all x are -infinity, y is -infinity and dx is 0.

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    def infer(self, x: Spec) -> Spec:
        check_float(x=x)
        self._refuse_empty(x.shape)
        return super().infer(x)

    def forward(self, ctx: Context, x: Array) -> Array:
        xp, dims, names = ctx.xp, self._dims(x.ndim), self._names(ctx)
        largest = ctx.max_over(names, extreme(xp, x, dims)).astype(wider(x.dtype), copy=False)
        # Do not subtract an infinite maximum: infinity - infinity is NaN.
        largest = xp.where(xp.isfinite(largest), largest, xp.zeros_like(largest))
        ctx.exps = xp.exp(x - largest)
        total = ctx.sum_over(names, ctx.exps.sum(axis=dims, keepdims=True))
        # The sum is 0 if all x are -infinity.
        is_empty = total == 0
        ctx.total = total + is_empty
        y = xp.where(is_empty, xp.full_like(total, -np.inf), xp.log(ctx.total) + largest)
        return y.astype(x.dtype, copy=False).reshape(ctx.plan.output.shape)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return ((ctx.exps * (dy.reshape(ctx.total.shape) / ctx.total)).astype(dy.dtype, copy=False),)

    def exchanges(self, plan: Plan) -> Exchanges:
        dtype = plan.inputs[0].dtype
        return Exchanges((self._asked(plan, "max", dtype), self._asked(plan, "sum", wider(dtype))))

    def work(self, x: Spec) -> Work:
        # Per element: maximum, subtraction, exponential (10 by convention), sum, division.
        return Work(14 * prod(x.shape), 3 * x.size_bytes + self.infer(x).size_bytes)


class Var(AbstractCompleted):
    """y = sum of (x - mean)^2 over `dim` / (n - correction), with the global number n of elements

    Two passes, so that a mean far from 0 costs no digits; float16 is summed in float32.

    Args:
        dim: dim or dims to reduce; None means all.
        correction: 1 for a sample's variance, 0 for a population's.
        keepdim: keep reduced dims with size 1.
    """

    result_of = staticmethod(np.mean)

    def __init__(self, dim: int | tuple[int, ...] | None = None, correction: int = 1, keepdim: bool = False) -> None:
        super().__init__(dim, keepdim)
        self.correction = correction

    def _divisor(self, ctx: Context) -> int:
        count = ctx.sizes(self._names(ctx))
        if count <= self.correction:
            raise ShapeError(
                f"{self!r}: the variance of {count} elements with correction={self.correction} is not "
                "defined; reduce over more elements, or use correction=0."
            )
        return count - self.correction

    def forward(self, ctx: Context, x: Array) -> Array:
        dtype, dims, names = ctx.plan.output.dtype, self._dims(x.ndim), self._names(ctx)
        divisor = self._divisor(ctx)
        x = x.astype(np.result_type(dtype, np.float32), copy=False)
        total = ctx.sum_over(names, x.sum(axis=dims, keepdims=True))
        ctx.centred = x - total / (divisor + self.correction)
        squares = ctx.sum_over(names, (ctx.centred * ctx.centred).sum(axis=dims, keepdims=True))
        y = self._of_variance(ctx, squares / divisor)
        return y.astype(dtype, copy=False).reshape(ctx.plan.output.shape)

    def _of_variance(self, ctx: Context, variance: Array) -> Array:
        """Return the result, computed from the variance."""
        return variance

    def _slope(self, ctx: Context) -> Array | int:
        """Return the derivative of the result with respect to the variance."""
        return 1

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        dy_wide = dy.reshape(self._wide(ctx.centred.shape)).astype(ctx.centred.dtype, copy=False) * self._slope(ctx)
        return ((ctx.centred * (dy_wide * (2 / self._divisor(ctx)))).astype(dy.dtype, copy=False),)

    def exchanges(self, plan: Plan) -> Exchanges:
        dtype = np.result_type(plan.output.dtype, np.float32)
        return Exchanges((self._asked(plan, "sum", dtype),) * 2)

    def work(self, x: Spec) -> Work:
        # Per element: sum, subtraction, square, sum.
        return Work(4 * prod(x.shape), 2 * x.size_bytes + self.infer(x).size_bytes)


class Std(Var):
    """y = the square root of `Var`; the gradient at 0 is 0"""

    def _of_variance(self, ctx: Context, variance: Array) -> Array:
        ctx.y = ctx.xp.sqrt(variance)
        return ctx.y

    def _slope(self, ctx: Context) -> Array:
        return ctx.arrays.masked(0.5 / (ctx.y + (ctx.y == 0)), ctx.y > 0)


@function("max amax", reduction)
def max(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the largest element over `dim` (all dims by default); equal elements share the gradient.

    The result is one tensor, as in NumPy and `torch.amax`, not the pair of `torch.max(x, dim)`; `argmax` gives the
    positions.

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(Max, as_dims("max: dim", dim), keepdim)(as_tensor(x))


@function("min amin", reduction)
def min(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the smallest element over `dim` (all dims by default), as one tensor; see `max`.

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(Min, as_dims("min: dim", dim), keepdim)(as_tensor(x))


@function("argmax", reduction)
def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the position of the largest element along `dim`, the lowest one of equal elements.

    Args:
        x: any shape.
        dim: one dim; None compares all elements and gives the row-major position.
        keepdim: keep the dim, with size 1.
    """
    return instance(ArgMax, as_dims("argmax: dim", dim), keepdim)(as_tensor(x))


@function("argmin", reduction)
def argmin(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the position of the smallest element along `dim`, the lowest one of equal elements.

    Args:
        x: any shape.
        dim: one dim; None compares all elements and gives the row-major position.
        keepdim: keep the dim, with size 1.
    """
    return instance(ArgMin, as_dims("argmin: dim", dim), keepdim)(as_tensor(x))


@function("logsumexp")
def logsumexp(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return ln of the sum of e ** x over `dim` (all dims by default), without overflow.

    Args:
        x: any shape, floating point.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(LogSumExp, as_dims("logsumexp: dim", dim), keepdim)(floating(x))


def _correction(correction: int, unbiased: bool | None) -> int:
    return correction if unbiased is None else int(unbiased)


@function("var", deviation)
def var(
    x: Any, dim: Dims = None, correction: int = 1, keepdim: bool = False, *, unbiased: bool | None = None
) -> Tensor:
    """Return the variance over `dim` (all dims by default): the sum of (x - mean) ** 2 / (n - correction).

    `unbiased` is PyTorch's older name: True for a correction of 1, False for 0. The method of Tensor also takes NumPy's
    `ddof`.

    Args:
        x: any shape; integers and bools are taken as float64.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
        correction: the divisor is the number n of elements minus this.
        unbiased: True for a correction of 1, False for 0.
    """
    correction = _correction(correction, unbiased)
    return instance(Var, as_dims("var: dim", dim), correction, keepdim)(as_tensor(x))


@function("std", deviation)
def std(
    x: Any, dim: Dims = None, correction: int = 1, keepdim: bool = False, *, unbiased: bool | None = None
) -> Tensor:
    """Return the standard deviation over `dim` (all dims by default): the root of `var`. The gradient at 0 is 0.

    Args:
        x: any shape; integers and bools are taken as float64.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
        correction: the divisor is the number n of elements minus this.
        unbiased: True for a correction of 1, False for 0.
    """
    correction = _correction(correction, unbiased)
    return instance(Std, as_dims("std: dim", dim), correction, keepdim)(as_tensor(x))
