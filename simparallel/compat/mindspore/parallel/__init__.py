"""`mindspore.parallel`."""

from __future__ import annotations

from typing import Any

from simparallel import AutoParallel as _AutoParallel
from simparallel.compat.front import refuse, take, unused
from simparallel.compat.mindspore import context as _auto_parallel_context
from simparallel.compat.mindspore.nn import (
    PipelineCell as Pipeline,
    PipelineGradReducer,
    sync_pipeline_shared_parameters,
)
from simparallel.compat.mindspore.parallel.shard import Layout, shard
from simparallel.world import context as _context

_SETTINGS = """
get_algo_parameters get_auto_parallel_context get_cost_model_context reset_algo_parameters
reset_cost_model_context set_algo_parameters set_auto_parallel_context set_cost_model_context
"""
take(globals(), _context, _SETTINGS)


class AutoParallel(_AutoParallel):
    """See `sp.AutoParallel`; with several pipeline stages, the network runs its own `PipelineCell`."""

    def pipeline(
        self, stages: int = 1, output_broadcast: bool = False, interleave: bool = False, scheduler: str = "1f1b"
    ) -> None:
        """Set the pipeline stages of this rank's auto-parallel context; every rank gets the loss in any case."""
        unused("AutoParallel.pipeline", output_broadcast=output_broadcast or None)
        config = {"pipeline_interleave": interleave, "pipeline_scheduler": scheduler}
        _context.set_auto_parallel_context(pipeline_stages=stages, pipeline_config=config)

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Refuse to cut states in a network whose operators are cut. Raises InputError, which names the alternative."""
        way = f"simparallel.parallel.fully_shard(net, reshard_after_forward={optimizer_level == 'level3'})"
        refuse(
            "AutoParallel.hsdp", f"call {way} for the bare network, with a batch for each rank", level=optimizer_level
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _context.get_auto_parallel_context("pipeline_stages") > 1:
            # Each stage has one rank: no op is cut.
            return self.network(*args, **kwargs)
        return super().__call__(*args, **kwargs)
