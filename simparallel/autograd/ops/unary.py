"""Elementwise ops of one input: smooth functions, and step functions without a gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from simparallel.autograd.methods import function
from simparallel.autograd.op import AbstractConstant, Context, Op, as_int, instance
from simparallel.autograd.ops.elementwise import AbstractFloatUnary, AbstractUnary
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused


class AbstractSmooth(AbstractFloatUnary):
    """A smooth function: y = function(xp, x), dx = gradient(xp, dy, kept), where `kept` is x or y."""

    _function: ClassVar[Any]
    _gradient: ClassVar[Any]
    _keeps_y: ClassVar[bool]

    def forward(self, ctx: Context, x: Array) -> Array:
        x = self._cast(ctx, x)
        y = self._function(ctx.xp, x)
        ctx.kept = y if self._keeps_y else x
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (fused(ctx.xp, self._gradient, f"{self.name}_gradient")(dy, ctx.kept),)


def _of_namespace(function: Any) -> staticmethod[[Any, Array], Array]:
    return staticmethod((lambda xp, x: getattr(xp, function)(x)) if isinstance(function, str) else function)


def _smooth(name: str, text: str, keeps: str, function: Any, gradient: Any) -> type[AbstractSmooth]:
    """Make the op class `name`.

    Args:
        name: name of the class.
        text: its docstring, the formula.
        keeps: "x" or "y", kept to compute the gradient.
        function: `function(xp, x)`, or its name in NumPy.
        gradient: `gradient(xp, dy, kept)`.
    """
    settings = {
        "__doc__": text,
        "__module__": __name__,
        "_function": _of_namespace(function),
        "_gradient": staticmethod(gradient),
        "_keeps_y": keeps == "y",
    }
    return type(name, (AbstractSmooth,), settings)


# fmt: off
Exp = _smooth("Exp", "y = e ** x", "y", "exp", lambda xp, dy, y: dy * y)
Expm1 = _smooth("Expm1", "y = e ** x - 1, exact near 0", "y", "expm1", lambda xp, dy, y: dy * (y + 1))
Log = _smooth("Log", "y = ln x", "x", "log", lambda xp, dy, x: dy / x)
Log1p = _smooth("Log1p", "y = ln(1 + x), exact near 0", "x", "log1p", lambda xp, dy, x: dy / (1 + x))
Log2 = _smooth("Log2", "y = the logarithm of x to base 2", "x", "log2", lambda xp, dy, x: dy / (x * math.log(2)))
Log10 = _smooth("Log10", "y = the logarithm of x to base 10", "x", "log10", lambda xp, dy, x: dy / (x * math.log(10)))
Sqrt = _smooth("Sqrt", "y = x ** (1/2); the gradient at 0 is infinite", "y", "sqrt", lambda xp, dy, y: dy / (2 * y))
Rsqrt = _smooth(
    "Rsqrt", "y = x ** (-1/2)", "y", lambda xp, x: 1 / xp.sqrt(x), lambda xp, dy, y: dy * (-0.5 * y * y * y)
)
Sin = _smooth("Sin", "y = sin x", "x", "sin", lambda xp, dy, x: dy * xp.cos(x))
Cos = _smooth("Cos", "y = cos x", "x", "cos", lambda xp, dy, x: -dy * xp.sin(x))
Tan = _smooth("Tan", "y = tan x", "y", "tan", lambda xp, dy, y: dy * (1 + y * y))
Asin = _smooth("Asin", "y = arcsin x", "x", "arcsin", lambda xp, dy, x: dy / xp.sqrt(1 - x * x))
Acos = _smooth("Acos", "y = arccos x", "x", "arccos", lambda xp, dy, x: -dy / xp.sqrt(1 - x * x))
Atan = _smooth("Atan", "y = arctan x", "x", "arctan", lambda xp, dy, x: dy / (1 + x * x))
Sinh = _smooth("Sinh", "y = sinh x", "x", "sinh", lambda xp, dy, x: dy * xp.cosh(x))
Cosh = _smooth("Cosh", "y = cosh x", "x", "cosh", lambda xp, dy, x: dy * xp.sinh(x))
Tanh = _smooth("Tanh", "y = tanh x", "y", "tanh", lambda xp, dy, y: dy * (1 - y * y))
# fmt: on


class AbstractStep(AbstractUnary, AbstractConstant):
    """A step function: constant between its jumps, without a gradient. Integers and bools are unchanged."""

    _function: ClassVar[Any]

    def forward(self, ctx: Context, x: Array) -> Array:
        return self._function(ctx.xp, x) if x.dtype.kind == "f" else x.copy()


def _step(name: str, text: str, function: str) -> type[AbstractStep]:
    settings = {"__doc__": text, "__module__": __name__, "_function": _of_namespace(function)}
    return type(name, (AbstractStep,), settings)


Floor = _step("Floor", "y = the largest integer <= x", "floor")
Ceil = _step("Ceil", "y = the smallest integer >= x", "ceil")
Trunc = _step("Trunc", "y = x without its fraction", "trunc")


class Sign(AbstractStep):
    """y = -1, 0 or 1: the sign of x"""

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.copy() if x.dtype.kind == "b" else ctx.xp.sign(x)


class Round(AbstractStep):
    """y = x rounded; a number halfway between two goes to the even one

    Args:
        decimals: digits to keep after the decimal point; -1 rounds to tens.
    """

    def __init__(self, decimals: int = 0) -> None:
        self.decimals = as_int("Round: decimals", decimals)

    def forward(self, ctx: Context, x: Array) -> Array:
        return ctx.xp.around(x, self.decimals) if x.dtype.kind != "b" else x.copy()


def _unary(kind: type[Op]) -> Callable[[Any], Tensor]:
    """Make the function and the method of an op that has one input and no settings."""
    call = kind()

    def unary(x: Any) -> Tensor:
        return call(as_tensor(x))

    unary.__name__ = unary.__qualname__ = name = kind.__name__.lower()
    unary.__doc__ = kind.__doc__
    return function(name)(unary)


exp, expm1, sqrt, rsqrt = _unary(Exp), _unary(Expm1), _unary(Sqrt), _unary(Rsqrt)
log, log1p, log2, log10 = _unary(Log), _unary(Log1p), _unary(Log2), _unary(Log10)
sin, cos, tan = _unary(Sin), _unary(Cos), _unary(Tan)
asin, acos, atan = _unary(Asin), _unary(Acos), _unary(Atan)
sinh, cosh, tanh = _unary(Sinh), _unary(Cosh), _unary(Tanh)
floor, ceil, trunc, sign = _unary(Floor), _unary(Ceil), _unary(Trunc), _unary(Sign)


@function("round")
def round(x: Any, decimals: int = 0) -> Tensor:
    """Round `x` to `decimals` digits after the point; a number halfway between two goes to the even one."""
    return instance(Round, decimals)(as_tensor(x))
