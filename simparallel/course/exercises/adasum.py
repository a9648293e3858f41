"""Exercises of lesson 5: Adasum."""

from __future__ import annotations

import numpy as np

from simparallel.base.adasum import adasum
from simparallel.course.exercises.exercise import Case, call_case, exercise, frugal_case, integers

# Two vectors of one to three numbers.
PAIRS: dict[str, tuple[list[float], list[float]]] = {
    "equal": ([2], [2]),
    "opposite": ([1], [-3]),
    "parallel": ([1, 2], [3, 6]),
    "orthogonal": ([3, 0], [0, 4]),
    "45 degrees": ([1, 0], [1, 1]),
    "wide": ([2, 0, 1], [-1, 3, 1]),
    "second is zero": ([1, 2], [0, 0]),
    "first is zero": ([0, 0], [1, 2]),
    "both are zero": ([0], [0]),
    "tiny": ([1, 2], [1e-9, 2e-9]),
}


@exercise(lesson=5, vectors=tuple(PAIRS))
def adasum_pair(vectors: str) -> Case:
    """Return the Adasum of two vectors; a zero vector leaves the other one unchanged."""
    a, b = (np.array(vector, float) for vector in PAIRS[vectors])
    return call_case({"a": a, "b": b}, {"Adasum": adasum([a, b])})


@exercise(lesson=5, levels=range(4), size=(1, 2, 3), seed=range(2))
def adasum_tree(levels: int, size: int, seed: int) -> Case:
    """Return the Adasum of 2^levels vectors, combined pairwise in a binary tree."""
    # Distinct vectors, so that any other pairing has another result.
    vectors = list(np.random.default_rng(seed).integers(1, 9, (1 << levels, size)).astype(float))
    given = {f"vector {i}": vector for i, vector in enumerate(vectors)}
    return call_case(given, {"Adasum": adasum(vectors)}, calls=[(vectors,)])


@exercise(
    lesson=5,
    ranks=range(1, 5),
    size=(1, 2, 5, 8, 13),
    vectors=("different", "orthogonal", "second is zero", "first ends in zeros"),
)
def adasum_of_slices(ranks: int, size: int, vectors: str) -> Case:
    """Return this rank's slice of the Adasum of two vectors that are cut over the ranks."""
    a, b = integers(2, size)
    if vectors == "orthogonal":
        a, b = np.where(np.arange(size) % 2, a, 0), np.where(np.arange(size) % 2, 0, b)
    elif vectors == "second is zero":
        b = 0 * b
    elif vectors == "first ends in zeros":
        a = np.where(np.arange(size) < (size + 1) // 2, a, 0)
    parts = list(zip(np.array_split(a, ranks), np.array_split(b, ranks), strict=True))
    given: dict[str, np.ndarray] = {}
    for rank, (a_part, b_part) in enumerate(parts):
        given |= {f"a of rank {rank}": a_part, f"b of rank {rank}": b_part}
    return frugal_case(given, np.array_split(adasum([a, b]), ranks), parts, count=3)
