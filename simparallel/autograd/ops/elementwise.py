"""Elementwise ops. Binary ops broadcast as in NumPy; their gradients are summed over the broadcast dims."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.autograd.methods import function, method
from simparallel.autograd.op import AbstractConstant, Context, Op, Plan, Spec, Work
from simparallel.autograd.ops.promotion import floating, operands
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused
from simparallel.errors import DTypeError, InputError


class AbstractBinary(Op):
    rule = "..., ... -> ..."


class AbstractUnary(Op):
    rule = "... -> ..."

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # Reads dy and what forward kept, writes dx.
        work = self.work_backward(needs, plan.work)
        return Work(work.flops, work.size_bytes + plan.output.size_bytes * sum(needs))


def _not_of_bools(y: Spec, instead: str) -> Spec:
    """Return `y`. Raise DTypeError for bools, where the op is not defined."""
    if y.dtype.kind == "b":
        raise DTypeError(f"not defined for bools; use {instead}, or x.astype('int64').")
    return y


class AbstractFloatUnary(AbstractUnary):
    """A unary op with a floating-point result: integers and bools become float32, as in PyTorch."""

    # A transcendental function, by convention.
    flops_per_element = 10

    def infer(self, x: Spec) -> Spec:
        return Spec(x.shape, x.dtype if x.dtype.kind == "f" else np.dtype(np.float32))

    def _cast(self, ctx: Context, x: Array) -> Array:
        return x.astype(ctx.plan.output.dtype, copy=False)


class Add(AbstractBinary):
    """y = a + b"""

    linear = True

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.shapes = a.shape, b.shape
        return ctx.arrays.elementwise(operator.add, a, b)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return [ctx.arrays.unbroadcast(dy, s) if n else None for s, n in zip(ctx.shapes, ctx.needs, strict=True)]

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # The gradient of an input of y's shape is dy itself, and costs nothing. If both inputs have this shape, as in a
        # residual block, they usually come from one tensor: the sum of its two gradients counts here. The gradient of
        # an input that broadcasts is a sum of dy.
        y, pairs = plan.output, zip(plan.inputs, needs, strict=True)
        wanted = [spec.size_bytes for spec, need in pairs if need]
        sums = sum(y.size_bytes + size for size in wanted if size != y.size_bytes)
        joined = 3 * y.size_bytes * (wanted.count(y.size_bytes) == 2)
        return Work(prod(y.shape) if sums or joined else 0, sums + joined)


class Sub(AbstractBinary):
    """y = a - b"""

    linear = True

    def infer(self, a: Spec, b: Spec) -> Spec:
        return _not_of_bools(super().infer(a, b), "a ^ b")

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.shapes = a.shape, b.shape
        return ctx.arrays.elementwise(operator.sub, a, b)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        da = ctx.arrays.unbroadcast(dy, ctx.shapes[0]) if ctx.needs[0] else None
        db = -ctx.arrays.unbroadcast(dy, ctx.shapes[1]) if ctx.needs[1] else None
        return da, db


class Mul(AbstractBinary):
    """y = a * b"""

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.shapes = a.shape, b.shape
        ctx.a, ctx.b = a if ctx.needs[1] else None, b if ctx.needs[0] else None
        return ctx.arrays.elementwise(operator.mul, a, b)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        arrays, times = ctx.arrays, operator.mul
        da = arrays.unbroadcast(arrays.elementwise(times, dy, ctx.b), ctx.shapes[0]) if ctx.needs[0] else None
        db = arrays.unbroadcast(arrays.elementwise(times, dy, ctx.a), ctx.shapes[1]) if ctx.needs[1] else None
        return da, db


class Div(AbstractBinary):
    """y = a / b"""

    def infer(self, a: Spec, b: Spec) -> Spec:
        spec = super().infer(a, b)
        return Spec(spec.shape, np.true_divide(np.ones((), a.dtype), np.ones((), b.dtype)).dtype)

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.a, ctx.b = a, b
        return a / b

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        d = dy / ctx.b
        da = ctx.arrays.unbroadcast(d, ctx.a.shape) if ctx.needs[0] else None
        db = ctx.arrays.unbroadcast(-d * (ctx.a / ctx.b), ctx.b.shape) if ctx.needs[1] else None
        return da, db


class FloorDivide(AbstractBinary, AbstractConstant):
    """y = a // b: the quotient, rounded down"""

    def infer(self, a: Spec, b: Spec) -> Spec:
        return _not_of_bools(super().infer(a, b), "a & b")

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        return a // b


class Remainder(AbstractBinary):
    """y = a % b = a - b (a // b), with the sign of b; gradients dy and -dy (a // b)"""

    def infer(self, a: Spec, b: Spec) -> Spec:
        return _not_of_bools(super().infer(a, b), "a & ~b")

    def forward(self, ctx: Context, a: Array, b: Array) -> Array:
        ctx.a, ctx.b = a, b
        return a % b

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        da = ctx.arrays.unbroadcast(dy, ctx.a.shape) if ctx.needs[0] else None
        db = ctx.arrays.unbroadcast(-dy * (ctx.a // ctx.b), ctx.b.shape) if ctx.needs[1] else None
        return da, db


class Neg(AbstractUnary):
    """y = -x"""

    linear = True

    def infer(self, x: Spec) -> Spec:
        return _not_of_bools(super().infer(x), "~x")

    def forward(self, ctx: Context, x: Array) -> Array:
        return -x

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (-dy,)


class Clone(AbstractUnary):
    """y = a copy of x; each rank copies its slice of a sharded x, in the same layout"""

    linear = stays = True
    flops_per_element = 0

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.copy()

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy,)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        # The gradient is passed on without a copy.
        return Work(0, 0)


class Abs(AbstractUnary):
    """y = |x|; the gradient at 0 is 0"""

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x
        return ctx.xp.abs(x)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy * ctx.xp.sign(ctx.x),)


def stable_sigmoid(xp: ModuleType, x: Array) -> Array:
    """Return 1 / (1 + e ** -x) of a floating-point array; also for `backend.fused`."""
    # In (0, 1]: never overflows.
    small = xp.exp(-xp.absolute(x))
    return xp.where(x < 0, small, 1) / (1 + small)


class Sigmoid(AbstractFloatUnary):
    """y = 1 / (1 + e ** -x), in a form without overflow that keeps small values"""

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.y = fused(ctx.xp, stable_sigmoid)(self._cast(ctx, x))
        return ctx.y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (fused(ctx.xp, _sigmoid_gradient)(dy, ctx.y),)


def _sigmoid_gradient(xp: ModuleType, dy: Array, y: Array) -> Array:
    return dy * y * (1 - y)


class ReLU(AbstractUnary):
    """y = max(x, 0); the gradient at 0 is 0"""

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.y = ctx.arrays.elementwise(ctx.xp.maximum, x, 0 if x.dtype.kind != "b" else False)
        return ctx.y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (ctx.arrays.where_positive(dy, ctx.y),)


_ADD, _SUB, _MUL, _DIV = Add(), Sub(), Mul(), Div()
_FLOOR_DIVIDE, _REMAINDER = FloorDivide(), Remainder()
_NEG, _CLONE, _ABS, _SIGMOID, _RELU = Neg(), Clone(), Abs(), Sigmoid(), ReLU()


@function("add __add__ __radd__ __iadd__")
def add(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    """Return a + alpha * b, broadcast."""
    return _ADD(*operands(a, b if alpha == 1 else as_tensor(b) * alpha))


@function("sub __sub__ __rsub__ __isub__")
def sub(a: Any, b: Any, *, alpha: float = 1) -> Tensor:
    """Return a - alpha * b, broadcast."""
    return _SUB(*operands(a, b if alpha == 1 else as_tensor(b) * alpha))


@function("mul __mul__ __rmul__ __imul__")
def mul(a: Any, b: Any) -> Tensor:
    """Return a * b, broadcast."""
    return _MUL(*operands(a, b))


@function("__truediv__ __rtruediv__ __itruediv__")
def div(a: Any, b: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Return a / b, broadcast. Two integers or bools give float32.

    `rounding_mode` "floor" rounds the quotient down, "trunc" rounds it towards 0. A rounded quotient has no gradient,
    and integers stay integers.
    """
    a, b = operands(a, b)
    if rounding_mode is not None:
        return _rounded_quotient(a, b, rounding_mode)
    if a.dtype.kind in "biu" and b.dtype.kind in "biu":
        a, b = floating(a), floating(b)
    return _DIV(a, b)


@method("div")
def _divided(x: Any, other: Any, *, rounding_mode: str | None = None) -> Tensor:
    """Return x / other, perhaps rounded; see `functions.div`."""
    return div(x, other, rounding_mode=rounding_mode)


def _rounded_quotient(a: Tensor, b: Tensor, rounding_mode: str) -> Tensor:
    if rounding_mode not in ("floor", "trunc"):
        raise InputError(f"div: rounding_mode={rounding_mode!r}, choose None, 'floor' or 'trunc'.")
    if rounding_mode == "floor":
        return a // b
    if a.dtype.kind == "f" or b.dtype.kind == "f":
        return _DIV(a, b).detach().trunc()
    # Integer division is exact where float64 has too few digits. It rounds down, so a negative quotient with a
    # remainder is one too low.
    quotient = a // b
    goes_up = (quotient * b != a) & (quotient < 0)
    return quotient + goes_up.astype(quotient.dtype)


@function("__floordiv__ __rfloordiv__")
def floor_divide(a: Any, b: Any) -> Tensor:
    """Return a // b, rounded down, broadcast. No gradient."""
    return _FLOOR_DIVIDE(*operands(a, b))


@function("__mod__ __rmod__")
def remainder(a: Any, b: Any) -> Tensor:
    """Return a % b = a - b (a // b), with the sign of b as in Python; broadcast."""
    return _REMAINDER(*operands(a, b))


@function("neg __neg__")
def neg(x: Any) -> Tensor:
    """Return -x."""
    return _NEG(as_tensor(x))


@function("clone")
def clone(x: Any) -> Tensor:
    """Copy `x`, differentiably; the copy is sharded like `x`. `x.detach().clone()` is a leaf."""
    return _CLONE(as_tensor(x))


@function("abs __abs__")
def abs(x: Any) -> Tensor:
    """Return the absolute value of `x`."""
    return _ABS(as_tensor(x))


@function("sigmoid")
def sigmoid(x: Any) -> Tensor:
    """Return 1 / (1 + e ** -x)."""
    return _SIGMOID(as_tensor(x))


@function("relu")
def relu(x: Any) -> Tensor:
    """Return max(x, 0)."""
    return _RELU(x)
