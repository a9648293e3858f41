"""Add values at positions of an array that may be equal, always in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.backend import Array
from simparallel.gpu.add_rows import add_rows


def add_at(xp: ModuleType, total: Array, dims: Sequence[int], indices: Sequence[Array], values: Array) -> None:
    """Compute total[…, indices, …] += values, where the values at equal positions add up in their order.

    Args:
        xp: numpy or cupy.
        total: contiguous.
        dims: the indexed dims, in ascending order.
        indices: integers for each of them, which broadcast together.
        values: of the shape of total[…, indices, …] and the dtype of `total`.
    """
    if isinstance(total, np.ndarray):
        key: list[Any] = [slice(None)] * total.ndim
        for dim, array in zip(dims, indices, strict=True):
            key[dim] = array
        xp.add.at(total, tuple(key), values)
        return
    assert total.flags.c_contiguous
    positions = xp.broadcast_to(_positions(xp, total.shape, dims, indices), values.shape).reshape(-1)
    add_rows(xp.ascontiguousarray(values).reshape(-1, 1), positions, total.reshape(-1, 1))


def _positions(xp: ModuleType, shape: tuple[int, ...], dims: Sequence[int], indices: Sequence[Array]) -> Array:
    """Return the position of each selected element in the flat array, in a shape that broadcasts to the selection's."""
    others = [dim for dim in range(len(shape)) if dim not in dims]
    # As in NumPy, the dims of the indices come where neighbouring dims were, else first.
    is_together = list(dims) == list(range(dims[0], dims[0] + len(dims)))
    num_before, num_dims = (dims[0] if is_together else 0), max(array.ndim for array in indices)
    positions = 0
    for dim, array in zip(dims, indices, strict=True):
        step = prod(shape[dim + 1 :])
        wrapped = array.astype("int64") % max(shape[dim], 1) * step
        positions = positions + wrapped.reshape((*array.shape, *(1,) * (len(others) - num_before)))
    for i, dim in enumerate(others):
        behind = len(others) - i - 1 + (num_dims if i < num_before else 0)
        positions = positions + (xp.arange(shape[dim]) * prod(shape[dim + 1 :])).reshape((-1, *(1,) * behind))
    return positions
