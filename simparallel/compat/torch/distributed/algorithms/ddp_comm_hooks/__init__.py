"""`torch.distributed.algorithms.ddp_comm_hooks`: `sp.parallel.comm_hooks`."""

from simparallel.compat.torch.distributed.algorithms.ddp_comm_hooks import (
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)
