"""The batch form of the rule of time: a task starts once all tasks before it have ended.

That is arithmetic with (max, +) in place of (+, *), as linear as a matrix product (Baccelli et al. 1992,
"Synchronization and linearity"). Times are integers, in picoseconds, or any other numbers. As an option, transfers of
programs share links, and computing and communicating slow each other.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from simparallel.clock.shared_links import NONE, Interference, Links, SharedLinks
from simparallel.clock.task_graph import ProgramGraph, TaskGraph, Times


def solve(
    graph: TaskGraph, *, links: Mapping[Hashable, Links] | None = None, interference: Interference = NONE
) -> Times:
    """Return the times of all tasks.

    Args:
        graph: the tasks; those of programs with the options.
        links: group -> the links that its communications share with those of other groups; a link has the same capacity
            everywhere. A communication on its own takes its duration, or longer if a link cannot carry its bytes in it.
            None shares nothing.
        interference: factors for computing and communicating at once.

    Raises:
        DeadlockError: tasks wait for each other; a pipeline's schedule raises ScheduleError.
        InputError: a factor below 1.

    Cost: about 1 us a task; with the options 5 us, and 30 us more for one that meets others on a link.
    """
    if links is not None or interference != NONE:
        assert isinstance(graph, ProgramGraph)
        return SharedLinks(graph, links or {}, interference).run()
    durations, after, missing = graph.durations, graph.after, list(map(len, graph.before))
    starts = [*graph.earliest, *[0] * (len(durations) - len(graph.earliest))]
    ends = [0] * len(durations)
    # In topological order (Kahn 1962).
    order = [task for task, count in enumerate(missing) if not count]
    for task in order:
        ends[task] = end = starts[task] + durations[task]
        for other in after[task]:
            if starts[other] < end:
                starts[other] = end
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    if len(order) < len(durations):
        raise graph.deadlock(_cycle(graph.before, missing))
    return Times(starts, ends)


def _cycle(before: Sequence[Sequence[int]], missing: Sequence[int]) -> list[int]:
    """Return tasks of which each waits for the next, and the last for the first; `missing` is 0 for those that ran."""
    task = next(task for task, count in enumerate(missing) if count)
    # Task -> its place on the path. Each task left has one before it that is left, so the path comes back to a task.
    path: dict[int, int] = {}
    while task not in path:
        path[task] = len(path)
        task = next(other for other in before[task] if missing[other])
    return list(path)[path[task] :]
