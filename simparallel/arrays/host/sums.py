"""Dtypes of sums, extremes of slices, exponentials and memory orders: helpers that the ops share."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from simparallel.backend import Array

HALF = np.dtype(np.float16)


def wider(dtype: np.dtype) -> np.dtype:
    """Return the dtype to compute in: float32 for float16, which has too few digits and too small a range for sums."""
    return np.dtype(np.float32) if dtype == HALF else dtype


def extreme(xp: ModuleType, x: Array, axis: int | tuple[int, ...], op: str = "max") -> Array:
    """Return the maximum or minimum of x along `axis`, kept with size 1.

    Where a dim is cut, a rank's slice may be empty: it gives the identity of the reduction, `lowest` or `highest`.
    """
    if x.size:
        return getattr(x, op)(axis=axis, keepdims=True)
    dims = (axis,) if isinstance(axis, int) else axis
    shape = [1 if d in dims or d - x.ndim in dims else size for d, size in enumerate(x.shape)]
    return xp.full(shape, lowest(x.dtype) if op == "max" else highest(x.dtype), x.dtype)


def exponentials(xp: ModuleType, x: Array, largest: Array, *, dtype: Any, keeps_shifted: bool) -> tuple[Array, ...]:
    """Return [x - largest,] e ** (x - largest), for `backend.fused`."""
    shifted = x.astype(dtype, copy=False) - largest.astype(dtype, copy=False)
    if keeps_shifted:
        return shifted, xp.exp(shifted)
    return (xp.exp(shifted, out=shifted),)


def lowest(dtype: np.dtype) -> Any:
    """Return the smallest value of a dtype (-infinity for floating point), the identity of max."""
    return -np.inf if dtype.kind == "f" else False if dtype.kind == "b" else np.iinfo(dtype).min


def highest(dtype: np.dtype) -> Any:
    """Return the largest value of a dtype (infinity for floating point), the identity of min."""
    return np.inf if dtype.kind == "f" else True if dtype.kind == "b" else np.iinfo(dtype).max


def divided(dy: Array, count: int) -> Array:
    """Return dy / count, computed in float32 for float16: the count may exceed 65504, the largest float16."""
    return (dy.astype(wider(dy.dtype), copy=False) / count).astype(dy.dtype, copy=False)


def in_order_of(xp: Any, x: Array, like: Array) -> Array:
    """Copy x to the memory order of `like`, of the same shape: mixed orders make every operation slow."""
    if x.strides == like.strides and x.dtype == like.dtype:
        return x
    ordered = xp.empty_like(like)
    ordered[...] = x
    return ordered
