"""Powers, with a number or a tensor as the exponent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, Work, instance
from simparallel.autograd.ops.promotion import floating, operands, plain
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import DTypeError


class Pow(Op):
    """y = a ** b, broadcast; with a number as the exponent, y = a ** exponent with one input.

    Gradients: dy b a^(b-1) for a, dy y ln a for b. Where b is 0, the gradient for a is 0, also at a = 0 and infinity.
    The gradient for b at a = 0 is 0, or -infinity where b is negative; it is NaN where a is negative (no real
    derivative).

    Args:
        exponent: a number; None to take the exponent as a second input.

    Raises:
        DTypeError: an integer tensor with a negative integer exponent, or bools.
    """

    # A transcendental function, by convention.
    flops_per_element = 10

    def __init__(self, exponent: float | None = None) -> None:
        self.exponent = exponent

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        return "..., ... -> ..." if self.exponent is None else "... -> ..."

    def infer(self, *inputs: Spec) -> Spec:
        shape, dtype = super().infer(*inputs)
        if self.exponent is not None:
            dtype = np.result_type(dtype, self.exponent)
            if dtype.kind in "iu" and self.exponent < 0:
                raise _no_negative_powers(dtype)
        if dtype.kind == "b":
            raise DTypeError("a bool tensor has no powers; use x.astype('int64').")
        return Spec(shape, dtype)

    def forward(self, ctx: Context, a: Array, b: Array | None = None) -> Array:
        if b is None:
            assert self.exponent is not None
            ctx.a = a
            return _power(ctx, a.astype(ctx.plan.output.dtype, copy=False), self.exponent)
        if ctx.plan.output.dtype.kind in "iu" and b.size and b.min() < 0:
            raise _no_negative_powers(ctx.plan.output.dtype)
        ctx.a, ctx.b = a, b
        ctx.y = a**b
        return ctx.y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, a = ctx.xp, ctx.a
        if self.exponent is not None:
            if self.exponent == 0:
                return (xp.zeros_like(a),)
            return (dy * (self.exponent * _power(ctx, a, self.exponent - 1)),)
        b, da, db = ctx.b, None, None
        if ctx.needs[0]:
            slope = xp.where(b == 0, xp.zeros_like(ctx.y), b * a ** xp.where(b == 0, xp.ones_like(b), b - 1))
            da = ctx.arrays.unbroadcast(dy * slope, a.shape)
        if ctx.needs[1]:
            is_zero = (a == 0) & (b >= 0)
            logs = xp.log(xp.where(is_zero | (a < 0), xp.ones_like(ctx.y), xp.abs(a)))
            logs = xp.where(a < 0, xp.full_like(logs, float("nan")), logs)
            db = ctx.arrays.unbroadcast(dy * (ctx.y * logs), b.shape)
        return da, db

    def work(self, *inputs: Spec) -> Work:
        y = self.infer(*inputs)
        cheap = self.exponent in _CHEAP
        flops = math.prod(y.shape) * (1 if cheap else self.flops_per_element)
        return Work(flops, y.size_bytes + sum(spec.size_bytes for spec in inputs))


def _no_negative_powers(dtype: np.dtype) -> DTypeError:
    return DTypeError(
        f"an integer tensor ({dtype}) has no negative integer powers; "
        "use x.astype('float32'), or a float as the exponent."
    )


# Exponents that need no logarithm: they count 1 flop per element.
_CHEAP = (0, 1, 2, 3, -1)


def _power(ctx: Context, x: Array, exponent: float) -> Array:
    """Return x ** exponent: a square root or a product for the common exponents 0.5, 2 and 3."""
    if exponent == 2:
        return x * x
    if exponent == 3:
        return x * x * x
    if exponent == 0.5:
        return ctx.xp.sqrt(x)
    return x**exponent


_POW = Pow()


@function("square")
def square(x: Any) -> Tensor:
    """Return x * x."""
    return pow(x, 2)


@function("pow __pow__ __rpow__ __ipow__")
def pow(x: Any, exponent: Any) -> Tensor:
    """Return x ** exponent, broadcast; the exponent is a number or a tensor.

    A float as the exponent turns an integer x into float32.
    """
    exponent = plain(exponent)
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        x = floating(x) if isinstance(exponent, float) else as_tensor(x)
        return instance(Pow, exponent)(x)
    return _POW(*operands(x, exponent))
