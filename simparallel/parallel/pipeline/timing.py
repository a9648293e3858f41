"""The task graph of a schedule, and its cost: every rank runs its cells in order, as soon as their inputs are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from simparallel.clock.solver import solve
from simparallel.clock.task_graph import TaskGraph, Times
from simparallel.errors import ScheduleError
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, Cell

# A number, or one for each stage.
Time = float | Sequence[float]


class Span(NamedTuple):
    """The start and the end of a cell."""

    start: float
    end: float


@dataclass(frozen=True)
class Cost:
    """The cost of a schedule, in the units of the given times.

    Attributes:
        makespan: from the start to the end of the last cell.
        work: of the busiest rank.
        bubble: makespan - work.
        span: the longest span of a rank, from its first start to its last end.
        span_bubble: the largest idle time of a rank within its span: the zero of "zero bubble".
        peak_live_at_input_gradient: for each rank the most micro-batches of a stage whose activations are live, if the
            input gradient releases them.
        peak_live_at_weight_gradient: the same, if the weight gradient does.
        messages: number of messages between ranks, of activations and of gradients.
    """

    makespan: float
    work: float
    bubble: float
    span: float
    span_bubble: float
    peak_live_at_input_gradient: tuple[int, ...]
    peak_live_at_weight_gradient: tuple[int, ...]
    messages: int


@dataclass(frozen=True)
class PipelineOrder:
    """The cells of each rank, and how the stages are connected.

    Attributes:
        cells: for each rank its cells.
        chains: rows of stages that a micro-batch passes one after the other.
    """

    cells: tuple[tuple[Cell, ...], ...]
    chains: tuple[range, ...]

    def needs(self, action: Action) -> list[tuple[Action, ...]]:
        """Return the actions that have to come before an action; of each entry, one is enough."""
        stage, kind, m = action
        if kind == WEIGHT_GRADIENT:
            return [(Action(stage, INPUT_GRADIENT, m),)]
        if kind == FORWARD:
            return [] if stage in self._firsts else [(Action(stage - 1, FORWARD, m),)]
        own = (Action(stage, FORWARD, m),)
        if stage in self._lasts:
            return [own]
        return [own, (Action(stage + 1, INPUT_GRADIENT, m), Action(stage + 1, BACKWARD, m))]

    @cached_property
    def _firsts(self) -> frozenset[int]:
        return frozenset(chain.start for chain in self.chains)

    @cached_property
    def _lasts(self) -> frozenset[int]:
        return frozenset(chain.stop - 1 for chain in self.chains)


class CellTask(NamedTuple):
    """An action in a schedule: its rank, and the number of its cell there."""

    rank: int
    cell: int
    action: Action


class ScheduleGraph(TaskGraph):
    """The tasks of a schedule, without times: its actions, in order, and then its messages, each on its own channel.

    Args:
        order: the cells. A pair is one action after the other.

    Attributes:
        each: task -> its action.
        inputs: action -> (task that delivers a result which it needs from another cell, the action that computes it).

    Raises:
        ScheduleError: no rank does an action that is needed. Facts: `rank`, `cell`, `stage`, `microbatch`.

    Cost: about 3 us an action.
    """

    def __init__(self, order: PipelineOrder) -> None:
        super().__init__()
        self.order = order
        self.each: list[CellTask] = []
        self.inputs: dict[Action, list[tuple[int, Action]]] = {}
        # Action -> its rank, and the task at whose end its results are there: the last one of its cell.
        done: dict[Action, tuple[int, int]] = {}
        for rank, cells in enumerate(order.cells):
            last: list[int] = []
            for number, cell in enumerate(cells):
                for action in cell:
                    last = [self.add(0, last)]
                    self.each.append(CellTask(rank, number, action))
                for action in cell:
                    # Of an action that is done twice, the first one counts.
                    done.setdefault(action, (rank, last[0]))
        first = 0
        for rank, cells in enumerate(order.cells):
            for number, cell in enumerate(cells):
                waits = self.before[first] = [*self.before[first]]
                for action in cell:
                    inputs: list[tuple[int, Action]] = []
                    self.inputs.setdefault(action, inputs)
                    for choices in order.needs(action):
                        needed = choices[-1] if choices[-1] in done else choices[0]
                        if needed in cell:
                            continue
                        if needed not in done:
                            place = CellTask(rank, number, action)
                            raise self._error(f"{self._text(place, action, needed)}, which no rank does", place)
                        source, task = done[needed]
                        if source != rank:
                            task = self.add(0, [task])
                        inputs.append((task, needed))
                        waits.append(task)
                first += len(cell)

    @cached_property
    def times(self) -> Times:
        """Start and end of every task. Raises ScheduleError: the ranks deadlock."""
        return solve(self)

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Start and end of each cell of each rank."""
        found, first = [], 0
        for cells in self.order.cells:
            ran = []
            for cell in cells:
                ran.append(Span(self.times.starts[first], self.times.ends[first + len(cell) - 1]))
                first += len(cell)
            found.append(ran)
        return found

    def deadlock(self, cycle: Sequence[int]) -> ScheduleError:
        each = [self.each[task] for task in cycle if task < len(self.each)]
        # The others are cells that come after the one before them on their rank.
        waits = [
            (one, other)
            for one, other in zip(each, [*each[1:], each[0]], strict=True)
            if other.rank != one.rank or other.cell > one.cell
        ]
        cells = self.order.cells
        texts = [
            next(
                self._text(one, action, needed)
                for action in cells[one.rank][one.cell]
                for _, needed in self.inputs[action]
                if needed in cells[other.rank][other.cell]
            )
            for one, other in waits
        ]
        return self._error(f"deadlock: {'; '.join(texts)}. Move one of these cells", waits[0][0])

    def _text(self, one: CellTask, action: Action, needed: Action) -> str:
        return f"rank {one.rank}, cell {one.cell}: {action} waits for {needed}"

    def _error(self, text: str, place: CellTask) -> ScheduleError:
        return ScheduleError(
            f"schedule: {text}.", rank=place.rank, cell=place.cell, stage=place.action.stage,
            microbatch=place.action.microbatch,
        )  # fmt: skip


def live(cells: Sequence[Cell], releases: tuple[str, ...]) -> int:
    """Return the most activations that are live at once; actions of the kinds `releases` release one."""
    peak = now = 0
    for cell in cells:
        for action in cell:
            if action.kind == FORWARD:
                now += 1
                peak = max(peak, now)
            elif action.kind in releases:
                now -= 1
    return peak


def cost(graph: ScheduleGraph) -> Cost:
    """Return the cost of a schedule."""
    cells, work = graph.order.cells, [0] * len(graph.order.cells)
    for (rank, _, _), duration in zip(graph.each, graph.durations, strict=False):
        work[rank] += duration
    ranges = [ran[-1].end - ran[0].start if ran else 0 for ran in graph.spans]
    makespan = max((ran[-1].end for ran in graph.spans if ran), default=0)
    return Cost(
        makespan, max(work), makespan - max(work), max(ranges),
        max(longest - own for longest, own in zip(ranges, work, strict=True)),
        tuple(live(own, (INPUT_GRADIENT, BACKWARD)) for own in cells),
        tuple(live(own, (WEIGHT_GRADIENT, BACKWARD)) for own in cells),
        len(graph) - len(graph.each),
    )  # fmt: skip
