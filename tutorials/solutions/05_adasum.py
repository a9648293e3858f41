"""Solutions to the exercises of the lesson on Adasum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import simparallel as sp


def combined(a: np.ndarray, b: np.ndarray, dot: float, a_square: float, b_square: float) -> np.ndarray:
    """Return the Adasum of two vectors, or slices of it, from the dot products of the whole vectors."""
    a_share = 1 - dot / (2 * a_square) if a_square else 1.0
    b_share = 1 - dot / (2 * b_square) if b_square else 1.0
    return a_share * a + b_share * b


def adasum_pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Exercise 1: subtract half of each projection, where there is something to project on."""
    return combined(a, b, a @ b, a @ a, b @ b)


def adasum_tree(vectors: Sequence[np.ndarray]) -> np.ndarray:
    """Exercise 2: join neighbours until one vector is left."""
    level = list(vectors)
    while len(level) > 1:
        level = [adasum_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def adasum_of_slices(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Exercise 3: the dot products of the slices, added over the ranks, are those of the vectors."""
    return combined(a, b, *sp.all_reduce(np.array([a @ b, a @ a, b @ b])))
