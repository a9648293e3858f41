"""Attribution of a schedule's time: the reasons why ranks are idle, and the chain of cells that sets the makespan."""

from __future__ import annotations

from operator import itemgetter
from typing import NamedTuple

from simparallel.clock.critical_path import critical_path
from simparallel.clock.event import COMPUTE, Event
from simparallel.parallel.pipeline.action import FORWARD, Action, Cell, cell_text
from simparallel.parallel.pipeline.timing import ScheduleGraph, Span


class Bubble(NamedTuple):
    """The idle time of a rank by its reason, in the units of the given times.

    Attributes:
        warmup: before the rank's first action.
        activation: waiting for the activation of the previous stage.
        gradient: waiting for the gradient of the next stage, as long as the rank's next forward lacks its input, too.
        memory: waiting for that gradient while the input of the rank's next forward is there: with one more live
            activation, the rank could run this forward now.
        barrier: after the rank's last action, until all ranks have ended.
    """

    warmup: float
    activation: float
    gradient: float
    memory: float
    barrier: float

    @property
    def total(self) -> float:
        """Return the makespan minus the rank's own work."""
        return sum(self)


class Bubbles(tuple[Bubble, ...]):
    """The bubble of each rank; as text, a table."""

    def __str__(self) -> str:
        rows = [(f"r{rank}", *(f"{time:g}" for time in (*each, each.total))) for rank, each in enumerate(self)]
        heads = ("", "warm-up", "activation", "gradient", "memory", "barrier", "bubble")
        return "\n".join(f"{first:<4}" + "".join(f"{text:>12}" for text in rest) for first, *rest in (heads, *rows))


def bubbles(graph: ScheduleGraph) -> Bubbles:
    """Return the idle time of each rank by reason; a cell waits for the last of the results that it needs.

    Errors as `graph.times`. Cost: a second pass over the cells.
    """
    makespan = max((ran[-1].end for ran in graph.spans if ran), default=0)

    def arrivals(cell: Cell) -> list[tuple[float, Action]]:
        """Return arrival time and action of each result that a cell needs."""
        return [(graph.times.ends[task], needed) for action in cell for task, needed in graph.inputs[action]]

    found = []
    for cells, ran in zip(graph.order.cells, graph.spans, strict=True):
        idle: dict[str, float] = {"activation": 0, "gradient": 0, "memory": 0}
        forward: Action | None = None  # the next one, in this cell or after it
        for number in range(len(cells) - 1, 0, -1):
            cell, free, start = cells[number], ran[number - 1].end, ran[number].start
            forward = next((action for action in cell if action.kind == FORWARD), forward)
            if start == free:
                continue
            _, last = max(arrivals(cell), key=itemgetter(0))
            if last.kind == FORWARD:
                idle["activation"] += start - free
                continue
            inputs = arrivals((forward,)) if forward else [(start, last)]
            arrived = min(start, max((free, *(time for time, _ in inputs))))
            idle["gradient"] += arrived - free
            idle["memory"] += start - arrived
        warmup, end = (ran[0].start, ran[-1].end) if ran else (0, 0)
        found.append(Bubble(warmup, **idle, barrier=makespan - end))
    return Bubbles(found)


def critical_cells(graph: ScheduleGraph) -> list[tuple[int, str, Span]]:
    """Return rank, cell and span of each cell on a longest chain, from time 0 to the makespan.

    Ties as in `clock.critical_path`: the chain stays on its rank. Errors as `graph.times`.
    """
    events = []
    for task, (start, end) in enumerate(zip(graph.times.starts, graph.times.ends, strict=True)):
        is_cell = task < len(graph.each)
        # A message counts for the rank that sends it.
        rank, _, action = graph.each[task if is_cell else graph.before[task][0]]
        stream, kind = (COMPUTE, "forward") if is_cell else ("send", "p2p")
        events.append(Event(rank, stream, str(action), kind, 0, 0, 0, start, end, 0, 0, 0, (), -1))
    path = [graph.each[task] for task in critical_path(events, graph.before) if task < len(graph.each)]
    # A pair is two tasks.
    return [
        (rank, cell_text(graph.order.cells[rank][cell]), graph.spans[rank][cell])
        for rank, cell in dict.fromkeys(each[:2] for each in path)
    ]
