"""`Pipeline`: a model in stages on the ranks of a mesh; its parameters and state, and values of all stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from math import inf
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Tensor, no_grad
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.tape import is_written_since
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import Array, get_namespace, to_host
from simparallel.base.attributes import setting
from simparallel.base.units import format_type_of
from simparallel.clock.memory import parse_bytes
from simparallel.comm import Group, current
from simparallel.errors import InputError, ScheduleError
from simparallel.layout.mesh import Mesh
from simparallel.nn import Module
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.nn.hooks import summed_along
from simparallel.nn.parameter import Parameter
from simparallel.nn.state import LoadResult, load
from simparallel.optim.norms import clip_grad_norm_
from simparallel.optim.optimizer import StageParameters
from simparallel.parallel.operator.interpreter import group_along
from simparallel.parallel.operator.op_call import mode
from simparallel.parallel.pipeline.action import BACKWARD, WEIGHT_GRADIENT, read_cell
from simparallel.parallel.pipeline.rules import BIDIRECTIONAL
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
from simparallel.parallel.pipeline.stage_forward import ForwardCache, Switch
from simparallel.parallel.pipeline.stages import balanced, calls, checked, owners, sizes_of, tensors_of, traced, within
from simparallel.parallel.pipeline.step import PipelineStep, tensors

# Names of axes: along the pipeline, and of data parallelism, also without `fully_shard`.
PIPELINE, DATA = "pp", ("dp", "replicate", "shard")
PIPEDREAM, PIPEDREAM_2BW = "pipedream", "pipedream_2bw"


class Pipeline:
    """A model that is cut into stages, and trained on the ranks of a pipeline.

    The model may be any Module: each rank runs its forward, and computes its own stages. A value that a later stage
    needs goes there directly, past the stages in between. Every rank makes the same calls.

    Args:
        model: its initial weights must be equal on all ranks, as with `set_seed`. If it is made inside
            `no_init_parameters()`, a rank has memory for the parameters of its own stages alone.
        loss_fn: loss of the model's output and the labels; a mean over the samples.
        microbatches: number of parts of a batch; they may differ by one sample.
        schedule: a name that `pipeline_schedule` takes, or a Schedule.
        stages: for each stage the names of its children, such as "norm" or "blocks.0", in the order of their calls.
            Name a parameter in each stage where the model's own code uses it, as for tied embeddings. None balances
            the stages: by simulated time with `example`, else by numbers of parameters.
        balance: for each stage its number of parts, in place of `stages`. Parts are the children of the model, and the
            entries of containers such as Sequential and ModuleList.
        chunks: stages of a rank, for looped schedules.
        mesh: all ranks, with the axis "pp" along the pipeline. "dp", "replicate" and "shard" are axes of data
            parallelism, unless a Layout cuts a parameter along them: of pipelines that each get their own part of the
            batch, as in `DistributedDataParallel`; so are the axes along which `fully_shard` was called for children
            that are stages, or parts of one. The ranks along all other axes run a stage together: cut its parameters
            over `mesh.part(axes, rank)` with Layouts beforehand, as by `distribute_module`. Tensors without a Layout
            count as replicated; values that are cut go to other stages in slices. None for one pipeline of all ranks.
        example: inputs and labels of a micro-batch, with which the model is run once without data, to find the order
            of the calls, their times on the described device, and shared parameters.
        memory_limit: of a rank, in bytes or as "8GB"; needs `example`. The stages of a rank share it evenly, and each
            holds its weights, their gradients, and the results of its ops for all live micro-batches.
        weight_fn: weight of a micro-batch in the mean, from its labels; by default its number of samples. For a loss
            that is a mean over tokens, return their number.

    Attributes:
        schedule: what each rank of a pipeline does.
        replica: number of this rank's pipeline among those with other parts of the batch; `replicas`: their number.
        stages: for each stage the names of its children.
        losses: of the micro-batches of the last step that this rank computed, in the order of the batch.

    Raises:
        InputError: fewer children than stages; stages with an unknown name, or not every parameter; a mesh without
            "pp", or not of all ranks; groups of `fully_shard` over another mesh, or along "pp"; shared parameters under
            the schedule "pipedream".
        ScheduleError: the schedule does not run, or is for another number of ranks.

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
            raise InputError(f"Pipeline: model is {format_type_of(model)}, expected a Module.")
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
        # The number of this pipeline in the run, and of its calls so far: the tags of its messages contain both.
        self.number, self.calls = next(communicator.kept.setdefault(Pipeline, count())), 0
        self._along = self._found_groups()
        # Axes along which pipelines have different parts of the batch.
        grouped = {axis for _, axes in self._along for axis in axes}
        layouts = [p.placement.layout for p in model.parameters() if p.placement is not None]
        cut = {axis for layout in layouts for cutting in layout.axes_by_dim for axis in cutting}
        self._data = [axis for axis in mesh.axis_names if axis in grouped or (axis in DATA and axis not in cut)]
        of_data = mesh.group(self._data, communicator.rank)
        self.replica, self.replicas = of_data.index(communicator.rank), len(of_data)
        # Global ranks: of this rank's pipeline, in order, and of the ranks that run a stage with this one.
        self.ranks = mesh.group(PIPELINE, communicator.rank)
        self._rank = self.ranks.index(communicator.rank)
        self._stage_ranks = mesh.group(
            [axis for axis in mesh.axis_names if axis not in (PIPELINE, *self._data)], communicator.rank
        )
        # Stages from a batch's input to its loss; a bidirectional pipeline has all of them twice.
        self._length = schedule.num_stages // (2 if schedule.placement == BIDIRECTIONAL else 1)
        if stages is None:
            stages = self._found_stages(example, balance, memory_limit)
        self.stages = checked(model, stages, self._length)
        self._cells = [read_cell(text, f"rank {self._rank}") for text in schedule.actions[self._rank]]
        # Stage -> the micro-batch whose gradients of weights are the last.
        last = [each for cell in self._cells for each in cell if each.kind in (BACKWARD, WEIGHT_GRADIENT)]
        self._last_backward = {action.stage: action.microbatch for action in last}
        self._switch = Switch(calls(model, self.stages))
        # Modes of the model's modules -> results of the passes in these modes.
        self._known: dict[tuple[bool, ...], ForwardCache] = {}
        self._ranks_of = [
            {schedule.rank_of(s) for s in range(stage, schedule.num_stages, self._length)}
            for stage in range(self._length)
        ]
        # id of a parameter -> the stages that use it, and the ranks of a pipeline that have it.
        self._stages_of = owners(model, self.stages)
        self._owners = {key: set().union(*(self._ranks_of[s] for s in found)) for key, found in self._stages_of.items()}
        # Listed once, because steps read it often.
        self._named = [(name, p) for name, p in model.named_parameters() if self._rank in self._owners[id(p)]]
        # Parameters made inside `no_init_parameters()` exist on the ranks of their stages alone.
        for parameter in self.parameters():
            if is_deferred(parameter):
                materialize(parameter)
        self._shared = self._groups_of_owners()
        if schedule.name == PIPEDREAM and self._shared:
            raise InputError(
                f"Pipeline: {PIPEDREAM} updates each rank on its own, and here ranks share parameters: tied weights, "
                "or replicas. Use pipedream_2bw or 1f1b."
            )
        # PipeDream-2BW: weights to read, weights at the last step, and the time of that step.
        self._read: list[Array] = []
        self._seen: list[Array] = []
        self._seen_at = 0
        self.losses: list[Tensor] = []

    def _found_groups(self) -> set[tuple[Mesh, tuple[str, ...]]]:
        """Return where groups of `fully_shard` sum gradients. Raise InputError for axes that the mesh cannot have."""
        found = {along for p in self.model.parameters() if (along := summed_along(p)) is not None}
        rank = self._communicator.rank
        for mesh, axes in found:
            is_known = PIPELINE not in axes and set(axes) <= set(self.mesh.axis_names)
            if not is_known or mesh.group(axes, rank) != self.mesh.group(axes, rank):
                raise InputError(
                    f"Pipeline: parameters of the model were given to fully_shard along {axes!r} of {mesh!r}, and the "
                    f"pipeline has {self.mesh!r}. Give both the same mesh, with an axis for each."
                )
        return found

    def _found_stages(
        self, example: tuple[Any, Any] | None, balance: Sequence[int] | None, memory_limit: str | int | None
    ) -> Sequence[Sequence[str]]:
        if example is None:
            if memory_limit is not None:
                raise InputError("Pipeline: memory_limit needs example=(inputs, labels), of a micro-batch.")
            return balanced(sizes_of(self.model), self._length, balance)
        inputs, labels = tensors(example[0]), as_tensor(example[1])
        limit_bytes = inf if memory_limit is None else parse_bytes(memory_limit) / self.schedule.chunks
        limits = [(limit_bytes, self.schedule.live_of(stage)) for stage in range(self._length)]
        with self.running():
            return traced(self.model, lambda: self.run(labels, *inputs), partial(within, limits, balance))

    def _groups_of_owners(self) -> list[tuple[Group, list[Parameter]]]:
        """Return (group, parameters) for each group of ranks that shares parameters with this one.

        These are tied weights, and all parameters of replicas and of bidirectional pipelines.
        """
        groups: dict[tuple[int, ...], Group | None] = {}
        found: dict[tuple[int, ...], list[Parameter]] = {}
        length = self.schedule.ranks
        # All ranks make all groups, in the same order.
        for parameter in self.model.parameters():
            own, along = self._owners[id(parameter)], summed_along(parameter)
            others = () if along is None else along[1]
            # The pipelines among which nobody else sums, one after the other.
            for column in self.mesh.groups([*(axis for axis in self._data if axis not in others), PIPELINE]):
                ranks = tuple(rank for i, rank in enumerate(column) if i % length in own)
                if len(ranks) > 1 and ranks not in groups:
                    groups[ranks] = self._communicator.new_group(ranks)
                if len(ranks) > 1 and self._communicator.rank in ranks:
                    found.setdefault(ranks, []).append(parameter)
        return [(group, found[ranks]) for ranks, group in groups.items() if group is not None and ranks in found]

    # --- parameters -----------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Return the parameters of this rank's stages, with their names in the model; each once."""
        return iter(self._named)

    def parameters(self) -> list[Parameter]:
        """Return the parameters of this rank's stages, for its optimizer; none if these stages have none."""
        return StageParameters(parameter for _, parameter in self._named)

    def predict(self, *inputs: Any) -> Tensor:
        """Run forward without gradients; return the model's output for these inputs on every rank of the pipeline.

        Raises:
            InputError: the model does not return one Tensor.
        """
        step, found = PipelineStep(self, inputs, None), None
        with no_grad(), self._switch.installed(), self.running():
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

        The loss is the mean over the batch, and a parameter's gradient adds up in the order of the rank's actions.
        Random masks equal the masks of one device that runs the whole batch. Batch norm uses the statistics of each
        micro-batch, and updates its running statistics with each.

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
            ShapeError: fewer samples than micro-batches, or a different number of labels.
            InputError: code of the model uses a parameter in a stage that does not name it, or that a group of
                `fully_shard` has, calls a child with a value of a later stage, or no loss comes from the last stage.
                An optimizer is missing, or not needed.
            UnknownValueError: code of the model branches on a value of another stage.
        """
        if (optimizer is not None) != (self.schedule.name == PIPEDREAM):
            raise InputError(
                f"Pipeline: step(..., optimizer=...) is for the schedule {PIPEDREAM!r}, which needs one; this is "
                f"{self.schedule.name!r}."
            )
        step = PipelineStep(self, inputs if isinstance(inputs, tuple) else (inputs,), labels, optimizer)
        if self.schedule.name != PIPEDREAM_2BW:
            return step.run()
        parameters = self.parameters()
        now = [p._data for p in parameters]
        # Between steps without an update, as in accumulation, the weights that are read stay the same.
        if any(is_written_since(x, self._seen_at) for x in now) or not self._seen:
            self._read, self._seen = self._seen or [x.copy() for x in now], [x.copy() for x in now]
        try:
            for parameter, data in zip(parameters, self._read, strict=True):
                parameter.data = data
            return step.run()
        finally:
            for parameter, data in zip(parameters, now, strict=True):
                parameter.data = data
            self._seen_at = next(grad_mode.numbers)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients of all stages so that their total norm is at most `max_norm`; return the norm before.

        A gradient that several ranks hold counts once. See `clip_grad_norm_`.

        Raises:
            InputError: a setting out of range; or a norm that is not finite, and then nothing is changed.

        Collective: yes, over all ranks. As a barrier between steps, it brings back the bubble of "zero bubble".
        """
        parameters, others = self.parameters(), self.replicas * len(self._stage_ranks)
        holders = [len(self._owners[id(p)]) * others for p in parameters if p.grad is not None]
        return clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, holders=holders)

    def any_rank(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank, such as for `GradScaler(reduce_overflow=pipeline.any_rank)`."""
        return bool(self._communicator.all_reduce(np.asarray(flag, np.int64), "max").item())

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the model's state of all stages, on every rank: its names and arrays do not depend on the cut."""
        self.collect()
        with self.running():
            return {name: to_host(x.full_tensor().data).copy() for name, x in self.model._saved_tensors()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> LoadResult:
        """Load a state of one device, or of another cut. Arguments, result and errors as for `Module`.

        None in place of an array leaves a tensor as it is.
        """
        # Parameters of other stages may have no data here, and arrays go into slices; `load` refuses wrong shapes.
        targets, own = dict(self.model._saved_tensors()), dict(state)
        for name, x in list(targets.items()):
            if name in own and (own[name] is None or np.shape(own[name]) == x.shape):
                if own[name] is None or is_deferred(x):
                    del targets[name], own[name]
                elif x.placement is not None:
                    own[name] = np.asarray(own[name])[x.placement.layout.slices(self._communicator.rank, x.shape)]
        self._read, self._seen = [], []
        return load(type(self.model).__name__, targets, own, strict)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and saved buffers of this rank's stages, by all their names in the model."""
        stages = self._stages_of_tensors()
        return {
            name: x
            for name, x in self.model._saved_tensors()
            if self._rank in self._owners.get(id(x), self._ranks_of[stages.get(id(x), 0)])
        }

    def _stages_of_tensors(self) -> dict[int, int]:
        return {id(x): stage for stage, names in enumerate(self.stages) for x in tensors_of(self.model, names)}

    def collect(self) -> None:
        """Copy the parameters and buffers of all stages into the model on every rank; of sharded ones, its slices.

        Training changes those of a rank's own stages alone. Afterwards the model is that of one device.
        """
        stages, group = self._stages_of_tensors(), group_along(self.mesh, (PIPELINE,))
        for _, x in self.model._saved_tensors():
            rank = self.schedule.rank_of(stages.get(id(x), 0))
            data = get_namespace(x.data).empty(x.data.shape, x.dtype) if is_deferred(x) else x.data
            x.data = data if group is None else collectives.broadcast(data, self.ranks[rank], group)
            if is_deferred(x):
                x.initial = None  # type: ignore[attr-defined]

    def running(self) -> AbstractContextManager[None]:
        """Run ops on the ranks of this rank's stages, inside the block, and weight losses by their samples."""
        return setting(mode, ranks=self._stage_ranks, replicating=True, weighted=True)

    def run(self, labels: Tensor | None, *inputs: Tensor) -> Any:
        """Run the model's forward, and the loss of these labels."""
        y = self.model(*inputs)
        return y if labels is None else self.loss_fn(y, labels)

    def check_used(self, used: dict[int, set[int]]) -> None:
        """Raise InputError if code of the model uses a parameter in a stage without it, or for new groups."""
        if self._found_groups() != self._along:
            raise InputError(
                "Pipeline: fully_shard was called for parts of the model after the Pipeline was made, which then does "
                "not know that their ranks have other samples. Call it before."
            )
        for name, parameter in self.model.named_parameters():
            for stage in sorted(used.get(id(parameter), set()) - self._stages_of[id(parameter)]):
                raise InputError(
                    f"Pipeline: code of the model uses {name} in stage {stage}, but only stages "
                    f"{sorted(self._stages_of[id(parameter)])} name it. Name it in this stage, too: "
                    f"stages=[…, [{stage}: …, '{name}'], …]; or pass "
                    "example=(inputs, labels), by which such parameters are found."
                )
