"""Execute a plan: give every call of an op its strategy, in the order of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simparallel.autograd import Op, Redistribute, Tensor
from simparallel.autograd.interpreter import AbstractInterpreter
from simparallel.backend import Array
from simparallel.errors import PlanError
from simparallel.layout.sharding import Placement, placement
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.search.plan import Plan
from simparallel.search.space import with_strategy


class Planned(AbstractInterpreter):
    """An interpreter that runs a program's ops as a plan says.

    A plan covers the ops up to the first backward. After its last op, a call that matches its first op starts it
    over, as for the next micro-batch; all other ops follow the layouts of their inputs.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, self.position = plan, 0
        # Number of a call -> the program's op, and its copy with the planned strategy: calls of a function share an op.
        self._copies: dict[int, tuple[Op, Op]] = {}

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Run an op with its strategy.

        Raises:
            PlanError: the call differs from the next one in the plan.
            StrategyError: the plan's strategy is not legal for the op.

        Collective: yes, where data is exchanged.
        """
        number = self._number(op, inputs)
        if number is None or type(op) is Redistribute:
            return SHARDED.run(op, inputs)
        # Not lazily, as a view outside of a plan: the plan states the layout of its result.
        return SHARDED.runner(self._planned(number, op), inputs)(inputs)

    def run_part(self, part: Callable[..., Tensor], inputs: tuple[Any, ...], is_optional: bool) -> Tensor | None:
        begins_at = self.plan.ops[self.position % len(self.plan.ops)].name
        return None if not is_optional or begins_at in self.plan.recomputed else part(*inputs)

    def micro_batches(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the micro-batches: equal parts of this rank's rows of each argument.

        Raises:
            PlanError: the rows of an argument have no equal parts.
        """
        count = self.plan.num_micro_batches
        each = [_parts_of(x, count) for x in inputs]
        return list(zip(*each, strict=True)) if count > 1 else [inputs]

    def _number(self, op: Op, inputs: tuple[Tensor, ...]) -> int | None:
        """Return the number of this call in the plan; None after the plan's end."""
        ops, number = self.plan.ops, self.position
        signature = op.name, tuple([x.shape for x in inputs])
        if number == len(ops):
            if (ops[0].op, ops[0].shapes) != signature:
                return None
            number = 0
        planned = ops[number]
        if (planned.op, planned.shapes) != signature:
            raise PlanError(
                f"AutoParallel: op {number} of the program is {op.described} on {signature[1]}, but the plan has "
                f"{planned.name} on {planned.shapes}{f' ({planned.line})' if planned.line else ''}. A plan holds for "
                "one sequence of ops: make an AutoParallel for each path of the program, such as training and "
                "evaluation, or a new plan (plan=None) after a change.",
                op=op.name,
                expected=planned.name,
            )
        self.position = number + 1
        return number

    def _planned(self, number: int, op: Op) -> Op:
        planned = self.plan.ops[number]
        if planned.in_strategy is None or op.in_strategy is not None:
            return op
        known, copy = self._copies.get(number, (None, op))
        if known is not op:
            copy = with_strategy(op, planned.in_strategy, planned.out_strategy)
            self._copies[number] = op, copy
        return copy

    def slice_of(self, x: Array, target: Placement) -> Array:
        return SHARDED.slice_of(x, target)

    def to_local(self, x: Tensor, grad_layout: object = None) -> Tensor:
        return SHARDED.to_local(x, grad_layout)  # type: ignore[arg-type]


def _parts_of(x: Any, count: int) -> list[Any]:
    """Return equal parts of this rank's rows of an argument, in the same layout; any other value `count` times."""
    place = x.placement if isinstance(x, Tensor) else None
    if place is None or not place.shape or count == 1:
        return [x] * count
    rows = place.local_shape[0]
    if rows % count or len(set(place.local_shapes.values())) > 1:
        raise PlanError(
            f"AutoParallel: the plan has {count} micro-batches, but ranks have {place.shapes_text} of an argument: "
            "their first dims must be equal and divisible. Pass another batch, or search anew (plan=None)."
        )
    part = placement(place.layout, (place.shape[0] // count, *place.shape[1:]))
    each = (x.data[start : start + rows // count] for start in range(0, rows, rows // count))
    return [Tensor._result(data, placement=part, interpreter=SHARDED) for data in each]
