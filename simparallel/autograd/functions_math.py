"""Functions that compute element by element, compare, or look for extremes."""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.autograd import (
    activation,
    cast as casting,
    compare,
    elementwise,
    extremum,
    op,
    power,
    select,
)
from simparallel.autograd.operands import as_dims, operands
from simparallel.autograd.tensor import Tensor, as_tensor

Dims = int | tuple[int, ...] | None

_SQRT, _ABS, _POW = elementwise.Sqrt(), elementwise.Abs(), power.Pow()
_SILU, _WHERE = activation.SiLU(), select.Where()
_MAXIMUM, _MINIMUM = select.Maximum(), select.Minimum()
_EQ, _NE, _LT = compare.Equal(), compare.NotEqual(), compare.Less()
_LE, _GT, _GE = compare.LessEqual(), compare.Greater(), compare.GreaterEqual()


def sqrt(x: Any) -> Tensor:
    """Square root."""
    return _SQRT(as_tensor(x))


def abs(x: Any) -> Tensor:
    """Absolute value."""
    return _ABS(as_tensor(x))


def pow(x: Any, exponent: Any) -> Tensor:
    """x ** exponent, a number or a tensor; broadcast."""
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        return op.instance(power.Pow, exponent)(as_tensor(x))
    return _POW(*operands(x, exponent))


def clip(x: Any, low: float | None = None, high: float | None = None) -> Tensor:
    """min(max(x, low), high); None is no bound."""
    return op.instance(select.Clip, low, high)(as_tensor(x))


clamp = clip


def gelu(x: Any, approximate: str = "none") -> Tensor:
    """x times the normal distribution function of x; `approximate` is "none" or "tanh"."""
    return op.instance(activation.GELU, approximate)(as_tensor(x))


def silu(x: Any) -> Tensor:
    """x * sigmoid(x)."""
    return _SILU(as_tensor(x))


def maximum(a: Any, b: Any) -> Tensor:
    """The larger of two, broadcast; equal ones share the gradient."""
    return _MAXIMUM(*operands(a, b))


def minimum(a: Any, b: Any) -> Tensor:
    """The smaller of two, broadcast; equal ones share the gradient."""
    return _MINIMUM(*operands(a, b))


def where(condition: Any, a: Any, b: Any) -> Tensor:
    """a where the condition (bool) holds, else b; broadcast."""
    return _WHERE(as_tensor(condition), *operands(a, b))


def cast(x: Any, dtype: Any) -> Tensor:
    """`x` in another dtype; `x` itself where it has that dtype already."""
    x, dtype = as_tensor(x), np.dtype(dtype)
    return x if x.dtype == dtype else op.instance(casting.Cast, dtype)(x)


def eq(a: Any, b: Any) -> Tensor:
    """a == b, bool, broadcast."""
    return _EQ(*operands(a, b))


def ne(a: Any, b: Any) -> Tensor:
    """a != b, bool, broadcast."""
    return _NE(*operands(a, b))


def lt(a: Any, b: Any) -> Tensor:
    """a < b, bool, broadcast."""
    return _LT(*operands(a, b))


def le(a: Any, b: Any) -> Tensor:
    """a <= b, bool, broadcast."""
    return _LE(*operands(a, b))


def gt(a: Any, b: Any) -> Tensor:
    """a > b, bool, broadcast."""
    return _GT(*operands(a, b))


def ge(a: Any, b: Any) -> Tensor:
    """a >= b, bool, broadcast."""
    return _GE(*operands(a, b))


def max(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Largest element over `dim` (all dims by default); equal ones share the gradient."""
    return op.instance(extremum.Max, as_dims(dim), keepdim)(as_tensor(x))


def min(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Smallest element over `dim` (all dims by default); equal ones share the gradient."""
    return op.instance(extremum.Min, as_dims(dim), keepdim)(as_tensor(x))


def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Position of the largest element along `dim`, or in row-major order; the lowest of equal ones."""
    return op.instance(extremum.ArgMax, dim, keepdim)(as_tensor(x))


def var(x: Any, dim: Dims = None, correction: int = 1, keepdim: bool = False) -> Tensor:
    """Variance over `dim` (all dims by default): the sum of squares / (n - correction)."""
    return op.instance(extremum.Var, as_dims(dim), correction, keepdim)(as_tensor(x))
