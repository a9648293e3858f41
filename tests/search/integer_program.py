"""The problem as an integer program, for HiGHS: a second opinion by another method."""

from __future__ import annotations

from math import ceil, inf
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from simparallel.search.local import improve
from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate
from simparallel.search.refusal import nothing_fits

_LARGEST = 1000  # scaled coefficient: HiGHS takes differences of a millionth for zero, and large coefficients strain it
_ERROR = 1e-6


class _Found(NamedTuple):
    choice: tuple[int, ...] | None
    bound: float
    is_optimal: bool


def solve_milp(problem: Problem, *, memory_limit_bytes: int | None = None, time_limit_s: float = 60.0) -> Solution:
    """Return the best choice that HiGHS finds, with its bound.

    Each candidate of a node has a binary variable, and one per node is 1. Each pair of candidates of an edge has a
    variable in [0, 1]; the rows and columns of an edge add up to the variables of its nodes' candidates (the local
    polytope, as in Alpa, arXiv 2201.12023).

    HiGHS computes with floats, so its bound is lowered by a millionth of it and of the largest cost. This still
    proves optima of small integers; with larger ones a `gap` of this size remains, and only `method` says "optimal".

    Args:
        problem: what to choose.
        memory_limit_bytes: no choice may hold more; None for no limit.
        time_limit_s: after this time, the best choice so far.

    Raises:
        SearchError: no choice fits, or none was found. Facts: `least_bytes`, `limit_bytes`.

    Cost: S_u * S_v variables for each edge; exponential time at worst.
    """
    found = _solved(problem, memory_limit_bytes, time_limit_s)
    choice = found.choice
    if choice is not None and memory_limit_bytes is not None:
        over = problem.memory_bytes(choice) - memory_limit_bytes
        if over > 0:  # by a rounding error
            choice = _solved(problem, memory_limit_bytes - 2 * over, time_limit_s).choice
            if choice is not None and problem.memory_bytes(choice) > memory_limit_bytes:
                choice = None
    if choice is None and memory_limit_bytes is None:
        choice = improve(problem, propagate(problem, {}).choice)
    elif choice is None:
        assert memory_limit_bytes is not None
        least = solve_milp(problem.memory_problem, time_limit_s=time_limit_s)
        if least.cost > memory_limit_bytes:
            raise nothing_fits("solve_milp", least.cost, memory_limit_bytes, least.bound > memory_limit_bytes)
        choice = improve(problem, least.choice, memory_limit_bytes)
    largest = max((int(table.max()) for table in (*problem.nodes, *problem.edges.values())), default=0)
    lowered = ceil(found.bound - _ERROR * (found.bound + largest)) if found.bound < inf else 0
    bound = min(max(lowered, problem.least), problem.cost(choice))
    return Solution.of(problem, choice, bound, f"integer program, {'optimal' if found.is_optimal else 'stopped'}")


def _solved(problem: Problem, memory_limit_bytes: int | None, time_limit_s: float) -> _Found:
    """Return the choice that HiGHS finds, and its bound [ps]."""
    if not len(problem):
        return _Found((), 0.0, True)
    firsts = np.cumsum([0, *map(len, problem.nodes)])
    memory = problem.memory_problem
    costs, held = ([*of.nodes] for of in (problem, memory))
    # Equations: one for the candidates of each node; then for each edge one for each row and column of its pairs.
    rows, columns = [np.arange(len(problem)).repeat(np.diff(firsts))], [np.arange(firsts[-1])]
    values, sums = [np.ones(firsts[-1])], [np.ones(len(problem))]
    row, column = len(problem), int(firsts[-1])
    for u, v in sorted({*problem.edges, *memory.edges}):
        shape = len(problem.nodes[u]), len(problem.nodes[v])
        blank = np.zeros(shape, np.int64)
        for parts, of in ((costs, problem), (held, memory)):
            parts.append(of.edges.get((u, v), blank).ravel())
        pairs = column + np.arange(blank.size)
        for node, axis in ((u, 0), (v, 1)):
            size = shape[axis]
            rows += [row + np.indices(shape)[axis].ravel(), row + np.arange(size)]
            columns += [pairs, firsts[node] + np.arange(size)]
            values += [np.ones(blank.size), -np.ones(size)]
            sums.append(np.zeros(size))
            row += size
        column += blank.size
    at = tuple(np.concatenate(of).astype(np.int32) for of in (rows, columns))  # SciPy 1.13 takes no int64
    equal = np.concatenate(sums)
    constraints: list[Any] = [LinearConstraint(coo_array((np.concatenate(values), at)).tocsr(), equal, equal)]
    cost, bytes_ = np.concatenate(costs), np.concatenate(held)
    scale, unit = (max(1.0, float(x.max()) / _LARGEST) for x in (cost, bytes_))
    if memory_limit_bytes is not None:
        constraints.append(LinearConstraint(bytes_[None] / unit, -np.inf, memory_limit_bytes / unit))
    found = milp(
        cost / scale,
        integrality=(np.arange(column) < firsts[-1]).astype(int),
        bounds=Bounds(0, 1),
        constraints=constraints,
        options={"time_limit": float(time_limit_s), "mip_rel_gap": 0.0},
    )
    choice = None
    if found.x is not None:
        choice = tuple(int(found.x[a:b].argmax()) for a, b in zip(firsts, firsts[1:], strict=False))
    bound = found.mip_dual_bound
    return _Found(choice, inf if bound is None or not np.isfinite(bound) else bound * scale, bool(found.success))
