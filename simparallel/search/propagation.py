"""Propagation: the candidates of configured nodes spread to their neighbours, greedily."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import numpy as np

from simparallel.search.problem import Problem, Solution


def propagate(problem: Problem, fixed: Mapping[int, int]) -> Solution:
    """Return the choice that fixed nodes lead to, breadth first, as MindSpore's "sharding_propagation" does.

    A node that is reached takes the candidate with the least cost of its edges to decided nodes; ties go to the least
    cost of its own, then to the first. A part of the graph that no fixed node reaches starts at the node whose cheapest
    candidate costs most, with this candidate.

    Args:
        problem: what to choose.
        fixed: node -> its candidate.

    Cost: S_v for each node and edge. The choice may be far from the optimum: the bound is `Problem.least`.
    """
    chosen = dict(fixed)
    # From the costliest node on: one start in each connected component that is still undecided.
    starts = sorted(range(len(problem)), key=lambda v: (-int(problem.nodes[v].min()), v))
    for start in (None, *starts):
        if start in chosen:
            continue
        if start is not None:
            chosen[start] = int(problem.nodes[start].argmin())
        queue = deque(chosen if start is None else [start])
        while queue:
            for v, _ in problem.links[queue.popleft()]:
                if v not in chosen:
                    ends = np.zeros_like(problem.nodes[v])
                    for u, table in problem.links[v]:
                        if u in chosen:
                            ends += table[:, chosen[u]]
                    chosen[v] = int(np.lexsort((problem.nodes[v], ends))[0])
                    queue.append(v)
    return Solution.of(problem, (chosen[v] for v in range(len(problem))), problem.least, "propagation")
