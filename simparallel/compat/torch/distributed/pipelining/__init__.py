"""`torch.distributed.pipelining`: stages of a model, and schedules that train them; see `sp.parallel.Pipeline`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

from simparallel import Group, Tensor, get_rank, get_world_size, pipeline_schedule
from simparallel.base.checks import check_integer
from simparallel.compat.front import public_names, refuse, unused
from simparallel.errors import InputError
from simparallel.nn import Module
from simparallel.parallel.pipeline.own_parts import Chain, PlacedPipeline, StageModule, WholeModel
from simparallel.parallel.pipeline.stages import cut_at, parts_of, traced


class SplitPoint(Enum):
    """Where to cut: a stage begins with the named child, or ends with it."""

    BEGINNING = 1
    END = 2


def pipe_split() -> None:
    """Refuse to cut inside of a forward.

    Raises:
        InputError: always.
    """
    raise InputError("pipe_split: cuts are between children; name them, pipeline(…, split_spec={'layers.4': …}).")


class PipelineStage:
    """A stage of a pipeline; this rank holds its module.

    The results of a stage are the arguments of the next one; the first dim of each counts the samples. A run without
    data finds the shapes.

    Args:
        submodule: the stage's module.
        stage_index, num_stages: number of this stage, from 0, and number of stages.
        device, input_args, output_args, output_grads, input_grads: no effect.
        group: all ranks of the run; for data parallelism see `sp.parallel.Pipeline(mesh=…)`.

    Raises:
        InputError: no such stage, a group of other ranks, or a dw_builder.
    """

    pipe: Pipe | None = None

    def __init__(
        self,
        submodule: Module,
        stage_index: int,
        num_stages: int,
        device: Any = None,
        input_args: Any = None,
        output_args: Any = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: Group | None = None,
        dw_builder: Any = None,
    ) -> None:
        check_integer("PipelineStage", "stage_index", stage_index, high=num_stages - 1)
        if group is not None and tuple(group.ranks) != tuple(range(get_world_size())):
            raise InputError(
                f"PipelineStage: group has the ranks {list(group.ranks)}; a pipeline has all {get_world_size()} ranks. "
                "For data parallelism, take sp.parallel.Pipeline(…, mesh=sp.Mesh(…, ('dp', 'pp')))."
            )
        examples = {"input_args": input_args, "output_args": output_args, "output_grads": output_grads}
        for name, value in {**examples, "input_grads": input_grads}.items():
            # Not the values, which may be large.
            unused("PipelineStage", **{name: None if value is None else "…"})
        refuse("PipelineStage", "gradients of weights are split by the schedule", dw_builder=dw_builder)
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group = device, group
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1


class Pipe:
    """A model cut into stages, which together run its own forward. Made by `pipeline`."""

    def __init__(self, module: Module, stages: Sequence[Sequence[str]]) -> None:
        self._module, self._stages = module, stages
        self.num_stages = len(stages)

    def get_stage_module(self, stage_idx: int) -> Module:
        """Return the children of a stage, under their names in the model. Raises InputError for an unknown stage."""
        check_integer("Pipe", "stage_idx", stage_idx, high=self.num_stages - 1)
        return StageModule(self._module, self._stages[stage_idx])

    def build_stage(self, stage_index: int, device: Any = None, group: Group | None = None) -> PipelineStage:
        """Return a stage for a schedule; arguments as for `PipelineStage`."""
        submodule = self.get_stage_module(stage_index)
        stage = PipelineStage(submodule, stage_index, self.num_stages, device, group=group)
        stage.pipe = self
        return stage


def pipeline(
    module: Module,
    mb_args: tuple[Any, ...],
    mb_kwargs: Mapping[str, Any] | None = None,
    split_spec: Mapping[str, SplitPoint] | None = None,
    split_policy: Any = None,
) -> Pipe:
    """Cut a model into stages before or after the named children.

    Children are in the order in which a run without data calls them; this run also finds shared parameters, which get
    the sum of their gradients. The model may be any Module, with skips between stages.

    Args:
        module: the whole model, equal on all ranks.
        mb_args, mb_kwargs: the inputs of a micro-batch.
        split_spec: name of a child -> where to cut; None for one stage.

    Raises:
        InputError: an unknown child, a stage without children, or a split_policy.
    """
    refuse("pipeline", "name children in split_spec", split_policy=split_policy)
    cuts = {name: point is SplitPoint.END for name, point in (split_spec or {}).items()}
    return Pipe(
        module,
        traced(
            module,
            lambda: module(*mb_args, **(mb_kwargs or {})),
            lambda costs: cut_at(costs, cuts),
            parts_of(module, inside=cuts),
        ),
    )


class _Schedule:
    """A schedule, with the stages of this rank.

    Every rank calls `step`: the first rank with the inputs, the last one with `target=`. Gradients accumulate in the
    `.grad` of the stages' parameters. Micro-batches differ by one sample at most, where PyTorch makes a smaller last
    one.

    Args:
        stage, stages: of this rank.
        n_microbatches: number of parts of a batch.
        loss_fn: of output and target of a micro-batch; None for forward only.
        scale_grads: True: gradients of the mean of the losses; unequal micro-batches are weighted by their samples,
            where PyTorch weighs them equally. False: gradients of the sum of the losses, which is `n_microbatches`
            times the mean. With True, each `step` and `eval` of PyTorch also divides the gradients that earlier steps
            left in `.grad`; here they stay as they are.

    Raises:
        InputError: stages of several models, other stages than this rank has in the schedule, or chunk specs.

    Collective: yes, all calls.
    """

    rule = ""

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        who = type(self).__name__
        specs = {name: value for name, value in locals().items() if name.endswith("_spec")}
        refuse(who, "all Tensors are split and joined along their first dim", **specs)
        autograd = backward_requires_autograd and None
        unused(who, defer_pp_recv=defer_pp_recv or None, backward_requires_autograd=autograd)
        ranks, count = get_world_size(), stages[0].num_stages
        schedule = pipeline_schedule(self.rule, ranks, n_microbatches, len(stages))
        own = [stage for stage in range(schedule.num_stages) if schedule.rank_of(stage) == get_rank()]
        found = [stage.stage_index for stage in stages]
        if count != schedule.num_stages or sorted(found) != own:
            raise InputError(
                f"{who}: got stages {found} of {count}; this rank has stages {own} of {schedule.num_stages}."
            )
        pipe = stages[0].pipe
        if any(stage.pipe is not pipe for stage in stages):
            raise InputError(f"{who}: the stages are of several models; take those that one Pipe has built.")
        if pipe is None:
            model: Chain | WholeModel = Chain({stage.stage_index: stage.submod for stage in stages}, count)
        else:
            model = WholeModel(pipe._module, pipe._stages)
        self._pipeline = PlacedPipeline(model, loss_fn, schedule, is_sum=not scale_grads)

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: Any = None,
        **kwargs: Any,
    ) -> Tensor | None:
        """Run forward and backward on a batch.

        Args:
            args: inputs, on the rank of the first stage; others may leave them out.
            target: labels, on the rank of the last stage.
            losses: gets the micro-batches' losses, on the rank of the last stage.
            kwargs: named inputs: with a `Pipe`, on the rank of the first stage; else on each rank, for its own stages.

        Returns:
            The joined output, detached, on the rank of the last stage; else None.
        """
        refuse("step", "give a loss_fn that has them", loss_kwargs=loss_kwargs)
        if self._pipeline.loss_fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        y = self._pipeline.step(_arguments(args, kwargs), target)
        _refill(losses, self._pipeline.losses)
        return y if return_outputs else None

    def eval(self, *args: Any, target: Any = None, losses: list[Tensor] | None = None, **kwargs: Any) -> Tensor | None:
        """Run forward on a batch without an autograd graph; arguments and result as for `step`."""
        y = self._pipeline.predict(_arguments(args, kwargs), target)
        _refill(losses, self._pipeline.losses)
        return y


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[int | str, Any]:
    return dict([*enumerate(args), *kwargs.items()])


def _refill(losses: list[Tensor] | None, found: Sequence[Tensor]) -> None:
    if losses is not None:
        losses[:] = found


class PipelineScheduleSingle(_Schedule):
    __doc__ = _Schedule.__doc__

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: Any = None,
        kwargs_chunk_spec: Any = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
    ) -> None:
        specs = args_chunk_spec, kwargs_chunk_spec, output_merge_spec
        super().__init__([stage], n_microbatches, loss_fn, *specs, scale_grads)


class PipelineScheduleMulti(_Schedule):
    __doc__ = _Schedule.__doc__


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards."""

    rule = "gpipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward and one backward in turn."""

    rule = "1f1b"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B with several stages on a rank, in a loop."""

    rule = "interleaved_1f1b"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """All micro-batches of a stage, then the next stage of the rank."""

    rule = "looped_bfs"

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
    ) -> None:
        more = output_merge_spec, scale_grads, backward_requires_autograd, defer_pp_recv
        super().__init__(stages, n_microbatches, loss_fn, None, None, *more)


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B whose bubbles are filled with gradients of weights."""

    rule = "interleaved_zb"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Two stages on a rank, back and forth, without a bubble."""

    rule = "zbv"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages on a rank, back and forth; forwards and backwards in pairs."""

    rule = "dualpipe_v"


def get_schedule_class(schedule_name: str) -> type[_Schedule]:
    """Return the schedule class of a name such as "1F1B", in any letter case. Raises InputError if there is none."""
    known = {name.removeprefix("Schedule").lower(): each for name, each in globals().items() if name.startswith("Sch")}
    if schedule_name.lower() not in known:
        raise InputError(f"get_schedule_class: {schedule_name!r} is not one of {', '.join(known)}.")
    return known[schedule_name.lower()]


__all__ = public_names(globals(), "Group", "Tensor")
