"""Attribution of a schedule's time: the reasons why ranks are idle, and the chain of cells that sets the makespan."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import NamedTuple

from simparallel.parallel.pipeline.action import FORWARD, Action, Cell, cell_text
from simparallel.parallel.pipeline.timing import PipelineOrder, Span, arrivals, spans


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


def bubbles(lists: PipelineOrder, duration: Callable[[Action], float], message: float) -> Bubbles:
    """Return the idle time of each rank by reason; a cell waits for the last of the results that it needs.

    Arguments and errors as `timing.spans`. Cost: a second pass over the cells.
    """
    each = spans(lists, duration, message)
    makespan = max((ran[-1].end for ran in each if ran), default=0)
    come = _arrivals(lists, each, message)
    found = []
    for rank, (cells, ran) in enumerate(zip(lists.cells, each, strict=True)):
        idle: dict[str, float] = {"activation": 0, "gradient": 0, "memory": 0}
        forward: Action | None = None  # the next one, in this cell or after it
        for number in range(len(cells) - 1, 0, -1):
            cell, free, start = cells[number], ran[number - 1].end, ran[number].start
            forward = next((action for action in cell if action.kind == FORWARD), forward)
            if start == free:
                continue
            _, last = max(come(cell, rank), key=itemgetter(0))
            if last.kind == FORWARD:
                idle["activation"] += start - free
                continue
            inputs = come((forward,), rank) if forward else [(start, last)]
            there = min(start, max((free, *(time for time, _ in inputs))))
            idle["gradient"] += there - free
            idle["memory"] += start - there
        warmup, end = (ran[0].start, ran[-1].end) if ran else (0, 0)
        found.append(Bubble(warmup, **idle, barrier=makespan - end))
    return Bubbles(found)


def critical_path(
    lists: PipelineOrder, duration: Callable[[Action], float], message: float
) -> list[tuple[int, str, Span]]:
    """Return rank, cell and span of each cell on a longest chain, from time 0 to the makespan.

    Each cell starts when the one before it has ended, on the same rank or `message` earlier on another one. Where both
    are possible, the chain stays on its rank. Arguments and errors as `timing.spans`.
    """
    each = spans(lists, duration, message)
    come = _arrivals(lists, each, message)
    places = {action: (r, n) for r, cells in enumerate(lists.cells) for n, cell in enumerate(cells) for action in cell}
    found: list[tuple[int, str, Span]] = []
    lasts = ((rank, len(ran) - 1) for rank, ran in enumerate(each) if ran)
    place = max(lasts, key=lambda at: each[at[0]][-1].end, default=None)
    while place is not None:
        rank, number = place
        cell, start = lists.cells[rank][number], each[rank][number].start
        found.append((rank, cell_text(cell), each[rank][number]))
        if start == 0:
            place = None
        elif number and each[rank][number - 1].end == start:
            place = rank, number - 1
        else:
            place = places[next(action for time, action in come(cell, rank) if time == start)]
    return found[::-1]


def _arrivals(
    lists: PipelineOrder, each: list[list[Span]], message: float
) -> Callable[[Cell, int], list[tuple[float, Action]]]:
    """Return a function of a cell and its rank: arrival time and action of each result that the cell needs."""
    ran = ((cell, span) for pair in zip(lists.cells, each, strict=True) for cell, span in zip(*pair, strict=True))
    ended = {action: span.end for cell, span in ran for action in cell}
    rank_of = lists.rank_of
    return lambda cell, rank: arrivals(lists, cell, rank, rank_of, ended, message) or []
