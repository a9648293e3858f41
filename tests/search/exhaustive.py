"""Brute force: every combination of candidates is priced. The oracle to test the other solvers."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, prod

import numpy as np

from simparallel.errors import InputError
from simparallel.search.problem import Pairs, Problem, Solution

_CHUNK = 1 << 16  # combinations priced at once: their arrays stay in the cache


def enumerate_all(problem: Problem, *, memory_limit_bytes: float = inf, max_combinations: int = 10_000_000) -> Solution:
    """Return the cheapest of all combinations; among equals, the first in lexicographic order.

    Args:
        problem: what to choose.
        memory_limit_bytes: no choice may hold more; there is a choice that holds less.
        max_combinations: how many to price at most.

    Raises:
        InputError: there are more combinations. Facts: `combinations`, `limit`.

    Cost: about 10 ns for each combination and each node and edge.
    """
    found = []
    for first, costs, memory in totals(problem, max_combinations):
        costs = np.where(memory <= memory_limit_bytes, costs, np.iinfo(np.int64).max)
        place = int(costs.argmin())
        found.append((int(costs[place]), first + place))
    best, number = min(found)
    sizes = [len(costs) for costs in problem.nodes]
    choice = map(int, np.unravel_index(number, sizes)) if sizes else ()
    return Solution.of(problem, choice, best, "exhaustive")


def totals(problem: Problem, max_combinations: int = 10_000_000) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield the number of the first combination of each chunk, and the cost and memory of all in it."""
    sizes = [len(costs) for costs in problem.nodes]
    count = prod(sizes)
    if count > max_combinations:
        raise InputError(
            f"enumerate_all: {count} combinations of candidates, more than the limit of {max_combinations}; use "
            "eliminate(), or raise max_combinations.",
            combinations=count,
            limit=max_combinations,
        )
    for first in range(0, count, _CHUNK):
        rest = np.arange(first, min(first + _CHUNK, count))
        digits: list[np.ndarray] = []
        for size in reversed(sizes):
            rest, digit = np.divmod(rest, size)
            digits.insert(0, digit)
        shape = rest.shape
        yield (
            first,
            _sums(problem.nodes, problem.edges, digits, shape),
            _sums(problem.memory or (), problem.edge_memory, digits, shape),
        )


def _sums(nodes: tuple[np.ndarray, ...], edges: Pairs, digits: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    sums = np.zeros(shape, np.int64)
    for costs, digit in zip(nodes, digits, strict=False):
        sums += costs[digit]
    for (u, v), table in edges.items():
        sums += table[digits[u], digits[v]]
    return sums
