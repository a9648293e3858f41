"""MindSpore's pipeline cells; see `sp.parallel.Pipeline`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from simparallel import pipeline_schedule
from simparallel.compat.front import unused
from simparallel.errors import InputError, UnknownNameError
from simparallel.nn import Module as Cell
from simparallel.parallel.pipeline.module import PipelineModule
from simparallel.parallel.pipeline.schedule import Schedule
from simparallel.world.context import PIPELINE_SCHEDULERS, get_auto_parallel_context
from simparallel.world.rank import get_world_size


class PipelineCell(PipelineModule):
    """A cell whose network runs in stages on the ranks; its result is the sum of the micro-batches' losses.

    The auto-parallel context has the number of stages, one for each rank, and the scheduler. The attribute
    `pipeline_stage` of a cell is its stage; with pipeline_interleave, `pipeline_segment` selects one of several stages
    on that rank. Other cells belong to the latest stage of their inputs. Every rank passes the whole batch, and gets
    the loss. See `sp.parallel.Pipeline`.

    Args:
        network: takes all fields of a batch and returns the loss, as `WithLossCell(net, loss_fn)`.
        micro_size: number of micro-batches, at least the number of stages.
        stage_config: name of a cell in `network` -> its stage, such as "_backbone.layer1".
        segment_config: name of a cell in `network` -> its segment.

    Raises:
        UnknownNameError: (a KeyError) no cell has this name.
        InputError: (when called) settings that do not fit together, or a batch that has no `micro_size` equal parts.
    """

    def __init__(
        self,
        network: Cell,
        micro_size: int,
        stage_config: Mapping[str, int] | None = None,
        segment_config: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__(network, partial(_schedule, network, micro_size), _virtual_stage, is_sum=True)
        self.micro_size, cells = micro_size, dict(network.named_modules())
        for attribute, config in (("pipeline_stage", stage_config), ("pipeline_segment", segment_config)):
            for name, number in (config or {}).items():
                if name not in cells:
                    raise UnknownNameError(
                        f"PipelineCell: no cell is called {name!r}; there are {', '.join(filter(None, cells))}."
                    )
                setattr(cells[name], attribute, number)

    def forward(self, *inputs: Any) -> Any:
        if len(inputs[0]) % self.micro_size:
            raise InputError(
                f"PipelineCell: a batch of {len(inputs[0])} samples is not divisible by micro_size={self.micro_size}."
            )
        return super().forward(*inputs)


def _schedule(network: Cell, micro_size: int) -> Schedule:
    """Return the schedule that the auto-parallel context and the cells describe."""
    stages, ranks = get_auto_parallel_context("pipeline_stages"), get_world_size()
    if stages != ranks:
        raise InputError(
            f"PipelineCell: pipeline_stages={stages} must be {ranks}, since each stage has one rank. Call "
            f"set_auto_parallel_context(pipeline_stages={ranks}); for data parallelism beside the stages, take "
            "sp.parallel.Pipeline(…, mesh=sp.Mesh(…, ('dp', 'pp')))."
        )
    if micro_size < stages:
        raise InputError(f"PipelineCell: micro_size={micro_size} must be {stages} or more, the number of stages.")
    config = get_auto_parallel_context("pipeline_config")
    segments = 1 + max(getattr(cell, "pipeline_segment", 0) for cell in network.modules())
    if segments > 1 and not config["pipeline_interleave"]:
        raise InputError("PipelineCell: a pipeline_segment above 0 needs pipeline_interleave=True in pipeline_config.")
    name = PIPELINE_SCHEDULERS[config["pipeline_scheduler"]][segments > 1]
    return pipeline_schedule(name, stages, micro_size, segments)


def _virtual_stage(schedule: Schedule, cell: Cell) -> int | None:
    """Return the number of a cell's stage in the schedule, from its rank and its segment; None without a rank."""
    rank, segment = getattr(cell, "pipeline_stage", None), getattr(cell, "pipeline_segment", 0)
    if rank is None:
        return None
    for stage in range(segment * schedule.ranks, (segment + 1) * schedule.ranks):
        if schedule.rank_of(stage) == rank:
            return stage
    raise InputError(f"PipelineCell: pipeline_stage={rank!r} of a cell must be in 0 … {schedule.ranks - 1}.")


class PipelineGradReducer(Cell):
    """A cell that divides the (complete) gradients of a `PipelineCell` by the loss scale: `grads = reducer(grads)`.

    Args:
        parameters: no effect.
        scale_sense: the loss scale.
        opt_shard: no effect.
    """

    def __init__(self, parameters: Any, scale_sense: float = 1.0, opt_shard: Any = None) -> None:
        super().__init__()
        unused("PipelineGradReducer", opt_shard=opt_shard)
        self.scale_sense = scale_sense

    def construct(self, grads: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(grad / self.scale_sense for grad in grads)


def sync_pipeline_shared_parameters(net: Cell) -> None:
    """Copy the parameters of each stage to all ranks, in every `PipelineCell` of `net`, to save them or to predict.

    Stages that share a parameter always have the same values. Collective: yes, after the first step.
    """
    for cell in net.modules():
        if isinstance(cell, PipelineModule):
            cell.collect()
