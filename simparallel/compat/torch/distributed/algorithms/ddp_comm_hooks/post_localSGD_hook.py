"""`torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook`."""

from simparallel.parallel.ddp.comm_hooks import *
