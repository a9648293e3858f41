"""`torch.distributed.algorithms.ddp_comm_hooks`: `sp.parallel.comm_hooks`."""

from simparallel.parallel.ddp import (
    comm_hooks as default_hooks,
    comm_hooks as post_localSGD_hook,
    comm_hooks as powerSGD_hook,
)
