"""The task graph of several programs: what has to end before each task can start.

A task is one action, or the actions by which the members of a group take part in one collective. Everything that delays
it is an edge: the task before it on each of its streams, and the tasks that it comes after. So the engines know nothing
of streams, ranks and groups; they look at a task once all tasks before it have ended.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from simparallel.clock.program import COLLECTIVE, RECEIVE, SEND, ProgramAction, RankProgram
from simparallel.errors import CollectiveMismatchError, DeadlockError, InputError

# Number of a program, and of an action in it.
Part = tuple[int, int]


class Stream(NamedTuple):
    """A stream of a device: number of the program, number of the device in the rank, and name."""

    program: int
    device: int
    name: Hashable


@dataclass(frozen=True)
class TaskGraph:
    """Tasks in an order in which each follows those that it waits for.

    Attributes:
        programs: the programs.
        tasks: program -> tasks of its actions, int64, shape (actions,).
        before: task -> numbers of the tasks and streams for which it waits. Number `len(graph) + i` stands for stream
            i, which may be busy at the beginning; the number after all streams is the beginning of time.
        durations: durations [ps], int64, shape (tasks,).
        first: task -> program and number of its first action.
        streams: all streams.
        last: stream -> its last task, int64, shape (streams,).
        receives: (task of a receive, its message, the receive before it on the stream, the action that issued it),
            int64, shape (receives, 4).
    """

    programs: Sequence[RankProgram]
    tasks: list[np.ndarray]
    before: list[tuple[int, ...]]
    durations: np.ndarray
    first: list[Part]
    streams: list[Stream]
    last: np.ndarray
    receives: np.ndarray

    def __len__(self) -> int:
        return len(self.before)

    def __repr__(self) -> str:
        return f"TaskGraph({len(self.programs)} programs, {len(self)} tasks)"

    def action(self, task: int) -> ProgramAction:
        """Return the first action of a task."""
        program, place = self.first[task]
        return self.programs[program].actions[place]

    @cached_property
    def after(self) -> list[list[int]]:
        """Task -> tasks that wait for it."""
        after: list[list[int]] = [[] for _ in self.before]
        for task, before in enumerate(self.before):
            for other in before:
                if other < len(after):
                    after[other].append(task)
        return after

    @cached_property
    def parties(self) -> list[list[int]]:
        """Task -> programs that take part; for a message, the receiver's too."""
        parties: list[list[int]] = [[] for _ in self.before]
        for program, tasks in enumerate(self.tasks):
            for task in tasks.tolist():
                parties[task].append(program)
        for receive, message in self.receives[:, :2].tolist():
            parties[message] += parties[receive]
        # A message may stay in a program.
        return [[*dict.fromkeys(each)] for each in parties]


@dataclass(frozen=True)
class Times:
    """Start and end of every task of a graph.

    Attributes:
        starts, ends: times [ps], int64, shape (tasks,), or (tasks, candidates).
        clocks: when each stream of the graph is free again [ps], shape (streams,) or (streams, candidates).
        loads: link -> [(time [ps], fraction of its capacity in use from then on), ...]; `events` fills it.
    """

    starts: np.ndarray
    ends: np.ndarray
    clocks: np.ndarray
    loads: dict[Hashable, list[tuple[int, float]]] = field(default_factory=dict)

    @property
    def makespan_ps(self) -> int | np.ndarray:
        """When everything has ended [ps], for each candidate."""
        ends = self.ends.max(axis=0, initial=0)
        return int(ends) if ends.ndim == 0 else ends

    @classmethod
    def of(cls, graph: TaskGraph, starts: np.ndarray, ends: np.ndarray, clocks: np.ndarray) -> Times:
        """Return the times of a graph whose streams were free at `clocks`; a receive starts with its message."""
        # Indexed by the numbers of `before`.
        everything = np.concatenate([ends, clocks, np.zeros_like(clocks, shape=(1, *clocks.shape[1:]))])
        receive, message, last, issued = graph.receives.T
        arrives = np.maximum(starts[message], np.maximum(everything[last], everything[issued]))
        starts[receive] = np.minimum(arrives, ends[receive])
        return cls(starts, ends, everything[graph.last])


def task_graph(programs: Sequence[RankProgram], groups: Mapping[Hashable, Sequence[int]]) -> TaskGraph:
    """Connect programs by their collectives and messages.

    Args:
        programs: one for each rank, or for each class of ranks (see `classes.fold`).
        groups: key of a group -> numbers of the programs of its members, for every collective's group.

    Raises:
        InputError: an action comes after a later one, a duration is not an integer of 0 or more, or `groups` lacks a
            group.
        CollectiveMismatchError: not all members call a collective, or they call different ones; a message is sent and
            not received, or received and not sent.
        DeadlockError: programs wait for each other.

    Cost: about 3 us an action.
    """
    # Actions are numbered program by program. Stream i has number num_actions + i, the beginning of time the last.
    offsets = np.cumsum([0, *map(len, programs)])
    num_actions = int(offsets[-1])
    streams: dict[tuple[int, int, Hashable], int] = {}
    stream_of: list[int] = []
    durations: list[int] = []
    sources, targets = [], []
    # (kind, group, seq) -> actions.
    calls: dict[tuple[str, Hashable, Hashable], list[int]] = {}
    for number, program in enumerate(programs):
        if not len(program):
            continue
        names, times, after, _, own_calls, devices = zip(*program.actions, strict=True)
        durations += times
        for name, device in zip(names, devices, strict=True):
            key = number, device, name
            stream_of.append(-1 if name is None else streams.setdefault(key, len(streams)))
        places = np.repeat(np.arange(len(after)), [len(each) for each in after])
        earlier = np.array([*chain.from_iterable(after)], np.int64)
        for place in places[(earlier < 0) | (earlier >= places)].tolist():
            raise InputError(
                f"{_text(programs, number, place)} comes after {after[place]}; an action comes after earlier actions "
                "of its program only."
            )
        sources.append(earlier + offsets[number])
        targets.append(places + offsets[number])
        for action, call in enumerate(own_calls, int(offsets[number])):
            if call is not None:
                calls.setdefault(call[:3], []).append(action)

    # The program of each action, and its place there.
    parts: list[Part] = [(number, place) for number, program in enumerate(programs) for place in range(len(program))]
    for part, duration_ps in zip(parts, durations, strict=True):
        if not isinstance(duration_ps, (int, np.integer)) or duration_ps < 0:
            raise InputError(
                f"{_text(programs, *part)}: duration_ps={duration_ps!r} must be an integer of 0 or more; `picoseconds` "
                "converts seconds."
            )
    _check(programs, groups, calls, parts)

    previous, last = _queues(np.array(stream_of, np.int64), len(streams))
    origin = num_actions + len(streams)

    # The members' parts of a collective are one task. A receive waits for its message, and not for its stream.
    task_of = np.arange(num_actions)
    received = []
    for (kind, group, seq), actions in calls.items():
        if kind == COLLECTIVE:
            task_of[actions] = actions[0]
        elif kind == RECEIVE:
            number, place = parts[actions[0]]
            after = programs[number].actions[place].after
            issued = int(offsets[number]) + after[0] if after else origin
            received.append((actions[0], calls[SEND, group, seq][0], int(previous[actions[0]]), issued))
    receives = np.array(received, np.int64).reshape(-1, 4)
    queued = np.delete(np.arange(num_actions), receives[:, 0])
    source = np.concatenate([*sources, previous[queued], receives[:, 1]])
    target = np.concatenate([*targets, queued, receives[:, 0]])

    # From actions to tasks, in the order of their first actions, and then in an order in which they can run.
    firsts, task_of = np.unique(task_of, return_inverse=True)
    num_tasks = len(firsts)
    task_of = np.concatenate([task_of, np.arange(num_tasks, num_tasks + len(streams) + 1)])
    order = _order(num_tasks, task_of[source], task_of[target])
    first = [parts[action] for action in firsts.tolist()]
    if len(order) < num_tasks:
        raise _deadlock(programs, first, task_of[source], task_of[target], order)
    position = np.arange(num_tasks + len(streams) + 1)
    position[order] = np.arange(num_tasks)
    task_of = position[task_of]
    return TaskGraph(
        programs,
        [task_of[start:stop] for start, stop in pairwise(offsets)],
        _by_key(task_of[target], task_of[source], num_tasks),
        np.array(durations, np.int64)[firsts[order]],
        [first[task] for task in order],
        [Stream(*key) for key in streams],
        task_of[last],
        task_of[receives],
    )


def _queues(stream_of: np.ndarray, num_streams: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the predecessor of each action on its stream, numbered as in `task_graph`, and each stream's last action.

    Args:
        stream_of: stream of each action; -1 for none.
        num_streams: number of streams.
    """
    order = np.argsort(stream_of, kind="stable")
    streams = stream_of[order]
    previous = np.empty_like(order)
    previous[order[1:]] = order[:-1]
    is_first = np.diff(streams, prepend=-2) != 0
    previous[order[is_first]] = len(order) + streams[is_first]
    previous[stream_of < 0] = len(order) + num_streams
    return previous, order[(np.diff(streams, append=-2) != 0) & (streams >= 0)]


def _by_key(keys: np.ndarray, values: np.ndarray, count: int) -> list[tuple[int, ...]]:
    """Return key -> its values, for keys 0 … count - 1."""
    flat = tuple(values[np.argsort(keys, kind="stable")].tolist())
    ends = np.cumsum(np.bincount(keys, minlength=count)).tolist()
    return [flat[start:stop] for start, stop in zip([0, *ends[:-1]], ends, strict=True)] if count else []


def _order(num_tasks: int, source: np.ndarray, target: np.ndarray) -> list[int]:
    """Return the tasks in topological order (Kahn 1962), without those on or after a cycle."""
    is_task = source < num_tasks
    after = _by_key(source[is_task], target[is_task], num_tasks)
    missing = np.bincount(target[is_task], minlength=num_tasks).tolist()
    order = [task for task, count in enumerate(missing) if count == 0]
    for task in order:
        for other in after[task]:
            missing[other] -= 1
            if missing[other] == 0:
                order.append(other)
    return order


# --- errors -----------------------------------------------------------------------------------------


def _check(
    programs: Sequence[RankProgram],
    groups: Mapping[Hashable, Sequence[int]],
    calls: Mapping[tuple[str, Hashable, Hashable], list[int]],
    parts: Sequence[Part],
) -> None:
    """Check that every collective has all members of its group, and every message one sender and one receiver."""
    members = {group: sorted(numbers) for group, numbers in groups.items()}
    for (kind, group, seq), actions in calls.items():
        others = calls.get((SEND if kind == RECEIVE else RECEIVE, group, seq), [])
        if kind != COLLECTIVE and len(actions) == len(others) == 1:
            continue
        if kind == COLLECTIVE and group not in members:
            raise InputError(f"{_text(programs, *parts[actions[0]])}: `groups` has no members of {group!r}.")
        made = [parts[action] for action in (actions if kind == COLLECTIVE else actions + others)]
        # Different calls, each with the first program that makes it.
        different: dict[Hashable, Part] = {}
        for number, place in made:
            action = programs[number].actions[place]
            different.setdefault((action.duration_ps, action.key, action.call), (number, place))
        callers = [number for number, _ in made]
        if kind == COLLECTIVE and callers == members[group] and len(different) == 1:
            continue
        shown = [_text(programs, *part) for part in different.values()][:4]
        rule = "A message has one sender and one receiver."
        if kind == COLLECTIVE:
            wrong = {
                "missing": [number for number in members[group] if number not in callers],
                "not a member": [number for number in callers if number not in members[group]],
                "more than once": [number for number in members[group] if callers.count(number) > 1],
            }
            shown += [
                f"{what}: {', '.join(_name(programs, n) for n in found[:4])}" for what, found in wrong.items() if found
            ]
            rule = "All members of a group make the same calls, once each, in the same order."
        raise CollectiveMismatchError(
            f"{kind} {seq} of {group!r} does not match. {'; '.join(shown)}. {rule}",
            group=str(group),
            seq=seq,
            calls={number: _text(programs, number, place) for number, place in made},
        )


def _deadlock(
    programs: Sequence[RankProgram], first: Sequence[Part], source: np.ndarray, target: np.ndarray, order: list[int]
) -> DeadlockError:
    """Build the error for tasks that wait for each other; `order` has those that do not."""
    done = set(order)
    before = _by_key(target, source, len(first))
    task = next(task for task in range(len(first)) if task not in done)
    path: list[int] = []
    # Each task left has one before it that is left, so the path comes back to a task.
    while task not in path:
        path.append(task)
        task = next(other for other in before[task] if other < len(first) and other not in done)
    circle = path[path.index(task) :]
    texts = [_text(programs, *first[task]) for task in circle[:6]]
    texts += [f"… ({len(circle)} actions in all)"] * (len(circle) > 6)
    return DeadlockError(
        f"The programs wait for each other: {', which waits for '.join([*texts, texts[0]])}. Issue calls in the same "
        "order on every rank, and send before you wait for the answer.",
        waiting={first[task][0]: _text(programs, *first[task]) for task in circle},
    )


def _name(programs: Sequence[RankProgram], number: int) -> str:
    return programs[number].name or f"program {number}"


def _text(programs: Sequence[RankProgram], number: int, place: int) -> str:
    """Describe an action: its program, its number, and its work."""
    action = programs[number].actions[place]
    call, what = action.call, "" if action.key is None else str(action.key)
    if call is None:
        what = what or ("wait" if action.after and not action.duration_ps else str(action.stream))
    else:
        what = f"{what or call.kind} {call.seq} of {call.group!r}"
        what += f", {call.size_bytes} bytes, {action.duration_ps} ps" if call.kind != RECEIVE else ""
    return f"{_name(programs, number)}, action {place} ({what})"
