"""Accurate sums, extremes of slices, memory orders and masked gradients: helpers that the ops share."""

from __future__ import annotations

from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.arrays.cuda.kernel_source import itself
from simparallel.arrays.cuda.row_sums import row_sums
from simparallel.arrays.host.windows import ones
from simparallel.backend import Array

_HALF = np.dtype(np.float16)
_BITS = {np.dtype(f"float{size}"): np.dtype(f"int{size}") for size in (16, 32, 64)}
# Below this many rows, a product gains little over NumPy's sum.
FEW_ROWS = 96
# Rows are summed in blocks of this many; the sums of the blocks are then summed the same way.
ROWS = 256
MANY_ROWS = 2 * ROWS


def wider(dtype: np.dtype) -> np.dtype:
    """Return the dtype to compute in: float32 for float16, which has too few digits and too small a range for sums."""
    return np.dtype(np.float32) if dtype == _HALF else dtype


def sum_rows(xp: ModuleType, x: Array, out: Array | None = None) -> Array:
    """Sum a floating-point x (M, N) over its rows: (N,) in x's dtype, written to `out` (contiguous) if given.

    A sum is a product with a vector of ones, which BLAS computes at the speed of memory. Blocks of rows keep the
    error small: `x.sum(axis=0)` adds one row after another, and its error grows with their number. A GPU sums many rows
    by `row_sums`, and few as the host, with its bits. float16 is summed in float32.
    """
    if x.dtype == _HALF:
        total = sum_rows(xp, x.astype(np.float32))
        if out is None:
            return total.astype(np.float16)
        out[...] = total
        return out
    num_rows, num_columns = x.shape
    if not isinstance(x, np.ndarray) and num_rows >= MANY_ROWS:
        if out is None:
            out = xp.empty(num_columns, x.dtype)
        row_sums(itself, [xp.ascontiguousarray(x)], out=out.reshape(1, num_columns))
        return out
    if num_rows < FEW_ROWS:
        return x.sum(axis=0, out=out)
    if num_rows < MANY_ROWS:
        return xp.matmul(ones(xp, num_rows, x), x, out=out)
    blocks, rest = divmod(num_rows, ROWS)
    parts = xp.matmul(ones(xp, ROWS, x), x[: num_rows - rest].reshape(blocks, ROWS, num_columns))
    total = sum_rows(xp, parts, out)
    if rest:
        total += xp.matmul(ones(xp, rest, x), x[num_rows - rest :])
    return total


def unbroadcast(xp: ModuleType, dy: Array, shape: tuple[int, ...]) -> Array:
    """Sum `dy` over the dims along which a tensor of `shape` was broadcast; float16 is summed in float32."""
    if dy.shape == shape:
        return dy
    extra = dy.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(i + extra for i, size in enumerate(shape) if size == 1)
    if axes == tuple(range(len(axes))) and len(axes) < dy.ndim and dy.dtype.kind == "f":
        rows = dy.reshape(prod(dy.shape[: len(axes)]), prod(dy.shape[len(axes) :]))
        return sum_rows(xp, rows).reshape(shape)
    # Inner dims, integers and full sums: NumPy's own sum, which adds pairwise along contiguous dims.
    total = xp.sum(dy, axis=axes, keepdims=True, dtype=wider(dy.dtype))
    return total.astype(dy.dtype, copy=False).reshape(shape)


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


def masked(xp: ModuleType, x: Array, keep: Array, out: Array | None = None) -> Array:
    """Return x where `keep`, else 0, also where x is infinite or NaN; write to `out` if given.

    x * keep would give NaN for infinity * 0. So the bits of x are multiplied as integers, which is as fast as a
    product of floats; `xp.where` takes ten times as long (NumPy 2.4, a mask without runs).

    Args:
        xp: numpy or cupy.
        x: floating point; other dtypes work, but take the slower `xp.where`.
        keep: bool, of a shape that broadcasts to x's.
        out: of x's shape and dtype, floating point.
    """
    bits = _BITS.get(x.dtype)
    if bits is None or (out is None and not isinstance(x, np.ndarray)):
        return xp.where(keep, x, xp.zeros((), x.dtype))
    if out is None:
        out = xp.empty_like(x)
    xp.multiply(x.view(bits), keep, out=out.view(bits))
    return out
