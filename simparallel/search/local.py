"""Coordinate descent: one node at a time takes its best candidate, given the others' choice."""

from __future__ import annotations

from collections.abc import Sequence

from simparallel.search.problem import Problem


def improve(problem: Problem, choice: Sequence[int], memory_limit_bytes: int | None = None) -> tuple[int, ...]:
    """Return a choice that costs no more than this one, and that no change of one node makes cheaper.

    Args:
        problem: what to choose.
        choice: where to start.
        memory_limit_bytes: no change may exceed it, or the present memory if that is more; None for no limit.

    Cost: passes over all nodes and edges, few in practice, S_v for each.
    """
    found = [*map(int, choice)]
    used = problem.memory_bytes(found)
    is_better = True
    while is_better:
        is_better = False
        for v in range(len(problem)):
            costs = problem.costs_at(v, found)
            if memory_limit_bytes is not None:
                memory = problem.memory_problem.costs_at(v, found)
                memory += used - memory[found[v]]
                costs[memory > max(memory_limit_bytes, used)] = costs[found[v]]
            best = int(costs.argmin())
            if costs[best] < costs[found[v]]:
                if memory_limit_bytes is not None:
                    used = int(memory[best])
                found[v], is_better = best, True
    return tuple(found)
