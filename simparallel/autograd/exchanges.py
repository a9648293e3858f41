"""The exchanges by which an op completes its cut dims, described from the shapes of a call alone."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np


class Asked(NamedTuple):
    """One exchange that an op asks its context for.

    Attributes:
        dims: names of the dims that it completes.
        reduce_op: "sum", "max" or "min".
        shape: of the array that each rank contributes.
        dtype: of that array.
        group_size: how many neighbouring slices are completed together; None for all.
    """

    dims: str
    reduce_op: str
    shape: tuple[int, ...]
    dtype: np.dtype
    group_size: int | None = None

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Exchanges(NamedTuple):
    """The exchanges in order: of forward, and of a backward in which all floating-point inputs require a gradient."""

    forward: tuple[Asked, ...] = ()
    backward: tuple[Asked, ...] = ()
