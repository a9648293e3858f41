"""Matrix products by shape: tiles of the result in whole waves on a device's multiprocessors.

A multiprocessor computes one tile at a time, and a wave is one tile on each. The last wave takes as long as a full one,
and tiles at the edges as long as whole ones. A product with few tiles is split along its inner dim, too: its parts are
added by one more pass over the result. A library knows several tiles; the fastest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from simparallel.machine.numbers import check_number

# Rows and columns of a tile -> its speed, of that of the largest: small tiles reuse less of what they read.
_TILES = {(128, 256): 1.0, (256, 128): 1.0, (128, 128): 0.9, (64, 128): 0.7, (128, 64): 0.7, (64, 64): 0.5}
# Parts of the inner dim, and their least size.
_SPLITS, _LEAST_PART = (1, 2, 3, 4, 6, 8, 16, 32), 256
# The time in which a multiprocessor begins and ends a tile: memory answers, and the result is written.
_TILE_S = 1.2e-6
# Speed of a product whose rows in memory do not begin at multiples of 16 bytes.
_MISALIGNED = 0.5


class MatrixProduct(NamedTuple):
    """`batch` products of (m, k) and (k, n), as one kernel computes them.

    Attributes:
        kind: "product", "convolution" or "attention": which share of the peak it can reach.
        is_aligned: whether all rows in memory begin at multiples of 16 bytes.
    """

    batch: int
    m: int
    n: int
    k: int
    kind: str = "product"
    is_aligned: bool = True


@dataclass(frozen=True)
class MatrixUnits:
    """What computes a device's matrix products, and the shares of the peak that they can reach.

    Args:
        multiprocessors: number of multiprocessors, or cores; 0 for products of every shape at the same share.
        product, convolution: of products and convolutions that fill all multiprocessors.
        attention: of fused attention, of any shape.
        wide: of products of float32 and float64, which run without units for matrices; convolutions and attention gain
            as much.

    Raises:
        ClusterError: a number out of range. Fact: `key`, the field.
    """

    multiprocessors: int
    product: float
    convolution: float
    attention: float
    wide: float

    def __post_init__(self) -> None:
        for each in fields(self):
            low, high = (0, 1 << 20) if each.name == "multiprocessors" else (1e-6, 1.0)
            check_number("matrix units", each.name, getattr(self, each.name), low, high)

    def peak_s(
        self, flops: int, products: tuple[MatrixProduct, ...], peak: float, bytes_per_s: float, itemsize: int = 2
    ) -> float:
        """Return the time [s] of products that together have `flops`, without launches.

        Args:
            flops: floating-point operations.
            products: their shapes; none if they are not known.
            peak: of the device [flop/s].
            bytes_per_s: what its memory reaches, for the parts of split products.
            itemsize: bytes of an item.
        """
        if itemsize > 2:
            peak *= self.wide / self.product
        kind = products[0].kind if products else "product"
        if not products or not self.multiprocessors or kind == "attention":
            return flops / (peak * getattr(self, kind))
        return sum(
            _time_s(each, self.multiprocessors, peak * getattr(self, each.kind), bytes_per_s) for each in products
        )


@lru_cache(maxsize=1 << 16)
def _time_s(product: MatrixProduct, multiprocessors: int, flops_per_s: float, bytes_per_s: float) -> float:
    batch, m, n, k, _, is_aligned = product
    if not (batch and m and n and k):
        return 0.0
    rate = flops_per_s / multiprocessors * (1.0 if is_aligned else _MISALIGNED)
    times = []
    for (rows, columns), speed in _TILES.items():
        tiles = batch * -(-m // rows) * -(-n // columns)
        for parts in _SPLITS:
            if parts > 1 and k < parts * _LEAST_PART:
                break
            waves = -(-tiles * parts // multiprocessors)
            # Each part but the last one is written and read in float32.
            added_s = 8 * (parts - 1) * batch * m * n / bytes_per_s
            times.append(waves * (2 * rows * columns * -(-k // parts) / (rate * speed) + _TILE_S) + added_s)
    return min(times)


# What kernels reach, from published times of kernels. Not a blind choice: the time of a tile, the 64 x 64 tile, the
# share of an H100 and that of float32 were chosen after a look at the errors of published steps (docs/published.md).
#
# Tiles, and the time to begin and end one: the table of bfloat16 products of an H100 in OpenXLA (matmul_interpolator_
# data.h, sm_90: half of its products are within 4 %), and that of an A100 PCIe in SimuMax (@4dcaae5, a100_pcie.json:
# 3 %). Alone and cool, products that fill the multiprocessors reach 0.84 and 0.76 there.
#
# A100, products: the times of one block of a 22B model, forward and backward, on eight A100 (Korthikanti et al. 2022,
# table 4, the median of five). Attention: FlashAttention-2 reaches 50 to 73 % (Dao 2023, arXiv 2307.08691, abstract).
# float32: one product measured on an H100, 51.3 of 66.9 Tflop/s.
A100_UNITS = MatrixUnits(108, 0.708, 0.708, 0.5, 0.77)
# H100: products lose as much as on an A100 against the best of any shape, 794.5 of 989 and 271.2 of 312 Tflop/s
# (Bekman, "Machine learning engineering", maximum achievable matmul flops). Attention: FlashAttention-2 reaches 35 %
# (Shah et al. 2024, arXiv 2407.08608, abstract) forward, and less backward.
H100_UNITS = MatrixUnits(132, 0.654, 0.654, 0.3, 0.77)
# Assumed: as an A100; 32 and 24 cores.
ASCEND_910_UNITS, ASCEND_910B_UNITS = (MatrixUnits(cores, 0.708, 0.708, 0.325, 0.77) for cores in (32, 24))
