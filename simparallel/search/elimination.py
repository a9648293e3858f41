"""The default solver: variable elimination, exact where its tables fit, with a bound where they do not."""

from __future__ import annotations

from simparallel.search.local import improve
from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate
from simparallel.search.tables import Progress, minimise

MAX_ENTRIES = 50_000_000


def eliminate(problem: Problem, *, max_entries: int = MAX_ENTRIES, progress: Progress = None) -> Solution:
    """Return the optimum, or the best choice found and a bound if tables would be larger than `max_entries`.

    Args:
        problem: what to choose; its memory is ignored.
        max_entries: most entries of a table, 8 bytes each.
        progress: called with the share that is done, 0 to 1.

    Cost: for each node its candidates times those of the neighbours that its table joins, about 1 ns each: S**2 on
        chains and trees, S**3 with skips.
    """
    found = minimise(problem, max_entries, progress)
    if found.is_exact:
        return Solution.of(problem, found.choice, found.bound, "elimination")
    # The better of the choices of the tables and of propagation, each after coordinate descent.
    starts = (found.choice, propagate(problem, {}).choice)
    choice = min((improve(problem, start) for start in starts), key=problem.cost)
    return Solution.of(problem, choice, found.bound, "elimination with mini-buckets")
