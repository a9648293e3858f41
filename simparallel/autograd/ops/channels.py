"""Sums per channel of a tensor (n, c, ...) in any memory order."""

from __future__ import annotations

from math import prod
from types import ModuleType

from simparallel.autograd.kernels.sums import sum_rows
from simparallel.autograd.kernels.windows import ones
from simparallel.backend import Array


def channel_sums(xp: ModuleType, x: Array, out: Array | None = None) -> Array:
    """Sum x (n, c, ...) over all dims but c; return shape (c,), written to `out` if given.

    The sums are products with a vector of ones, which BLAS computes at the speed of memory; NumPy's own sum over
    several dims takes three to five times as long.
    """
    num_rows, num_channels = x.shape[:2]
    num_inner = prod(x.shape[2:])
    if x.flags.c_contiguous:
        if num_inner == 1:
            return sum_rows(xp, x.reshape(num_rows, num_channels), out)
        rows = x.reshape(num_rows * num_channels, num_inner) @ ones(xp, num_inner, x)
        return sum_rows(xp, rows.reshape(num_rows, num_channels), out)
    last = x.transpose((0, *range(2, x.ndim), 1))
    if last.flags.c_contiguous:
        return sum_rows(xp, last.reshape(num_rows * num_inner, num_channels), out)
    return x.sum(axis=(0, *range(2, x.ndim)), out=out)


def along_channels(values: Array, ndim: int) -> Array:
    """View values (c,) as (1, c, 1, ...) with `ndim` dims."""
    return values.reshape(1, -1, *(1,) * (ndim - 2))
