"""The Pareto front of cost against memory: the price of using less memory."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import numpy as np

from simparallel.search.elimination import MAX_ENTRIES
from simparallel.search.frontier import Frontier, TooManyRows
from simparallel.search.local import improve
from simparallel.search.problem import MOST, Pairs, Problem, Solution
from simparallel.search.tables import minimise


def pareto(problem: Problem, *, points: int = 32, max_entries: int = MAX_ENTRIES) -> list[Solution]:
    """Return the Pareto front of cost and memory, or points of it, by ascending memory.

    Lists of cost and memory (`frontier`) give the whole front. If they are longer than an eighth of `max_entries`,
    prices of memory give the corners of its convex hull: each is optimal at some limit, but choices
    between them are missing. `method` says which.

    Args:
        problem: what to choose.
        points: most choices to return; of a longer front evenly spaced ones, with both ends.
        max_entries: most entries of a table, 8 bytes each.

    Returns:
        Solutions; the bound of each holds for a limit of its own memory.
    """
    try:
        front = Frontier(problem, max_entries)
    except TooManyRows:
        return hull(problem, points, max_entries)
    count = len(front.cost)
    wanted = np.unique(np.linspace(0, count - 1, min(points, count)).round().astype(int))
    found = ((front.choice(point), int(front.cost[point])) for point in wanted.tolist())
    return [Solution.of(problem, choice, cost, "Pareto lists") for choice, cost in found]


def hull(problem: Problem, points: int, max_entries: int = MAX_ENTRIES) -> list[Solution]:
    """Return corners of the convex hull of the front, by the line between neighbours (Handler and Zang 1980)."""
    method = "Lagrange multipliers (corners of the convex hull)"
    free = minimise(problem, max_entries)
    smallest = minimise(problem.memory_problem, max_entries).choice
    smallest = improve(problem, smallest, problem.memory_bytes(smallest))
    ends = [Solution.of(problem, choice, free.bound, method) for choice in (smallest, improve(problem, free.choice))]
    found, gaps = {(end.memory_bytes, end.cost): end for end in ends}, [tuple(ends)]
    while gaps and len(found) < points:
        below, above = gaps.pop(0)
        if above.memory_bytes <= below.memory_bytes or above.cost >= below.cost:
            continue
        price = (below.cost - above.cost) / (above.memory_bytes - below.memory_bytes)
        # The largest price at which all sums stay below 2**61.
        price = min(price, (MOST * 0.99 - problem.most) / max(1, problem.memory_problem.most))
        lowest = minimise(priced(problem, price), max_entries)
        memory = problem.memory_bytes(lowest.choice)
        # An upper bound on the price of this much memory: `priced` rounds weights as floats.
        bound = lowest.bound - ceil(Fraction(price) * memory * (1 + Fraction(1, 1 << 50)))
        point = Solution.of(problem, lowest.choice, max(bound, free.bound), method)
        if point.cost + price * memory < below.cost + price * below.memory_bytes - len(problem):
            found[memory, point.cost] = point
            gaps += [(below, point), (point, above)]
    front: list[Solution] = []
    for _, point in sorted(found.items()):
        if not front or point.cost < front[-1].cost:
            front.append(point)
    return front


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
