"""`torch.distributed.algorithms.ddp_comm_hooks.default_hooks`."""

from simparallel.parallel.ddp.comm_hooks import *
