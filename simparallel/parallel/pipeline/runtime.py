"""Run a pipeline: each rank does the actions of its list, with real gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad, run_backward
from simparallel.autograd.tape import Node, Reversible
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace, random_state
from simparallel.base.checks import is_integer
from simparallel.base.units import format_type_of
from simparallel.comm import Group, Work, current
from simparallel.errors import InputError, ScheduleError, ShapeError
from simparallel.nn import Module
from simparallel.nn.parameter import Parameter
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, read_cell
from simparallel.parallel.pipeline.schedule import BIDIRECTIONAL, Schedule, pipeline_schedule
from simparallel.parallel.pipeline.split_backward import input_gradient
from simparallel.parallel.pipeline.stage_forward import Crossing, Known, StageForward, Switch
from simparallel.parallel.pipeline.stages import balanced, calls, checked, find, owners, sizes_of, traced

FORWARDS, BACKWARDS = 0, 1


class Pipeline:
    """Train a model that is cut into stages on the ranks of a pipeline.

    The model may be any Module: each rank runs its forward, and computes its own stages. A value that a later stage
    needs goes there directly, also past other stages. Every rank makes the same calls.

    Args:
        model: its initial weights must be equal on all ranks, as with `set_seed`.
        loss_fn: loss of the model's output and the labels; a mean over the samples.
        microbatches: into how many parts a batch is split; parts may differ by one sample.
        schedule: name of `pipeline_schedule`, or a Schedule.
        stages: for each stage the names of its children, such as "norm" or "blocks.0", in the order of their calls.
            Name a parameter in each stage where the model's own code uses it, as for tied embeddings. None balances
            the stages: by simulated time with `example`, else by numbers of parameters.
        chunks: stages of a rank, for looped schedules.
        replicas: number of pipelines, for data parallelism; each has neighbouring ranks, and its own part of the batch,
            as in `DistributedDataParallel`.
        example: inputs and labels as for `step`, of a few samples, with which the model is run once without data, to
            find the order of the calls, their times, and shared parameters.

    Attributes:
        schedule: what each rank of a pipeline does.
        replica: number of this rank's pipeline.
        stages: for each stage the names of its children.
        losses: of the micro-batches of the last step that this rank computed, in the order of the batch.

    Raises:
        InputError: fewer children than stages; stages with an unknown name, or not every parameter; ranks that cannot
            be divided into `replicas`.
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
        example: tuple[Any, Any] | None = None,
    ) -> None:
        if not isinstance(model, Module):
            raise InputError(f"Pipeline: model is {format_type_of(model)}; a Module is needed.")
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
        if stages is None:
            stages = self._found_stages(example)
        self.stages = checked(model, stages, self._length)
        self._cells = [read_cell(text, f"rank {self._rank}") for text in schedule.actions[self._rank]]
        self._switch, self._known = Switch(calls(model, self.stages)), Known()
        ranks_of_stage = [
            {schedule.rank_of(s) for s in range(stage, schedule.num_stages, self._length)}
            for stage in range(self._length)
        ]
        # id of a parameter -> the ranks of a pipeline that have it.
        self._stages_of = owners(model, self.stages)
        self._owners = {key: set().union(*(ranks_of_stage[s] for s in found)) for key, found in self._stages_of.items()}
        self._shared = self._groups_of_owners()
        self.losses: list[Tensor] = []

    def _found_stages(self, example: tuple[Any, Any] | None) -> Sequence[Sequence[str]]:
        if example is None:
            return balanced(sizes_of(self.model), self._length)
        inputs, labels = _tensors(example[0]), as_tensor(example[1])
        return traced(
            self.model, lambda: self.loss_fn(self.model(*inputs), labels), partial(balanced, count=self._length)
        )

    def _groups_of_owners(self) -> list[tuple[Group, list[Parameter]]]:
        """Return the groups of ranks with which this one shares parameters, each with these parameters.

        These are tied weights, and all parameters of replicas and of bidirectional pipelines.
        """
        starts = range(0, self._communicator.world_size, self.schedule.ranks)
        groups: dict[tuple[int, ...], Group | None] = {}
        found: dict[tuple[int, ...], list[Parameter]] = {}
        # All ranks make all groups, in the same order.
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            ranks = tuple(start + rank for start in starts for rank in sorted(self._owners[id(parameter)]))
            if len(ranks) > 1 and ranks not in groups:
                groups[ranks] = self._communicator.new_group(ranks)
            if len(ranks) > 1 and self._communicator.rank in ranks:
                found.setdefault(ranks, []).append(parameter)
        return [(group, found[ranks]) for ranks, group in groups.items() if group is not None and ranks in found]

    # --- parameters -----------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield the parameters of this rank's stages, with their names in the model; each once."""
        for name, parameter in self.model.named_parameters():
            if self._rank in self._owners[id(parameter)]:
                yield name, parameter

    def parameters(self) -> list[Parameter]:
        """Return the parameters of this rank's stages, for its optimizer."""
        return [parameter for _, parameter in self.named_parameters()]

    def sync_parameters(self) -> None:
        """Copy the parameters and buffers of each stage to all ranks, which then have the trained model."""
        for stage, names in enumerate(self.stages):
            for found in (find(self.model, name) for name in names):
                tensors = [*found.parameters(), *found.buffers()] if isinstance(found, Module) else [found]
                for x in tensors:
                    collectives.broadcast(x, self.schedule.rank_of(stage))

    @property
    def first_rank(self) -> int:
        """The first rank of this pipeline."""
        return self.replica * self.schedule.ranks

    def predict(self, *inputs: Any) -> Tensor:
        """Run forward off the tape; return the model's output of these inputs on every rank of the pipeline.

        Raises:
            InputError: the model does not return one Tensor.
        """
        step, found = _Step(self, inputs, None), None
        with no_grad(), self._switch.installed():
            for stage in range(self._length):
                if self.schedule.rank_of(stage) == self._rank:
                    y, pass_ = step.run_stage(stage, 0)
                    if isinstance(y, Tensor) and pass_.stage_of(y) == stage:
                        found = y.data
            return as_tensor(step.from_last(found))

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, inputs: Any, labels: Any) -> Tensor:
        """Run forward and backward of a batch; gradients are added to `.grad` of this rank's parameters.

        The gradient of a parameter is that of the mean loss of the batch; its contributions are added in the order of
        the rank's actions. Random masks are those of one device that runs the whole batch. A batch norm has the
        statistics of a micro-batch, and updates its running ones with each.

        Args:
            inputs: the whole batch of the pipeline, (samples, ...), or a tuple of several inputs of the model.
            labels: its labels, (samples, ...).

        Returns:
            The mean loss, over the pipelines, too; on every rank.

        Raises:
            ShapeError: fewer samples than micro-batches, or not as many labels.
            InputError: code of the model uses a parameter in a stage that does not name it, calls a child with a value
                of a later stage, or no loss comes from the last stage.
            UnknownValueError: code of the model decides by a value of another stage.
        """
        return _Step(self, inputs if isinstance(inputs, tuple) else (inputs,), labels).run()

    def run(self, labels: Tensor | None, *inputs: Tensor) -> Any:
        """Run the model's forward, and the loss of these labels."""
        y = self.model(*inputs)
        return y if labels is None else self.loss_fn(y, labels)

    def check_used(self, used: dict[int, set[int]]) -> None:
        """Raise InputError if code of the model uses a parameter in a stage that does not have it."""
        for name, parameter in self.model.named_parameters():
            for stage in sorted(used.get(id(parameter), set()) - self._stages_of[id(parameter)]):
                raise InputError(
                    f"Pipeline: code of the model uses {name} in stage {stage}, and it is in stages "
                    f"{sorted(self._stages_of[id(parameter)])}. Name it there, too: stages=[…, [{stage}: …, '{name}'], "
                    "…]; or pass example=(inputs, labels), by which such parameters are found."
                )


class _Live(NamedTuple):
    """A forward whose backward is to come: the values that came from other stages, and those that went there."""

    received: list[tuple[Crossing, Tensor]]
    sent: list[tuple[Crossing, Tensor]]
    loss: Tensor | None


class _Ends(Reversible):
    """Joins the results of a stage to one root of its backward."""

    def __init__(self, gradients: list[Array]) -> None:
        self._gradients = gradients

    def run_backward(self, ctx: Any, dy: Array) -> list[Array]:
        return self._gradients


class _Step:
    """The state of one step on this rank."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], labels: Any) -> None:
        schedule = pipeline.schedule
        # Prediction runs the batch in one part.
        count = 1 if labels is None else schedule.microbatches
        self._inputs, self._labels = _tensors(inputs), None if labels is None else as_tensor(labels)
        self._samples = _samples([*self._inputs, *([] if self._labels is None else [self._labels])], count)
        self._pipeline, self._schedule = pipeline, schedule
        self._length, self._rank, self._first_rank = pipeline._length, pipeline._rank, pipeline.first_rank
        self._xp = get_namespace(*(x.data for x in self._inputs))
        # Unequal parts differ by one sample.
        self._ends = [self._samples * m // count for m in range(count + 1)]
        self._loss = self._xp.zeros((), np.float64)
        self._losses: list[tuple[int, Array]] = []
        # (stage, micro-batch) -> its forward; direction, crossing, micro-batch -> a value for this rank itself.
        self._live: dict[tuple[int, int], _Live] = {}
        self._local: dict[tuple[int, Crossing, int], Array] = {}
        self._late: dict[tuple[int, int], Callable[[], None]] = {}
        self._works: list[Work] = []
        # Random numbers at the start; calls of each stream of masks so far.
        self._drawn = random_state.snapshot()
        self._masks: dict[str, int] = {}
        # Gradients of this step of parameters that other ranks have, too.
        self._shared: dict[int, Array | None] = {id(p): None for _, parameters in pipeline._shared for p in parameters}

    def run(self) -> Tensor:
        act = {FORWARD: self._forward, BACKWARD: self._backward, INPUT_GRADIENT: self._backward_first,
               WEIGHT_GRADIENT: self._backward_later}  # fmt: skip
        with self._pipeline._switch.installed():
            for cell in self._pipeline._cells:
                for action in cell:
                    act[action.kind](action)
        random_state.calls = self._masks
        for work in self._works:
            work.wait()
        self._sum_shared()
        self._pipeline.losses = [as_tensor(loss) for _, loss in sorted(self._losses, key=itemgetter(0))]
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

    def run_stage(self, stage: int, m: int) -> tuple[Any, StageForward]:
        """Run the forward of a stage; return what the model's code returned, and the pass."""
        first, last = self._span(stage, m)
        forward = StageForward(
            stage % self._length, self._pipeline._switch, _Mail(self, stage, m), self._pipeline._known
        )
        inputs = [as_tensor(x.data[first:last]) for x in self._inputs]
        labels = None if self._labels is None else as_tensor(self._labels.data[first:last])
        # The same masks as on one device: those of the samples' places in the whole batch.
        random_state.restore(self._drawn)
        given, replicas = random_state.given_part, self._pipeline.replicas
        start = self._pipeline.replica * self._samples + first
        random_state.given_part = Fraction(start, last - first), Fraction(self._samples * replicas, last - first)
        try:
            return forward.run_model(self._pipeline.run, labels, *inputs), forward
        finally:
            random_state.given_part = given
            # A pass ends early, without the masks of later stages.
            for stream, count in random_state.calls.items():
                self._masks[stream] = max(count, self._masks.get(stream, 0))

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        loss, forward = self.run_stage(stage, m)
        if forward.is_first:
            self._check(loss, forward)
        is_last = stage % self._length == self._length - 1
        if is_last:
            self._loss += self._share(stage, m) * loss.data
            self._losses.append((self._number(stage, m), loss.data))
        self._live[stage, m] = _Live(forward.received, forward.sent, loss if is_last else None)

    def _check(self, loss: Any, forward: StageForward) -> None:
        self._pipeline.check_used(forward.used)
        end = self._length - 1
        source = forward.stage_of(loss)
        if not isinstance(loss, Tensor) or source != end or loss.shape:
            told = f" of shape {loss.shape} from stage {source}" if isinstance(loss, Tensor) else ""
            raise InputError(
                f"Pipeline: loss_fn gave {format_type_of(loss)}{told}; a Tensor of shape () from stage {end}, the last "
                "one, is needed."
            )

    def _backward(self, action: Action) -> None:
        live, root, seed = self._root_of(action)
        found: dict[int, Array] = {}
        if root.requires_grad:
            run_backward(root, seed, partial(self._deliver, live, found))
        self._send_back(action, live, found)

    def _backward_first(self, action: Action) -> None:
        live, root, seed = self._root_of(action)
        found: dict[int, Array] = {}
        if root.requires_grad:
            leaves = [x for _, x in live.received]
            deliver = partial(self._deliver, live, found)
            self._late[action.stage, action.microbatch] = input_gradient(root, seed, leaves, deliver)
        self._send_back(action, live, found)

    def _backward_later(self, action: Action) -> None:
        finish = self._late.pop((action.stage, action.microbatch), None)
        if finish is not None:
            finish()

    def _root_of(self, action: Action) -> tuple[_Live, Tensor, Array]:
        """Return the forward of a stage, the tensor from which its backward starts, and the gradient of that tensor."""
        stage, m = action.stage, action.microbatch
        live = self._live.pop((stage, m))
        mail = _Mail(self, stage, m)
        ends = [(x, mail.gradient_of(crossing)) for crossing, x in live.sent if x.dtype.kind == "f"]
        if live.loss is not None:
            ends.append((live.loss, self._xp.full((), self._share(stage, m), live.loss.dtype)))
        ends = [(x, gradient) for x, gradient in ends if x.requires_grad]
        if len(ends) == 1:
            return live, *ends[0]
        return live, *_joined(ends, self._xp)

    def _send_back(self, action: Action, live: _Live, found: dict[int, Array]) -> None:
        mail = _Mail(self, action.stage, action.microbatch)
        for crossing, x in live.received:
            if x.requires_grad:
                gradient = found.get(id(x))
                mail.send_gradient(crossing, get_namespace(x.data).zeros_like(x.data) if gradient is None else gradient)

    def _deliver(self, live: _Live, found: dict[int, Array], leaf: Tensor, gradient: Array) -> None:
        if any(leaf is x for _, x in live.received):
            found[id(leaf)] = gradient
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

    def _span(self, stage: int, m: int) -> tuple[int, int]:
        """Return the samples of a micro-batch."""
        number = self._number(stage, m)
        return self._ends[number], self._ends[number + 1]

    def _share(self, stage: int, m: int) -> float:
        """Return the share of a micro-batch in the mean loss."""
        first, last = self._span(stage, m)
        return (last - first) / self._samples / self._pipeline.replicas

    # --- messages -------------------------------------------------------------------------------------

    def send(self, direction: int, crossing: Crossing, m: int, target: int, x: Array) -> None:
        """Give a value to another stage; on this rank by reference."""
        rank = self._schedule.rank_of(target)
        if rank == self._rank:
            self._local[direction, crossing, m] = x
        else:
            self._works.append(collectives.isend(x, self._first_rank + rank, self._tag(direction, crossing, m)))

    def receive(self, direction: int, crossing: Crossing, m: int, source: int) -> Array:
        rank = self._schedule.rank_of(source)
        if rank == self._rank:
            return self._local.pop((direction, crossing, m))
        return _received(self._xp, self._first_rank + rank, self._tag(direction, crossing, m))

    def _tag(self, direction: int, crossing: Crossing, m: int) -> int:
        source, target, number = crossing
        num_stages = self._schedule.num_stages
        return (
            ((number * self._schedule.microbatches + m) * num_stages + source) * num_stages + target
        ) * 2 + direction

    def from_last(self, x: Array | None) -> Array:
        """Return a value of the last stage on every rank of the pipeline."""
        last = self._schedule.rank_of(self._length - 1)
        if self._rank != last:
            return _received(self._xp, self._first_rank + last, 0)
        if x is None:
            raise InputError("Pipeline: the model does not return one Tensor of its last stage.")
        for rank in range(self._schedule.ranks):
            if rank != last:
                collectives.send(x, self._first_rank + rank, 0)
        return x


class _Mail(NamedTuple):
    """The messages of one forward or backward: crossings count stages from the input of their own replica."""

    step: _Step
    stage: int
    microbatch: int

    def _global(self, crossing: Crossing) -> Crossing:
        start = self.stage - self.stage % self.step._length
        return Crossing(crossing.source + start, crossing.target + start, crossing.number)

    def send(self, crossing: Crossing, x: Tensor) -> None:
        own = self._global(crossing)
        self.step.send(FORWARDS, own, self.microbatch, own.target, x.data)

    def receive(self, crossing: Crossing) -> Tensor:
        own = self._global(crossing)
        x = as_tensor(self.step.receive(FORWARDS, own, self.microbatch, own.source))
        x.requires_grad = x.dtype.kind == "f"
        return x

    def send_gradient(self, crossing: Crossing, gradient: Array) -> None:
        own = self._global(crossing)
        self.step.send(BACKWARDS, own, self.microbatch, own.source, gradient)

    def gradient_of(self, crossing: Crossing) -> Array:
        own = self._global(crossing)
        return self.step.receive(BACKWARDS, own, self.microbatch, own.target)


def _tensors(inputs: Any) -> list[Tensor]:
    return [as_tensor(x) for x in (inputs if isinstance(inputs, tuple) else (inputs,))]


def _samples(tensors: Sequence[Tensor], count: int) -> int:
    """Return the number of samples. Raise ShapeError unless all tensors have as many, and enough for `count` parts."""
    shapes = [x.shape for x in tensors]
    samples = {shape[0] if shape else 0 for shape in shapes}
    if len(samples) != 1 or min(samples) < count:
        raise ShapeError(
            f"Pipeline: inputs and labels of shapes {', '.join(map(str, shapes))} cannot be split into {count} "
            f"micro-batches: all need as many samples, {count} or more."
        )
    return samples.pop()


def _joined(ends: list[tuple[Tensor, Array]], xp: Any) -> tuple[Tensor, Array]:
    """Return a tensor behind which are all results of a stage, and its gradient."""
    zero = xp.zeros((), np.float32)
    if not ends:
        return as_tensor(zero), zero
    tensors, gradients = zip(*ends, strict=True)
    return Tensor._result(zero, Node(_Ends(list(gradients)), _Needs((True,) * len(ends)), tensors)), zero  # type: ignore[arg-type]


class _Needs:
    """Context of `_Ends`."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs = needs


def _add(leaf: Tensor, gradient: Array) -> None:
    if leaf.grad is None:
        leaf.grad = Tensor(gradient.copy())
    else:
        leaf.grad.data += gradient


def _received(xp: Any, rank: int, tag: int) -> Array:
    """Return the next message of this tag; its header has its shape and dtype."""
    header = collectives.probe(rank, tag)
    return collectives.recv(xp.empty(header.shape, header.dtype), rank, tag)
