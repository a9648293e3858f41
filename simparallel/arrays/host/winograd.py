"""3 x 3 convolution with stride 1 by minimal filtering: a quarter of the multiplications.

Winograd 1980, "Arithmetic complexity of computations", in the form of Lavin and Gray 2016, "Fast
algorithms for convolutional neural networks", section 4.1, F(4 x 4, 3 x 3): the output is cut into
tiles of 4 x 4 pixels. For each tile, with d its 6 x 6 inputs and g the 3 x 3 filter,

    y = A' [ (G g G') * (B' d B) ] A        * element by element, summed over the channels

so that 36 products per tile and pair of channels replace 144 direct ones, and the sums over
channels are 36 matrix products. Backward is the transposed bilinear form: with dM = A dy A',

    dg = G' [ sum over tiles of dM * (B' d B) ] G        dd = B [ (G g G') * dM ] B'

In memory order (H, W, N, C) a pixel is one contiguous row of N * C numbers: every transform is a
batch of small matrix products, without gathering and without work per sample.

The constants, up to 8 and down to 1/24, cost precision: in float32, outputs and gradients have an
error within 2e-5 of the largest element (1.1e-5 was the largest measured); direct summation has 5e-7.

Tile rows are processed in chunks and, where there are many filters, channels in blocks, so that the
transformed data stay in the cache: the filters of 512 x 512 channels would fill 38 MB.

Letters in shapes: t, s tile row and column; i, j row and column in a tile after the transform;
R tile rows per chunk; T = R * s * N; B channels of filters per block.
"""

from __future__ import annotations

import numpy as np

from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.tiles import multiply
from simparallel.arrays.host.windows import Pair, Windows, scratch
from simparallel.backend import Array, each, to_device_like

TILE, FIELD, NUM_PRODUCTS = 4, 6, 36
# Least number of tiles per chunk, if the image has that many: with fewer, the matrix products are slow.
TILES_AT_A_TIME = 128
# From this many tiles on, the faster product pays for transposed filters (see `forward`).
ENOUGH_TILES = 64
# Size of the transformed filters of one block.
FILTER_BYTES = 5 << 19

_B_T = np.array(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ],
    np.float32,
)
_G = np.array(
    [
        [1 / 4, 0, 0],
        [-1 / 6, -1 / 6, -1 / 6],
        [-1 / 6, 1 / 6, -1 / 6],
        [1 / 24, 1 / 12, 1 / 6],
        [1 / 24, -1 / 12, 1 / 6],
        [0, 0, 1],
    ]
)
_A_T = np.array([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]], np.float32)
# (36, 9): rows are positions 6 j + i after the transform, columns are taps 3 row + column.
_GG = np.einsum("jq,ip->jipq", _G, _G).reshape(36, 9).astype(np.float32)


def forward(arrays: HostArrays, x: Array, w: Array, at: Windows) -> Array:
    """Convolve.   x: (H, W, N, C)   w: (O, C, 3, 3)   result: (P, Q, N, O); contiguous, float32"""
    num, channels, out_channels = x.shape[2], x.shape[3], w.shape[0]
    width, wide = at.out[1], _num_tiles(at)[1]
    pixel = num * out_channels
    a_t = to_device_like(_A_T, x)
    y = arrays.xp.empty((*at.out, num, out_channels), x.dtype)
    filters = _Filters(arrays, w, out_channels, channels)
    # Column-major filters multiply faster, but have to be transposed first.
    in_columns = _num_tiles(at)[0] * wide * num >= ENOUGH_TILES
    for first, last in each(_chunks(at, num), x):
        count = last - first
        v = _inputs(arrays, x, at, first, last)
        m = scratch.get("winograd.m", (NUM_PRODUCTS, count * wide * num, out_channels), x)
        for block in filters.blocks:
            if in_columns:
                u = filters.transformed(w[block].swapaxes(0, 1))
            else:
                u = filters.transformed(w[block]).transpose(0, 2, 1)
            multiply(arrays.matmul, v, u, m[:, :, block])  # (36, T, C) @ (36, C, B)
        tiles = m.reshape(FIELD, FIELD, count, wide, pixel).transpose(2, 1, 3, 0, 4)
        z = scratch.get("winograd.z", (count, FIELD, wide, TILE, pixel), x)
        arrays.matmul(a_t, tiles, out=z)  # over j: (4, 6) @ (6, N O)
        z = z.reshape(count, FIELD, wide * TILE, pixel)
        for t in range(first, last):
            rows = y[TILE * t : TILE * (t + 1)].reshape(-1, width, pixel)
            columns = z[t - first, :, :width].transpose(1, 0, 2)
            arrays.matmul(a_t[: len(rows)], columns, out=rows.transpose(1, 0, 2))  # over i
    return y


def backward(
    arrays: HostArrays, x: Array, w: Array, dy: Array, at: Windows, needs_dx: bool, dw: Array | None
) -> Array | None:
    """Return dx, or None if not needed; fill `dw` if given.   dy: (P, Q, N, O), x and w as in `forward`"""
    num, channels, out_channels = x.shape[2], x.shape[3], w.shape[0]
    wide = _num_tiles(at)[1]
    dx = arrays.xp.empty(x.shape, x.dtype) if needs_dx else None
    filters = _Filters(arrays, w, channels, out_channels)
    gradients = None if dw is None else _FilterGradients(arrays, w, len(_chunks(at, num)))
    for first, last in each(_chunks(at, num), x):
        dm = _cotangents(arrays, dy, at, first, last)
        if gradients is not None and dw is not None:
            v = _inputs(arrays, x, at, first, last)
            gradients.add(dm, v, dw)
        if dx is not None:
            dv = scratch.get("winograd.v", (NUM_PRODUCTS, (last - first) * wide * num, channels), x)
            for block in filters.blocks:
                u = filters.transformed(w[:, block])
                multiply(arrays.matmul, dm, u, dv[:, :, block])  # (36, T, O) @ (36, O, B)
            _scatter(arrays, dv, dx, at, first, last)
    return dx


def _num_tiles(at: Windows) -> Pair:
    return -(-at.out[0] // TILE), -(-at.out[1] // TILE)


def _chunks(at: Windows, num: int) -> list[Pair]:
    """Split the tile rows into chunks first … last - 1 of at least TILES_AT_A_TIME tiles."""
    tall, wide = _num_tiles(at)
    count = -(-TILES_AT_A_TIME // (wide * num))
    return [(first, min(first + count, tall)) for first in range(0, tall, count)]


def _blocks(size: int, other: int, itemsize: int) -> list[slice]:
    """Split `size` channels into blocks whose filters, `other` for each channel, fit FILTER_BYTES when transformed.

    A block has at least 8 channels.
    """
    count = max(8, FILTER_BYTES // (NUM_PRODUCTS * other * itemsize))
    return [slice(first, first + count) for first in range(0, size, count)]


class _Filters:
    """Transformed filters u = G w G', one block of channels at a time; a single block is transformed only once.

    w: (a, b, 3, 3)   u: (36, a, b)
    """

    def __init__(self, arrays: HostArrays, w: Array, size: int, other: int) -> None:
        self.arrays = arrays
        self.blocks = _blocks(size, other, w.itemsize)
        self._kept: Array | None = None

    def transformed(self, w: Array) -> Array:
        if self._kept is not None:
            return self._kept
        u = scratch.get("winograd.u", (NUM_PRODUCTS, *w.shape[:2]), w)
        taps = self.arrays.xp.ascontiguousarray(w.reshape(*w.shape[:2], 9).transpose(0, 2, 1))
        self.arrays.matmul(to_device_like(_GG, w), taps, out=u.transpose(1, 0, 2))  # (36, 9) @ (9, b)
        if len(self.blocks) == 1:
            self._kept = u
        return u


class _FilterGradients:
    """The filter gradient dw = G' (sum over tiles of dm * v) G, summed over chunks of tile rows."""

    def __init__(self, arrays: HostArrays, w: Array, num_chunks: int) -> None:
        self.arrays, self.left = arrays, num_chunks
        out_channels, channels = w.shape[:2]
        self.blocks = _blocks(out_channels, channels, w.itemsize)
        self.sum: Array | None = None
        if num_chunks > 1:
            self.sum = scratch.get("winograd.sum", (NUM_PRODUCTS, out_channels, channels), w)
            self.sum[...] = 0

    def add(self, dm: Array, v: Array, dw: Array) -> None:
        """Add the contribution of one chunk; after the last chunk, write `dw`."""
        arrays, (out_channels, channels) = self.arrays, dw.shape[:2]
        self.left -= 1
        dw_OC9 = dw.reshape(out_channels, channels, 9)
        for block in self.blocks:
            dm_BT = dm[:, :, block].transpose(0, 2, 1)
            part = scratch.get("winograd.du", (NUM_PRODUCTS, dm_BT.shape[1], channels), dw)
            multiply(arrays.matmul, dm_BT, v, part)  # (36, B, T) @ (36, T, C)
            if self.sum is not None:
                self.sum[:, block] += part
                part = self.sum[:, block]
            if self.left == 0:
                arrays.matmul(part.transpose(1, 2, 0), to_device_like(_GG, dw), out=dw_OC9[block])


def _inputs(arrays: HostArrays, x: Array, at: Windows, first: int, last: int) -> Array:
    """Return v = B' d B for tile rows first … last - 1, shape (36, T, C)."""
    num, channels = x.shape[2:]
    pixel = num * channels
    wide, count = _num_tiles(at)[1], last - first
    # Width of the padded image, rounded up to whole tiles.
    width = TILE * wide + FIELD - TILE
    whole = at._replace(after=(at.after[0], width - at.image[1] - at.before[1]))
    d = arrays.pad_rows(x, whole, (TILE * first, TILE * last + FIELD - TILE), "winograd.d")
    b_t = to_device_like(_B_T, x)
    as_strided, item = arrays.xp.lib.stride_tricks.as_strided, x.itemsize
    row = width * pixel * item
    # Fields overlap by two pixels: strided views give all of them without a copy.
    fields = as_strided(d, (count, width, FIELD, pixel), (TILE * row, pixel * item, row, item))
    e = scratch.get("winograd.e", (count, width, FIELD, pixel), x)
    arrays.matmul(b_t, fields, out=e)  # over rows: (6, 6) @ (6, N C)
    v = scratch.get("winograd.v", (FIELD, FIELD, count, wide, pixel), x)
    column = FIELD * pixel * item
    fields = as_strided(
        e, (count, wide, FIELD, FIELD, pixel), (width * column, TILE * column, pixel * item, column, item)
    )
    arrays.matmul(b_t, fields, out=v.transpose(2, 3, 1, 0, 4))  # over columns
    return v.reshape(NUM_PRODUCTS, count * wide * num, channels)


def _cotangents(arrays: HostArrays, dy: Array, at: Windows, first: int, last: int) -> Array:
    """Return dm = A dy A' for tile rows first … last - 1, shape (36, T, O)."""
    width, num, channels = dy.shape[1:]
    pixel = num * channels
    wide, count = _num_tiles(at)[1], last - first
    a = to_device_like(_A_T, dy).T
    e = scratch.get("winograd.z", (count, FIELD, TILE * wide, pixel), dy)
    e[:, :, width:] = 0
    for t in range(first, last):
        rows = dy[TILE * t : TILE * (t + 1)].reshape(-1, width, pixel)
        out = e[t - first, :, :width].transpose(1, 0, 2)
        arrays.matmul(a[:, : len(rows)], rows.transpose(1, 0, 2), out=out)  # (6, 4) @ (4, N O)
    dm = scratch.get("winograd.m", (FIELD, FIELD, count, wide, pixel), dy)
    e = e.reshape(count, FIELD, wide, TILE, pixel)
    arrays.matmul(a, e, out=dm.transpose(2, 1, 3, 0, 4))
    return dm.reshape(NUM_PRODUCTS, count * wide * num, channels)


def _scatter(arrays: HostArrays, dv: Array, dx: Array, at: Windows, first: int, last: int) -> None:
    """Add B dv B' of tile rows first … last - 1 to dx, where neighbouring tiles overlap by two pixels."""
    height, width, num, channels = dx.shape
    pixel = num * channels
    wide, count = _num_tiles(at)[1], last - first
    top, left = at.before
    # The last two rows and columns of a field are the first ones of the next tile: add these separately.
    b = to_device_like(_B_T, dx).T
    inner, border = b[:TILE], b[TILE:]
    tiles = dv.reshape(FIELD, FIELD, count, wide, pixel).transpose(2, 1, 3, 0, 4)
    e = scratch.get("winograd.e", (count, FIELD, wide + 1, TILE, pixel), dx)
    arrays.matmul(inner, tiles, out=e[:, :, :wide])
    over = scratch.get("winograd.d", (count, FIELD, wide, FIELD - TILE, pixel), dx)
    arrays.matmul(border, tiles, out=over)
    e[:, :, 1:wide, : FIELD - TILE] += over[:, :, :-1]
    e[:, :, wide, : FIELD - TILE] = over[:, :, -1]
    columns = e.reshape(count, FIELD, (wide + 1) * TILE, pixel)[:, :, left : left + width]
    dx = dx.reshape(height, width, pixel)
    for t in range(first, last):
        _add_rows(arrays, inner, columns[t - first], dx, TILE * t - top, 0 if t == 0 else FIELD - TILE)
        _add_rows(arrays, border, columns[t - first], dx, TILE * (t + 1) - top, 0)


def _add_rows(arrays: HostArrays, matrix: Array, columns: Array, dx: Array, at: int, num_added: int) -> None:
    """Write matrix @ columns to rows at, at + 1, … of dx; add the first `num_added` rows to the present content."""
    begin, end = max(0, -at), min(len(matrix), len(dx) - at)
    if end <= begin:
        return
    source = columns.transpose(1, 0, 2)  # (W, 6, N C)
    added = min(max(num_added - begin, 0), end - begin)
    if added:
        rows = dx[at + begin : at + begin + added]
        part = scratch.get("winograd.rows", rows.shape, dx)
        arrays.matmul(matrix[begin : begin + added], source, out=part.transpose(1, 0, 2))
        rows += part
    if end > begin + added:
        rows = dx[at + begin + added : at + end]
        arrays.matmul(matrix[begin + added : end], source, out=rows.transpose(1, 0, 2))
