"""Matrix products by shape: tiles of the result in whole waves on a device's multiprocessors.

A multiprocessor computes one tile at a time, and a wave is one tile on each. The last wave takes as long as a full one,
and tiles at the edges as long as whole ones. A product with few tiles is split along its inner dim, too: its parts are
added by one more pass over the result. A library knows several tiles; the fastest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import NamedTuple

from simparallel.machine.achieved import LEAST_PART, MISALIGNED, SPLITS, TILE_S, TILES
from simparallel.machine.numbers import check_number


class MatrixProduct(NamedTuple):
    """`batch` products of (m, k) and (k, n), as one kernel computes them.

    Attributes:
        kind: "product", "convolution" or "attention": which share of the peak it can reach.
        is_aligned: whether all rows in memory begin at multiples of 16 bytes.
        speeds: its speed in float32 and in TF32, of that of other products.
    """

    batch: int
    m: int
    n: int
    k: int
    kind: str = "product"
    is_aligned: bool = True
    speeds: tuple[float, float] = (1.0, 1.0)


@dataclass(frozen=True)
class MatrixUnits:
    """What computes a device's matrix products, and the shares of the peak that they can reach.

    Args:
        multiprocessors: number of multiprocessors, or cores; 0 for products of every shape at the same share.
        product, convolution: of products and convolutions that fill all multiprocessors.
        attention: of fused attention, of any shape.
        wide: of products of float32 and float64, but TF32, which run without units for matrices; convolutions and
            attention gain as much.
        lanes: of each multiprocessor for float32; cuDNN's kernels of convolutions in float32 were written for 64, and
            with 128 they reach less of the peak (`MatrixProduct.speeds`).

    Raises:
        ClusterError: a number out of range. Fact: `key`, the field.
    """

    multiprocessors: int
    product: float
    convolution: float
    attention: float
    wide: float
    lanes: int = 64

    def __post_init__(self) -> None:
        for each in fields(self):
            low, high = (0, 1 << 20) if each.name in ("multiprocessors", "lanes") else (1e-6, 1.0)
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
        if itemsize > 3:
            peak *= self.wide / self.product
        kind = products[0].kind if products else "product"
        if not products or not self.multiprocessors or kind == "attention":
            return flops / (peak * getattr(self, kind))
        rates = ((each, peak * getattr(self, each.kind)) for each in products)
        if itemsize == 3 or (itemsize > 3 and self.lanes > 64):
            rates = ((each, rate * each.speeds[itemsize == 3]) for each, rate in rates)
        return sum(_time_s(each, self.multiprocessors, rate, bytes_per_s) for each, rate in rates)


@lru_cache(maxsize=1 << 16)
def _time_s(product: MatrixProduct, multiprocessors: int, flops_per_s: float, bytes_per_s: float) -> float:
    batch, m, n, k, _, is_aligned, _ = product
    if not (batch and m and n and k):
        return 0.0
    rate = flops_per_s / multiprocessors * (1.0 if is_aligned else MISALIGNED)
    times = []
    for (rows, columns), speed in TILES.items():
        tiles = batch * -(-m // rows) * -(-n // columns)
        for parts in SPLITS:
            if parts > 1 and k < parts * LEAST_PART:
                break
            waves = -(-tiles * parts // multiprocessors)
            # Each part but the last one is written and read in float32.
            added_s = 8 * (parts - 1) * batch * m * n / bytes_per_s
            times.append(waves * (2 * rows * columns * -(-k // parts) / (rate * speed) + TILE_S) + added_s)
    return min(times)
