"""`torch.distributed.optim`."""

from __future__ import annotations

from typing import Any

from simparallel import parallel
from simparallel.compat.front import refuse, unused
from simparallel.parallel import PostLocalSGDOptimizer


class ZeroRedundancyOptimizer(parallel.ZeroRedundancyOptimizer):
    """See `sp.parallel.ZeroRedundancyOptimizer`."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        **defaults: Any,
    ) -> None:
        unused("ZeroRedundancyOptimizer", parameters_as_bucket_view=parameters_as_bucket_view or None)
        refuse("ZeroRedundancyOptimizer", "call step() after backward", overlap_with_ddp=overlap_with_ddp)
        super().__init__(params, optimizer_class, process_group=process_group, **defaults)
