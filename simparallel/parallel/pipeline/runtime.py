"""Run a pipeline: each rank does the actions of its list, with real gradients."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import pairwise
from math import inf, prod
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad, run_backward
from simparallel.autograd.tape import mark_changed
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace, random_state
from simparallel.base.units import format_type_of
from simparallel.comm import Group, Work, current
from simparallel.errors import InputError, ScheduleError, ShapeError
from simparallel.hardware.memory import parse_bytes
from simparallel.layout.mesh import Mesh
from simparallel.nn import Module
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.nn.parameter import Parameter
from simparallel.optim.norms import clip_grad_norm_
from simparallel.parallel.operator.interpreter import running_on
from simparallel.parallel.pipeline.action import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action, read_cell
from simparallel.parallel.pipeline.schedule import BIDIRECTIONAL, Schedule, pipeline_schedule
from simparallel.parallel.pipeline.split_backward import input_gradient, joined
from simparallel.parallel.pipeline.stage_forward import Crossing, Known, StageForward, Switch
from simparallel.parallel.pipeline.stages import balanced, calls, checked, owners, sizes_of, tensors_of, traced, within

FORWARDS, BACKWARDS = 0, 1
# Names of axes.
PIPELINE, DATA = "pp", "dp"
PIPEDREAM, PIPEDREAM_2BW = "pipedream", "pipedream_2bw"
_WORDS = {
    FORWARD: "forward", BACKWARD: "backward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradients"
}  # fmt: skip


class Pipeline:
    """Train a model that is cut into stages on the ranks of a pipeline.

    The model may be any Module: each rank runs its forward, and computes its own stages. A value that a later stage
    needs goes there directly, also past other stages. Every rank makes the same calls.

    Args:
        model: its initial weights must be equal on all ranks, as with `set_seed`. If it is made inside
            `no_init_parameters()`, a rank has memory for the parameters of its own stages alone.
        loss_fn: loss of the model's output and the labels; a mean over the samples.
        microbatches: into how many parts a batch is split; parts may differ by one sample.
        schedule: name of `pipeline_schedule`, or a Schedule.
        stages: for each stage the names of its children, such as "norm" or "blocks.0", in the order of their calls.
            Name a parameter in each stage where the model's own code uses it, as for tied embeddings. None balances
            the stages: by simulated time with `example`, else by numbers of parameters.
        balance: for each stage its number of parts, in place of `stages`. Parts are the children of the model, and the
            entries of containers such as Sequential and ModuleList.
        chunks: stages of a rank, for looped schedules.
        mesh: all ranks, with the axis "pp" along the pipeline. "dp" is the axis of data parallelism: of pipelines that
            each get their own part of the batch, as in `DistributedDataParallel`. The ranks along all other axes run a
            stage together: before, cut its parameters over `mesh.group(axes, rank)` with Layouts, as by
            `distribute_module`. Tensors without a Layout count as replicated, and values go to other stages whole.
            None for one pipeline of all ranks.
        example: inputs and labels of a micro-batch, with which the model is run once without data, to find the order
            of the calls, their times on the described device, and shared parameters.
        memory_limit: of a rank, in bytes or as "8GB"; needs `example`. The stages of a rank share it evenly, and each
            holds its weights, their gradients, and the results of its ops for all live micro-batches.
        weight_fn: weight of a micro-batch in the mean, from its labels; by default its number of samples. For a loss
            that is a mean over tokens, return their number.

    Attributes:
        schedule: what each rank of a pipeline does.
        replica: number of this rank's pipeline along "dp"; `replicas`: their number.
        stages: for each stage the names of its children.
        losses: of the micro-batches of the last step that this rank computed, in the order of the batch.

    Raises:
        InputError: fewer children than stages; stages with an unknown name, or not every parameter; a mesh without
            "pp", or not of all ranks.
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
        mesh: Mesh | None = None,
        example: tuple[Any, Any] | None = None,
        weight_fn: Callable[[Tensor], float] | None = None,
        balance: Sequence[int] | None = None,
        memory_limit: str | int | None = None,
    ) -> None:
        if not isinstance(model, Module):
            raise InputError(f"Pipeline: model is {format_type_of(model)}; a Module is needed.")
        communicator = current()
        mesh = mesh or Mesh((communicator.world_size,), (PIPELINE,))
        if PIPELINE not in mesh.axis_names or sorted(mesh.ranks) != list(range(communicator.world_size)):
            raise InputError(
                f"Pipeline: {mesh!r} must have an axis {PIPELINE!r}, and all {communicator.world_size} ranks of the "
                "run."
            )
        length = mesh.axis_size(PIPELINE)
        if isinstance(schedule, str):
            schedule = pipeline_schedule(schedule, length, microbatches, chunks)
        if schedule.ranks != length:
            raise ScheduleError(f"Pipeline: the schedule is for {schedule.ranks} ranks, and a pipeline has {length}.")
        schedule.check()
        self.schedule, self.model, self.loss_fn, self.mesh = schedule, model, loss_fn, mesh
        self._communicator, self._weight_fn = communicator, weight_fn
        place = dict(zip(mesh.axis_names, mesh.coordinate(communicator.rank), strict=True))
        self._rank, self.replica = place[PIPELINE], place.get(DATA, 0)
        self.replicas = mesh.axis_size(DATA) if DATA in place else 1
        # Global ranks: of this rank's pipeline, in order, and of those that run a stage with it.
        self.ranks = mesh.group(PIPELINE, communicator.rank)
        self._mates = mesh.group([axis for axis in mesh.axis_names if axis not in (PIPELINE, DATA)], communicator.rank)
        # Stages from a batch's input to its loss; a bidirectional pipeline has all of them twice.
        self._length = schedule.num_stages // (2 if schedule.placement == BIDIRECTIONAL else 1)
        if stages is None:
            stages = self._found_stages(example, balance, memory_limit)
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
        # Parameters made inside `no_init_parameters()` exist on the ranks of their stages alone.
        for parameter in self.parameters():
            if is_deferred(parameter):
                materialize(parameter)
        self._shared = self._groups_of_owners()
        if schedule.name == PIPEDREAM and self._shared:
            raise InputError(
                f"Pipeline: {PIPEDREAM} updates each rank on its own, and here ranks share parameters: tied weights, "
                "or replicas. Take pipedream_2bw or 1f1b."
            )
        # The weights before the last step, for PipeDream-2BW.
        self._previous: dict[int, Array] = {}
        # The ranks of this rank's pipeline, once they are needed as a group.
        self._group: Group | None = None
        self.losses: list[Tensor] = []

    def _found_stages(
        self, example: tuple[Any, Any] | None, balance: Sequence[int] | None, memory_limit: str | int | None
    ) -> Sequence[Sequence[str]]:
        if example is None:
            if memory_limit is not None:
                raise InputError("Pipeline: memory_limit needs example=(inputs, labels), of a micro-batch.")
            return balanced(sizes_of(self.model), self._length, balance)
        inputs, labels = _tensors(example[0]), as_tensor(example[1])
        limit_bytes = inf if memory_limit is None else parse_bytes(memory_limit) / self.schedule.chunks
        limits = [(limit_bytes, self.schedule.live_of(stage)) for stage in range(self._length)]
        return traced(self.model, lambda: self.run(labels, *inputs), partial(within, limits, balance))

    def _groups_of_owners(self) -> list[tuple[Group, list[Parameter]]]:
        """Return the groups of ranks with which this one shares parameters, each with these parameters.

        These are tied weights, and all parameters of replicas and of bidirectional pipelines.
        """
        groups: dict[tuple[int, ...], Group | None] = {}
        found: dict[tuple[int, ...], list[Parameter]] = {}
        mesh = self.mesh
        # The ranks of all replicas, at the place of each rank of a stage: [[ranks of a pipeline], …].
        columns = mesh.groups([DATA, PIPELINE] if DATA in mesh.axis_names else [PIPELINE])
        length = self.schedule.ranks
        # All ranks make all groups, in the same order.
        for parameter in self.model.parameters():
            if not parameter.requires_grad:
                continue
            own = self._owners[id(parameter)]
            for column in columns:
                ranks = tuple(rank for i, rank in enumerate(column) if i % length in own)
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

    def predict(self, *inputs: Any) -> Tensor:
        """Run forward off the tape; return the model's output of these inputs on every rank of the pipeline.

        Raises:
            InputError: the model does not return one Tensor.
        """
        step, found = _Step(self, inputs, None), None
        with no_grad(), self._switch.installed(), running_on(self._mates):
            for stage in range(self._length):
                if self.schedule.rank_of(stage) == self._rank:
                    y, pass_ = step.run_stage(stage, 0)
                    if isinstance(y, Tensor) and pass_.stage_of(y) == stage:
                        found = y.full_tensor().data
            step.end_masks()
            return as_tensor(step.from_last(found))

    # --- a step ---------------------------------------------------------------------------------------

    def step(self, inputs: Any, labels: Any, optimizer: Any = None) -> Tensor:
        """Run forward and backward of a batch; gradients are added to `.grad` of this rank's parameters.

        The gradient of a parameter is that of the mean loss of the batch; its contributions are added in the order of
        the rank's actions. Random masks are those of one device that runs the whole batch. A batch norm has the
        statistics of a micro-batch, and updates its running ones with each.

        With the schedule "pipedream" each micro-batch is a batch of its own: the rank's optimizer steps after each
        backward, which sees the weights that its forward saw (Narayanan et al. 2019, "PipeDream", arXiv 1806.03377).
        With "pipedream_2bw" gradients are those of the weights before the last step (Narayanan et al. 2021, "Memory-
        efficient pipeline-parallel DNN training", arXiv 2006.09503); step the optimizer as usual.

        Args:
            inputs: the whole batch of the pipeline, (samples, ...), or a tuple of several inputs of the model.
            labels: its labels, (samples, ...).
            optimizer: of this rank's parameters; for "pipedream" alone, which also resets their gradients.

        Returns:
            The mean loss, over the pipelines, too; on every rank.

        Raises:
            ShapeError: fewer samples than micro-batches, or not as many labels.
            InputError: code of the model uses a parameter in a stage that does not name it, calls a child with a value
                of a later stage, or no loss comes from the last stage. An optimizer is missing, or not needed.
            UnknownValueError: code of the model decides by a value of another stage.
        """
        if (optimizer is not None) != (self.schedule.name == PIPEDREAM):
            raise InputError(
                f"Pipeline: step(..., optimizer=...) is for the schedule {PIPEDREAM!r}, which needs one; this is "
                f"{self.schedule.name!r}."
            )
        step = _Step(self, inputs if isinstance(inputs, tuple) else (inputs,), labels, optimizer)
        if self.schedule.name != PIPEDREAM_2BW:
            return step.run()
        now = {id(p): p.data for p in self.parameters()}
        for parameter in self.parameters():
            parameter.data = self._previous.get(id(parameter), parameter.data)
        try:
            return step.run()
        finally:
            for parameter in self.parameters():
                parameter.data = now[id(parameter)]
                # The optimizer writes in place.
                self._previous[id(parameter)] = parameter.data.copy()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients of all stages so that their total norm is at most `max_norm`; return the norm before.

        A gradient that several ranks hold counts once. See `clip_grad_norm_`.

        Raises:
            InputError: a setting out of range; or a norm that is not finite, and then nothing is changed.

        Collective: yes, over all ranks: the barrier that ends "zero bubble".
        """
        return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite, over=self._over_ranks)

    def _over_ranks(self, values: list[float], gradients: list[Tensor], op: str = "sum") -> list[float]:
        """Reduce values of this rank's gradients over all ranks, to one; see `over_slices`."""
        with_gradient = [p for p in self.parameters() if p.grad is not None]
        own = max(values, default=0.0)
        if op == "sum":
            own = 0.0
            for value, parameter in zip(values, with_gradient, strict=True):
                slices = 1 if parameter.placement is None else prod(parameter.placement.layout.cuts)
                holders = len(self._owners[id(parameter)]) * self.replicas * len(self._mates)
                own += value * slices / holders
        return [self._communicator.all_reduce(np.asarray(own, np.float64), op).item()]

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, such as for `GradScaler(reduce_overflow=pipeline.any_rank)`."""
        return bool(self._communicator.all_reduce(np.asarray(flag, np.int64), "max").item())

    def collect(self) -> None:
        """Copy the parameters and buffers of all stages into the model, on every rank.

        Training changes those of a rank's own stages alone. Afterwards the model is that of one device: save
        `model.state_dict()`, whose names do not depend on the stages; load it on every rank, into any cut.
        """
        if self._group is None:
            groups = [self._communicator.new_group(ranks) for ranks in self.mesh.groups(PIPELINE)]
            self._group = next(group for group in groups if group.rank is not None)
        stages = {id(x): stage for stage, names in enumerate(self.stages) for x in tensors_of(self.model, names)}
        for _, x in self.model._saved_tensors():
            rank = self.schedule.rank_of(stages.get(id(x), 0))
            x.data[...] = collectives.broadcast(x.data, self.ranks[rank], self._group)
            mark_changed([x])

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


class _Step:
    """The state of one step on this rank."""

    def __init__(self, pipeline: Pipeline, inputs: Sequence[Any], labels: Any, optimizer: Any = None) -> None:
        schedule, self._optimizer = pipeline.schedule, optimizer
        # Prediction runs the batch in one part.
        count = 1 if labels is None else schedule.microbatches
        self._inputs, self._labels = _tensors(inputs), None if labels is None else as_tensor(labels)
        self._samples = _samples([*self._inputs, *([] if self._labels is None else [self._labels])], count)
        self._pipeline, self._schedule = pipeline, schedule
        self._length, self._rank, self._ranks = pipeline._length, pipeline._rank, pipeline.ranks
        self._xp = get_namespace(*(x.data for x in self._inputs))
        # Unequal parts differ by one sample.
        self._ends = [self._samples * m // count for m in range(count + 1)]
        self._weights = self._weights_of_parts(count)
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
        with self._pipeline._switch.installed(), running_on(self._pipeline._mates):
            for cell in self._pipeline._cells:
                for action in cell:
                    try:
                        act[action.kind](action)
                    except BaseException as error:
                        error.add_note(self._place(action, str(error)))
                        raise
        self.end_masks()
        for work in self._works:
            work.wait()
        self._sum_shared()
        self._pipeline.losses = [as_tensor(loss) for _, loss in sorted(self._losses, key=itemgetter(0))]
        with no_grad():
            # The ranks of a stage have the same loss.
            return as_tensor(collectives.all_reduce(self._loss) / len(self._pipeline._mates))

    def _place(self, action: Action, text: str) -> str:
        """Return the place of an error in the pipeline, and the values that its message knows by their tags."""
        names = ", ".join(self._pipeline.stages[action.stage % self._length])
        told = f"In the pipeline: {action}, {_WORDS[action.kind]} of micro-batch {action.microbatch} in stage "
        told += f"{action.stage} ({names}), rank {self._ranks[self._rank]}."
        for tag in dict.fromkeys(map(int, re.findall(r"\btag[= ](\d+)", text))):
            direction, (source, target, number), m = self._of_tag(tag)
            value = f"value {number} of stage {source} for stage {target}, micro-batch {m}"
            told += f" Tag {tag} is {'the gradient of ' * (direction == BACKWARDS)}{value}."
        return told

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
        before = random_state.given_part, random_state.sharded_part
        start, size = self._pipeline.replica * self._samples + first, last - first
        part = Fraction(start, size), Fraction(self._samples * self._pipeline.replicas, size)
        random_state.given_part = random_state.sharded_part = part
        try:
            return forward.run_model(self._pipeline.run, labels, *inputs), forward
        finally:
            random_state.given_part, random_state.sharded_part = before
            # A pass ends early, without the masks of later stages.
            for stream, count in random_state.calls.items():
                self._masks[stream] = max(count, self._masks.get(stream, 0))

    def end_masks(self) -> None:
        """Count the masks of this step: one call of each layer, in whatever order the micro-batches came."""
        random_state.calls = self._masks

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.microbatch
        loss, forward = self.run_stage(stage, m)
        if forward.is_first:
            self._check(loss, forward)
        is_last = stage % self._length == self._length - 1
        if is_last:
            self._loss += self._weights[self._number(stage, m)] * loss.data
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
        if self._optimizer is not None:
            for parameter in self._pipeline.parameters():
                # Forwards whose backward is to come keep the version that they saw.
                parameter.data = parameter.data.copy()
            self._optimizer.step()
            self._optimizer.zero_grad()

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
            seed = get_namespace(live.loss.data).full((), self._share(stage, m), live.loss.dtype)
            ends.append((live.loss, seed))
        return live, *joined([(x, gradient) for x, gradient in ends if x.requires_grad], self._xp)

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
        """Return the weight of the loss of a micro-batch in its gradients."""
        return 1.0 if self._optimizer is not None else self._weights[self._number(stage, m)]

    def _weights_of_parts(self, count: int) -> list[float]:
        """Return the share of each micro-batch in the mean loss over all pipelines."""
        spans, pipeline = list(pairwise(self._ends)), self._pipeline
        if pipeline._weight_fn is None or self._labels is None:
            return [(last - first) / self._samples / pipeline.replicas for first, last in spans]
        weights = [float(pipeline._weight_fn(as_tensor(self._labels.data[first:last]))) for first, last in spans]
        total = np.asarray(sum(weights), np.float64)
        if pipeline.replicas > 1:
            total = pipeline._communicator.all_reduce(total) / len(pipeline.ranks) / len(pipeline._mates)
        return [weight / total.item() for weight in weights]

    # --- messages -------------------------------------------------------------------------------------

    def send(self, direction: int, crossing: Crossing, m: int, target: int, x: Array) -> None:
        """Give a value to another stage; on this rank by reference."""
        rank = self._schedule.rank_of(target)
        if rank == self._rank:
            self._local[direction, crossing, m] = x
        else:
            self._works.append(collectives.isend(x, self._ranks[rank], self._tag(direction, crossing, m)))

    def receive(self, direction: int, crossing: Crossing, m: int, source: int) -> Array:
        rank = self._schedule.rank_of(source)
        if rank == self._rank:
            return self._local.pop((direction, crossing, m))
        return _received(self._xp, self._ranks[rank], self._tag(direction, crossing, m))

    def _tag(self, direction: int, crossing: Crossing, m: int) -> int:
        source, target, number = crossing
        num_stages = self._schedule.num_stages
        return (
            ((number * self._schedule.microbatches + m) * num_stages + source) * num_stages + target
        ) * 2 + direction

    def _of_tag(self, tag: int) -> tuple[int, Crossing, int]:
        """Return direction, crossing and micro-batch of a tag."""
        num_stages = self._schedule.num_stages
        rest, direction = divmod(tag, 2)
        rest, target = divmod(rest, num_stages)
        rest, source = divmod(rest, num_stages)
        number, m = divmod(rest, self._schedule.microbatches)
        return direction, Crossing(source, target, number), m

    def from_last(self, x: Array | None) -> Array:
        """Return a value of the last stage on every rank of the pipeline."""
        last = self._schedule.rank_of(self._length - 1)
        if self._rank != last:
            return _received(self._xp, self._ranks[last], 0)
        if x is None:
            raise InputError("Pipeline: the model does not return one Tensor of its last stage.")
        for rank in range(self._schedule.ranks):
            if rank != last:
                collectives.send(x, self._ranks[rank], 0)
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


def _add(leaf: Tensor, gradient: Array) -> None:
    if leaf.grad is None:
        leaf.grad = leaf._gradient(gradient.copy())
    else:
        leaf.grad.data += gradient


def _received(xp: Any, rank: int, tag: int) -> Array:
    """Return the next message of this tag; its header has its shape and dtype."""
    header = collectives.probe(rank, tag)
    return collectives.recv(xp.empty(header.shape, header.dtype), rank, tag)
