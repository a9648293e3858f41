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
from simparallel.base.checks import is_integer
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
    """Train a model whose children run one after the other, cut into stages on the ranks of a pipeline.

    Every rank makes the same calls; it computes its own stages.

    Args:
        model: a Sequential. Its initial weights must be equal on all ranks, as with `set_seed`.
        loss_fn: loss of the model's output and the labels; a mean over the samples.
        microbatches: into how many parts a batch is split; parts may differ by one sample.
        schedule: name of `pipeline_schedule`, or a Schedule.
        stages: for each stage the names of its children, in the model's order; None balances their parameters.
        chunks: stages of a rank, for looped schedules.
        replicas: number of pipelines, for data parallelism; each has neighbouring ranks, and its own part of the batch,
            as in `DistributedDataParallel`.

    Attributes:
        schedule: what each rank of a pipeline does.
        replica: number of this rank's pipeline.
        stages: for each stage the names of its children.

    Raises:
        InputError: not a Sequential, fewer children than stages, or stages that are not all children in order.
            Ranks that cannot be divided into `replicas`.
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
        replicas: int = 1,
    ) -> None:
        if not isinstance(model, Sequential):
            raise InputError(
                f"Pipeline: model is {format_type_of(model)}; a model whose parts run one after the other is needed: "
                "nn.Sequential(part, part, ...)."
            )
        communicator = current()
        if not is_integer(replicas) or replicas < 1 or communicator.world_size % replicas:
            raise InputError(f"Pipeline: replicas={replicas!r} must divide the {communicator.world_size} ranks.")
        length = communicator.world_size // replicas
        if isinstance(schedule, str):
            schedule = pipeline_schedule(schedule, length, microbatches, chunks)
        if schedule.ranks != length:
            raise ScheduleError(f"Pipeline: the schedule is for {schedule.ranks} ranks, and a pipeline has {length}.")
        if schedule.name.startswith("pipedream"):
            raise ScheduleError(
                f"Pipeline: {schedule.name} has no flush: its weights are of several versions, which are not kept yet. "
                "Take 1f1b, which has the same order and a flush."
            )
        schedule.check()
        self.schedule, self.model, self.loss_fn = schedule, model, loss_fn
        self._communicator, self.replicas = communicator, replicas
        self.replica, self._rank = divmod(communicator.rank, length)
        # Stages from a batch's input to its loss; a bidirectional pipeline has all of them twice.
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

    def _groups_of_owners(self) -> list[tuple[Group, list[Parameter]]]:
        """Return the groups of ranks with which this one shares parameters, each with these parameters.

        These are tied weights, and all parameters of replicas and of bidirectional pipelines.
        """
        children = self.model._modules
        owners: dict[int, set[int]] = {}
        for stage in range(self.schedule.num_stages):
            for name in self.stages[stage % self._length]:
                for parameter in children[name].parameters():
                    owners.setdefault(id(parameter), set()).add(self.schedule.rank_of(stage))
        starts = range(0, self._communicator.world_size, self.schedule.ranks)
        groups: dict[tuple[int, ...], Group | None] = {}
        found: dict[tuple[int, ...], list[Parameter]] = {}
        # All ranks make all groups, in the same order.
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            ranks = tuple(start + rank for start in starts for rank in sorted(owners[id(parameter)]))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = self._communicator.new_group(ranks)
            if len(ranks) > 1 and self._communicator.rank in ranks:
                found.setdefault(ranks, []).append(parameter)
        return [(group, found[ranks]) for ranks, group in groups.items() if group is not None and ranks in found]

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
        """Run forward off the tape; return the model's output of these inputs on every rank of the pipeline."""
        x, start = as_tensor(inputs).data, self.first_rank
        ranks = [self.schedule.rank_of(number) for number in range(self._length)]
        with no_grad():
            for number, rank in enumerate(ranks):
                if rank == self._rank:
                    x = self.stage(number, as_tensor(x)).data
                # To the next stage, and from the last one to all.
                others = ranks[number + 1 : number + 2] or range(self.schedule.ranks)
                for other in others:
                    if rank == self._rank != other:
                        collectives.send(x, start + other, number)
                    elif other == self._rank != rank:
                        x = receive(get_namespace(x), start + rank, number)
        return as_tensor(x)

    @property
    def first_rank(self) -> int:
        """The first rank of this pipeline."""
        return self.replica * self.schedule.ranks

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, inputs: Any, labels: Any) -> Tensor:
        """Run forward and backward of a batch; gradients are added to `.grad` of this rank's parameters.

        The gradient of a parameter is that of the mean loss of the batch; its contributions are added in the order of
        the rank's actions.

        Args:
            inputs, labels: the whole batch of the pipeline, (samples, ...); the first stage reads the inputs, the last
                one the labels.

        Returns:
            The mean loss, over the pipelines, too; on every rank.

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
        self._length, self._rank, self._first_rank = pipeline._length, pipeline._rank, pipeline.first_rank
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
        self._shared: dict[int, Array | None] = {id(p): None for _, parameters in pipeline._shared for p in parameters}

    def run(self) -> Tensor:
        act = {FORWARD: self._forward, BACKWARD: self._backward, INPUT_GRADIENT: self._backward_first,
               WEIGHT_GRADIENT: self._backward_later}  # fmt: skip
        for cell in self._pipeline._cells:
            for action in cell:
                act[action.kind](action)
        for work in self._works:
            work.wait()
        self._sum_shared()
        with no_grad():
            return as_tensor(collectives.all_reduce(self._loss))

    def _sum_shared(self) -> None:
        """Sum the gradients of parameters that other ranks have, too: one collective for each group."""
        for group, parameters in self._pipeline._shared:
            own = [(p, self._shared[id(p)]) for p in parameters]
            sums = [get_namespace(p.data).zeros_like(p.data) if x is None else x for p, x in own]
            for parameter, total in zip(parameters, collectives.all_reduce(sums, "sum", group), strict=True):
                _add(parameter, total)

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
        return (last - first) / len(self._inputs) / self._pipeline.replicas

    # --- messages -------------------------------------------------------------------------------------

    def _tag(self, direction: int, source: int, m: int) -> int:
        return (m * self._schedule.num_stages + source) * 2 + direction

    def _send(self, direction: int, source: int, target: int, m: int, x: Array) -> None:
        """Give a result to the next stage; on this rank by reference."""
        rank = self._schedule.rank_of(target)
        if rank == self._rank:
            self._local[direction, source, m] = x
        else:
            self._works.append(collectives.isend(x, self._first_rank + rank, self._tag(direction, source, m)))

    def _receive(self, direction: int, source: int, target: int, m: int) -> Array:
        rank = self._schedule.rank_of(source)
        if rank == self._rank:
            return self._local.pop((direction, source, m))
        xp = get_namespace(self._inputs.data)
        return receive(xp, self._first_rank + rank, self._tag(direction, source, m))


def _add(leaf: Tensor, gradient: Array) -> None:
    if leaf.grad is None:
        leaf.grad = Tensor(gradient.copy())
    else:
        leaf.grad.data += gradient


def receive(xp: Any, rank: int, tag: int) -> Array:
    """Return the next message of this tag; its header has its shape and dtype."""
    header = collectives.probe(rank, tag)
    return collectives.recv(xp.empty(header.shape, header.dtype), rank, tag)
