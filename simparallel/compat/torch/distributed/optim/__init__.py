"""`torch.distributed.optim`."""

from __future__ import annotations

from typing import Any

from simparallel import parallel
from simparallel.compat.front import refuse, unused
from simparallel.parallel import PostLocalSGDOptimizer


class ZeroRedundancyOptimizer(parallel.ZeroRedundancyOptimizer):
    """See `sp.parallel.ZeroRedundancyOptimizer`; `parameters_as_bucket_view` has no effect."""

    def __init__(self, params: Any, optimizer_class: Any, process_group: Any = None, **defaults: Any) -> None:
        name = type(self).__name__
        unused(name, parameters_as_bucket_view=defaults.pop("parameters_as_bucket_view", None))
        refuse(name, "call step() after backward", overlap_with_ddp=defaults.pop("overlap_with_ddp", None))
        super().__init__(params, optimizer_class, process_group=process_group, **defaults)
