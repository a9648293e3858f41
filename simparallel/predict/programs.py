"""Recorders of dry runs: the work of a rank at its device's peak; and its program, which the solver can time again."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.op import Context, Op
from simparallel.backend import Array, has_data, is_array
from simparallel.clock.critical_path import critical_path
from simparallel.clock.event import COMPUTE, Event
from simparallel.clock.launcher import Launcher
from simparallel.clock.memory import ACTIVATIONS, BUFFERS, GATHERED, MemoryAccount, owner_of
from simparallel.clock.program import COLLECTIVE, LAUNCHER, RECEIVE, SEND, Communication, RankProgram
from simparallel.clock.recorder import Recorder, WorkPrice
from simparallel.clock.shared_links import Interference
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph, Times
from simparallel.machine.cluster import PS_PER_S, ClusterSpec


class _KeptBytes:
    """Bytes that a kernel keeps for backward, counted as an array is."""

    base = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class EagerAccount(MemoryAccount):
    """The memory of a device whose kernels are those of today's frameworks.

    There an activation is freed after the first operation that reads it, unless a backward needs it, or another
    operation reads it later.

    Args:
        who: the device, for messages.
        cluster: the described hardware; its type says how large arrays are there.
    """

    def __init__(self, who: str, cluster: ClusterSpec) -> None:
        super().__init__(None, who)
        self._cluster = cluster

    def note(self, op: Op, ctx: Context, inputs: Sequence[Array], y: Array) -> None:
        """Count the result of an op, and what it keeps."""
        arrays = [x for x in ctx.__dict__.values() if is_array(x)]
        given, extra_bytes = {id(owner_of(x)) for x in inputs}, 0
        kept, keeps = arrays, op.eager_keeps(op.in_dtype(ctx.plan, self._cluster.dtype))
        if keeps is not None:
            numbers, extra_bytes = keeps
            kept = [inputs[i] for i in numbers]
        if True not in ctx.needs:
            kept, extra_bytes = [], 0
        self.keep(ctx, kept, extra_bytes)
        if is_array(y):
            self.hold(y, ACTIVATIONS)
        # The memory of a view is that of its input.
        for key in given - {id(owner_of(y))}:
            self._free(key)

    def keep(self, owner: Any, arrays: Iterable[Array], extra_bytes: int = 0) -> None:
        """Count arrays and bytes until `owner` is freed, also if what runs here frees the arrays before."""
        for array in arrays:
            key = id(owner_of(array))
            if has_data(array) and key not in self._held:
                continue  # a batch
            self.hold(array, ACTIVATIONS)
            held = self._held[key]
            if held.category == GATHERED:
                continue  # freed by who has gathered it, and gathered again
            held.num_keepers += 1
            weakref.finalize(owner, self._end, held).atexit = False
        if extra_bytes:
            owner.kept = _KeptBytes(extra_bytes)
            self.hold(owner.kept, ACTIVATIONS)

    def size_of(self, array: Any) -> int:
        # Memory that a kernel keeps has no dtype.
        dtype = getattr(array, "dtype", None)
        return array.nbytes if dtype is None else array.size * self._cluster.itemsize(dtype)

    def _release(self, held: Any) -> None:
        # The garbage collector may report an array that was released just before.
        if not self._has(held):
            return
        super()._release(held)
        if held.num_keepers:
            # Another array may get the id, but the bytes count on.
            self.live[held.category] += held.size_bytes
            self.total += held.size_bytes

    def _has(self, held: Any) -> bool:
        return self._held.get(held.key) is held

    def _end(self, held: Any) -> None:
        held.num_keepers -= 1
        if self._has(held):
            self._free(held.key)
        elif not held.num_keepers:
            self.live[held.category] -= held.size_bytes
            self.total -= held.size_bytes

    def _free(self, key: int) -> None:
        held = self._held.get(key)
        if held is not None and held.category == ACTIVATIONS and not held.num_keepers:
            self._release(held)


class TwoAccounts(MemoryAccount):
    """The memory of this package's kernels, and beside it that of a device's software.

    Attributes:
        described: the second account.
        is_shared: whether what is held now is held in both.
    """

    is_shared = True

    def __init__(self, limit_bytes: int | None, who: str, cluster: ClusterSpec) -> None:
        super().__init__(limit_bytes, who)
        self.described = EagerAccount(who, cluster)

    def hold(self, array: Any, category: str, **settings: Any) -> None:
        super().hold(array, category, **settings)
        if self.is_shared:
            self.described.hold(array, category, **settings)

    def hold_scratch(self, array: Any) -> None:
        super().hold(array, BUFFERS)

    def keep(self, owner: Any, arrays: Iterable[Array]) -> None:
        self.described.keep(owner, arrays)


class WorkRecorder(Recorder):
    """A recorder that also sums the time that the flops of the work take at the peak for their own dtypes.

    Beside the memory of what runs here it counts that of the described software, see `Op.eager_keeps`.

    Attributes:
        at_peak_ps: (number of the device, whether the model needs the work) -> time [ps]; the model needs neither
            recomputed work nor the optimizer's.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.at_peak_ps: Counter[tuple[int, bool]] = Counter()
        if self.cluster.device.software != "plain":
            self.memory = TwoAccounts(self.memory.limit_bytes, self.memory.who, self.cluster)

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: WorkPrice, layer: str = ""
    ) -> None:
        start_ps = self.clock_ps[COMPUTE]
        super().compute(name, kind, wall_start_ns, wall_end_ns, price, layer)
        # Measured operations may be faster than the described peak.
        at_peak_ps = min(price.at_peak_ps, self.clock_ps[COMPUTE] - start_ps)
        self.at_peak_ps[self._number, kind != "optimizer" and not grad_mode.recomputing] += at_peak_ps

    @property
    def software_peak_bytes(self) -> int:
        """The peak of the memory that the kernels of the device's software take, see `DeviceSpec`."""
        return self.memory.described.peak if isinstance(self.memory, TwoAccounts) else self.memory.peak

    def end_forward(self, op: Op, ctx: Context, inputs: Sequence[Array], y: Array, start_ns: int) -> None:
        memory = self.memory
        if isinstance(memory, TwoAccounts):
            memory.described.note(op, ctx, inputs, y)
            memory.is_shared = False
            super().end_forward(op, ctx, inputs, y, start_ns)
            memory.is_shared = True
        else:
            super().end_forward(op, ctx, inputs, y, start_ns)


class NotedTime(int):
    """A time [ps], with the action of a program that ends at it.

    Attributes:
        action: number of the action.
    """

    action: int

    def __new__(cls, time_ps: int, action: int = -1) -> NotedTime:
        noted = super().__new__(cls, time_ps)
        noted.action = action
        return noted


class NotingLauncher(Launcher):
    """A launcher that notes what it starts and waits for, as a stream of a rank's program.

    Args:
        now_ps, turns: as for `Launcher`.
        program: the program of the rank.
        device: number of a device, whose stream is used.
    """

    launched_ps: NotedTime

    def __init__(self, now_ps: int, turns: int, program: RankProgram, device: int) -> None:
        super().__init__(now_ps, turns)
        self._program, self._device = program, device
        self.wait(now_ps)

    def moment(self) -> NotedTime:
        return NotedTime(self.now_ps, self._program.last(LAUNCHER, self._device))

    def spend(self, duration_ps: int) -> None:
        super().spend(duration_ps)
        self._program.add(LAUNCHER, duration_ps, device=self._device)

    def wait(self, until_ps: Any) -> None:
        super().wait(until_ps)
        self._program.add(LAUNCHER, 0, (until_ps.action,), device=self._device)


class ProgramRecorder(WorkRecorder):
    """A recorder that also notes the program of its rank: what is issued when, and what the program waits for.

    Its times are `NotedTime`s, so a wait for one of them knows the action that it waits for.

    Attributes:
        program: the actions of the rank.
        places: number of an event among all events of the rank -> its action.
    """

    launcher: NotingLauncher | None

    def __init__(self, rank: int, *args: Any, **settings: Any) -> None:
        self.program = RankProgram()
        self.places: dict[int, int] = {}
        super().__init__(rank, *args, **settings)

    def new_launcher(self, now_ps: int, turns: int = 1) -> NotingLauncher:
        return NotingLauncher(now_ps, turns, self.program, self._number)

    def latest(self, *moments: Any) -> NotedTime:
        return NotedTime(max(moments), self.program.add(None, 0, tuple([time.action for time in moments])))

    def moment(self, stream: str = COMPUTE) -> NotedTime:
        return NotedTime(super().moment(stream), self.program.last(stream, self._number))

    def compute(self, name: str, *how: Any) -> None:
        with self.program.lock:
            after: tuple[int, ...] = ()
            free_ps = self.clock_ps[COMPUTE]
            super().compute(name, *how)
            if self.launcher is not None:
                free_ps, after = max(free_ps, self.launcher.launched_ps), (self.launcher.launched_ps.action,)
            self._note(COMPUTE, self.clock_ps[COMPUTE] - free_ps, after)

    def communicate(self, name: str, kind: str, stream: str, *how: Any, after: Any = ()) -> NotedTime:
        _, _, start_ps, end_ps, _, _, group, seq, *_ = how
        call, duration_ps, cluster = None, end_ps - start_ps, self.cluster
        if kind == "collective":
            latency_ps = min(cluster.collective(name, 0, group).time_ps, duration_ps)
            size_bytes = _flow(cluster.links_of(group), duration_ps - latency_ps)
            call = Communication(COLLECTIVE, (stream, group), seq, size_bytes, latency_ps)
        elif name == "send":
            latency_ps = min(cluster.message(0, *group).time_ps, duration_ps)
            size_bytes = _flow(cluster.links_of(group, one_way=True), duration_ps - latency_ps)
            call = Communication(SEND, group, seq, size_bytes, latency_ps)
        elif name == "recv":
            call, duration_ps = Communication(RECEIVE, group, seq), 0
        with self.program.lock:
            super().communicate(name, kind, stream, *how)
            actions = tuple([time.action for time in after])
            return NotedTime(end_ps, self._note(stream, duration_ps, actions, call))

    def reply(self, op: str, at_ps: Any, channel: tuple[int, int], seq: int) -> NotedTime:
        kind, after = (SEND, (at_ps.action,)) if op == "send" else (RECEIVE, ())
        return NotedTime(at_ps, self.program.add(None, 0, after, Communication(kind, channel, seq)))

    def join(self, until_ps: Any, busy_ps: int = 0) -> None:
        super().join(until_ps, busy_ps)
        # Messages without a price end at 0, where everything begins.
        after = [until_ps.action] if until_ps else []
        if busy_ps and self.cluster.sharing is not None:
            # The compute stream has nothing else to do, but it does not compute.
            after.append(self.program.add(None, busy_ps, (self.moment().action,)))
        self.program.wait(*after, device=self._number)

    def _note(self, stream: str, duration_ps: int, after: tuple[int, ...], call: Communication | None = None) -> int:
        """Add the action of the newest event."""
        number = self.program.add(stream, duration_ps, after, call, self._number)
        self.places[len(self._recording.rows) - 1] = number
        return number


def _flow(links: Sequence[Any], duration_ps: int) -> int:
    """Return the bytes for which the narrowest of these links is busy for this time [ps]."""
    if not links or not duration_ps:
        return 0
    return int(min(link.capacity_bytes_per_s / link.share for link in links) * duration_ps / PS_PER_S)


def graph_of(recorders: Sequence[ProgramRecorder]) -> ProgramGraph:
    """Return the task graph of all ranks."""
    return ProgramGraph([recorder.program for recorder in recorders])


def contended(
    recorders: Sequence[ProgramRecorder], cluster: ClusterSpec, interference: Interference
) -> dict[int, list[Event]]:
    """Time all ranks again, with links that groups share; return rank -> events."""
    graph = graph_of(recorders)
    links = {
        call.group: {link.name: (link.capacity_bytes_per_s, link.share) for link in _links(cluster, call)}
        for recorder in recorders
        for call in (action.call for action in recorder.program.actions)
        if call is not None and call.size_bytes
    }
    return retimed(recorders, graph, solve(graph, links=links, interference=interference))


def _links(cluster: ClusterSpec, call: Communication) -> Sequence[Any]:
    if call.kind == SEND:
        return cluster.links_of(call.group, one_way=True)  # type: ignore[arg-type]
    return cluster.links_of(call.group[1])  # type: ignore[index]


def retimed(recorders: Sequence[ProgramRecorder], graph: ProgramGraph, times: Times) -> dict[int, list[Event]]:
    """Return rank -> its events at these times; marks of the program are left out."""
    found, starts, ends = {}, graph.shown(times), times.ends
    for recorder, tasks in zip(recorders, graph.tasks, strict=True):
        of_row = {row: tasks[number] for row, number in recorder.places.items()}
        found[recorder.rank] = [
            event._replace(sim_start_ps=starts[of_row[row]], sim_end_ps=ends[of_row[row]])
            for row, event in enumerate(recorder.events)
            if row in of_row
        ]
    return found


def critical_events(recorders: Sequence[ProgramRecorder]) -> list[Event]:
    """Return the events that the makespan consists of, in order: each waited for the one before it.

    What has no event of its own gets one: the launches of an interpreter, and the time that a communication keeps a
    core busy.
    """
    graph = graph_of(recorders)
    times = solve(graph)
    # Task -> its event, of a collective that of the lowest rank.
    shown: dict[int, Event] = {}
    for recorder, tasks in zip(recorders, graph.tasks, strict=True):
        events = recorder.events
        for row, number in recorder.places.items():
            shown.setdefault(tasks[number], events[row])
    # The last event: an interpreter may go on after it.
    last = max(shown, key=lambda task: (times.ends[task], -task), default=None)
    timed: list[Event] = []
    for task, (action, start_ps, end_ps) in enumerate(zip(graph.actions, times.starts, times.ends, strict=True)):
        rank, name = recorders[min(graph.parties[task])].rank, "launch" if action.stream == LAUNCHER else "busy core"
        event = Event(
            rank, str(action.stream or COMPUTE), name, name, 0, 0, 0, start_ps, end_ps, 0, 0, 0, (), -1, action.device
        )
        timed.append(event)
        # Waits are tasks, too, and take no time.
        if end_ps > start_ps:
            shown.setdefault(task, event)
    return [shown[task] for task in critical_path(timed, graph.before, last) if task in shown]
