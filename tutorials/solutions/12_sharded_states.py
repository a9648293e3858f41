"""Solutions to the exercises of the lesson on sharded states."""

from __future__ import annotations

import numpy as np

import simparallel as sp


def rows_of_rank(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Exercise 1: a chunk has rows / ranks rows, rounded up; no rank begins or ends behind the last row."""
    chunk = -(-rows // ranks)
    return min(rank * chunk, rows), min((rank + 1) * chunk, rows)


def sharded_step(weights: np.ndarray, gradient: np.ndarray, momentum: np.ndarray, lr: float, beta: float) -> np.ndarray:
    """Exercise 2: reduce-scatter the gradients, update the own slice, and gather the slices."""
    own = sp.reduce_scatter(gradient, op="mean")
    momentum = beta * momentum + own
    slices = np.split(weights, sp.get_world_size())
    return np.asarray(sp.all_gather(slices[sp.get_rank()] - lr * momentum))


def bytes_of_states(letters: str, count: int, ranks: int) -> list[int]:
    """Exercise 3: a partial gradient is as large as a replicated one; Adam has two moments."""
    return [
        size * (count // ranks if letter == "S" else count) for letter, size in zip(letters, (4, 4, 8), strict=True)
    ]
