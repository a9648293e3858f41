"""`HostArrays`: the kernels whose code depends on where arrays are, for arrays in host memory.

    ctx.arrays.sum_rows(x)        the fast sum of this library

`cuda.arrays.CudaArrays` has the same kernels for a GPU, and `seam` finds the ones of an array. So no op asks what kind
of array it has.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.arrays.host import normalize, scores, tiles
from simparallel.arrays.host.sums import HALF, wider
from simparallel.arrays.host.windows import Pair, Windows, scratch
from simparallel.backend import Array, fused

# Arrays (or None) and numbers of a tensor; a number is a float or a 0-d array.
Call = tuple[Sequence[Any], Sequence[Any]]
_BITS = {np.dtype(f"float{size}"): np.dtype(f"int{size}") for size in (16, 32, 64)}
# Below this many rows, a sum as a product with ones gains little over NumPy's sum.
FEW_ROWS = 96
# Rows are summed in blocks of this many; the sums of the blocks are then summed the same way.
ROWS = 256
MANY_ROWS = 2 * ROWS


class HostArrays:
    """The kernels for arrays in host memory.

    Args:
        xp: numpy, or the namespace of arrays without data.

    Attributes:
        xp: the array library.
        matmul: a @ b as the library computes it: (a, b, out=None).
        einsum: the library's einsum.
        elementwise: calls an elementwise function, (function, *args), see `backend.in_memory_order`.
        pieces: (size, others) -> (b, L): b pieces of length L, whose products with `others` numbers are fast.
        gathered_bytes: size of the gathered windows of a convolution at once.
        work_bytes: size of other intermediate results of a call at once.
        scores_bytes: size of the largest scores of an attention that are kept for backward.
        has_fast_taps: sums over the taps of a window, and small transforms, are faster than one large product.
        joins_updates: the updates of many parameters are one kernel, so they are collected.
        reads_wait: a read of a value waits for pending operations.
    """

    gathered_bytes = 4 << 20
    work_bytes: float = math.inf
    scores_bytes: float = math.inf
    has_fast_taps = True
    joins_updates = False
    reads_wait = False
    matmul: Callable[..., Array]
    einsum: Callable[..., Array]
    elementwise: Callable[..., Any] = staticmethod(operator.call)  # type: ignore[arg-type]
    pieces: Callable[[int, int], tuple[int, int]] = staticmethod(tiles.pieces)

    def __init__(self, xp: ModuleType) -> None:
        self.xp, self.matmul, self.einsum = xp, xp.matmul, xp.einsum

    # --- places ---------------------------------------------------------------------------------

    def from_host(self, make: Callable[[], np.ndarray], like: Array) -> Array:
        """Return the array of `make()` where `like` is; in a capture, `make()` runs again for each launch."""
        return make()

    def temporaries(self, count: int, like: Array, dtype: Any) -> list[Array | None]:
        """Return arrays for `out`, of the shape of `like`; None where `fused` needs no memory for them."""
        return [self.xp.empty_like(like, dtype=dtype) for _ in range(count)]

    def reusable(self, array: Array) -> Array | None:
        """Return an array whose memory may be reused for `out`; None where `fused` needs no memory for it."""
        return array

    def fusible(self, x: Array, like: Array) -> Array:
        """Return x in the memory order of `like`, if kernels that read both are slow for two orders."""
        return x

    # --- products -------------------------------------------------------------------------------

    def product(self, a: Array, b: Array, out: Array | None = None) -> Array:
        """Return a @ b, written to `out` if given: with the product's shape and dtype.

        float32 matrices are multiplied in tiles where that is faster. BLAS has no float16 product, so arrays of float16
        are multiplied in float32 and rounded once.
        """
        is_alike = a.dtype == b.dtype
        if is_alike and a.dtype == np.float32 and a.ndim == b.ndim == 2:
            (rows, inner), columns = a.shape, b.shape[1]
            # Tiles of a non-contiguous `b` would read short runs of its memory.
            tile = tiles.tile(rows, inner, columns) if b.flags.c_contiguous else None
            if tile is not None and (out is None or out.flags.c_contiguous):
                height, width = tile
                y = self.xp.empty((rows, columns), np.float32) if out is None else out
                self.matmul(
                    a.reshape(rows // height, 1, height, inner),
                    b.reshape(inner, columns // width, width).transpose(1, 0, 2),
                    out=y.reshape(rows // height, height, columns // width, width).transpose(0, 2, 1, 3),
                )
                return y
        elif is_alike and a.dtype == np.float16:
            wide = self.matmul(a.astype(np.float32), b.astype(np.float32))
            if out is None:
                return wide.astype(np.float16)
            out[...] = wide
            return out
        return self.matmul(a, b, out=out)

    def scaled_transpose(self, x: Array, scale: float) -> Array:
        """Return scale * x.T for x (..., t, d): contiguous, where products with it are faster than with a view."""
        out = self.xp.empty((*x.shape[:-2], x.shape[-1], x.shape[-2]), x.dtype)
        return self.xp.multiply(x.swapaxes(-1, -2), scale, out=out)

    def ones(self, count: int, like: Array) -> Array:
        """Return a vector of `count` ones with the dtype of `like`. Never write to it: calls may share it."""
        return self.xp.ones(count, like.dtype)

    # --- sums -----------------------------------------------------------------------------------

    def sum_rows(self, x: Array, out: Array | None = None) -> Array:
        """Sum a floating-point x (M, N) over its rows: (N,) in x's dtype, written to `out` (contiguous) if given.

        A sum is a product with a vector of ones, which BLAS computes at the speed of memory. Blocks of rows keep the
        error small: `x.sum(axis=0)` adds one row after another, and its error grows with their number. float16 is
        summed in float32.
        """
        if x.dtype == HALF:
            total = self.sum_rows(x.astype(np.float32))
            if out is None:
                return total.astype(np.float16)
            out[...] = total
            return out
        num_rows, num_columns = x.shape
        if num_rows < FEW_ROWS:
            return x.sum(axis=0, out=out)
        if num_rows < MANY_ROWS:
            return self.matmul(self.ones(num_rows, x), x, out=out)
        blocks, rest = divmod(num_rows, ROWS)
        parts = self.matmul(self.ones(ROWS, x), x[: num_rows - rest].reshape(blocks, ROWS, num_columns))
        total = self.sum_rows(parts, out)
        if rest:
            total += self.matmul(self.ones(rest, x), x[num_rows - rest :])
        return total

    def unbroadcast(self, dy: Array, shape: tuple[int, ...]) -> Array:
        """Sum `dy` over the dims along which a tensor of `shape` was broadcast; float16 is summed in float32."""
        if dy.shape == shape:
            return dy
        extra = dy.ndim - len(shape)
        axes = tuple(range(extra)) + tuple(i + extra for i, size in enumerate(shape) if size == 1)
        if axes == tuple(range(len(axes))) and len(axes) < dy.ndim and dy.dtype.kind == "f":
            rows = dy.reshape(prod(dy.shape[: len(axes)]), prod(dy.shape[len(axes) :]))
            return self.sum_rows(rows).reshape(shape)
        # Inner dims, integers and full sums: NumPy's own sum, which adds pairwise along contiguous dims.
        total = self.xp.sum(dy, axis=axes, keepdims=True, dtype=wider(dy.dtype))
        return total.astype(dy.dtype, copy=False).reshape(shape)

    def channel_sums(self, x: Array, out: Array | None = None) -> Array:
        """Sum x (n, c, ...) over all dims but c, in any memory order; return (c,), written to `out` if given.

        The sums are products with a vector of ones, which BLAS computes at the speed of memory; NumPy's own sum over
        several dims takes up to four times as long, and adds up larger errors.
        """
        num_rows, num_channels = x.shape[:2]
        num_inner = prod(x.shape[2:])
        rows = None if num_inner > 1 and x.flags.c_contiguous else channels_last(x)
        if rows is not None:
            return self.sum_rows(rows, out)
        if x.flags.c_contiguous:
            of_images = self.matmul(x.reshape(num_rows * num_channels, num_inner), self.ones(num_inner, x))
            return self.sum_rows(of_images.reshape(num_rows, num_channels), out)
        return x.sum(axis=(0, *range(2, x.ndim)), out=out)

    def sums_of_channels(
        self, compute: Callable[..., Any], arrays: Sequence[Array], columns: Sequence[Array]
    ) -> tuple[Array, Array | None]:
        """Sum the results of an elementwise function over all dims but c.

        Args:
            compute: (xp, *arrays, *columns) -> arrays; see `cuda.kernel_source`.
            arrays: arrays (n, c, ...) of one dtype.
            columns: arrays (c,).

        Returns:
            The sums, (results, c); and the last result, or None where the sums were computed without it.
        """
        results = compute(self.xp, *arrays, *(normalize.along_channels(v, arrays[0].ndim) for v in columns))
        sums = self.xp.empty((len(results), arrays[0].shape[1]), results[0].dtype)
        for k, result in enumerate(results):
            self.channel_sums(result, sums[k])
        return sums, results[-1]

    def map_channels(
        self, compute: Callable[..., None], arrays: Sequence[Any], columns: Sequence[Any], *numbers: float
    ) -> None:
        """Call an elementwise function, which changes arrays in place.

        Args:
            compute: (xp, *arrays, *columns, *numbers); see `cuda.kernel_source`.
            arrays: arrays (n, c, ...) of one dtype. Any but the first may be None.
            columns: arrays (c,), or None.
            numbers: numbers.
        """
        along = [v if v is None else normalize.along_channels(v, arrays[0].ndim) for v in columns]
        fused(self.xp, compute)(*arrays, *along, *numbers)

    def centered(self, x: Array, sums: Array, count: int) -> tuple[Array, Array | None, Array, Array]:
        """Centre x (n, c, ...) for a batch norm, given its sums (c,) over `count` elements.

        Returns:
            What backward keeps of x, the means to subtract from it (None if that is done), an array like x with
            arbitrary content, and the sums (c,) of the squares of the centred x.
        """
        kept, y = fused(self.xp, normalize.centered)(x, normalize.along_channels(sums, x.ndim), count)
        return kept, None, y, self.channel_sums(y)

    def column_softmax(self, x: Array, first: int | None, may_see_none: bool) -> Array:
        """Return the softmax of x (..., s, t) along s; the memory of x may be reused.

        Args:
            first: column i has the rows 0 … first + i, and 0 in all others; None for all rows.
            may_see_none: all numbers of a column may be -infinity, and its softmax is 0 then.
        """
        return scores.softmax(self, x, first, may_see_none)

    def column_softmax_gradient(self, dp: Array, p: Array) -> Array:
        """Return the gradient of x, p (dp - d) with d = sum of dp p over s, in the memory of dp."""
        return scores.gradient(self, dp, p)

    # --- many parameters ------------------------------------------------------------------------

    def for_each(self, compute: Callable[..., None], calls: Sequence[Call], **settings: Any) -> None:
        """Call `compute(xp, *arrays, *numbers, **settings)`, which changes arrays in place, for each of the tensors.

        Args:
            compute: a module-level function of elements, see `cuda.kernel_source`.
            calls: arrays and numbers of each tensor. No call reads an array that another one changes.
            settings: hashable keyword arguments of `compute`.
        """
        for arrays, numbers in calls:
            compute(self.xp, *arrays, *numbers, **settings)

    def sums(self, compute: Callable[..., Array], arrays: Sequence[Array]) -> Array:
        """Return the sums of the elements of `compute(xp, array)` over each of the arrays, float64, without a wait."""
        return self.xp.stack([compute(self.xp, x).sum(dtype="float64") for x in arrays])

    def total(self, x: Array, here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> Any:
        """Return `here(x)`; or, as a 0-d array, the sum of the elements of `in_kernel(xp, x)`, without a wait."""
        return here(x)

    def totals(self, xs: Sequence[Array], here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> list[Any]:
        """Return `total` of each array as a number; on a GPU after one wait."""
        return [here(x) for x in xs]

    # --- positions ------------------------------------------------------------------------------

    def masked(self, x: Array, keep: Array, out: Array | None = None) -> Array:
        """Return x where `keep`, else 0, also where x is infinite or NaN; write to `out` if given.

        x * keep would give NaN for infinity * 0. So the bits of x are multiplied as integers, which is as fast as a
        product of floats; `xp.where` takes ten times as long (NumPy 2.4, a mask without runs).

        Args:
            x: floating point; other dtypes work, but take the slower `xp.where`.
            keep: bool, of a shape that broadcasts to x's.
            out: of x's shape and dtype, floating point.
        """
        bits = _BITS.get(x.dtype)
        if bits is None:
            return self.xp.where(keep, x, self.xp.zeros((), x.dtype))
        if out is None:
            out = self.xp.empty_like(x)
        self.xp.multiply(x.view(bits), keep, out=out.view(bits))
        return out

    def where_positive(self, x: Array, y: Array) -> Array:
        """Return x where y > 0, else 0."""
        return self.masked(x, y > 0)

    def add_at(self, total: Array, key: tuple[Any, ...], values: Array) -> None:
        """Compute total[key] += values, where the values at equal positions add up in their order.

        Args:
            total: contiguous.
            key: for each dim an array of integers, or slice(None); the arrays broadcast together.
            values: of the shape of total[key] and the dtype of `total`.
        """
        self.xp.add.at(total, key, values)

    def add_rows(self, total: Array, ids: Array, rows: Array, inside: Array | None = None) -> None:
        """Add each row to the row of `total` that its id names, in the order of the rows.

        Args:
            total: (V, E), contiguous.
            ids: (n,), int64 from 0 to V - 1.
            rows: (n, E), contiguous, of the dtype of `total`.
            inside: (n,) bool: rows that are not inside are 0 and have id 0; None if there are none.
        """
        if len(total):
            # A one-dimensional `add.at` takes about 1 ns for each number. By rows it is five times slower, and
            # sorting the ids first is slower, too, unless there are few different ids.
            places = ids[:, None] * total.shape[1] + self.xp.arange(total.shape[1])
            self.xp.add.at(total.reshape(-1), places.reshape(-1), rows.reshape(-1))

    # --- windows --------------------------------------------------------------------------------

    def pad_rows(self, x: Array, at: Windows, rows: Pair, name: str, axis: int = 0) -> Array:
        """Copy rows `rows` of the padded image to scratch memory.

        x: (..., H, W, ...) with H at `axis`   result: (..., rows, padded W, ...)
        """
        height, width = at.image
        top, left = at.before
        first, last = rows
        # The rows low … high of the image become the rows begin … end of the result.
        low, high = min(max(first - top, 0), height), min(max(last - top, 0), height)
        shape = (*x.shape[:axis], last - first, at.padded[1], *x.shape[axis + 2 :])
        padded = scratch.get(name, shape, x)
        begin, end = (low + top - first, high + top - first) if low < high else (0, 0)
        before = (slice(None),) * axis
        self.clear_border(padded, before, slice(begin, end), slice(left, left + width))
        padded[(*before, slice(begin, end), slice(left, left + width))] = x[(*before, slice(low, high))]
        return padded

    def clear_border(self, padded: Array, before: tuple[slice, ...], rows: slice, columns: slice) -> None:
        """Write zeros to a padded image (*before, H, W, ...), at least outside of these rows and columns."""
        # Only there: the rest is written once, by the image.
        padded[(*before, slice(None, rows.start))] = 0
        padded[(*before, slice(rows.stop, None))] = 0
        if columns.start:
            padded[(*before, rows, slice(None, columns.start))] = 0
        if columns.stop < padded.shape[len(before) + 1]:
            padded[(*before, rows, slice(columns.stop, None))] = 0

    def gather(self, source: Array, strides: Sequence[int], out: Array) -> None:
        """Copy the elements of `source` at these strides [bytes] to `out`."""
        out[...] = self.xp.lib.stride_tricks.as_strided(source, out.shape, strides)

    def window_maxima(self, taps: Sequence[Array]) -> Array:
        """Return the maxima of windows, given the pixels at each of their taps, in the memory order of the pixels."""
        y = taps[0].copy(order="K")
        for tap in taps[1:]:
            self.xp.maximum(y, tap, out=y)
        return y

    def give_to_first(self, dy: Array, y: Array, taps: Sequence[Array], grads: Sequence[Array], is_apart: bool) -> None:
        """Add dy to the gradient of the first tap of each window that has its maximum y.

        Args:
            dy, y: of the windows.
            taps: the pixels at each tap of all windows.
            grads: the gradients of these pixels; they are overwritten if no two windows overlap.
            is_apart: no two windows overlap.
        """
        xp = self.xp
        # Windows with no maximum found yet.
        is_free = xp.ones_like(y, dtype=bool)
        is_first, part = xp.empty_like(is_free), xp.empty_like(y)
        for tap, grad in zip(taps, grads, strict=True):
            xp.equal(tap, y, out=is_first)
            is_first &= is_free
            is_free ^= is_first
            if is_apart:
                self.masked(dy, is_first, out=grad)
            else:
                grad += self.masked(dy, is_first, out=part)


def channels_last(x: Array) -> Array | None:
    """View x (n, c, ...) as (rows, c), in the order of memory; None if channels are not innermost there."""
    axes = sorted((0, *range(2, x.ndim)), key=lambda axis: -x.strides[axis])
    last = x.transpose(*axes, 1)
    return last.reshape(prod(last.shape[:-1]), x.shape[1]) if last.flags.c_contiguous else None
