"""`torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook`."""

from simparallel.parallel.ddp.comm_hooks import *
