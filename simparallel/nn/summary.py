"""Summarise a model: its modules, and the cost of one forward pass."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd import Tensor, no_grad
from simparallel.backend import is_array
from simparallel.base.attributes import setting
from simparallel.base.text_table import aligned
from simparallel.base.units import format_bytes, format_count
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import InputError
from simparallel.machine.cluster import describe
from simparallel.nn.module import Module


class LayerSummary(NamedTuple):
    """One module of a model. Counts include the modules below it.

    Attributes:
        name: path of the module, such as "blocks.0.norm"; "" for the model itself.
        kind: name of its class.
        output_shape: shape of the output of its last call; None if it was not called.
        num_parameters: number of elements of its parameters; each parameter counts once.
        work_flops: floating-point operations of its calls in the forward pass.
        size_bytes: bytes that its calls in the forward pass read and write.
    """

    name: str
    kind: str
    output_shape: tuple[int, ...] | None
    num_parameters: int
    work_flops: int
    size_bytes: int


class Summary(list[LayerSummary]):
    """The layers: the model itself first, parents before children. Prints as a table.

    Made by `summary`.
    """

    def __repr__(self) -> str:
        header = ("layer", "output shape", "parameters", "flops", "memory traffic")
        lines = aligned([header, *map(_cells, self)], "<<>")
        total = self[0]
        lines.insert(1, "-" * len(lines[0]))
        lines.append("-" * len(lines[0]))
        lines.append(
            f"{total.num_parameters:,} parameters; forward: {format_count(total.work_flops, 'flop')}, "
            f"{format_bytes(total.size_bytes)} moved"
        )
        return "\n".join(lines)


def _cells(layer: LayerSummary) -> tuple[str, ...]:
    depth = layer.name.count(".") + bool(layer.name)
    name = layer.name.rpartition(".")[2]
    label = f"{'  ' * depth}{name + ': ' if name else ''}{layer.kind}"
    shape = "" if layer.output_shape is None else str(layer.output_shape)
    parameters = f"{layer.num_parameters:,}" if layer.num_parameters else "-"
    return label, shape, parameters, format_count(layer.work_flops), format_bytes(layer.size_bytes)


def summary(model: Module, example: Any, *more: Any, dtype: Any = np.float32) -> Summary:
    """Run one forward pass in eval mode, without gradients, and list every module with its cost.

    Costs are those that the ops declare (`Op.work`) for the shapes of the run.

    Args:
        model: its modes are restored afterwards.
        example: a shape such as (32, 1, 28, 28), for zeros of `dtype`; or an array or Tensor.
        more: further inputs, likewise.
        dtype: of inputs given as shapes; an integer dtype for ids.

    Raises:
        InputError: an input that is neither a shape nor an array nor a Tensor.
    """
    inputs = [_as_input(value, dtype) for value in (example, *more)]
    recorder = Recorder(0, describe(1), record="full")
    shapes: dict[int, tuple[int, ...] | None] = {}
    costs: dict[int, list[int]] = {}
    starts: list[int] = []

    def enter(module: Module, inputs: Any) -> None:
        starts.append(len(recorder.events))

    def leave(module: Module, inputs: Any, output: Any) -> None:
        events = recorder.events[starts.pop() :]
        cost = costs.setdefault(id(module), [0, 0])
        cost[0] += sum(event.flops for event in events)
        cost[1] += sum(event.size_bytes for event in events)
        shapes[id(module)] = tuple(output.shape) if hasattr(output, "shape") else None

    named = list(model.named_modules())
    with ExitStack() as hooks, setting(*(module for _, module in named), training=False):
        for _, module in named:
            hooks.enter_context(module.register_forward_pre_hook(enter))
            hooks.enter_context(module.register_forward_hook(leave))
        with no_grad(), use_recorder(recorder):
            model(*inputs)
    return Summary(
        LayerSummary(
            name,
            type(module).__name__,
            shapes.get(id(module)),
            sum(parameter.size for parameter in module.parameters()),
            *costs.get(id(module), (0, 0)),
        )
        for name, module in named
    )


def _as_input(value: Any, dtype: Any) -> Any:
    if isinstance(value, Tensor) or is_array(value):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(size, (int, np.integer)) for size in value):
        return np.zeros(tuple(value), dtype)
    raise InputError(f"summary: {value!r} is neither a shape nor an array.")
