"""Ops that select one of their inputs for every element: maximum, minimum, where, clip."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import numpy as np

from simparallel.autograd.methods import FUNCTIONS, function
from simparallel.autograd.op import Context, Op, Spec, instance
from simparallel.autograd.ops.elementwise import AbstractBinary, AbstractUnary
from simparallel.autograd.ops.promotion import as_like, floating, operands, plain
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import DTypeError, InputError


class AbstractExtreme(AbstractBinary):
    """The larger or the smaller of two elements; equal elements get half of the gradient each."""

    def _wins(self, a: Array, b: Array) -> Array:
        raise TypeError(f"{self.name} does not define _wins")

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        a, b = ctx.a, ctx.b
        tie = ctx.arrays.masked(dy / 2, a == b)
        da = db = None
        if ctx.needs[0]:
            da = ctx.arrays.unbroadcast(ctx.arrays.masked(dy, self._wins(a, b)) + tie, a.shape)
        if ctx.needs[1]:
            db = ctx.arrays.unbroadcast(ctx.arrays.masked(dy, self._wins(b, a)) + tie, b.shape)
        return da, db


class Maximum(AbstractExtreme):
    """y = a where a > b, else b; NaN where a or b is NaN"""

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.a, ctx.b = a, b
        return ctx.xp.maximum(a, b)

    def _wins(self, a: Array, b: Array) -> Array:
        return a > b


class Minimum(AbstractExtreme):
    """y = a where a < b, else b; NaN where a or b is NaN"""

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.a, ctx.b = a, b
        return ctx.xp.minimum(a, b)

    def _wins(self, a: Array, b: Array) -> Array:
        return a < b


class Where(Op):
    """y = a where condition, else b; all three broadcast.   condition: bool"""

    rule = "..., ..., ... -> ..."

    def infer(self, condition: Spec, a: Spec, b: Spec) -> Spec:
        if condition.dtype.kind != "b":
            raise DTypeError(f"the condition has dtype {condition.dtype}, needs bool; use condition != 0.")
        return Spec(super().infer(condition, a, b).shape, np.result_type(a.dtype, b.dtype))

    def forward(self, ctx: Context, condition: Array, a: Array, b: Array) -> Array:
        ctx.condition = condition
        return ctx.xp.where(condition, a, b)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        _, a, b = ctx.plan.inputs
        da = ctx.arrays.unbroadcast(ctx.arrays.masked(dy, ctx.condition), a.shape) if ctx.needs[1] else None
        db = ctx.arrays.unbroadcast(ctx.arrays.masked(dy, ~ctx.condition), b.shape) if ctx.needs[2] else None
        return None, da, db


class Clip(AbstractUnary):
    """y = min(max(x, low), high); the gradient passes where low <= x <= high

    Args:
        low, high: numbers, or None for no bound. A float bound turns an integer tensor into a floating-point one.

    Raises:
        InputError: both bounds are None.
    """

    def __init__(self, low: float | None = None, high: float | None = None) -> None:
        if low is None and high is None:
            raise InputError("Clip: low and high are both None; give at least one bound.")
        self.low, self.high = low, high

    def infer(self, x: Spec) -> Spec:
        bounds = [bound for bound in (self.low, self.high) if bound is not None]
        return Spec(x.shape, np.result_type(x.dtype, *bounds))

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x
        return x.astype(ctx.plan.output.dtype, copy=False).clip(self.low, self.high)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        inside = ctx.xp.ones(ctx.x.shape, dtype=bool) if self.low is None else ctx.x >= self.low
        if self.high is not None:
            inside &= ctx.x <= self.high
        return (ctx.arrays.masked(dy, inside),)


_MAXIMUM, _MINIMUM, _WHERE = Maximum(), Minimum(), Where()


@function()
def maximum(a: Any, b: Any) -> Tensor:
    """Return the larger element of each pair, broadcast; equal elements share the gradient.

    Args:
        a, b: shapes that broadcast.
    """
    return _MAXIMUM(*operands(a, b))


@function()
def minimum(a: Any, b: Any) -> Tensor:
    """Return the smaller element of each pair, broadcast; equal elements share the gradient.

    Args:
        a, b: shapes that broadcast.
    """
    return _MINIMUM(*operands(a, b))


@function()
def where(condition: Any, a: Any, b: Any) -> Tensor:
    """Return a where the condition (bool) holds, else b; broadcast."""
    return _WHERE(as_tensor(condition), *operands(a, b))


@function("clip")
def clip(x: Any, low: Any = None, high: Any = None) -> Tensor:
    """Clip x to low … high, that is min(max(x, low), high); None sets no bound.

    With numbers as bounds, the gradient also passes where x equals a bound. Tensors, arrays and lists as bounds
    broadcast and get gradients: where x equals such a bound, the two share the gradient.
    """
    x, low, high = as_tensor(x), plain(low), plain(high)
    if isinstance(low, (NoneType, int, float)) and isinstance(high, (NoneType, int, float)):
        if isinstance(low, float) or isinstance(high, float):
            x = floating(x)
        return instance(Clip, low, high)(x)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


FUNCTIONS["clamp"] = clamp = clip


@function("masked_fill")
def masked_fill(x: Any, mask: Any, value: Any) -> Tensor:
    """Put `value` where the mask (bool) is True; the mask broadcasts, and a number takes the dtype of x."""
    x = as_tensor(x)
    return _WHERE(as_tensor(mask), as_like(value, x), x)
