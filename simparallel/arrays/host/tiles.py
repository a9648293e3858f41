"""Matrix products in pieces.

BLAS copies its operands into a layout of its own before it multiplies, which pays off for large
matrices only. With AVX-512, OpenBLAS has a second kernel that skips the copies, for products of up
to 100 ** 3 multiplications. Cut into a batch of products of that size, the long thin products of
convolutions are up to five times as fast, and products of linear layers with a small batch up to a
third faster (measured, in float32).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from simparallel.backend import Array
from simparallel.base import blas

# Multiplications in one tile: just below the limit of the small kernel.
SMALL_PRODUCT = 950_000
# Least length of a piece where one side alone is cut.
SHORTEST = 64
# Tile widths that fill whole registers.
WIDTHS = (64, 48, 32, 16)
# In a linear layer, tiles pay off for batches of at most FEW rows, as long as the data of a tile stay in the cache.
# (Measured on AMD Zen 5: batches of 64 gain nothing, batches of 256 lose a quarter.)
FEW, LONGEST_INNER = 32, 512


@lru_cache(maxsize=4096)
def pieces(size: int, others: int) -> tuple[int, int]:
    """Split `size` into b pieces of length L with L * others in the range of the small kernel; return (b, L).

    (1, size) if L would be shorter than SHORTEST, or if BLAS has no small kernel.
    """
    if not blas.has_small_kernel():
        return 1, size
    longest = SMALL_PRODUCT // max(others, 1)
    divisors = (n for n in range(1, size // SHORTEST + 1) if size % n == 0 and size // n <= longest)
    count = next(divisors, 1)
    return count, size // count


@lru_cache(maxsize=4096)
def _tiles(rows: int, inner: int, columns: int) -> tuple[int, int]:
    """Return (height, width) of the largest tiles in the range of the small kernel.

    (rows, columns) if there are none, or if BLAS has no small kernel.
    """
    if not blas.has_small_kernel():
        return rows, columns
    best = (0, 0)
    for width in (columns, *WIDTHS):
        if columns % width == 0:
            tallest = SMALL_PRODUCT // (inner * width)
            heights = (rows // n for n in range(1, rows // 16 + 1) if rows % n == 0 and rows // n <= tallest)
            best = max(best, (next(heights, 0), width), key=lambda tile: tile[0] * tile[1])
    return best if best[0] else (rows, columns)


def multiply(matmul: Callable[..., Array], a: Array, b: Array, out: Array) -> None:
    """Write a @ b to out, in tiles.   a: (n, M, K)   b: (n, K, N)   out: (n, M, N), any strides"""
    (num, rows, inner), columns = a.shape, b.shape[2]
    height, width = _tiles(rows, inner, columns)
    tall, wide = rows // height, columns // width
    matmul(
        a.reshape(num, tall, 1, height, inner),
        b.reshape(num, 1, inner, wide, width).transpose(0, 1, 3, 2, 4),
        out=out.reshape(num, tall, height, wide, width).transpose(0, 1, 3, 2, 4),
    )


@lru_cache(maxsize=4096)
def tile(rows: int, inner: int, columns: int) -> tuple[int, int] | None:
    """Return (height, width) of the tiles of one product; None where a single product is faster (measured)."""
    # A small product uses the small kernel without being cut.
    is_small = rows * inner * columns <= SMALL_PRODUCT
    if is_small or not blas.has_small_kernel():
        return None
    if inner <= FEW:
        shortest, widths = 32, [128, 64, columns]
    elif rows <= FEW and inner <= LONGEST_INNER:
        shortest, widths = 16, [64, 32]
    else:
        return None
    for width in widths:
        if columns % width == 0:
            tallest = SMALL_PRODUCT // (inner * width)
            height = next((rows // n for n in range(1, rows // 16 + 1) if rows % n == 0 and rows // n <= tallest), 0)
            if height >= shortest:
                return height, width
    return None
