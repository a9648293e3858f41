"""Wrong answers to the exercises on Adasum: exercise -> a part of the text about the failing case -> answer."""

from __future__ import annotations

from functools import reduce

import numpy as np

import simparallel as sp


def pair(a, b, half=2.0, on_itself=True):
    """Return Adasum with a factor and a denominator to get wrong."""
    dot = a @ b
    a_square, b_square = (a @ a, b @ b) if on_itself else (b @ b, a @ a)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (1 - dot / (half * a_square)) * a + (1 - dot / (half * b_square)) * b


def with_epsilon(a, b):
    return (1 - a @ b / (2 * a @ a + 1e-12)) * a + (1 - a @ b / (2 * b @ b + 1e-12)) * b


def halves(vectors):
    """Pair each vector with the one half of the list away."""
    level = list(vectors)
    while len(level) > 1:
        level = [sp.adasum(two) for two in zip(level[: len(level) // 2], level[len(level) // 2 :], strict=True)]
    return level[0]


def gathered(a, b):
    """Gather both vectors."""
    rank = sp.get_rank()
    whole = [sp.all_gather_object(x) for x in (a, b)]
    sp.all_gather(np.concatenate([a, b]), uneven=True)
    total = sp.adasum([np.concatenate(parts) for parts in whole])
    start = sum(len(part) for part in whole[0][:rank])
    return total[start : start + len(a)]


def zero_by_slice(a, b):
    """Treat a slice of zeros as a vector of zeros."""
    dot, a_square, b_square = sp.all_reduce(np.array([a @ b, a @ a, b @ b]))
    if not a.any():
        return b
    if not b.any():
        return a
    return (1 - dot / (2 * a_square)) * a + (1 - dot / (2 * b_square)) * b


def undefined_for_zero(a, b):
    """Divide by the squared length, whatever it is."""
    dot, a_square, b_square = sp.all_reduce(np.array([a @ b, a @ a, b @ b]))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (1 - dot / (2 * a_square)) * a + (1 - dot / (2 * b_square)) * b


WRONG = {
    "adasum_pair": {
        "vectors='equal': Adasum[0] is 0, expected 2": lambda a, b: pair(a, b, half=1.0),
        "vectors='opposite'": lambda a, b: pair(a, b, on_itself=False),
        "vectors='second is zero': Adasum[0] is nan": pair,
        "vectors='tiny'": with_epsilon,
        "vectors='equal': Adasum[0] is 4": lambda a, b: a + b,
        "vectors='orthogonal'": lambda a, b: (a + b) / 2,
    },
    "adasum_tree": {
        "levels=2, size=1, seed=0: Adasum[0] is 4.375": lambda vectors: reduce(lambda a, b: sp.adasum([a, b]), vectors),
        "levels=2, size=2, seed=0: Adasum[0]": halves,
        "levels=1, size=2": lambda vectors: sum(vectors) / len(vectors),
        "levels=1, size=1": sum,
    },
    "adasum_of_slices": {
        "ranks=2, size=2, vectors='different': rank 0[0]": lambda a, b: sp.adasum([a, b]) if len(a) else a,
        "are enough": gathered,
        "ranks=1, size=1, vectors='orthogonal': rank 0[0] is nan": undefined_for_zero,
        "ranks=2, size=2, vectors='first ends in zeros': rank 1[0]": zero_by_slice,
    },
}
