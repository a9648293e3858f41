"""The record of an algorithm: by its textbook, what each rank sends, and the order of its sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from simparallel.algorithms import split

# (p ranks, n bytes of the vector, number of the rank from the root on) -> messages and bytes that the rank sends
Sent = Callable[[int, int, int], tuple[int, int]]


class AlgorithmRecord(NamedTuple):
    """An algorithm by its textbook.

    Attributes:
        sent: for each collective what a rank sends, on two ranks or more; n is divisible by p and by its powers of two.
        total: the sum of its all_reduce, if it has one, from the vectors of eight ranks.
    """

    sent: dict[str, Sent]
    total: Callable[[Sequence[np.ndarray]], np.ndarray] | None = None


def _children(p: int, number: int) -> int:
    return sum(number % 2 ** (i + 1) == 0 and number + 2**i < p for i in range((p - 1).bit_length()))


def _core(p: int, number: int) -> tuple[int, int, bool, bool]:
    """Return the core's size, its depth, whether a rank is in a pair, and whether another one stands for it."""
    core = 2 ** (p.bit_length() - 1)
    pairs = number < 2 * (p - core)
    return core, core.bit_length() - 1, pairs, pairs and number % 2 == 0


def _halved_all_reduce(p: int, n: int, number: int) -> tuple[int, int]:
    core, depth, pairs, is_folded = _core(p, number)
    return (1, n) if is_folded else (2 * depth + pairs, 2 * (core - 1) * n // core + pairs * n)


def _halved_reduce_scatter(p: int, n: int, number: int) -> tuple[int, int]:
    _, depth, pairs, is_folded = _core(p, number)
    return (1, n) if is_folded else (depth + pairs, (p - 1) * n // p)


def _doubled_all_gather(p: int, n: int, number: int) -> tuple[int, int]:
    """A rank of the core sends in step i the parts of its block of 2^i ranks of the core; one of a pair, all parts."""
    core, depth, pairs, is_folded = _core(p, number)
    if is_folded:
        return 1, n // p
    own = number // 2 if pairs else number - (p - core)
    members = [k for k in range(core) for _ in range(2 if k < p - core else 1)]
    parts = sum(own >> i == k >> i for i in range(depth) for k in members)
    return depth + pairs, parts * n // p + pairs * n


RECORDS = {
    "naive": AlgorithmRecord(
        {
            "broadcast": lambda p, n, number: (0, 0) if number else (p - 1, (p - 1) * n),
            "reduce": lambda p, n, number: (1, n) if number else (0, 0),
            "all_reduce": lambda p, n, number: (1, n) if number else (p - 1, (p - 1) * n),
            "gather": lambda p, n, number: (1, n // p) if number else (0, 0),
            "scatter": lambda p, n, number: (0, 0) if number else (p - 1, (p - 1) * n // p),
            "all_to_all": lambda p, n, number: (p - 1, (p - 1) * n // p),
        },
        lambda x: reduce(add, x),
    ),
    "ring": AlgorithmRecord(
        {
            "reduce_scatter": lambda p, n, number: (p - 1, (p - 1) * n // p),
            "all_gather": lambda p, n, number: (p - 1, (p - 1) * n // p),
            "all_reduce": lambda p, n, number: (2 * (p - 1), 2 * (p - 1) * n // p),
            "broadcast": lambda p, n, number: (p, n) if number < p - 1 else (0, 0),
        },
        lambda x: np.concatenate([reduce(add, (split(x[(i + 1 + j) % 8], 8)[i] for j in range(8))) for i in range(8)]),
    ),
    "tree": AlgorithmRecord(
        {
            "broadcast": lambda p, n, number: (_children(p, number), _children(p, number) * n),
            "reduce": lambda p, n, number: (1, n) if number else (0, 0),
            "all_reduce": lambda p, n, number: (
                _children(p, number) + (number > 0), (_children(p, number) + (number > 0)) * n
            ),
        },
        lambda x: ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7])),
    ),
    "halving_doubling": AlgorithmRecord(
        {
            "all_reduce": _halved_all_reduce, "reduce_scatter": _halved_reduce_scatter,
            "all_gather": _doubled_all_gather,
        },
        lambda x: ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])),
    ),
}  # fmt: skip
