"""Activations: GELU, SiLU and leaky ReLU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from simparallel.arrays.host.erf import erf
from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Plan, instance
from simparallel.autograd.ops.elementwise import AbstractFloatUnary, stable_sigmoid
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused
from simparallel.base.checks import check_choice
from simparallel.errors import InputError

_INNER = math.sqrt(2 / math.pi)
_CUBIC = 0.044715


class GELU(AbstractFloatUnary):
    """y = x P(X <= x) for a standard normal X (Hendrycks and Gimpel 2016, arXiv:1606.08415)

    Args:
        approximate: "none": x/2 (1 + erf(x / sqrt 2));
            "tanh": x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as in GPT-2.

    Raises:
        InputError: another name in `approximate`.
    """

    # A transcendental function counts 10 by convention; the arithmetic around it is the rest.
    flops_per_element = 20

    def __init__(self, approximate: str = "none") -> None:
        check_choice("GELU", "approximate", approximate, ("none", "tanh"))
        self.approximate = approximate

    def forward(self, ctx: Context, x: Array) -> Array:
        xp, dtype = ctx.xp, ctx.plan.output.dtype
        # In float16, x ** 3 overflows from x = 41 on.
        wide = wider(dtype)
        work = ctx.arrays.temporaries(2, x, wide)
        settings = {"is_exact": self.approximate == "none", "wide": wide, "dtype": dtype}
        if not ctx.needs[0]:
            return fused(xp, _gelu, **settings, has_slope=False)(x, *work)[0]
        # Backward keeps one array, the slope, instead of two.
        y, ctx.slope = fused(xp, _gelu, **settings, has_slope=True)(x, *work)
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy * ctx.slope,)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        return (0,), 0


def _gelu(
    xp: ModuleType, x: Array, square: Array | None, share: Array | None, *, is_exact: bool, wide: Any, dtype: Any,
    has_slope: bool,
) -> tuple[Array, ...]:  # fmt: skip
    """Return y and, with `has_slope`, dy/dx, computed while the inputs are in the cache."""
    x = x.astype(wide, copy=False)
    square = xp.multiply(x, x, out=square)
    if is_exact:
        share = erf(xp, x * math.sqrt(0.5))
    else:
        share = xp.multiply(square, _INNER * _CUBIC, out=share)
        share += _INNER
        share *= x
        share = xp.tanh(share, out=share)
    share *= 0.5
    share += 0.5  # P(X <= x)
    y = x * share
    if not has_slope:
        return (y.astype(dtype, copy=False),)
    slope = square
    if is_exact:  # share + x times the normal density
        slope *= -0.5
        slope = xp.exp(slope, out=slope)
        slope *= x
        slope *= math.sqrt(0.5 / math.pi)
    else:  # share + x inner' / 2 (1 - tanh^2), where 1 - tanh^2 = 4 share (1 - share) and y = x share
        slope *= 6 * _CUBIC * _INNER
        slope += 2 * _INNER
        share_of_y = 1 - share
        # Before the factor `slope`: this product is 0 where the square may be infinite.
        share_of_y *= y
        slope *= share_of_y
    slope += share
    return y.astype(dtype, copy=False), slope.astype(dtype, copy=False)


class SiLU(AbstractFloatUnary):
    """y = x / (1 + e ** -x), also called swish"""

    def forward(self, ctx: Context, x: Array) -> Array:
        ctx.x = x = self._cast(ctx, x)
        y, ctx.gate = fused(ctx.xp, _silu)(x)
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (fused(ctx.xp, _silu_gradient)(dy, ctx.x, ctx.gate),)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        return (0,), 0


def _silu(xp: ModuleType, x: Array) -> tuple[Array, Array]:
    gate = stable_sigmoid(xp, x)
    return x * gate, gate


def _silu_gradient(xp: ModuleType, dy: Array, x: Array, gate: Array) -> Array:
    return dy * (gate * (1 + x * (1 - gate)))


class LeakyReLU(AbstractFloatUnary):
    """y = x for x > 0, else negative_slope * x (Maas et al. 2013, "Rectifier nonlinearities improve ...")

    The gradient at 0 is `negative_slope`.

    Args:
        negative_slope: a finite number.

    Raises:
        InputError: `negative_slope` is not a finite number.
    """

    # A product and a selection.
    flops_per_element = 2

    def __init__(self, negative_slope: float = 0.01) -> None:
        if isinstance(negative_slope, bool) or not isinstance(negative_slope, (int, float)):
            raise InputError(f"LeakyReLU: negative_slope={negative_slope!r} must be a number.")
        if not math.isfinite(negative_slope):
            raise InputError(f"LeakyReLU: negative_slope={negative_slope!r} must be finite.")
        self.negative_slope = float(negative_slope)

    def forward(self, ctx: Context, x: Array) -> Array:
        x = self._cast(ctx, x)
        y = fused(ctx.xp, _leaky)(x, x, self.negative_slope)
        # With a positive slope, y has the signs of x. The next op usually keeps y anyway, so keeping y here frees x.
        ctx.signs = y if self.negative_slope > 0 else x
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (fused(ctx.xp, _leaky)(dy, ctx.signs, self.negative_slope),)


def _leaky(xp: ModuleType, x: Array, signs: Array, slope: float) -> Array:
    return xp.where(signs > 0, x, x * slope)


_SILU = SiLU()


@function()
def gelu(x: Any, approximate: str = "none") -> Tensor:
    """Return x times the normal distribution function of x; `approximate` is "none" or "tanh"."""
    return instance(GELU, approximate)(as_tensor(x))


@function()
def silu(x: Any) -> Tensor:
    """Return x * sigmoid(x)."""
    return _SILU(as_tensor(x))


@function()
def leaky_relu(x: Any, negative_slope: float = 0.01) -> Tensor:
    """Return x where x > 0, else negative_slope * x."""
    return instance(LeakyReLU, negative_slope)(as_tensor(x))
