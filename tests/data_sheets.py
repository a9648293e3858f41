"""The record of a preset: the round numbers by which people know the machine."""

from __future__ import annotations

from typing import NamedTuple


class Sheet(NamedTuple):
    """A machine, as its data sheet or its users state it; None where no node is described.

    Attributes:
        devices: devices of a node.
        memory_gb, memory_tb_per_s: memory of a device.
        tflops: peak of a device on dense float16 matrices.
    """

    devices: int | None
    memory_gb: float
    memory_tb_per_s: float
    tflops: float


SHEETS = {
    "a100": Sheet(None, 80, 2.039, 312),
    "ascend910": Sheet(None, 32, 1.2, 256),
    "ascend910-8": Sheet(8, 32, 1.2, 256),
    "ascend910b-8": Sheet(8, 64, 1.6, 376),
    "dgx-a100": Sheet(8, 80, 2.039, 312),
    "dgx-h100": Sheet(8, 80, 3.35, 989.4),
    "h200-8": Sheet(8, 141, 4.8, 989.4),
    "b200-8": Sheet(8, 180, 8.0, 2250),
    "gb200-nvl72": Sheet(72, 186, 8.0, 2500),
    "h20-8": Sheet(8, 96, 4.0, 148),
    "l40s-8": Sheet(8, 48, 0.864, 362),
    "p4de": Sheet(8, 80, 2.039, 312),
    "p5": Sheet(8, 80, 3.35, 989.4),
    "mi300x-8": Sheet(8, 192, 5.3, 1307.4),
    "ascend910c-384": Sheet(384, 128, 3.2, 752),
}
