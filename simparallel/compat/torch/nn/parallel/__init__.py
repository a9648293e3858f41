"""`torch.nn.parallel`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simparallel import parallel
from simparallel.clock.cuda import cuda_device
from simparallel.compat.front import front
from simparallel.parallel import gather, parallel_apply, replicate, scatter


@front(parallel.DistributedDataParallel)
def DistributedDataParallel(
    module: Any,
    device_ids: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool = True,
    init_sync: bool = True,
    process_group: Any = None,
    bucket_cap_mb: Any = None,
    find_unused_parameters: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    mixed_precision: Any = None,
) -> dict[str, Any]:
    """See `sp.parallel.DistributedDataParallel`; device ids are numbers on the node."""
    # torch's device ids count the devices of a node, ours those of a rank.
    own = None if device_ids is None else [cuda_device(device) for device in device_ids]
    return {"device_ids": own, "output_device": None if output_device is None else cuda_device(output_device)}


DataParallel = parallel.DataParallel
