"""Sums per channel of a tensor (n, c, ...) in any memory order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.arrays.cuda.row_sums import row_sums
from simparallel.arrays.host.sums import MANY_ROWS, sum_rows
from simparallel.arrays.host.windows import ones
from simparallel.backend import Array


def channel_sums(xp: ModuleType, x: Array, out: Array | None = None) -> Array:
    """Sum x (n, c, ...) over all dims but c; return shape (c,), written to `out` if given.

    The sums are products with a vector of ones, which BLAS computes at the speed of memory; NumPy's own sum over
    several dims takes up to four times as long, and adds up larger errors.
    """
    num_rows, num_channels = x.shape[:2]
    num_inner = prod(x.shape[2:])
    rows = None if num_inner > 1 and x.flags.c_contiguous else _as_rows(x)
    if rows is not None:
        return sum_rows(xp, rows, out)
    if x.flags.c_contiguous:
        of_images = x.reshape(num_rows * num_channels, num_inner) @ ones(xp, num_inner, x)
        return sum_rows(xp, of_images.reshape(num_rows, num_channels), out)
    return x.sum(axis=(0, *range(2, x.ndim)), out=out)


def sums_of_channels(
    xp: ModuleType, compute: Callable[..., Any], arrays: Sequence[Array], columns: Sequence[Array]
) -> tuple[Array, Array | None]:
    """Sum the results of an elementwise function over all dims but c.

    Args:
        xp: numpy or cupy.
        compute: (xp, *arrays, *columns) -> arrays; see `row_sums`.
        arrays: arrays (n, c, ...) of one dtype.
        columns: arrays (c,).

    Returns:
        The sums, (results, c); and the last result, or None where the sums were computed without it.
    """
    rows = [_as_rows(x) for x in arrays]
    first, is_alike = rows[0], len({x.strides for x in arrays}) == 1
    if not (first is None or isinstance(first, np.ndarray)) and is_alike and len(first) >= MANY_ROWS:
        return row_sums(compute, rows, columns), None
    results: Sequence[Array] = compute(xp, *arrays, *(along_channels(v, arrays[0].ndim) for v in columns))
    sums = xp.empty((len(results), arrays[0].shape[1]), results[0].dtype)
    for k, result in enumerate(results):
        channel_sums(xp, result, sums[k])
    return sums, results[-1]


def along_channels(values: Array, ndim: int) -> Array:
    """View values (c,) as (1, c, 1, ...) with `ndim` dims."""
    return values.reshape(1, -1, *(1,) * (ndim - 2))


def _as_rows(x: Array) -> Array | None:
    """View x (n, c, ...) as (rows, c), in the order of memory; None if channels are not innermost there."""
    axes = sorted((0, *range(2, x.ndim)), key=lambda axis: -x.strides[axis])
    last = x.transpose(*axes, 1)
    return last.reshape(prod(last.shape[:-1]), x.shape[1]) if last.flags.c_contiguous else None
