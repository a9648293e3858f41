"""`CudaArrays`: the kernels of `HostArrays` for arrays on a GPU, where other code is faster or does not wait."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from simparallel.arrays.captures import running
from simparallel.arrays.cuda import add_rows, column_softmax, multi_tensor, products
from simparallel.arrays.cuda.kernel_source import itself
from simparallel.arrays.cuda.row_sums import row_map, row_sums
from simparallel.arrays.host import normalize
from simparallel.arrays.host.arrays import MANY_ROWS, HostArrays, channels_last
from simparallel.arrays.host.sums import HALF, in_order_of
from simparallel.arrays.host.windows import scratch
from simparallel.backend import Array, fused, in_memory_order, to_device_like, to_host

# Size of intermediate results of a call at once; at most 1 / 16 of `device_memory`.
CHUNK_BYTES = 256 << 20
# Size of the largest scores of an attention that backward does not compute again: two passes over a small array take
# less time than to start the kernels for it.
SCORES_BYTES = 64 << 20
# Vectors of ones up to this length share one array.
_NUM_ONES = 1 << 16
# The longest word that a thread copies at once.
_WORD_BYTES = 16
# Taps of a window in one kernel, because CUDA limits the arguments of a kernel to 4,096 bytes: 80 for each array.
_MOST_TAPS = 16


class CudaArrays(HostArrays):
    """The kernels for arrays on a GPU.

    Args:
        xp: cupy, or a stand-in.
    """

    has_fast_taps = False
    joins_updates = True
    reads_wait = True
    pieces = staticmethod(lambda size, others: (1, size))
    for_each = staticmethod(multi_tensor.for_each)
    sums = staticmethod(multi_tensor.sums)
    elementwise = staticmethod(in_memory_order)

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.matmul = self.product = partial(products.matmul, xp)  # type: ignore[method-assign]
        self.einsum = partial(products.einsum, xp)

    @property
    def work_bytes(self) -> float:  # type: ignore[override]
        return min(CHUNK_BYTES, (scratch.limit_bytes or sys.maxsize) // 16)

    @property
    def scores_bytes(self) -> float:  # type: ignore[override]
        return min(SCORES_BYTES, self.work_bytes)

    gathered_bytes = work_bytes  # type: ignore[assignment]

    def from_host(self, make: Callable[[], np.ndarray], like: Array) -> Array:
        return to_device_like(make(), like) if running.capture is None else running.capture.add_input(make)

    def temporaries(self, count: int, like: Array, dtype: Any) -> list[Array | None]:
        return [None] * count

    def reusable(self, array: Array) -> Array | None:
        return None

    def fusible(self, x: Array, like: Array) -> Array:
        return in_order_of(self.xp, x, like)

    def scaled_transpose(self, x: Array, scale: float) -> Array:
        # cuBLAS reads transposed matrices; to write them takes longer than to scale them.
        return self.xp.multiply(x, scale, out=self.xp.empty(x.shape, x.dtype)).swapaxes(-1, -2)

    def ones(self, count: int, like: Array) -> Array:
        if count > _NUM_ONES:
            return self.xp.ones(count, like.dtype)
        return scratch.made("ones", _NUM_ONES, _NUM_ONES, like, lambda: self.xp.ones(_NUM_ONES, like.dtype))[:count]

    def sum_rows(self, x: Array, out: Array | None = None) -> Array:
        # Few rows are summed as in host memory, with the same bits.
        if x.dtype == HALF or len(x) < MANY_ROWS:
            return super().sum_rows(x, out)
        if out is None:
            out = self.xp.empty(x.shape[1], x.dtype)
        row_sums(itself, [self.xp.ascontiguousarray(x)], out=out.reshape(1, x.shape[1]))
        return out

    def sums_of_channels(
        self, compute: Callable[..., Any], arrays: Sequence[Array], columns: Sequence[Array]
    ) -> tuple[Array, Array | None]:
        rows = [channels_last(x) for x in arrays]
        is_alike = len({x.strides for x in arrays}) == 1
        if rows[0] is None or not is_alike or len(rows[0]) < MANY_ROWS:
            return super().sums_of_channels(compute, arrays, columns)
        return row_sums(compute, rows, columns), None

    def map_channels(
        self, compute: Callable[..., None], arrays: Sequence[Any], columns: Sequence[Any], *numbers: float
    ) -> None:
        given, rows = [x for x in arrays if x is not None], [x if x is None else channels_last(x) for x in arrays]
        if rows[0] is None or len({(x.strides, x.dtype) for x in given}) > 1:
            super().map_channels(compute, arrays, columns, *numbers)
        else:
            dtype = rows[0].dtype
            of_columns = [v if v is None else self.xp.ascontiguousarray(v, dtype) for v in columns]
            row_map(compute, rows, of_columns, *numbers)

    def centered(self, x: Array, sums: Array, count: int) -> tuple[Array, Array | None, Array, Array]:
        # Kernels compute distances from the mean anew, instead of writing and reading them.
        mean = sums / count
        return x, mean, self.xp.empty_like(x), self.sums_of_channels(normalize.squared_distances, [x], [mean])[0][0]

    def column_softmax(self, x: Array, first: int | None, may_see_none: bool) -> Array:
        x = self.xp.ascontiguousarray(x)
        column_softmax.softmax(x, first, float(np.finfo(x.dtype).min) if may_see_none else -math.inf)
        return x

    def column_softmax_gradient(self, dp: Array, p: Array) -> Array:
        column_softmax.gradient(dp, p)
        return dp

    def total(self, x: Array, here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> Any:
        return self.sums(in_kernel, [x])[0]

    def totals(self, xs: Sequence[Array], here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> list[Any]:
        return to_host(self.sums(in_kernel, xs)).tolist()

    def masked(self, x: Array, keep: Array, out: Array | None = None) -> Array:
        if out is None:
            return self.elementwise(self.xp.where, keep, x, self.xp.zeros((), x.dtype))
        return super().masked(x, keep, out)

    def where_positive(self, x: Array, y: Array) -> Array:
        return fused(self.xp, _where_positive)(x, y)

    def add_at(self, total: Array, key: tuple[Any, ...], values: Array) -> None:
        add_rows.add_at(self.xp, total, key, values)

    def add_rows(self, total: Array, ids: Array, rows: Array, inside: Array | None = None) -> None:
        # One thread would add up all rows that are not inside.
        add_rows.add_rows(rows, ids if inside is None else self.xp.where(inside, ids, -1), total)

    def clear_border(self, padded: Array, before: tuple[slice, ...], rows: slice, columns: slice) -> None:
        # One kernel instead of one for each border.
        padded.fill(0)

    def gather(self, source: Array, strides: Sequence[int], out: Array) -> None:
        # In words of 16 bytes, because a GPU takes longer to compute the index of an element than to copy it.
        is_aligned = source.data.ptr % _WORD_BYTES == 0 and not any(step % _WORD_BYTES for step in strides[:-1])
        if strides[-1] == out.itemsize and out.shape[-1] * out.itemsize % _WORD_BYTES == 0 and is_aligned:
            source, out = source.view("complex128"), out.view("complex128")
            strides = (*strides[:-1], _WORD_BYTES)
        super().gather(source, strides, out)

    def window_maxima(self, taps: Sequence[Array]) -> Array:
        y = fused(self.xp, _largest)(*taps[: 1 + _MOST_TAPS])
        for start in range(1 + _MOST_TAPS, len(taps), _MOST_TAPS):
            y = fused(self.xp, _largest)(y, *taps[start : start + _MOST_TAPS])
        return y

    def give_to_first(self, dy: Array, y: Array, taps: Sequence[Array], grads: Sequence[Array], is_apart: bool) -> None:
        # No two windows may write the same pixel in one kernel.
        step = _MOST_TAPS if is_apart else 1
        is_free = self.xp.ones_like(y, dtype=bool) if step < len(taps) else None
        for start in range(0, len(taps), step):
            pixels = *taps[start : start + step], *grads[start : start + step]
            fused(self.xp, _give_to_first, is_apart=is_apart)(dy, y, is_free, *pixels)


def _where_positive(xp: Any, x: Array, y: Array) -> Array:
    return xp.where(y > 0, x, 0)


def _largest(xp: Any, first: Array, *others: Array) -> Array:
    y = first.copy()
    for other in others:
        y = xp.maximum(y, other)
    return y


def _give_to_first(xp: Any, dy: Array, y: Array, is_free: Array | None, *pixels: Array, is_apart: bool) -> None:
    """Add dy to dx where x is the first maximum of its window; overwrite if `is_apart`.

    `pixels` are x at some taps of each window, and then dx there. `is_free` are windows with no maximum found yet; None
    for all of them.
    """
    for x, dx in zip(pixels[: len(pixels) // 2], pixels[len(pixels) // 2 :], strict=True):
        is_first = x == y
        if is_free is None:
            is_free = xp.logical_not(is_first)
        else:
            is_first = is_first & is_free
            is_free ^= is_first
        part = xp.where(is_first, dy, 0)
        if is_apart:
            dx[...] = part
        else:
            dx += part
