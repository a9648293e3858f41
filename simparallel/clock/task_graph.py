"""Task graphs: what has to end before each task can start.

A task is one action of a program, or the actions by which the members of a group take part in one collective, or an
action of a pipeline's schedule. Everything that delays it is an edge: the task before it on its stream, and the tasks
that it comes after. So the solver knows nothing of streams, ranks and groups.

Which messages queue is decided where a graph is made: on one channel, a message comes after the message before it. Runs
have a channel for each pair of ranks and direction. A pipeline's schedule has one for each message, so that messages
are latencies.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from simparallel.clock.program import COLLECTIVE, RECEIVE, SEND, ProgramAction, RankProgram
from simparallel.errors import DeadlockError, SimParallelError


@dataclass(frozen=True)
class Times:
    """Start and end of every task of a graph.

    Attributes:
        starts, ends: task -> time, in the unit of the durations.
        loads: link -> [(time [ps], fraction of its capacity in use from then on), ...], where links are shared.
    """

    starts: list[Any]
    ends: list[Any]
    loads: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def makespan(self) -> Any:
        """When everything has ended."""
        return max(self.ends, default=0)


class TaskGraph:
    """Tasks, and what each waits for.

    Attributes:
        durations: task -> its duration.
        before: task -> tasks for which it waits.
        earliest: task -> the time before which it does not start, for the first tasks; 0 for all others.
    """

    def __init__(self) -> None:
        self.durations: list[Any] = []
        self.before: list[list[int]] = []
        self.earliest: list[Any] = []

    def add(self, duration: Any, before: list[int]) -> int:
        """Append a task; return its number."""
        self.durations.append(duration)
        self.before.append(before)
        return len(self.durations) - 1

    def __len__(self) -> int:
        return len(self.durations)

    @cached_property
    def after(self) -> list[list[int]]:
        """Task -> tasks that wait for it. Read it once all tasks are there."""
        after: list[list[int]] = [[] for _ in self.before]
        for task, before in enumerate(self.before):
            for other in before:
                after[other].append(task)
        return after

    def deadlock(self, cycle: Sequence[int]) -> SimParallelError:
        """Return the error for tasks of which each waits for the next, and the last for the first."""
        return DeadlockError(f"Tasks {', '.join(map(str, cycle))} wait for each other.")


class ProgramGraph(TaskGraph):
    """The tasks of the programs of several ranks, connected by their collectives and messages.

    Args:
        programs: one for each rank. All members of a group make its collectives, and each message is sent and received
            once, as in the run that noted the programs.

    Attributes:
        tasks: program -> tasks of its actions.
        actions: task -> its action; one of them for a collective.
        parties: task -> programs that take part; for a message, the receiver's too.

    Cost: about 2 us an action.
    """

    def __init__(self, programs: Sequence[RankProgram]) -> None:
        super().__init__()
        self.tasks: list[list[int]] = []
        self.actions: list[ProgramAction] = []
        self.parties: list[dict[int, None]] = []
        # Task of a receive -> its message, and the tasks that end before it is shown as receiving.
        self._receives: dict[int, tuple[int, list[int]]] = {}
        # (kind, group, seq) -> its task.
        calls: dict[tuple[str, Hashable, Hashable], int] = {}
        for number, program in enumerate(programs):
            self._add_program(number, program, calls)
        for (kind, group, seq), receive in calls.items():
            if kind == RECEIVE:
                message = calls[SEND, group, seq]
                self.before[receive].append(message)
                self.parties[message].update(self.parties[receive])
                self._receives[receive] = message, self._receives[receive][1]

    def _add_program(self, number: int, program: RankProgram, calls: dict[tuple[str, Hashable, Hashable], int]) -> None:
        own: list[int] = []
        # (stream, device) -> its last task.
        last: dict[tuple[Hashable, int], int] = {}
        for action in program.actions:
            stream, duration_ps, after, call, device = action
            before = [own[i] for i in after]
            queue = last.get((stream, device)) if stream is not None else None
            known = calls.get(call[:3]) if call is not None and call.kind == COLLECTIVE else None
            # A receive waits for its message, and not for its stream.
            waits = before if queue is None or (call is not None and call.kind == RECEIVE) else [*before, queue]
            if known is not None:
                # The members' parts of a collective are one task.
                task = known
                self.before[task] += waits
            else:
                task = self.add(duration_ps, waits)
                self.actions.append(action)
                self.parties.append({})
            if call is not None:
                calls[call[:3]] = task
                if call.kind == RECEIVE:
                    self._receives[task] = -1, [*before, *([] if queue is None else [queue])]
            self.parties[task][number] = None
            last[stream, device] = task
            own.append(task)
        self.tasks.append(own)

    def shown(self, times: Times) -> list[int]:
        """Return the start of each task, that of a receive as in a trace: when its message and its stream are ready."""
        starts = [*times.starts]
        for receive, (message, others) in self._receives.items():
            start = max([times.starts[message], *(times.ends[other] for other in others)])
            starts[receive] = min(start, times.ends[receive])
        return starts
