"""Add values at positions of an array that may be equal, always in the same order."""

from __future__ import annotations

from functools import reduce
from math import prod
from operator import add
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.arrays.cuda import add_rows as gpu_rows
from simparallel.backend import Array


def add_at(xp: ModuleType, total: Array, key: tuple[Any, ...], values: Array) -> None:
    """Compute total[key] += values, where the values at equal positions add up in their order.

    Args:
        xp: numpy or cupy.
        total: contiguous.
        key: for each dim an array of integers, or slice(None); the arrays broadcast together.
        values: of the shape of total[key] and the dtype of `total`.
    """
    if isinstance(total, np.ndarray):
        xp.add.at(total, key, values)
        return
    assert total.flags.c_contiguous
    positions = xp.broadcast_to(_positions(xp, total.shape, key), values.shape).reshape(-1)
    gpu_rows.add_rows(xp.ascontiguousarray(values).reshape(-1, 1), positions, total.reshape(-1, 1))


def add_rows(xp: ModuleType, total: Array, ids: Array, rows: Array) -> None:
    """Add each row to the row of `total` that its id names, in the order of the rows.

    Args:
        xp: numpy or cupy.
        total: (V, E), contiguous.
        ids: (n,), int64 from 0 to V - 1; on a GPU rows with a negative id are left out.
        rows: (n, E), contiguous, of the dtype of `total`.
    """
    if not isinstance(total, np.ndarray):
        gpu_rows.add_rows(rows, ids, total)
    elif len(total):
        # A one-dimensional `add.at` takes about 1 ns for each number. By rows it is five times slower, and
        # sorting the ids first is slower, too, unless there are few different ids.
        places = ids[:, None] * total.shape[1] + xp.arange(total.shape[1])
        xp.add.at(total.reshape(-1), places.reshape(-1), rows.reshape(-1))


def _positions(xp: ModuleType, shape: tuple[int, ...], key: tuple[Any, ...]) -> Array:
    """Return the position of each selected element in the flat array, in a shape that broadcasts to the selection's."""
    indexed = [dim for dim, item in enumerate(key) if not isinstance(item, slice)]
    whole = [dim for dim in range(len(shape)) if dim not in indexed]
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # As in NumPy, the dims of the indices come where neighbouring dims were, else first.
    is_together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    num_before, num_dims = (indexed[0] if is_together else 0), max(key[dim].ndim for dim in indexed)
    parts = []
    for dim in indexed:
        wrapped = key[dim].astype("int64") % max(shape[dim], 1) * steps[dim]
        parts.append(wrapped.reshape((*wrapped.shape, *(1,) * (len(whole) - num_before))))
    for i, dim in enumerate(whole):
        behind = len(whole) - i - 1 + (num_dims if i < num_before else 0)
        parts.append((xp.arange(shape[dim]) * steps[dim]).reshape((-1, *(1,) * behind)))
    return reduce(add, parts)
