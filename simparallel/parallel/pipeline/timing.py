"""The time of a schedule by its lists: every rank runs its cells in order, as soon as their inputs are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

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


class PipelineOrder(NamedTuple):
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
        (chain,) = (each for each in self.chains if stage in each)
        if kind == FORWARD:
            return [(Action(stage - 1, FORWARD, m),)] if stage > chain.start else []
        if kind == WEIGHT_GRADIENT:
            return [(Action(stage, INPUT_GRADIENT, m),)]
        own = (Action(stage, FORWARD, m),)
        if stage == chain.stop - 1:
            return [own]
        return [own, (Action(stage + 1, INPUT_GRADIENT, m), Action(stage + 1, BACKWARD, m))]

    def before(self, action: Action) -> int | None:
        """Return the stage whose result an action starts from; None if it needs no other stage."""
        return self._beside(action, -1 if action.kind == FORWARD else 1)

    def after(self, action: Action) -> int | None:
        """Return the stage that needs the result of an action; None if none does."""
        return self._beside(action, 1 if action.kind == FORWARD else -1)

    def _beside(self, action: Action, step: int) -> int | None:
        other = action.stage + step
        is_linked = any(action.stage in chain and other in chain for chain in self.chains)
        return other if is_linked and action.kind != WEIGHT_GRADIENT else None

    @property
    def rank_of(self) -> dict[int, int]:
        """Stage -> its rank."""
        return {action.stage: rank for rank, cells in enumerate(self.cells) for cell in cells for action in cell}

    @property
    def ranks_of(self) -> dict[int | None, set[int]]:
        """Stage -> all ranks that do its actions; more than one only where a schedule is wrong."""
        found: dict[int | None, set[int]] = {}
        for rank, cells in enumerate(self.cells):
            for stage in {action.stage for cell in cells for action in cell}:
                found.setdefault(stage, set()).add(rank)
        return found


def spans(lists: PipelineOrder, duration: Callable[[Action], float], message: float = 0) -> list[list[Span]]:
    """Return the start and end of each cell of each rank.

    Args:
        lists: the cells.
        duration: of an action; that of a pair is the sum.
        message: latency between two ranks.

    Raises:
        ScheduleError: the ranks wait for each other in a cycle. Facts: `rank`, `cell`.
    """
    rank_of, ranks_of = lists.rank_of, lists.ranks_of
    ended: dict[Action, float] = {}
    found: list[list[Span]] = [[] for _ in lists.cells]
    free = [0.0 if isinstance(message, float) else 0] * len(lists.cells)
    # Ranks whose next cell may have its inputs by now.
    ready = dict.fromkeys(reversed(range(len(lists.cells))))
    while ready:
        rank, _ = ready.popitem()
        cells = lists.cells[rank]
        while len(found[rank]) < len(cells):
            cell = cells[len(found[rank])]
            come = arrivals(lists, cell, rank, rank_of, ended, message)
            if come is None:
                break
            start = max((free[rank], *(time for time, _ in come)))
            end = start
            for action in cell:
                end += duration(action)
            for action in cell:
                ended[action] = end
                ready.update(dict.fromkeys(ranks_of[action.stage] | ranks_of.get(lists.after(action), set())))
            found[rank].append(Span(start, end))
            free[rank] = end
    if any(len(done) < len(cells) for done, cells in zip(found, lists.cells, strict=True)):
        raise _stuck(lists, found, ended)
    return found


def arrivals(
    lists: PipelineOrder, cell: Cell, rank: int, rank_of: dict[int, int], ended: dict[Action, float], message: float
) -> list[tuple[float, Action]] | None:
    """Return arrival time and action of each result that a cell needs; None if one is not known yet."""
    found = []
    for action in cell:
        for each in lists.needs(action):
            if each[0] in cell:
                continue
            done = next((other for other in each if other in ended), None)
            if done is None:
                return None
            found.append((ended[done] + (0 if rank_of[done.stage] == rank else message), done))
    return found


def _stuck(lists: PipelineOrder, found: list[list[Span]], ended: dict[Action, float]) -> ScheduleError:
    """Return the error of ranks that wait for each other: the cycle, or the action that no rank does."""
    told = []
    doers = {action: rank for rank, cells in enumerate(lists.cells) for cell in cells for action in cell}
    rank = next(r for r, cells in enumerate(lists.cells) if len(found[r]) < len(cells))
    seen: list[int] = []
    while rank not in seen:
        seen.append(rank)
        cell = lists.cells[rank][len(found[rank])]
        action, wanted = next(
            (action, each)
            for action in cell
            for each in lists.needs(action)
            if each[0] not in cell and not any(other in ended for other in each)
        )
        there = next((other for other in wanted if other in doers), None)
        place = f"rank {rank}, cell {len(found[rank])}: {action} waits for {there or wanted[0]}"
        if there is None:
            return ScheduleError(
                f"schedule: {place}, which no rank does.", rank=rank, cell=len(found[rank]), stage=action.stage,
                microbatch=action.microbatch,
            )  # fmt: skip
        told.append(place)
        rank = doers[there]
    circle = told[seen.index(rank) :]
    first = lists.cells[rank][len(found[rank])][0]
    return ScheduleError(
        f"schedule: the ranks wait for each other: {'; '.join(circle)}. Move one of these cells.",
        rank=rank, cell=len(found[rank]), stage=first.stage, microbatch=first.microbatch,
    )  # fmt: skip


def durations(num_stages: int, forward: Time, input_gradient: Time, weight_gradient: Time) -> Callable[[Action], float]:
    """Return the function that gives the time of an action; each argument is a time, or one for each stage."""

    def each(time: Time) -> Sequence[Any]:
        return (time,) * num_stages if isinstance(time, (int, float)) else time

    f, i, w = each(forward), each(input_gradient), each(weight_gradient)
    by_kind = {FORWARD: f, INPUT_GRADIENT: i, WEIGHT_GRADIENT: w, BACKWARD: [a + b for a, b in zip(i, w, strict=True)]}
    return lambda action: by_kind[action.kind][action.stage]


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


def cost(lists: PipelineOrder, duration: Callable[[Action], float], message: float) -> Cost:
    """Return the cost of a schedule."""
    each = spans(lists, duration, message)
    work = [sum(duration(action) for cell in cells for action in cell) for cells in lists.cells]
    ranges = [ran[-1].end - ran[0].start if ran else 0 for ran in each]
    makespan = max((ran[-1].end for ran in each if ran), default=0)
    rank_of = lists.rank_of
    actions = (action for cells in lists.cells for cell in cells for action in cell)
    ends = ((action.stage, lists.after(action)) for action in actions)
    sent = sum(other is not None and rank_of[other] != rank_of[stage] for stage, other in ends)
    return Cost(
        makespan, max(work), makespan - max(work), max(ranges),
        max(longest - own for longest, own in zip(ranges, work, strict=True)),
        tuple(live(cells, (INPUT_GRADIENT, BACKWARD)) for cells in lists.cells),
        tuple(live(cells, (WEIGHT_GRADIENT, BACKWARD)) for cells in lists.cells),
        sent,
    )  # fmt: skip
