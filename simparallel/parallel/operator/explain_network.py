"""Plan the strategies of a whole network: every op, every redistribution between them, and the totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from simparallel.algorithms import price
from simparallel.autograd import Op, Spec, Tensor
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.base.attributes import setting
from simparallel.base.html import table
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.layout.mesh import groups_text
from simparallel.layout.sharding import Placement, placement, unfinished
from simparallel.nn.deferred import placeholder
from simparallel.nn.module import Module
from simparallel.parallel.operator.auto import input_layout
from simparallel.parallel.operator.explain import (
    SUM_OF_GRADIENT,
    OpCollective,
    OpPlan,
    exchanges_of,
    explain_call,
    explain_op,
)
from simparallel.parallel.operator.gradient_sums import Filling
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.parallel.operator.op_call import OpCall, mode, plan_way
from simparallel.parallel.operator.pending_view import pending_view, root_of
from simparallel.parallel.operator.plan_inputs import input_specs, num_devices

__all__ = ["NetworkPlan", "explain_network", "explain_op"]


class Row(NamedTuple):
    """One communication of a training step."""

    # The op, or "input i of op" for a redistribution; prefixed by the layer of the op's parameters.
    where: str
    # "forward" or "backward".
    phase: str
    exchange: OpCollective


class NetworkPlan:
    """All communication of a network in one forward and backward pass, by its strategies.

    Attributes:
        ops: an OpPlan for each call of an op, in order.
        rows: the communications, those of forward and then those of backward, in their order.
        parameters: name -> (global shape, layout) of each parameter that an op shards.
    """

    def __init__(self, device_num: int, ops: list[OpPlan], rows: list[Row], parameters: dict[str, Placement]) -> None:
        self.device_num, self.ops, self.rows = device_num, ops, rows
        self.parameters = {name: (place.shape, place.layout) for name, place in parameters.items()}

    @property
    def forward_bytes(self) -> int:
        """Bytes per rank of the forward pass."""
        return sum(row.exchange.bytes_per_rank for row in self.rows if row.phase == "forward")

    @property
    def backward_bytes(self) -> int:
        """Bytes per rank of the backward pass."""
        return sum(row.exchange.bytes_per_rank for row in self.rows if row.phase == "backward")

    @property
    def total_bytes(self) -> int:
        """Bytes per rank of a step."""
        return self.forward_bytes + self.backward_bytes

    def _cells(self) -> list[tuple[str, str, str, str, str]]:
        header = ("where", "phase", "collective", "bytes/rank", "why")
        rows = [
            (r.where, r.phase, _collective(r.exchange), f"{r.exchange.bytes_per_rank}", r.exchange.why)
            for r in self.rows
        ]
        totals = f"forward {format_bytes(self.forward_bytes)}, backward {format_bytes(self.backward_bytes)}"
        return [header, *rows, ("total", totals, "", f"{self.total_bytes}", "")]

    # Shows the table in a terminal, as `_repr_html_` does in a notebook.
    def __repr__(self) -> str:
        rows = self._cells()
        head = f"{self.device_num} devices, {len(self.ops)} ops, {len(self.rows)} communications a step"
        return "\n".join([head, *aligned(rows[:-1]), f"total {self.total_bytes} B/rank: {rows[-1][1]}"])

    def _repr_html_(self) -> str:
        return table(self._cells(), left=True)


def _collective(exchange: OpCollective) -> str:
    op = f"({exchange.reduce_op})" if exchange.reduce_op else ""
    return f"{exchange.collective}{op} {groups_text(exchange.groups)}"


def explain_network(
    network: Module,
    shapes: Sequence[Sequence[int]],
    device_num: int | None = None,
    *,
    dtype: Any = np.float32,
    dataset_strategy: Any = "full_batch",
) -> NetworkPlan:
    """See `Module.explain`."""
    who = f"{type(network).__name__}.explain"
    device_num = num_devices(who, device_num, current().world_size)
    specs = input_specs(who, shapes, dtype)
    entries = dataset_strategy if isinstance(dataset_strategy, tuple) else (dataset_strategy,) * len(specs)
    if len(entries) != len(specs):
        raise InputError(f"{who}: dataset_strategy has {len(entries)} entries for {len(specs)} inputs.")
    planning = _Planning(device_num, {id(p): name for name, p in network.named_parameters()})
    inputs = []
    for spec, entry in zip(specs, entries, strict=True):
        layout = input_layout(spec.shape, entry, device_num)
        # The ranks feed slices of one size; `spec.shape` is the global shape.
        layout.check_divides(spec.shape)
        place = placement(layout, spec.shape)
        inputs.append(Tensor._result(placeholder(place.local_shape, spec.dtype), placement=place, interpreter=SHARDED))
    with setting(mode, automatic=True), setting(grad_mode, interpreter=planning):
        network(*inputs)
    rows = planning.rows + planning.backward_rows()
    return NetworkPlan(device_num, planning.ops, rows, planning.parameters)


class _Planning(AbstractInterpreter):
    """An interpreter that runs no op: it records the communication of each call, and returns a tensor without data."""

    def __init__(self, device_num: int, names: dict[int, str]) -> None:
        self._device_num, self._names = device_num, names
        self.ops: list[OpPlan] = []
        self.rows: list[Row] = []
        # In the order of the forward pass.
        self._backward: list[Row | _Sum] = []
        self.parameters: dict[str, Placement] = {}
        # Placement of each parameter that an op has cut, by id: the real ones stay plain.
        self._places: dict[int, Placement] = {}
        # Number of uses of each leaf, by id.
        self._uses: Counter[int] = Counter()

    def backward_rows(self) -> list[Row]:
        """Return the communications of the backward pass in their order, with gradients grouped as in a run."""
        rows: list[Row] = []
        filling = Filling()
        for entry in reversed(self._backward):
            if isinstance(entry, Row):
                rows.append(entry)
            # `Postponed.take` refuses a leaf with several uses, so its sums run one by one.
            elif self._uses[entry.leaf] > 1:
                rows.append(entry.row)
            else:
                exchange = entry.row.exchange
                part = filling.add((exchange.groups, entry.spec.dtype), entry, entry.spec.size_bytes)
                rows += [_combined(part)] if part else []
        return rows + [_combined(part) for part in filling.rest()]

    def _described(self, op: Op, inputs: tuple[Tensor, ...]) -> str:
        """Describe the op, prefixed by the layer of its first parameter."""
        owners = (self._names[id(x)].rpartition(".")[0] for x in inputs if id(x) in self._names)
        layer = next(owners, "")
        return f"{layer}: {op.described}" if layer else op.described

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor:
        laid = [self._laid(x) for x in inputs]
        # The same `OpCall` as in a run, so a plan and a run cannot differ in cuts or redistributions.
        call = OpCall(op, laid, self._device_num, [id(x) in self._names for x in inputs])
        for x, target in zip(inputs, call.inputs, strict=True):
            # As `shard_parameter` in a run: the first op that uses a plain parameter cuts it for good.
            if target is not None and x.placement is None and x.is_leaf and x.requires_grad:
                self._places.setdefault(id(x), target)
                self.parameters.setdefault(self._names.get(id(x), f"tensor {len(self._places)}"), self._places[id(x)])
        plan = explain_call(call)
        self.ops.append(plan)
        run = partial(self._run, call, plan, self._described(op, inputs), inputs, laid)
        waiting = pending_view(inputs[0], laid[0].placement, call, run, SHARDED) if call.can_wait else None
        return run() if waiting is None else waiting

    def _run(
        self, call: OpCall, plan: OpPlan, described: str, inputs: tuple[Tensor, ...], laid: list[Tensor]
    ) -> Tensor:
        """Record the communication of the call; return its output, without data."""
        for i in call.unsettled:
            laid[i].settle()  # type: ignore[attr-defined]
        for implicit in call.implicit:
            i, dtype = implicit.input, inputs[implicit.input].dtype
            where = f"input {i} of {described}"
            self._note(where, "forward", exchanges_of(implicit.plan, dtype, "redistribute"))
            if inputs[i].requires_grad:
                # The gradient comes back as addends, and the way back sums them.
                addends = unfinished(implicit.target, call.sharding.gradient_axes(i))
                back = plan_way(addends, implicit.source.gradient, dtype.itemsize)
                self._note(where, "backward", exchanges_of(back, dtype, "redistribute"))
        self._note(described, "forward", plan.forward)
        needs = [x.requires_grad for x in inputs]
        if any(needs):
            itemsize = call.local.output.dtype.itemsize
            back = plan_way(call.output.gradient, call.made.gradient, itemsize)
            gradients: list[Row | _Sum] = []
            moved = {implicit.input for implicit in call.implicit}
            for i, (x, grads) in enumerate(zip(inputs, plan.backward, strict=True)):
                self._uses[id(root_of(x))] += needs[i]
                lies = laid[i].placement
                # A parameter that this op redistributes is no leaf to the interpreter: its gradient is summed at once.
                is_leaf = id(x) in self._places and (lies is None or lies is call.inputs[i])
                for e in grads if needs[i] else ():
                    if i in moved and e.why == SUM_OF_GRADIENT:
                        continue
                    what = f"gradient of {self._names.get(id(x), f'input {i}')}"
                    row = Row(described, "backward", e._replace(why=e.why.replace(SUM_OF_GRADIENT, what)))
                    is_sum = is_leaf and e.why == SUM_OF_GRADIENT
                    gradients.append(_Sum(row, id(x), call.local.inputs[i]) if is_sum else row)
            # Recorded from the last to the first, because `backward_rows` reads the list in reverse.
            self._backward += gradients[::-1]
            self._note(described, "backward", plan.backward_inside[::-1])
            self._note(described, "backward", exchanges_of(back, call.local.output.dtype, "redistribute")[::-1])
        # Shape and dtype are enough for the next op.
        data = placeholder(call.output.local_shape, call.local.output.dtype)
        y = Tensor._result(data, placement=call.output, interpreter=SHARDED)
        y.requires_grad = any(needs) and call.local.output.dtype.kind in "fc"
        return y

    def _laid(self, x: Tensor) -> Tensor:
        """Return the tensor with its current placement: the first op that uses a parameter determines it."""
        place = self._places.get(id(x))
        if place is None:
            return x
        return Tensor._result(placeholder(place.local_shape, x.dtype), placement=place, interpreter=SHARDED)

    def _note(self, where: str, phase: str, exchanges: Sequence[OpCollective]) -> None:
        rows: list[Any] = self.rows if phase == "forward" else self._backward
        rows += [Row(where, phase, exchange) for exchange in exchanges]


class _Sum(NamedTuple):
    """The sum of a leaf's gradient, which may be postponed: see `gradient_sums`."""

    row: Row
    leaf: int
    spec: Spec


def _combined(part: Sequence[_Sum]) -> Row:
    """Return the row of gradients that share one collective."""
    if len(part) == 1:
        return part[0].row
    first = part[0].row.exchange
    whys = [entry.row.exchange.why for entry in part]
    share = price("direct", "all_reduce", len(first.groups[0]), 0).sent
    size_bytes = round(share * sum(entry.spec.size_bytes for entry in part))
    names = ", ".join([whys[0].replace("gradient", "gradients", 1), *(why.split(" of ", 1)[1] for why in whys[1:])])
    return Row(f"{len(part)} parameters", "backward", first._replace(bytes_per_rank=size_bytes, why=names))
