"""Lagrange multipliers: a price of memory turns a limit into costs, and the best price gives a bound."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import NamedTuple

import numpy as np

from simparallel.search.local import improve
from simparallel.search.problem import MOST, Pairs, Problem, Solution
from simparallel.search.refusal import nothing_fits
from simparallel.search.tables import BoundedChoice, Progress, minimise

_STEPS = 30  # each is a whole elimination; the search ends much earlier by itself


class Relaxed(NamedTuple):
    """The best choice found that fits, and its bound.

    Attributes:
        solution: the choice, with the best bound known.
        price: of memory [ps/byte], the price with the best bound.
    """

    solution: Solution
    price: float


def relax(
    problem: Problem, memory_limit_bytes: int, free: Solution, max_entries: int, progress: Progress = None
) -> Relaxed:
    """Return the best choice within a limit that a price of memory leads to (Handler and Zang 1980, Networks 10).

    The line through a choice that fits and one that does not gives a price; the optimum at this price replaces one of
    them, until no choice lies below the line. Each optimum bounds all choices that fit:
    cost >= min(cost + price * memory) - price * limit.

    Args:
        problem: what to choose.
        memory_limit_bytes: the limit.
        free: the best choice without the limit; it exceeds the limit.
        max_entries: most entries of a table.
        progress: called with the share that is done; the number of steps to come is a guess.

    Raises:
        SearchError: no choice fits, or none was found. Facts: `least_bytes`, `limit_bytes`.
    """
    smallest = minimise(problem.memory_problem, max_entries)
    least_choice = smallest.choice if smallest.is_exact else improve(problem.memory_problem, smallest.choice)
    above, below = free, Solution.of(problem, least_choice, free.bound, "")
    if below.memory_bytes > memory_limit_bytes:
        raise nothing_fits("eliminate", below.memory_bytes, memory_limit_bytes, smallest.bound > memory_limit_bytes)
    best = improve(problem, below.choice, memory_limit_bytes)
    bound, best_price = free.bound, 0.0
    for step in range(_STEPS):
        if below.cost <= above.cost or problem.cost(best) == bound:
            break
        price = (below.cost - above.cost) / (above.memory_bytes - below.memory_bytes)
        found = minimise(priced(problem, price := capped(price, problem)), max_entries)
        if (lower := found.bound - allowance(price, memory_limit_bytes)) > bound:
            bound, best_price = lower, price
        point = Solution.of(problem, found.choice, bound, "")
        fits = point.memory_bytes <= memory_limit_bytes
        if fits:
            best = min(best, improve(problem, point.choice, memory_limit_bytes), key=problem.cost)
        if progress is not None:
            progress(1 - 0.8 ** (step + 1))
        on_line = below.cost + price * below.memory_bytes
        if _at(found, problem, price) >= on_line - abs(on_line) * 1e-12 - len(problem):
            break
        above, below = (above, point) if fits else (point, below)
    bound = min(bound, problem.cost(best))
    solution = Solution.of(problem, best, bound, "elimination with a Lagrange multiplier")
    return Relaxed(solution, best_price)


def _at(found: BoundedChoice, problem: Problem, price: float) -> float:
    return problem.cost(found.choice) + price * problem.memory_bytes(found.choice)


def capped(price: float, problem: Problem) -> float:
    """Return the price, or the largest at which all sums stay below 2**61."""
    return min(price, (MOST * 0.99 - problem.most) / max(1, problem.memory_problem.most))


def allowance(price: float, memory_bytes: int) -> int:
    """Return an upper bound on the price of this much memory in `priced`, which rounds weights as floats."""
    return ceil(Fraction(price) * memory_bytes * (1 + Fraction(1, 1 << 50)))


def priced(problem: Problem, price: float) -> Problem:
    """Return the problem whose costs are cost + floor(price * memory); equal arrays stay equal."""
    made: dict[tuple[int, int], np.ndarray] = {}

    def sums(costs: np.ndarray | None, memory: np.ndarray | None) -> np.ndarray:
        key = id(costs), id(memory)
        if key not in made:
            weight = np.int64(0) if memory is None else np.floor(price * memory).astype(np.int64)
            made[key] = np.asarray(weight if costs is None else costs + weight)
        return made[key]

    memory = problem.memory or (None,) * len(problem)
    pairs: set[tuple[int, int]] = {*problem.edges, *problem.edge_memory}
    edges: Pairs = {pair: sums(problem.edges.get(pair), problem.edge_memory.get(pair)) for pair in sorted(pairs)}
    return Problem(tuple(map(sums, problem.nodes, memory)), edges)
