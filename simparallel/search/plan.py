"""`Plan`: a strategy for every op of a program. Plain data: printed, compared, edited, saved, loaded, executed."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from simparallel.base.checks import check_integer
from simparallel.base.files import parse_json, read_text, write_atomically
from simparallel.base.html import table
from simparallel.base.names import printable
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_seconds
from simparallel.errors import ClusterError, InputError, PlanError
from simparallel.layout.mesh import plain_cuts
from simparallel.machine.description import from_plain
from simparallel.search.explanation import Cuts, Explanation, Move, Option, strategy_text

FORMAT = 1
# The largest file that is read.
MAX_BYTES = 1 << 26


class PlannedOp(NamedTuple):
    """The strategy of one call of an op.

    Attributes:
        name: of the call: layer and op, numbered.
        op: name of the op.
        shapes: global shapes of its inputs.
        in_strategy, out_strategy: the arguments of `shard`; None for an op that runs as the program says.
        line: of the program.
        options: its strategy and the next best ones, with their costs; empty if no search made the plan.
        moves: redistributions of its inputs.
    """

    name: str
    op: str
    shapes: Cuts
    in_strategy: Cuts | None
    out_strategy: tuple[int, ...] | None = None
    line: str = ""
    options: tuple[Option, ...] = ()
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True, repr=False)
class Plan:
    """Strategies for all ops of a program, in the order of their calls.

    Attributes:
        device_num: number of devices.
        ops: the strategies.
        method: how they were found.
        cluster: name of the hardware that they were found for.
        step_time_ps: simulated time [ps] of a step: forward, backward and the optimizer. None if it is not known, as
            after an edit.
        data_parallel_ps: the same for data parallelism.
        cost_ps, bound_ps: cost of the plan in the model of the search, and a lower bound on all plans' costs.
        memory_bytes: peak of a device's memory in a step, as a run counts it; None as for the time.
        notes: what the search left out.
        recomputed: names of the first calls of the optional parts (`nn.checkpoint`) that backward runs again.
        num_micro_batches: number of parts into which `parallel.micro_batches` splits a batch.
    """

    device_num: int
    ops: tuple[PlannedOp, ...]
    method: str = "by hand"
    cluster: str = ""
    step_time_ps: int | None = None
    data_parallel_ps: int | None = None
    cost_ps: int | None = None
    bound_ps: int | None = None
    memory_bytes: int | None = None
    notes: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    num_micro_batches: int = 1

    @property
    def step_time_s(self) -> float | None:
        """Simulated time [s] of a step."""
        return None if self.step_time_ps is None else self.step_time_ps / 1e12

    @property
    def gap(self) -> float | None:
        """How far the cost may be above the optimum, as a fraction of the bound; 0.0 if the plan is proven optimal."""
        if self.cost_ps is None or self.bound_ps is None:
            return None
        more = self.cost_ps - self.bound_ps
        return more / self.bound_ps if more and self.bound_ps else float(more)

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, name: str | int) -> PlannedOp:
        """Return the strategy of a call, by name or number. Raises PlanError for an unknown one."""
        if not isinstance(name, int):
            return self.ops[self._number(name)]
        if not 0 <= name < len(self.ops):
            raise PlanError(f"plan: there is no call number {name}; this plan has {len(self.ops)}, from 0.")
        return self.ops[name]

    def with_(self, name: str, in_strategy: Any, out_strategy: Any = None) -> Plan:
        """Return the plan with another strategy of one call, as the arguments of `shard`.

        Raises:
            PlanError: no call of this name, or a strategy that is no tuple of tuples of integers, one for each input.
        """
        number = self._number(name)
        planned = self.ops[number]
        cuts, out = _checked(name, in_strategy, out_strategy)
        if cuts is not None and len(cuts) != len(planned.shapes):
            raise PlanError(
                f"plan: {name} has {len(planned.shapes)} inputs, the strategy {cuts!r} {len(cuts)} entries."
            )
        # The known costs are those of the plan before the edit.
        ops = [op._replace(options=(), moves=()) for op in self.ops]
        ops[number] = ops[number]._replace(in_strategy=cuts, out_strategy=out)
        edited = replace(self, ops=tuple(ops), method=f"{self.method}, edited", step_time_ps=None, memory_bytes=None)
        return replace(edited, cost_ps=None, bound_ps=None)

    def diff(self, other: Plan) -> list[tuple[str, Any, Any]]:
        """Return (name, strategy here, strategy there) for each call that differs; None where a plan lacks the call."""
        mine, theirs = ({p.name: (p.in_strategy, p.out_strategy) for p in plan.ops} for plan in (self, other))
        names = dict.fromkeys((*mine, *theirs))
        return [(name, mine.get(name), theirs.get(name)) for name in names if mine.get(name) != theirs.get(name)]

    def explain(self, name: str | int) -> Explanation:
        """Explain the strategy of a call: its cost, those of the next best ones, and the redistributions of its inputs.

        Costs are those of the search, while all other calls keep their strategies.

        Raises:
            PlanError: no call of this name, or a plan without costs: made or edited by hand.
        """
        planned = self[name]
        if not planned.options:
            raise PlanError(
                f"plan: the cost of {planned.name} is not known, as this plan was made or edited by hand; a search "
                "(plan=None) gives one with costs."
            )
        title = f"{planned.name} on {_shapes_text(planned.shapes)}{f', {planned.line}' if planned.line else ''}"
        return Explanation(title, planned.options, planned.moves)

    # --- files ----------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, lists, strings and numbers."""
        return {"format": FORMAT, **asdict(self), "ops": [op._asdict() for op in self.ops]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON, atomically: a reader never sees half a file."""
        lines = ",\n  ".join(json.dumps(op) for op in self.to_dict()["ops"])
        head = {name: value for name, value in self.to_dict().items() if name != "ops"}
        write_atomically(path, f'{json.dumps(head, indent=1)[:-2]},\n "ops": [\n  {lines}\n ]\n}}\n'.encode())

    @classmethod
    def from_dict(cls, data: Any, where: str = "plan") -> Plan:
        """Return the plan of a dict that `to_dict` made.

        Raises:
            PlanError: no such dict.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("ops"), list):
            raise PlanError(f"{where}: no plan of format {FORMAT}: expected an object with 'format' and 'ops'.")
        try:
            plan = from_plain(cls, {name: value for name, value in data.items() if name != "format"}, where)
        except ClusterError as error:
            raise PlanError(f"{error} Compare with a file that Plan.save has written.") from None
        for planned in plan.ops:
            _checked(planned.name, planned.in_strategy, planned.out_strategy, where)
        for name in ("device_num", "num_micro_batches"):
            check_integer(where, name, getattr(plan, name), 1, PlanError)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Return the plan of a file.

        Raises:
            PlanError: no such file, or no plan.
        """
        where = os.fspath(path)
        try:
            return parse_json(read_text(path, MAX_BYTES), lambda data: cls.from_dict(data, where))
        except InputError as error:
            raise PlanError(f"{where}: {error}.") from None

    # --- as text ----------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self._text([("op", "inputs", "strategy"), *self._rows()])

    def table(self) -> str:
        """Return the plan as text, with a summary and one row for all ops of a kind that have the same strategy.

        A row has the name and the inputs of the first of them. The text of the plan itself, `str(plan)`, has every op.
        """
        whole = sum(op.in_strategy is None or all(n == 1 for row in op.in_strategy for n in row) for op in self.ops)
        notes = [f"Cut: {len(self.ops) - whole} ops; whole on every device: {whole}."]
        if self.memory_bytes is not None:
            notes.append(f"memory of a device, as modelled: {format_bytes(self.memory_bytes)}")
        alike = Counter((op.op, op.in_strategy, op.out_strategy) for op in self.ops)
        rows = []
        for planned, (name, *rest) in zip(self.ops, self._rows(), strict=True):
            # 0 for all but the first of those that are alike.
            count = alike.pop((planned.op, planned.in_strategy, planned.out_strategy), 0)
            if count:
                rows.append((name, f"and {count - 1} more" if count > 1 else "", *rest))
        return self._text([("op", "", "inputs", "strategy"), *rows], notes)

    def _text(self, rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> str:
        return printable("\n".join([self.title, *notes, *self.notes, *self._saved_memory(), *aligned(rows)]))

    def _repr_html_(self) -> str:
        """Return the plan as an HTML table, for notebooks."""
        rows = [("op", "inputs", "strategy"), *self._rows()]
        return table(rows, title=self.title, notes=[*self.notes, *self._saved_memory()], left=True)

    @property
    def title(self) -> str:
        """One line: devices, times, and how good the plan is."""
        parts = [f"{len(self.ops)} ops on {self.device_num} devices{f' of {self.cluster}' if self.cluster else ''}"]
        if self.step_time_ps is not None:
            parts.append(f"{format_seconds(self.step_time_ps / 1e12)} a step")
        if self.data_parallel_ps is not None:
            parts.append(f"data parallelism {format_seconds(self.data_parallel_ps / 1e12)}")
        gap = self.gap
        if gap is not None:
            parts.append(f"{self.method}, " + ("optimal in the model" if gap == 0 else f"gap at most {gap:.2%}"))
        else:
            parts.append(self.method)
        return "; ".join(parts)

    def _saved_memory(self) -> Iterator[str]:
        if self.num_micro_batches > 1:
            yield f"A batch is split into {self.num_micro_batches} micro-batches."
        if self.recomputed:
            yield f"Backward recomputes {len(self.recomputed)} parts, which begin with {', '.join(self.recomputed)}."

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        for planned in self.ops:
            yield planned.name, _shapes_text(planned.shapes), strategy_text(planned.in_strategy, planned.out_strategy)

    def _number(self, name: str) -> int:
        for number, planned in enumerate(self.ops):
            if planned.name == name:
                return number
        raise PlanError(f"plan: no op {name!r}; the names are those of print(plan), such as {self.ops[0].name!r}.")


def _shapes_text(shapes: Cuts) -> str:
    return " ".join("x".join(map(str, shape)) or "()" for shape in shapes)


def _checked(
    name: str, in_strategy: Any, out_strategy: Any, where: str = "plan"
) -> tuple[Cuts | None, tuple[int, ...] | None]:
    """Return a strategy of plain integers. Whether it is legal depends on the op."""
    cuts, out = plain_cuts(in_strategy), plain_cuts(out_strategy)
    rows: Sequence[Any] = cuts if isinstance(cuts, tuple) else () if cuts is None else (None,)
    for row in (*rows, *(() if out is None else (out,))):
        if not isinstance(row, tuple) or not all(type(cut) is int and cut >= 1 for cut in row):
            raise PlanError(
                f"{where}: the strategy of {name} is {in_strategy!r}, {out_strategy!r}; expected a tuple of cuts for "
                "each input, such as ((8, 1), (1, 1)), and for the output None or a tuple."
            )
    return cuts, out
