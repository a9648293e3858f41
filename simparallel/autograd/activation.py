"""Smooth activations: GELU and SiLU."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simparallel.autograd.elementwise import AbstractFloatUnary, stable_sigmoid
from simparallel.autograd.erf import erf
from simparallel.autograd.op import Context
from simparallel.backend import Array
from simparallel.errors import InputError

_INNER = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class GELU(AbstractFloatUnary):
    """y = x P(X <= x) for a standard normal X (Hendrycks and Gimpel 2016, arXiv:1606.08415)

    Args:
        approximate: "none": x/2 (1 + erf(x / sqrt 2));
            "tanh": x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as GPT-2 has it.
    """

    flops_per_element = 20  # one transcendental function, and the arithmetic around it

    def __init__(self, approximate: str = "none") -> None:
        if approximate not in ("none", "tanh"):
            raise InputError(f"GELU: approximate={approximate!r}, choose 'none' or 'tanh'.")
        self.approximate = approximate

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x = self._cast(ctx, x)
        if self.approximate == "none":
            share = erf(ctx.xp, x * math.sqrt(0.5))
        else:
            inner = x * x
            inner *= _INNER * _CUBIC
            inner += _INNER
            inner *= x
            share = ctx.xp.tanh(inner)
        share += 1
        share *= 0.5
        ctx.share = share  # P(X <= x)
        return x * share

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        x, share = ctx.x, ctx.share
        square = x * x
        if self.approximate == "none":  # the normal density
            slope = ctx.xp.exp(square * -0.5)
            slope *= x
            slope *= math.sqrt(0.5 / math.pi)
        else:  # 1 - tanh^2 = 4 share (1 - share)
            slope = square
            slope *= 3 * _CUBIC * _INNER
            slope += _INNER
            slope *= x
            slope *= 2 * share * (1 - share)
        slope += share
        slope *= dy
        return (slope,)


class SiLU(AbstractFloatUnary):
    """y = x / (1 + e ** -x), also called swish"""

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x = self._cast(ctx, x)
        ctx.gate = stable_sigmoid(ctx.xp, x)
        return x * ctx.gate

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        gate = ctx.gate
        return (dy * (gate * (1 + ctx.x * (1 - gate))),)
