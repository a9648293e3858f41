"""The default solver: variable elimination, exact where its tables fit, with a bound where they do not."""

from __future__ import annotations

from simparallel.search.frontier import TooManyRows, within_limit
from simparallel.search.local import improve
from simparallel.search.multiplier import relax
from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate
from simparallel.search.tables import BoundedChoice, Progress, minimise

MAX_ENTRIES = 50_000_000


def eliminate(
    problem: Problem,
    *,
    memory_limit_bytes: int | None = None,
    max_entries: int = MAX_ENTRIES,
    progress: Progress = None,
) -> Solution:
    """Return the optimum, or the best choice found and a bound if tables would be larger than `max_entries`.

    With a limit of memory, in this order: the optimum without it, if that fits; the Lagrange multiplier of memory,
    which gives a choice that fits and a bound; lists of all costs and memory that could still lie between the two.
    `method` names the last of these that was needed.

    Args:
        problem: what to choose.
        memory_limit_bytes: no choice may hold more; None for no limit.
        max_entries: most entries of a table, 8 bytes each; lists have at most an eighth as many rows.
        progress: called with the share that is done, 0 to 1.

    Raises:
        SearchError: no choice fits into the limit, or none was found. Facts: `least_bytes`, `limit_bytes`.

    Cost: for each node its candidates times those of the neighbours that its table joins, about 1 ns each: S**2 on
        chains and trees, S**3 with skips. With a limit that the optimum exceeds, about ten times as much.
    """
    is_limited = memory_limit_bytes is not None
    free = minimise(problem, max_entries, _part(progress, 0.0, 0.2 if is_limited else 1.0))
    choice = free.choice if free.is_exact else _repaired(problem, free)
    method = "elimination" if free.is_exact else "elimination with mini-buckets"
    solution = Solution.of(problem, choice, free.bound, method)
    if memory_limit_bytes is None or solution.memory_bytes <= memory_limit_bytes:
        return _done(solution, progress)
    relaxed = relax(problem, memory_limit_bytes, solution, max_entries, _part(progress, 0.2, 0.8))
    if not relaxed.solution.is_exact:
        try:
            return _done(within_limit(problem, memory_limit_bytes, relaxed, max_entries), progress)
        except TooManyRows:
            pass
    return _done(relaxed.solution, progress)


def _repaired(problem: Problem, found: BoundedChoice) -> tuple[int, ...]:
    """Return the better of the choices of the tables and of propagation, each after coordinate descent."""
    starts = (found.choice, propagate(problem, {}).choice)
    return min((improve(problem, start) for start in starts), key=problem.cost)


def _part(progress: Progress, first: float, last: float) -> Progress:
    return None if progress is None else lambda done: progress(first + done * (last - first))


def _done(solution: Solution, progress: Progress) -> Solution:
    if progress is not None:
        progress(1.0)
    return solution
