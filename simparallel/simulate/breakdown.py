"""Where the time goes: the breakdown of a device's time, and the critical path."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from simparallel.hardware.recorder import COMPUTE, COPY_IN
from simparallel.simulate.task_graph import TaskGraph, Times


class Breakdown(NamedTuple):
    """The time of one device [ps]. Its first four parts add up to the makespan.

    Attributes:
        compute_ps: it computes.
        exposed_ps: it communicates and does not compute.
        bubble_ps: it does neither, before the end of its last action: it waits for others.
        idle_ps: it has ended.
        overlap_ps: it computes and communicates; a part of `compute_ps`.
    """

    compute_ps: int
    exposed_ps: int
    bubble_ps: int
    idle_ps: int
    overlap_ps: int


def breakdown(graph: TaskGraph, times: Times, program: int, device: int = 0) -> Breakdown:
    """Return how a device spends the time from 0 to the makespan.

    Args:
        graph: the tasks.
        times: their times, for one candidate.
        program: number of the program.
        device: number of the device in the rank.
    """
    actions, tasks = graph.programs[program].actions, graph.tasks[program].tolist()
    own: dict[bool, list[int]] = {True: [], False: []}
    for action, task in zip(actions, tasks, strict=True):
        if action.device == device:
            # An incoming copy leaves a mark here, which stands for the copy itself, an action of the other device.
            is_mark = action.stream == COPY_IN and action.after
            own[action.stream == COMPUTE].append(tasks[action.after[0]] if is_mark else task)
    computing, communicating, both = (
        _covered(times.starts[found], times.ends[found]) for found in (own[True], own[False], own[True] + own[False])
    )
    end = int(times.ends[own[True] + own[False]].max(initial=0))
    return Breakdown(
        computing, both - computing, end - both, int(times.makespan_ps) - end, computing + communicating - both
    )


def _covered(starts: np.ndarray, ends: np.ndarray) -> int:
    """Return the length of the union of intervals."""
    order = np.argsort(starts)
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    # The part of each interval beyond the ends of all before it.
    return int((reached - np.maximum(starts, np.append(0, reached[:-1]))).clip(0).sum()) if len(order) else 0


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
