"""The problem as an integer program, for HiGHS: a second opinion by another method."""

from __future__ import annotations

from math import ceil, inf
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from simparallel.search.local import improve
from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate

_LARGEST = 1000  # scaled coefficient: HiGHS takes differences of a millionth for zero, and large coefficients strain it
_ERROR = 1e-6


class _Found(NamedTuple):
    choice: tuple[int, ...] | None
    bound: float
    is_optimal: bool


def solve_milp(problem: Problem, *, time_limit_s: float = 60.0) -> Solution:
    """Return the best choice that HiGHS finds, with its bound.

    Each candidate of a node has a binary variable, and one per node is 1. Each pair of candidates of an edge has a
    variable in [0, 1]; the rows and columns of an edge add up to the variables of its nodes' candidates (the local
    polytope, as in Alpa, arXiv 2201.12023).

    HiGHS computes with floats, so its bound is lowered by a millionth of it and of the largest cost. This still
    proves optima of small integers; with larger ones a `gap` of this size remains, and only `method` says "optimal".

    Args:
        problem: what to choose.
        time_limit_s: after this time, the best choice so far.

    Cost: S_u * S_v variables for each edge; exponential time at worst.
    """
    found = _solved(problem, time_limit_s)
    choice = improve(problem, propagate(problem, {}).choice) if found.choice is None else found.choice
    largest = max((int(table.max()) for table in (*problem.nodes, *problem.edges.values())), default=0)
    lowered = ceil(found.bound - _ERROR * (found.bound + largest)) if found.bound < inf else 0
    bound = min(max(lowered, problem.least), problem.cost(choice))
    return Solution.of(problem, choice, bound, f"integer program, {'optimal' if found.is_optimal else 'stopped'}")


def _solved(problem: Problem, time_limit_s: float) -> _Found:
    """Return the choice that HiGHS finds, and its bound [ps]."""
    if not len(problem):
        return _Found((), 0.0, True)
    firsts = np.cumsum([0, *map(len, problem.nodes)])
    costs = [*problem.nodes]
    # Equations: one for the candidates of each node; then for each edge one for each row and column of its pairs.
    rows, columns = [np.arange(len(problem)).repeat(np.diff(firsts))], [np.arange(firsts[-1])]
    values, sums = [np.ones(firsts[-1])], [np.ones(len(problem))]
    row, column = len(problem), int(firsts[-1])
    for u, v in sorted(problem.edges):
        table = problem.edges[u, v]
        shape = table.shape
        costs.append(table.ravel())
        pairs = column + np.arange(table.size)
        for node, axis in ((u, 0), (v, 1)):
            size = shape[axis]
            rows += [row + np.indices(shape)[axis].ravel(), row + np.arange(size)]
            columns += [pairs, firsts[node] + np.arange(size)]
            values += [np.ones(table.size), -np.ones(size)]
            sums.append(np.zeros(size))
            row += size
        column += table.size
    at = tuple(np.concatenate(of).astype(np.int32) for of in (rows, columns))  # SciPy 1.13 takes no int64
    equal = np.concatenate(sums)
    cost = np.concatenate(costs)
    scale = max(1.0, float(cost.max()) / _LARGEST)
    found = milp(
        cost / scale,
        integrality=(np.arange(column) < firsts[-1]).astype(int),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(coo_array((np.concatenate(values), at)).tocsr(), equal, equal),
        options={"time_limit": float(time_limit_s), "mip_rel_gap": 0.0},
    )
    choice = None
    if found.x is not None:
        choice = tuple(int(found.x[a:b].argmax()) for a, b in zip(firsts, firsts[1:], strict=False))
    bound = found.mip_dual_bound
    return _Found(choice, inf if bound is None or not np.isfinite(bound) else bound * scale, bool(found.success))
