"""Simulated annealing: random changes, kept by chance if they cost more. A peer to compare the exact solvers with."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log

import numpy as np

from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate
from simparallel.search.refusal import nothing_fits
from simparallel.search.tables import Progress


def anneal(
    problem: Problem,
    *,
    memory_limit_bytes: int | None = None,
    seed: int = 0,
    steps: int = 100_000,
    start: Sequence[int] | None = None,
    progress: Progress = None,
) -> Solution:
    """Return the best choice that a random walk sees: Metropolis' rule, as in FlexFlow (arXiv 1807.05358).

    Each step offers a random node a random candidate. A change that costs d more is kept with probability
    exp(-d / temperature); the temperature falls from the mean size of such changes to a thousandth of it. While the
    choice exceeds the memory limit, only the changes that reduce its memory are kept.

    Args:
        problem: what to choose.
        memory_limit_bytes: no choice may hold more; None for no limit.
        seed: of the random numbers; the same seed gives the same choice.
        steps: changes to try.
        start: a choice; None for the result of `propagate`.
        progress: called with the share of the steps that are done, 0 to 1.

    Raises:
        SearchError: the walk saw no choice that fits. Facts: `least_bytes`, `limit_bytes`.

    Cost: about 5 us a step and 1 us for each edge of its node. The bound is `Problem.least`.
    """
    choice = [*map(int, propagate(problem, {}).choice if start is None else start)]
    cost, held = problem.cost(choice), problem.memory_bytes(choice)
    limit = held if memory_limit_bytes is None else memory_limit_bytes
    best, least_bytes = (cost, tuple(choice)) if held <= limit else None, held
    movable = [v for v, costs in enumerate(problem.nodes) if len(costs) > 1]
    memory = problem.memory_problem if memory_limit_bytes is not None else None
    rng = np.random.default_rng(seed)
    temperature, count = 0.0, steps if movable else 0
    nodes = rng.integers(0, max(1, len(movable)), count)
    chances = rng.random((count, 2))
    ups = 0
    for step in range(count):
        v = movable[nodes[step]]
        candidate = int(chances[step, 0] * (len(problem.nodes[v]) - 1))
        candidate += candidate >= choice[v]  # any but the current one
        more = _change(problem, v, candidate, choice)
        more_bytes = _change(memory, v, candidate, choice) if memory else 0
        if more > 0:  # the mean of the increases so far
            ups += 1
            temperature += (more - temperature) / ups
        if held > limit:
            is_kept = more_bytes < 0
        else:
            heat = temperature * exp(-log(1000) * step / count)
            is_kept = held + more_bytes <= limit and (more <= 0 or chances[step, 1] < exp(-more / heat))
        if is_kept:
            choice[v] = candidate
            cost, held = cost + more, held + more_bytes
            least_bytes = min(held, least_bytes)
            if held <= limit and (best is None or cost < best[0]):
                best = cost, tuple(choice)
        if progress is not None and step % 1024 == 0:
            progress(step / count)
    if best is None:
        raise nothing_fits("anneal", least_bytes, limit, is_proven=False)
    if progress is not None:
        progress(1.0)
    return Solution.of(problem, best[1], problem.least, "annealing")


def _change(problem: Problem, v: int, candidate: int, choice: Sequence[int]) -> int:
    """Return how much more a choice costs with another candidate of one node."""
    old, costs = choice[v], problem.nodes[v]
    more = int(costs[candidate]) - int(costs[old])
    for u, table in problem.links[v]:
        more += int(table[candidate, choice[u]]) - int(table[old, choice[u]])
    return more
