"""Recorders of dry runs: the work of a rank at its device's peak; and its program, which the engines can time anew."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from simparallel.autograd.grad_mode import grad_mode
from simparallel.clock.event import Event
from simparallel.clock.program import COLLECTIVE, RECEIVE, SEND, Communication, RankProgram
from simparallel.clock.shared_links import Interference
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph, Times
from simparallel.clock.two_clocks import TwoClockRecorder
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S, ClusterSpec, picoseconds


class WorkRecorder(TwoClockRecorder):
    """A recorder that also sums the time that the flops of the work take at the peak for their own dtypes.

    Attributes:
        at_peak_ps: (number of the device, whether the model needs the work) -> time [ps]; the model needs neither
            recomputed work nor the optimizer's.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.at_peak_ps: Counter[tuple[int, bool]] = Counter()
        # Id of a price, which is kept -> time at peak [ps].
        self._at_peak_of: dict[int, int] = {}

    def price(
        self, name: str, flops: int, size_bytes: int, itemsize: int, results: int = 0, is_product: bool = False
    ) -> tuple[int, int, int]:
        price = super().price(name, flops, size_bytes, itemsize, results, is_product)
        self._at_peak_of[id(price)] = picoseconds(flops / self.cluster.device.peak(itemsize, is_product))
        return price

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: tuple[int, int, int], layer: str = ""
    ) -> None:
        start_ps = self.now_ps
        super().compute(name, kind, wall_start_ns, wall_end_ns, price, layer)
        # Measured operations may be faster than the described peak.
        at_peak_ps = min(self._at_peak_of[id(price)], self.now_ps - start_ps)
        self.at_peak_ps[self._number, kind != "optimizer" and not grad_mode.recomputing] += at_peak_ps


class ProgramRecorder(WorkRecorder):
    """A recorder that also notes the program of its rank: what is issued when, and what the program waits for.

    Attributes:
        program: the actions of the rank.
        places: number of an event among all events of the rank -> its action.
        gap: why the program is not whole; "" if it is.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.program = RankProgram(f"rank {self.rank}")
        self.places: dict[int, int] = {}
        self.gap = ""
        # Stream -> actions after which its communications were issued, oldest first.
        self._issued: dict[str, deque[int]] = {}
        # Time -> communications that end then.
        self._ends: dict[int, list[int]] = {}

    def issue(self, stream: str) -> int:
        self._issued.setdefault(stream, deque()).append(self.program.last())
        return super().issue(stream)

    def compute(self, name: str, *how: Any) -> None:
        if self.launcher is not None:
            self.gap = "the interpreter runs beside the device" if self.has_two_clocks else "a rank has several devices"
        start_ps = self.now_ps
        super().compute(name, *how)
        self._note(self.program.compute(self.now_ps - start_ps, name))

    def communicate(self, name: str, kind: str, stream: str, *times: Any) -> None:
        super().communicate(name, kind, stream, *times)
        _, _, start_ps, end_ps, _, _, group, seq, *_ = times
        waiting = self._issued.get(stream)
        if kind == "copy" or not waiting:
            self.gap = "a rank has several devices" if kind == "copy" else "a rank received a message from any source"
            return
        after, duration_ps, cluster = (waiting.popleft(),), end_ps - start_ps, self.cluster
        if kind == "collective":
            latency_ps = min(cluster.collective(name, 0, group).time_ps, duration_ps)
            size_bytes = _flow(cluster.links_of(group), duration_ps - latency_ps)
            call = Communication(COLLECTIVE, (stream, group), seq, size_bytes, latency_ps)
        elif name == "send":
            latency_ps = min(cluster.message(0, *group).time_ps, duration_ps)
            size_bytes = _flow(cluster.links_of(group, one_way=True), duration_ps - latency_ps)
            call = Communication(SEND, group, seq, size_bytes, latency_ps)
        else:
            call, duration_ps = Communication(RECEIVE, group, seq), 0
        number = self.program.add((kind, stream), duration_ps, after, name, call)
        self._note(number)
        self._ends.setdefault(end_ps, []).append(number)

    def join(self, until_ps: int, busy_ps: int = 0) -> None:
        super().join(until_ps, busy_ps)
        if busy_ps and self.cluster.sharing is not None:
            self.gap = "ranks share the cores of their machine"
        ends = self._ends.get(until_ps)
        if ends is not None:
            self.program.wait(*ends)
        elif until_ps:
            self.gap = self.gap or "a rank waits for the reply to a message"

    def _note(self, number: int) -> None:
        self.places[len(self._recording.rows) - 1] = number


def _flow(links: Sequence[Any], duration_ps: int) -> int:
    """Return the bytes for which the narrowest of these links is busy for this time [ps]."""
    if not links or not duration_ps:
        return 0
    return int(min(link.capacity_bytes_per_s / link.share for link in links) * duration_ps / PS_PER_S)


def graph_of(recorders: Sequence[ProgramRecorder]) -> ProgramGraph:
    """Return the task graph of all ranks.

    Raises:
        InputError: a program is not whole.
    """
    for recorder in recorders:
        if recorder.gap:
            raise InputError(f"rank {recorder.rank}: {recorder.gap}, which cannot be timed anew.")
    return ProgramGraph([recorder.program for recorder in recorders])


def contended(
    recorders: Sequence[ProgramRecorder], cluster: ClusterSpec, interference: Interference
) -> dict[int, list[Event]]:
    """Time all ranks anew, with links that groups share; return rank -> events.

    Raises:
        InputError: a program is not whole.
    """
    graph = graph_of(recorders)
    links = {
        call.group: {link.name: (link.capacity_bytes_per_s, link.share) for link in _links(cluster, call)}
        for recorder in recorders
        for call in (action.call for action in recorder.program.actions)
        if call is not None and call.kind != RECEIVE
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
