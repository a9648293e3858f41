"""A pipeline schedule as a value: printed, compared, edited, checked, priced, and kept as CSV."""

from __future__ import annotations

import csv
import io
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import simparallel.parallel.pipeline.attribution as attribution
import simparallel.parallel.pipeline.timing as timing
from simparallel.base.checks import check_choice, check_integer
from simparallel.base.files import read_text, write_atomically
from simparallel.base.html import PALE, table
from simparallel.base.names import printable
from simparallel.base.units import format_number_of
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline.action import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    cell_text,
    read_cell,
)
from simparallel.parallel.pipeline.attribution import Bubbles
from simparallel.parallel.pipeline.mailbox import depth_of
from simparallel.parallel.pipeline.rules import BIDIRECTIONAL, LOOP, RULES, ZIGZAG
from simparallel.parallel.pipeline.timing import Cost, PipelineOrder, Span, Time

# The largest file that is read.
MAX_BYTES = 1 << 26


# Names of PyTorch and of MindSpore, in lower case.
ALIASES = {
    "interleaved1f1b": "interleaved_1f1b", "loopedbfs": "looped_bfs", "interleavedzerobubble": "interleaved_zb",
    "zbvzerobubble": "zbv", "dualpipev": "dualpipe_v", "zero_bubble_v": "zbv",
}  # fmt: skip


@dataclass(frozen=True, repr=False)
class Schedule:
    """The actions of each rank of a pipeline, in their order.

    A stage is a part of the model. With `placement` "loop", stage s is on rank s mod `ranks`; with "v", stages go back
    and forth; with "bidirectional" there are two replicas, and stage `ranks` + s of the second one is on rank
    `ranks` - 1 - s.

    Args:
        name: of the rule, or of your own schedule.
        ranks, microbatches: their numbers; in a bidirectional pipeline each replica has half of the micro-batches.
        chunks: stages of a rank.
        placement: where the stages are.
        actions: for each rank its actions, such as "2F0": stage, kind (F forward, I input gradient, W weight gradient,
            B both gradients) and micro-batch. "(0F7+7B3)" is a pair that may overlap.

    Raises:
        InputError: numbers out of range, an unknown placement, or not one list for each rank.
        ScheduleError: a text that is not an action. Other rules are checked by `check`.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int
    placement: str
    actions: tuple[tuple[str, ...], ...]
    _lists: PipelineOrder = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("ranks", "microbatches", "chunks"):
            check_integer("Schedule", name, getattr(self, name), 1)
        check_choice("Schedule", "placement", self.placement, (LOOP, ZIGZAG, BIDIRECTIONAL))
        actions = tuple(tuple(each) for each in self.actions)
        if len(actions) != self.ranks:
            raise InputError(f"Schedule: {len(actions)} lists for {self.ranks} ranks.", field="actions")
        cells = tuple(
            tuple(read_cell(text, f"rank {rank}, cell {number}") for number, text in enumerate(each))
            for rank, each in enumerate(actions)
        )
        count = self.num_stages
        halves = range(count // 2), range(count // 2, count)
        chains = halves if self.placement == BIDIRECTIONAL else (range(count),)
        vars(self).update(actions=actions, _lists=PipelineOrder(cells, chains))

    @property
    def num_stages(self) -> int:
        """Number of stages, of both replicas together in a bidirectional pipeline."""
        return self.ranks * self.chunks

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage."""
        turn, place = divmod(stage, self.ranks)
        is_back = self.placement != LOOP and turn % 2 == 1
        return self.ranks - 1 - place if is_back else place

    def live_of(self, stage: int) -> int:
        """Return the most micro-batches whose activations a stage holds, until their weight gradients."""
        cells = self._lists.cells[self.rank_of(stage)]
        own = [tuple(action for action in cell if action.stage == stage) for cell in cells]
        return timing.live(own, (WEIGHT_GRADIENT, BACKWARD))

    def weight_version(self, rank: int, microbatch: int, step: int = 0) -> int:
        """Return the number of updates in the weights that a forward and its backward read.

        "pipedream" updates after each micro-batch, and a rank reads what it has: weights are up to `ranks` - 1 - `rank`
        updates old (Narayanan et al. 2019). "pipedream_2bw" updates after each step, and reads the version before the
        last one (Narayanan et al. 2021). All others have no old weights.
        """
        if self.name == "pipedream":
            return max(0, step * self.microbatches + microbatch - (self.ranks - 1 - rank))
        return max(0, step - 1) if self.name == "pipedream_2bw" else step

    # --- time -----------------------------------------------------------------------------------------

    def cost(self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0) -> Cost:
        """Return the cost of the schedule: makespan, bubble, live activations and messages.

        Args:
            forward, input_gradient, weight_gradient: times of a stage, or a sequence with those of each stage. A full
                backward takes both gradients' times, and a pair the sum.
            message: latency of a message between two ranks.

        Raises:
            InputError: a negative time, or not one for each stage.
            ScheduleError: the ranks deadlock.
        """
        return timing.cost(self._graph(forward, input_gradient, weight_gradient, message))

    def spans(
        self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0
    ) -> list[list[Span]]:
        """Return start and end of each cell of each rank; arguments and errors as `cost`."""
        return self._graph(forward, input_gradient, weight_gradient, message).spans

    def bubbles(
        self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0
    ) -> Bubbles:
        """Return the idle time of each rank by its reason, printed as a table; arguments and errors as `cost`."""
        return attribution.bubbles(self._graph(forward, input_gradient, weight_gradient, message))

    def critical_path(
        self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0
    ) -> list[tuple[int, str, Span]]:
        """Return (rank, cell, start and end) along a longest chain from 0 to the makespan; arguments as `cost`.

        Each cell starts when the one before it has ended, on the same rank or `message` earlier on another one. Only a
        faster cell or message on it can make the schedule faster.
        """
        return attribution.critical_cells(self._graph(forward, input_gradient, weight_gradient, message))

    def boxes(self, **times: Any) -> Iterator[tuple[int, Action, Span]]:
        """Yield (rank, action, start and end) of every action, one after the other in a pair; arguments as `cost`."""
        graph = self._graph(**times)
        for (rank, _, action), start, end in zip(graph.each, graph.times.starts, graph.times.ends, strict=False):
            yield rank, action, Span(start, end)

    def duration(
        self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0
    ) -> Callable[[Action], float]:
        """Return the function that gives the time of an action; arguments as `cost`. Raises InputError."""
        given = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
        each = {}
        for name, time in {**given, "message": message}.items():
            each[name] = (time,) * self.num_stages if isinstance(time, (int, float)) else tuple(time)
            if len(each[name]) != self.num_stages:
                raise InputError(f"cost: {name} has {len(each[name])} times for {self.num_stages} stages.", field=name)
            if not all(isinstance(t, (int, float)) and t >= 0 for t in each[name]):
                raise InputError(f"cost: {name}={time!r} must be times of 0 or more.", field=name)
        f, i, w, _ = each.values()
        full = tuple(a + b for a, b in zip(i, w, strict=True))
        by_kind = {FORWARD: f, INPUT_GRADIENT: i, WEIGHT_GRADIENT: w, BACKWARD: full}
        return lambda action: by_kind[action.kind][action.stage]

    def graph(self) -> timing.ScheduleGraph:
        """Return the task graph, without times."""
        return timing.ScheduleGraph(self._lists)

    def _graph(
        self, forward: Time = 1, input_gradient: Time = 1, weight_gradient: Time = 1, message: float = 0
    ) -> timing.ScheduleGraph:
        duration, graph = self.duration(forward, input_gradient, weight_gradient, message), self.graph()
        times = [duration(action) for _, _, action in graph.each]
        graph.durations = times + [message] * (len(graph) - len(times))
        return graph

    # --- checks ---------------------------------------------------------------------------------------

    def check(self, memory: int | None = None, *, depth: int | None = None) -> Cost:
        """Check that the schedule runs and computes each gradient once; return its cost for equal times.

        `cost` prices it with other times; `bubbles` and `critical_path` explain the price.

        Args:
            memory: most activations that a rank may hold, in micro-batches of a stage, until the weight gradient.
            depth: messages that a mailbox between two ranks holds; None for any number.

        Raises:
            ScheduleError: with the place: a micro-batch or stage that does not exist or is on another rank, an action
                that is missing, done twice or too early, a deadlock, a rank that holds too much, or a mailbox that is
                too small. Facts: `rank`, `cell`, `stage`, `microbatch`.
        """
        self._check_places()
        self._check_counts()
        found = self.cost()
        for rank, peak in enumerate(found.peak_live_at_weight_gradient):
            if memory is not None and peak > memory:
                raise ScheduleError(
                    f"schedule {self.name}: rank {rank} holds activations of {peak} micro-batches, and "
                    f"memory={memory}. Raise memory=, or take a schedule with fewer forwards ahead, such as v_min.",
                    rank=rank,
                )
        if depth is not None and self.mailbox_depth > depth:
            raise ScheduleError(
                f"schedule {self.name}: depth={depth} deadlocks; depth={self.mailbox_depth} or more is needed."
            )
        return found

    @cached_property
    def mailbox_depth(self) -> int:
        """Messages that a mailbox from one rank to another has to hold, so that the ranks do not deadlock.

        Messages are found by their tags (direction, stage, micro-batch). With 0, a sender may wait for its receiver.
        """
        return depth_of(self._lists)

    @property
    def _num_microbatches(self) -> int:
        """Number of micro-batches of each replica."""
        return self.microbatches // 2 if self.placement == BIDIRECTIONAL else self.microbatches

    def _each(self) -> Iterator[tuple[int, int, Action]]:
        for rank, cells in enumerate(self._lists.cells):
            for number, cell in enumerate(cells):
                for action in cell:
                    yield rank, number, action

    def _check_places(self) -> None:
        for rank, number, action in self._each():
            stage, _, m = action
            problem = ""
            if stage >= self.num_stages:
                problem = f"there are stages 0 to {self.num_stages - 1} (ranks={self.ranks}, chunks={self.chunks})"
            elif self.rank_of(stage) != rank:
                problem = f"stage {stage} is on rank {self.rank_of(stage)}"
            elif m >= self._num_microbatches:
                problem = (
                    f"there are micro-batches 0 to {self._num_microbatches - 1} (microbatches={self.microbatches})"
                )
            if problem:
                raise self._error(rank, number, action, problem)
        for rank, cells in enumerate(self._lists.cells):
            for number, cell in enumerate(cells):
                if len(cell) == 2 and (cell[0].kind != FORWARD or cell[1].kind not in (BACKWARD, INPUT_GRADIENT)):
                    raise self._error(
                        rank, number, cell[0], f"it is beside {cell[1]}; a pair is a forward, then a backward"
                    )

    def _check_counts(self) -> None:
        counts = Counter(action for _, _, action in self._each())
        for rank, number, action in self._each():
            if counts[action] > 1:
                raise self._error(rank, number, action, f"it is done {counts[action]} times")
        for stage in range(self.num_stages):
            for m in range(self._num_microbatches):
                has = {kind for kind in KINDS if Action(stage, kind, m) in counts}
                if has in ({FORWARD, BACKWARD}, {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}):
                    continue
                known = ", ".join(sorted(has)) or "nothing"
                raise ScheduleError(
                    f"schedule {self.name}: stage {stage} on rank {self.rank_of(stage)} does {known} of micro-batch "
                    f"{m}; it needs F and B, or F, I and W.",
                    rank=self.rank_of(stage), stage=stage, microbatch=m,
                )  # fmt: skip

    def _error(self, rank: int, number: int, action: Action, problem: str) -> ScheduleError:
        return ScheduleError(
            f"schedule {self.name}: rank {rank}, cell {number}: {action}: {problem}.",
            rank=rank, cell=number, stage=action.stage, microbatch=action.microbatch,
        )  # fmt: skip

    # --- edits ----------------------------------------------------------------------------------------

    def with_actions(self, actions: Iterable[Sequence[str]], name: str | None = None) -> Schedule:
        """Return a schedule with other actions on the same stages; see `check`."""
        return replace(self, name=name or f"{self.name}, edited", actions=tuple(map(tuple, actions)))

    def diff(self, other: Schedule) -> list[tuple[int, int, str | None, str | None]]:
        """Return (rank, cell, action here, action there) where two schedules differ; None where a list has ended."""
        ranks = zip_longest(self.actions, other.actions, fillvalue=())
        cells = ((rank, enumerate(zip_longest(*both))) for rank, both in enumerate(ranks))
        return [(rank, cell, a, b) for rank, each in cells for cell, (a, b) in each if a != b]

    # --- files ----------------------------------------------------------------------------------------

    def to_csv(self) -> str:
        """Return the actions in PyTorch's format "compute_only": a row for each rank, a cell for each action."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        for cells in self._lists.cells:
            writer.writerow([cell_text(c) if len(c) == 1 else f"({c[0]};{c[1]})OVERLAP_F_B" for c in cells])
        return text.getvalue()

    def save_csv(self, path: str | os.PathLike[str]) -> None:
        """Write `to_csv` to a file, atomically."""
        write_atomically(path, self.to_csv().encode())

    @classmethod
    def from_csv(cls, text: str, *, placement: str = LOOP, name: str = "csv") -> Schedule:
        """Return the schedule of a CSV in PyTorch's format; empty cells are idle steps, and are left out.

        Args:
            text: a row for each rank.
            placement: where the stages are, see the class.
            name: of the schedule.

        Raises:
            InputError: no actions, or stages that cannot be divided evenly among the ranks.
            ScheduleError: a cell that is not an action, or text that is not CSV.
        """
        try:
            rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(io.StringIO(text)) if row]
        except csv.Error as error:
            raise ScheduleError(f"Schedule.from_csv: not a valid CSV: {error}.") from None
        cells = [[read_cell(cell, f"rank {r}, cell {n}") for n, cell in enumerate(row)] for r, row in enumerate(rows)]
        each = [action for row in cells for cell in row for action in cell]
        if not each:
            raise InputError("Schedule.from_csv: no actions; expected a row of cells such as 0F0 for each rank.")
        num_stages, count = (max(values) + 1 for values in zip(*((a.stage, a.microbatch) for a in each), strict=True))
        # A number that no schedule of this size can have would take time and memory.
        if max(num_stages, count) > len(each):
            raise InputError(
                f"Schedule.from_csv: {len(each)} actions are too few for {num_stages} stages and {count} micro-batches."
            )
        chunks, rest = divmod(num_stages, len(rows))
        if rest:
            raise InputError(
                f"Schedule.from_csv: {num_stages} stages cannot be divided evenly among {len(rows)} ranks."
            )
        count *= 2 if placement == BIDIRECTIONAL else 1
        return cls(name, len(rows), count, chunks, placement, tuple(tuple(map(cell_text, row)) for row in cells))

    @classmethod
    def load_csv(cls, path: str | os.PathLike[str], *, placement: str = LOOP) -> Schedule:
        """Return the schedule of a file, see `from_csv`.

        Raises:
            ScheduleError: the file cannot be read, or has no schedule. Facts: `path`, and those of `from_csv`.
        """
        try:
            return cls.from_csv(read_text(path, MAX_BYTES), placement=placement, name=Path(path).stem)
        except (InputError, ScheduleError) as error:
            raise ScheduleError(f"{os.fspath(path)}: {error}", **{**error.facts, "path": os.fspath(path)}) from None

    # --- as text --------------------------------------------------------------------------------------

    @property
    def title(self) -> str:
        stages = f", {self.chunks} stages each" if self.chunks > 1 else ""
        batches = f"{self.microbatches} micro-batch{'es' * (self.microbatches > 1)}"
        return f"{printable(self.name)}: {format_number_of(self.ranks, 'rank')}{stages}, {batches}"

    def grid(self) -> list[str]:
        """Return a row of text for each rank: actions over time for F = I = W = 1, and dots where the rank is idle."""
        rows = [[text for text, _ in cells] for cells in self._cells()]
        width = max(len(text) for texts in rows for text in texts)
        return [
            f"{f'r{rank}':<4}" + " ".join(f"{text:<{width}}" for text in texts).rstrip()
            for rank, texts in enumerate(rows)
        ]

    def _cells(self) -> list[list[tuple[str, str]]]:
        """Return for each rank, in each unit of time, text and kind of its action; "." and "" where it is idle."""
        rows = []
        for cells, ran in zip(self._lists.cells, self.spans(), strict=True):
            row: list[tuple[str, str]] = []
            for cell, span in zip(cells, ran, strict=True):
                row += [(".", "")] * (int(span.start) - len(row))
                for action in cell:
                    text = str(action) if self.chunks > 1 else str(action)[len(str(action.stage)) :]
                    row += [(text, action.kind)] * (2 if action.kind == BACKWARD else 1)
            rows.append(row)
        return rows

    def _summary(self) -> str:
        found = self.cost()
        costs = f"makespan {found.makespan}, bubble {found.bubble}, span bubble {found.span_bubble}"
        live = " ".join(map(str, found.peak_live_at_weight_gradient))
        return f"{self.title}; {costs}, live {live}"

    def __str__(self) -> str:
        return "\n".join([self._summary(), *self.grid()])

    def _repr_html_(self) -> str:
        """Return the grid as an HTML table with a colour for each kind of action, for notebooks."""
        cells = self._cells()
        rows = [["", *map(str, range(max(map(len, cells))))]]
        rows += [[f"rank {rank}", *(text.strip(".") for text, _ in row)] for rank, row in enumerate(cells)]
        colours = {
            (rank + 1, time + 1): PALE[KINDS.index(kind)]
            for rank, row in enumerate(cells)
            for time, (_, kind) in enumerate(row)
            if kind
        }
        return table(rows, title=self._summary(), colours=colours)

    def __repr__(self) -> str:
        return f"<Schedule {self.title}>"


def pipeline_schedule(name: str, ranks: int = 4, microbatches: int = 8, chunks: int | None = None) -> Schedule:
    """Return a known schedule.

    Args:
        name: of a schedule, such as "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zbv", "dualpipe" or "chimera", or
            PyTorch's or MindSpore's name of one; in upper or lower case. The error for an unknown name lists all.
        ranks, microbatches: their numbers.
        chunks: stages of a rank, for looped schedules; None for 2 there; other schedules have a fixed number.

    Raises:
        InputError: an unknown name, or numbers that the schedule does not allow. Fact: `field`.

    Example:
        >>> print(sp.pipeline_schedule("1f1b", ranks=2, microbatches=3))
        1f1b: 2 ranks, 3 micro-batches; makespan 12, bubble 3, span bubble 3, live 2 1
        r0  F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        r1  .  F0 B0 B0 F1 B1 B1 F2 B2 B2
    """
    known = ALIASES.get(str(name).lower(), str(name).lower())
    if known not in RULES:
        raise InputError(f"pipeline_schedule: {name!r} is not one of {', '.join(RULES)}.", field="name")
    given = {"ranks": ranks, "microbatches": microbatches, "chunks": 1 if chunks is None else chunks}
    for option, value in given.items():
        check_integer("pipeline_schedule", option, value, 1)
    rule = RULES[known]
    if rule.chunks is not None and chunks not in (None, rule.chunks):
        raise InputError(
            f"pipeline_schedule: chunks={chunks}: {known} has {format_number_of(rule.chunks, 'stage')} on a rank.",
            field="chunks",
        )
    count = chunks or rule.chunks or 2
    lists = rule.make(ranks, microbatches, count)
    actions = tuple(tuple(map(cell_text, cells)) for cells in lists)
    return Schedule(known, ranks, microbatches, count, rule.placement, actions)
