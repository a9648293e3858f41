"""Direct convolution: gather the windows as the rows or columns of a matrix, then one matrix product.

Chellapilla et al. 2006, "High performance convolutional neural networks for document processing".
The matrix is gathered for a few output rows at a time, so that it stays in the cache; on a GPU for all rows, unless
that takes too much memory, so that the number of kernels does not grow with the images.

There are two memory orders, because a long contiguous run of each window is fast to copy:

* *pixels*, (H, W, N, C): for many channels. Windows are the rows of the matrix.
* *planes*, (C, H, W, N): for few channels, and for groups, which form a batch of products.
  Windows are the columns of the matrix.

Letters in shapes: g groups; c, o channels of one group; K = c kh kw; p output rows per chunk;
M = p Q N; b pieces of M with L elements each (see `tiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.windows import Pair, Windows, scratch
from simparallel.backend import Array, each

# From this many rows on, a product in pieces is faster with its left operand in column-major order.
ENOUGH_ROWS = 12


def _chunks(arrays: HostArrays, x: Array, at: Windows, row_bytes: int, weight_bytes: int) -> Sequence[Pair]:
    """Split the output rows into chunks first … last - 1 of `gathered_bytes`, or of twice the weights if that is more.

    Chunks of an array without data are alike, so there is one.
    """
    count = max(1, max(arrays.gathered_bytes, 2 * weight_bytes) // max(row_bytes, 1))
    return each([(first, min(first + count, at.out[0])) for first in range(0, at.out[0], count)], x)


def _input_rows(at: Windows, rows: Pair) -> Pair:
    """Return the rows (start, stop) of the padded image under the windows of these output rows."""
    reach = at.dilation[0] * (at.kernel[0] - 1) + 1
    return rows[0] * at.stride[0], (rows[1] - 1) * at.stride[0] + reach


def _add_product(arrays: HostArrays, total: Array, a: Array, b: Array, is_first: bool) -> None:
    """Add a @ b, summed over the pieces, to total, or write it there first.

    a: (..., b, O, L)   b: (..., b, L, K)   total: (..., O, K)
    """
    if is_first and a.shape[-3] == 1:
        arrays.matmul(a, b, out=total[..., None, :, :])
        return
    if a.shape[-3] > 1 and a.shape[-2] >= ENOUGH_ROWS:
        a = arrays.xp.ascontiguousarray(a.swapaxes(-1, -2)).swapaxes(-1, -2)
    part = scratch.get("conv.product", (*a.shape[:-1], b.shape[-1]), total)
    arrays.matmul(a, b, out=part)
    if is_first:
        part.sum(axis=-3, out=total)
    else:
        total += part[..., 0, :, :] if part.shape[-3] == 1 else part.sum(axis=-3)


# --- pixels -------------------------------------------------------------------------------------


def _pixel_windows(arrays: HostArrays, x: Array, at: Windows, rows: Pair) -> Array:
    """Gather the windows as rows (M, K), K in the order kh, kw, c; a view of x if `at.is_plain`."""
    num, channels = x.shape[2:]
    if at.is_plain:
        return x[rows[0] : rows[1]].reshape((rows[1] - rows[0]) * at.out[1] * num, channels)
    padded = _padded(arrays, x, at, rows)
    shape = (rows[1] - rows[0], at.out[1], num)
    gathered = scratch.get("conv.gathered", (*shape, *at.kernel, channels), x)
    row, column, image, channel = padded.strides
    (sh, sw), (dh, dw) = at.stride, at.dilation
    # A strided view has all windows without a copy; the assignment gathers them into contiguous memory.
    strides = (row * sh, column * sw, image, row * dh, column * dw, channel)
    arrays.gather(padded, strides, gathered)
    return gathered.reshape(prod(shape), at.kernel[0] * at.kernel[1] * channels)


def _padded(arrays: HostArrays, x: Array, at: Windows, rows: Pair, axis: int = 0) -> Array:
    """Return the rows of the padded image under the windows of `rows`; without padding this is a view of x."""
    first, last = _input_rows(at, rows)
    if at.before == at.after == (0, 0):
        return x[(*(slice(None),) * axis, slice(first, last))]
    return arrays.pad_rows(x, at, (first, last), "conv.padded", axis=axis)


def pixels_forward(arrays: HostArrays, x: Array, w: Array, at: Windows) -> Array:
    """Convolve in pixel order.   x: (H, W, N, C)   w: (O, C, kh, kw)   result: (P, Q, N, O)"""
    w_KO = w.transpose(0, 2, 3, 1).reshape(len(w), prod(w.shape[1:])).T
    num, (num_taps, out_channels) = x.shape[2], w_KO.shape
    y = arrays.xp.empty((*at.out, num, out_channels), x.dtype)
    for rows in _chunks(arrays, x, at, at.out[1] * num * num_taps * x.itemsize, w.nbytes):
        cut = arrays.pieces((rows[1] - rows[0]) * at.out[1] * num, num_taps * out_channels)
        gathered = _pixel_windows(arrays, x, at, rows).reshape(*cut, num_taps)
        arrays.matmul(gathered, w_KO, out=y[rows[0] : rows[1]].reshape(*cut, out_channels))  # (b, L, K) @ (K, O)
    return y


def pixels_backward(
    arrays: HostArrays, x: Array, w: Array, dy: Array, at: Windows, needs_dx: bool, dw: Array | None
) -> Array | None:
    """Return dx, or None if not needed; fill `dw` if given.   dy: (P, Q, N, O), x and w as in `pixels_forward`"""
    (kh, kw), (num, channels), out_channels = at.kernel, x.shape[2:], len(w)
    num_taps = kh * kw * channels
    dw_OK = None if dw is None else arrays.xp.empty((out_channels, num_taps), w.dtype)
    turned = None if arrays.has_fast_taps else at.turned
    is_summed = needs_dx and turned is None
    dx = arrays.xp.zeros((*at.padded, num, channels), x.dtype) if is_summed else None
    # dx is summed tap by tap.
    taps = w.transpose(2, 3, 0, 1)[:, :, None]  # (kh, kw, 1, O, C)
    for rows in _chunks(arrays, x, at, at.out[1] * num * num_taps * x.itemsize, w.nbytes):
        dy_MO = dy[rows[0] : rows[1]].reshape((rows[1] - rows[0]) * at.out[1] * num, out_channels)
        if dw_OK is not None:
            cut = arrays.pieces(len(dy_MO), num_taps * out_channels)
            gathered = _pixel_windows(arrays, x, at, rows).reshape(*cut, num_taps)
            dy_bOL = dy_MO.reshape(*cut, out_channels).transpose(0, 2, 1)
            _add_product(arrays, dw_OK, dy_bOL, gathered, rows[0] == 0)  # (b, O, L) @ (b, L, K)
        if dx is not None:
            cut = arrays.pieces(len(dy_MO), out_channels * channels)
            parts = scratch.get("conv.gathered", (kh, kw, rows[1] - rows[0], at.out[1], num, channels), x)
            # (b, L, O) @ (kh, kw, 1, O, C)
            arrays.matmul(dy_MO.reshape(*cut, out_channels), taps, out=parts.reshape(kh, kw, *cut, channels))
            for i, j in at.taps():
                dx[at.slices(i, j, rows)] += parts[i, j]
    if dw is not None and dw_OK is not None:
        dw[...] = dw_OK.reshape(out_channels, kh, kw, channels).transpose(0, 3, 1, 2)
    if needs_dx and turned is not None:
        return pixels_forward(arrays, dy, _turned(w, 1), turned)
    return None if dx is None else _crop(arrays, dx, at, 0)


def _turned(w: Array, groups: int) -> Array:
    """Turn each filter by 180° and swap its channels.   w: (O, c, kh, kw)   result: (C, o, kh, kw)"""
    out_channels, channels, *kernel = w.shape
    parts = w.reshape(groups, out_channels // groups, channels, *kernel).swapaxes(1, 2)[..., ::-1, ::-1]
    return parts.reshape(groups * channels, out_channels // groups, *kernel)


def _crop(arrays: HostArrays, padded: Array, at: Windows, axis: int) -> Array:
    """Return the image without its padding, contiguous."""
    (top, left), (height, width) = at.before, at.image
    inner = (*(slice(None),) * axis, slice(top, top + height), slice(left, left + width))
    return arrays.xp.ascontiguousarray(padded[inner])


# --- planes -------------------------------------------------------------------------------------


def _plane_windows(arrays: HostArrays, x: Array, at: Windows, rows: Pair, groups: int) -> Array:
    """Gather the windows as columns (g, K, M), K in order c, kh, kw; a view of x for all rows if `at.is_plain`."""
    channels, num = x.shape[0], x.shape[3]
    count, width = rows[1] - rows[0], at.out[1]
    columns = count * width * num
    if at.is_plain and count == at.out[0]:
        return x.reshape(groups, channels // groups, columns)
    padded = _padded(arrays, x, at, rows, axis=1)
    gathered = scratch.get("conv.gathered", (channels, *at.kernel, count, width, num), x)
    channel, row, column, image = padded.strides
    (sh, sw), (dh, dw) = at.stride, at.dilation
    strides = (channel, row * dh, column * dw, row * sh, column * sw, image)
    arrays.gather(padded, strides, gathered)
    return gathered.reshape(groups, channels // groups * at.kernel[0] * at.kernel[1], columns)


def planes_forward(arrays: HostArrays, x: Array, w: Array, at: Windows, groups: int, to_pixels: bool) -> Array:
    """Convolve in plane order.   x: (C, H, W, N)   w: (O, c, kh, kw)   result: (O, P, Q, N)

    With `to_pixels`, which needs one group, the result is (P, Q, N, O).
    """
    row, out_channels = at.out[1] * x.shape[3], len(w)
    out_group = out_channels // groups
    w_goK = w.reshape(groups, 1, out_group, prod(w.shape[1:]))
    num_taps, size = w_goK.shape[3], at.out[0] * row
    y = arrays.xp.empty((size, out_channels) if to_pixels else (groups, out_group, size), x.dtype)
    for rows in _chunks(arrays, x, at, row * groups * num_taps * x.itemsize, w.nbytes):
        part = slice(rows[0] * row, rows[1] * row)
        cut = arrays.pieces(part.stop - part.start, num_taps * out_group)
        gathered = _plane_windows(arrays, x, at, rows, groups)
        gathered = gathered.reshape(groups, num_taps, *cut).transpose(0, 2, 1, 3)  # (g, b, K, L)
        if to_pixels:
            out = y[part].reshape(*cut, out_channels)
            arrays.matmul(gathered[0].transpose(0, 2, 1), w_goK[0, 0].T, out=out)  # (b, L, K) @ (K, O)
        else:
            out = y[:, :, part].reshape(groups, out_group, *cut).transpose(0, 2, 1, 3)
            arrays.matmul(w_goK, gathered, out=out)  # (g, 1, o, K) @ (g, b, K, L)
    return y.reshape((*at.out, x.shape[3], out_channels) if to_pixels else (out_channels, *at.out, x.shape[3]))


def planes_backward(
    arrays: HostArrays, x: Array, w: Array, dy: Array, at: Windows, groups: int, needs_dx: bool, dw: Array | None
) -> Array | None:
    """Return dx, or None if not needed; fill `dw` if given.

    dy: (O, P, Q, N) with any strides; x and w as in `planes_forward`.
    """
    row, out_group, channels = at.out[1] * x.shape[3], len(w) // groups, x.shape[0]
    w_gKo = w.reshape(groups, 1, out_group, prod(w.shape[1:])).transpose(0, 1, 3, 2)
    num_taps = w_gKo.shape[2]
    # A view if dy is in plane order, or in pixel order with one group.
    dy_goM = dy.reshape(groups, out_group, at.out[0] * row)
    dw_goK = None
    if dw is not None:
        dw_goK = dw.reshape(groups, out_group, num_taps)
    turned = None if arrays.has_fast_taps else at.turned
    is_summed = needs_dx and turned is None
    dx = arrays.xp.zeros((channels, *at.padded, x.shape[3]), x.dtype) if is_summed else None
    for rows in _chunks(arrays, x, at, row * groups * num_taps * x.itemsize, w.nbytes):
        part = slice(rows[0] * row, rows[1] * row)
        cut = arrays.pieces(part.stop - part.start, num_taps * out_group)
        dy_gboL = dy_goM[:, :, part].reshape(groups, out_group, *cut).transpose(0, 2, 1, 3)
        if dw_goK is not None:
            gathered = _plane_windows(arrays, x, at, rows, groups).reshape(groups, num_taps, *cut)
            # (g, b, o, L) @ (g, b, L, K)
            _add_product(arrays, dw_goK, dy_gboL, gathered.transpose(0, 2, 3, 1), rows[0] == 0)
        if dx is not None:
            shape = (channels, *at.kernel, rows[1] - rows[0], at.out[1], x.shape[3])
            gathered = scratch.get("conv.gathered", shape, x)
            out = gathered.reshape(groups, num_taps, *cut).transpose(0, 2, 1, 3)
            # With one filter in each group, this outer product of a column and a row is an elementwise product.
            if out_group == 1:
                arrays.xp.multiply(w_gKo, dy_gboL, out=out)
            else:
                arrays.matmul(w_gKo, dy_gboL, out=out)  # (g, 1, K, o) @ (g, b, o, L)
            for i, j in at.taps():
                dx[(slice(None), *at.slices(i, j, rows))] += gathered[:, i, j]
    if needs_dx and turned is not None:
        return planes_forward(arrays, dy, _turned(w, groups), turned, groups, False)
    return None if dx is None else _crop(arrays, dx, at, 1)
