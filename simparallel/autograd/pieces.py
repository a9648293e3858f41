"""Matrix products in pieces.

BLAS copies its operands into a layout of its own before it multiplies, which pays for large
matrices only. OpenBLAS (0.3.31, with AVX-512) has another kernel, without the copies, for up to
100 ** 3 multiplications; long thin products, such as those of convolutions, are up to five times as
fast when they are cut into a batch of products of that size (measured, in float32).
"""

from __future__ import annotations

from functools import lru_cache
from types import ModuleType

from simparallel.backend import Array

SMALL_PRODUCT = 950_000  # multiplications
SHORTEST = 64  # of a side that is cut alone
WIDTHS = (64, 48, 32, 16)  # whole registers


@lru_cache(maxsize=4096)
def pieces(size: int, others: int) -> tuple[int, int]:
    """(b, L) with b * L = size and L * others small; (1, size) where that would make L too short."""
    longest = SMALL_PRODUCT // max(others, 1)
    divisors = (n for n in range(1, size // SHORTEST + 1) if size % n == 0 and size // n <= longest)
    count = next(divisors, 1)
    return count, size // count


@lru_cache(maxsize=4096)
def _tiles(rows: int, inner: int, columns: int) -> tuple[int, int]:
    """(height, width) of the largest tiles of a product that are small enough; all of it if none are."""
    best = (0, 0)
    for width in (columns, *WIDTHS):
        if columns % width == 0:
            tallest = SMALL_PRODUCT // (inner * width)
            heights = (rows // n for n in range(1, rows // 16 + 1) if rows % n == 0 and rows // n <= tallest)
            best = max(best, (next(heights, 0), width), key=lambda tile: tile[0] * tile[1])
    return best if best[0] else (rows, columns)


def multiply(xp: ModuleType, a: Array, b: Array, out: Array) -> None:
    """out = a @ b, in tiles.   a: (n, M, K)   b: (n, K, N)   out: (n, M, N), any strides"""
    (num, rows, inner), columns = a.shape, b.shape[2]
    height, width = _tiles(rows, inner, columns)
    tall, wide = rows // height, columns // width
    xp.matmul(
        a.reshape(num, tall, 1, height, inner),
        b.reshape(num, 1, inner, wide, width).transpose(0, 1, 3, 2, 4),
        out=out.reshape(num, tall, height, wide, width).transpose(0, 1, 3, 2, 4),
    )
