"""The critical path: the tasks that the makespan consists of."""

from __future__ import annotations

import numpy as np

from simparallel.clock.task_graph import TaskGraph, Times


def critical_path(graph: TaskGraph, times: Times) -> list[int]:
    """Return the tasks that the makespan consists of, in order: each could start when the one before it ended.

    Shortening any other task does not shorten the makespan.

    Args:
        graph: the tasks.
        times: their times, for one candidate.
    """
    ready = times.starts.copy()
    # A receive is shown from the start of its message, but takes no time of its own.
    ready[graph.receives[:, 0]] = times.ends[graph.receives[:, 0]]
    path: list[int] = []
    before = [int(np.argmax(times.ends))] if len(graph) else []
    while before:
        path.append(before[-1])
        before = [
            other for other in graph.before[path[-1]] if other < len(graph) and times.ends[other] == ready[path[-1]]
        ]
    return path[::-1]
