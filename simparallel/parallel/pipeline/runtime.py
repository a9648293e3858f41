"""Run a pipeline: each rank does the actions of its list, with real gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad, run_backward
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace
from simparallel.base.units import format_type_of
from simparallel.comm import Group, Work, current
from simparallel.errors import InputError, ScheduleError, ShapeError
from simparallel.nn import Module, Sequential
from simparallel.nn.parameter import Parameter
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, read_cell
from simparallel.parallel.pipeline.schedule import BIDIRECTIONAL, Schedule, pipeline_schedule
from simparallel.parallel.pipeline.split_backward import input_gradient
from simparallel.parallel.pipeline.stages import balanced, checked_stages

FORWARDS, BACKWARDS = 0, 1


class Pipeline:
    """Train a model whose children run one after the other, cut into stages on all ranks.

    Every rank makes the same calls with the same arguments; it computes its own stages.

    Args:
        model: a Sequential. Its initial weights must be equal on all ranks, as with `set_seed`.
        loss_fn: loss of the model's output and the labels; a mean over the samples.
        microbatches: into how many parts a batch is split; parts may differ by one sample.
        schedule: name of `pipeline_schedule`, or a Schedule.
        stages: for each stage the names of its children, in the model's order; None balances their parameters.
        chunks: stages of a rank, for looped schedules.

    Attributes:
        schedule: what each rank does.
        stages: for each stage the names of its children.

    Raises:
        InputError: not a Sequential, fewer children than stages, or stages that are not all children in order.
        ScheduleError: the schedule does not run, is for another number of ranks, or leaves old weights (PipeDream).

    Collective: yes, all calls.

    Example:
        >>> net = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.ReLU(), sp.nn.Linear(8, 2))
        >>> pipeline = sp.parallel.Pipeline(net, sp.nn.CrossEntropyLoss(), microbatches=2)
        >>> float(pipeline.step(np.ones((4, 4), np.float32), np.array([0, 1, 0, 1]))) > 0
        True
    """

    def __init__(
        self,
        model: Module,
        loss_fn: Callable[..., Tensor],
        microbatches: int = 8,
        schedule: str | Schedule = "1f1b",
        stages: Sequence[Sequence[str]] | None = None,
        chunks: int | None = None,
    ) -> None:
        if not isinstance(model, Sequential):
            raise InputError(
                f"Pipeline: model is {format_type_of(model)}; a model whose parts run one after the other is needed: "
                "nn.Sequential(part, part, ...)."
            )
        communicator = current()
        if isinstance(schedule, str):
            schedule = pipeline_schedule(schedule, communicator.world_size, microbatches, chunks)
        if schedule.ranks != communicator.world_size:
            raise ScheduleError(
                f"Pipeline: the schedule is for {schedule.ranks} ranks, and the run has {communicator.world_size}."
            )
        if schedule.name.startswith("pipedream"):
            raise ScheduleError(
                f"Pipeline: {schedule.name} has no flush: its weights are of several versions, which are not kept yet. "
                "Take 1f1b, which has the same order and a flush."
            )
        schedule.check()
        self.schedule, self.model, self.loss_fn = schedule, model, loss_fn
        self._rank, self._communicator = communicator.rank, communicator
        # Stages of one replica.
        self._length = schedule.num_stages // (2 if schedule.placement == BIDIRECTIONAL else 1)
        # A child may stand in two places.
        children = dict(model._modules)
        self.stages = (
            balanced(children, self._length) if stages is None else checked_stages(children, stages, self._length)
        )
        self._cells = [read_cell(text, f"rank {self._rank}") for text in schedule.actions[self._rank]]
        own = sorted({action.stage for cell in self._cells for action in cell})
        self._modules = {
            stage: Sequential(*(children[name] for name in self.stages[stage % self._length])) for stage in own
        }
        self._shared = self._groups_of_owners()

    def _groups_of_owners(self) -> list[tuple[Parameter, Group]]:
        """Return the parameters that this rank shares with others, each with the group of its owners.

        These are tied weights, and all parameters if there are two replicas.
        """
        children = self.model._modules
        owners: dict[int, set[int]] = {}
        for stage in range(self.schedule.num_stages):
            for name in self.stages[stage % self._length]:
                for parameter in children[name].parameters():
                    owners.setdefault(id(parameter), set()).add(self.schedule.rank_of(stage))
        groups: dict[tuple[int, ...], Group | None] = {}
        found = []
        # All ranks make all groups, in the same order.
        for parameter in self.model.parameters():
            ranks = tuple(sorted(owners[id(parameter)]))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = self._communicator.new_group(ranks)
            if len(ranks) > 1 and self._rank in ranks:
                group = groups[ranks]
                assert group is not None
                found.append((parameter, group))
        return found

    # --- parameters -----------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of this rank's stages, with their names in the model; each once."""
        own = {id(parameter) for module in self._modules.values() for parameter in module.parameters()}
        for name, parameter in self.model.named_parameters():
            if id(parameter) in own:
                yield name, parameter

    def parameters(self) -> list[Parameter]:
        """Return the parameters of this rank's stages, for its optimizer."""
        return [parameter for _, parameter in self.named_parameters()]

    def stage(self, number: int, x: Tensor) -> Tensor:
        """Run a stage of this rank.

        Raises:
            InputError: it does not return one Tensor.
        """
        y = self._modules[number](x)
        if not isinstance(y, Tensor):
            raise InputError(
                f"Pipeline: stage {number} ({', '.join(self.stages[number % self._length])}) returned "
                f"{format_type_of(y)}; one Tensor goes from stage to stage."
            )
        return y

    def predict(self, inputs: Any) -> Tensor:
        """Run forward off the tape; return the model's output on every rank."""
        x = as_tensor(inputs).data
        last = self._length - 1
        with no_grad():
            for number in range(self._length):
                rank = self.schedule.rank_of(number)
                if rank == self._rank:
                    x = self.stage(number, as_tensor(x)).data
                target = self.schedule.rank_of(min(number + 1, last))
                if rank != target and rank == self._rank:
                    collectives.send(x, target, number)
                elif rank != target and target == self._rank:
                    x = receive(get_namespace(x), rank, number)
            source = self.schedule.rank_of(last)
            shape, dtype = self._communicator.broadcast_object((x.shape, x.dtype.str), source)
            if self._rank != source:
                x = get_namespace(x).empty(shape, dtype)
            return as_tensor(collectives.broadcast(x, source))

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, inputs: Any, labels: Any) -> Tensor:
        """Run forward and backward of a batch; gradients are added to `.grad` of this rank's parameters.

        The gradient of a parameter is that of the mean loss of the batch; its contributions are added in the order of
        the rank's actions.

        Args:
            inputs, labels: the whole batch, (samples, ...); the first stage reads the inputs, the last the labels.

        Returns:
            The mean loss of the batch, on every rank.

        Raises:
            ShapeError: fewer samples than micro-batches, or not as many labels.
        """
        return _Step(self, as_tensor(inputs), as_tensor(labels)).run()


class _Step:
    """The state of one step on this rank."""

    def __init__(self, pipeline: Pipeline, inputs: Tensor, labels: Tensor) -> None:
        schedule, count = pipeline.schedule, pipeline.schedule.microbatches
        if not inputs.ndim or len(inputs) < count or labels.ndim == 0 or len(labels) != len(inputs):
            raise ShapeError(
                f"Pipeline: inputs of shape {inputs.shape} and labels of shape {labels.shape} cannot be split into "
                f"{count} micro-batches: both need as many samples, {count} or more."
            )
        self._pipeline, self._schedule = pipeline, schedule
        self._length, self._rank = pipeline._length, pipeline._rank
        xp = get_namespace(inputs.data)
        self._inputs, self._labels = inputs, labels
        # Unequal parts differ by one sample.
        ends = [len(inputs) * (m + 1) // count for m in range(count)]
        self._bounds = list(zip([0, *ends[:-1]], ends, strict=True))
        self._loss = xp.zeros((), np.float64)
        # (stage, micro-batch) -> input and result of a forward; results of neighbours on this rank.
        self._live: dict[tuple[int, int], tuple[Tensor | None, Tensor]] = {}
        self._local: dict[tuple[int, int, int], Array] = {}
        self._late: dict[tuple[int, int], Callable[[], None]] = {}
        self._works: list[Work] = []
        # Gradients of this step of parameters that other ranks have, too.
        self._shared: dict[int, Array | None] = {id(parameter): None for parameter, _ in pipeline._shared}

    def run(self) -> Tensor:
        act = {FORWARD: self._forward, BACKWARD: self._backward, INPUT_GRADIENT: self._backward_first,
               WEIGHT_GRADIENT: self._backward_later}  # fmt: skip
        for cell in self._pipeline._cells:
            for action in cell:
                act[action.kind](action)
        for work in self._works:
            work.wait()
        for parameter, group in self._pipeline._shared:
            own = self._shared[id(parameter)]
            if own is None:
                own = get_namespace(parameter.data).zeros_like(parameter.data)
            _add(parameter, collectives.all_reduce(own, "sum", group))
        with no_grad():
            return as_tensor(collectives.all_reduce(self._loss))

    # --- actions --------------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        x: Tensor | None = None
        if stage % self._length == 0:
            y = self._pipeline.stage(stage, self._part(self._inputs, stage, m))
        else:
            x = as_tensor(self._receive(FORWARDS, stage - 1, stage, m))
            x.requires_grad = x.dtype.kind == "f"
            y = self._pipeline.stage(stage, x)
        if stage % self._length == self._length - 1:
            y = self._pipeline.loss_fn(y, self._part(self._labels, stage, m))
            self._loss += float(self._share(stage, m)) * y.data
        else:
            self._send(FORWARDS, stage, stage + 1, m, y.data)
        self._live[stage, m] = x, y

    def _backward(self, action: Action) -> None:
        x, y, dy = self._gradient_of(action)
        found: list[Array] = []
        if y.requires_grad:
            run_backward(y, dy, partial(self._deliver, x, found))
        self._send_back(action, x, found)

    def _backward_first(self, action: Action) -> None:
        x, y, dy = self._gradient_of(action)
        found: list[Array] = []
        if y.requires_grad:
            key = action.stage, action.microbatch
            self._late[key] = input_gradient(y, dy, x, partial(self._deliver, x, found))
        self._send_back(action, x, found)

    def _backward_later(self, action: Action) -> None:
        finish = self._late.pop((action.stage, action.microbatch), None)
        if finish is not None:
            finish()

    def _gradient_of(self, action: Action) -> tuple[Tensor | None, Tensor, Array]:
        """Return input and result of the forward of a stage, and the gradient of the result."""
        stage, m = action.stage, action.microbatch
        x, y = self._live.pop((stage, m))
        if stage % self._length == self._length - 1:
            xp = get_namespace(y.data)
            return x, y, xp.full(y.shape, self._share(stage, m), y.dtype)
        return x, y, self._receive(BACKWARDS, stage + 1, stage, m)

    def _send_back(self, action: Action, x: Tensor | None, found: list[Array]) -> None:
        if x is None:
            return
        gradient = found[0] if found else get_namespace(x.data).zeros_like(x.data)
        self._send(BACKWARDS, action.stage, action.stage - 1, action.microbatch, gradient)

    def _deliver(self, x: Tensor | None, found: list[Array], leaf: Tensor, gradient: Array) -> None:
        if leaf is x:
            found.append(gradient)
        elif id(leaf) not in self._shared:
            _add(leaf, gradient)
        # Gradients of earlier steps have been summed over the owners already.
        elif (sum_so_far := self._shared[id(leaf)]) is None:
            self._shared[id(leaf)] = gradient.copy()
        else:
            sum_so_far += gradient

    # --- parts of the batch ---------------------------------------------------------------------------

    def _number(self, stage: int, m: int) -> int:
        """Return the number of a micro-batch in the batch: of two replicas, each has every other one."""
        return m if self._schedule.placement != BIDIRECTIONAL else 2 * m + (stage >= self._length)

    def _part(self, x: Tensor, stage: int, m: int) -> Tensor:
        first, last = self._bounds[self._number(stage, m)]
        return as_tensor(x.data[first:last])

    def _share(self, stage: int, m: int) -> float:
        """Return the share of a micro-batch in the mean loss."""
        first, last = self._bounds[self._number(stage, m)]
        return (last - first) / len(self._inputs)

    # --- messages -------------------------------------------------------------------------------------

    def _tag(self, direction: int, source: int, m: int) -> int:
        return (m * self._schedule.num_stages + source) * 2 + direction

    def _send(self, direction: int, source: int, target: int, m: int, x: Array) -> None:
        """Give a result to the next stage; on this rank by reference."""
        rank = self._schedule.rank_of(target)
        if rank == self._rank:
            self._local[direction, source, m] = x
        else:
            self._works.append(collectives.isend(x, rank, self._tag(direction, source, m)))

    def _receive(self, direction: int, source: int, target: int, m: int) -> Array:
        rank = self._schedule.rank_of(source)
        if rank == self._rank:
            return self._local.pop((direction, source, m))
        return receive(get_namespace(self._inputs.data), rank, self._tag(direction, source, m))


def _add(leaf: Tensor, gradient: Array) -> None:
    if leaf.grad is None:
        leaf.grad = Tensor(gradient.copy())
    else:
        leaf.grad.data += gradient


def receive(xp: Any, rank: int, tag: int) -> Array:
    """Return the next message of this tag; its header has its shape and dtype."""
    header = collectives.probe(rank, tag)
    return collectives.recv(xp.empty(header.shape, header.dtype), rank, tag)
