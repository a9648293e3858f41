"""`torch.distributed.algorithms`."""

from simparallel.compat.torch.distributed.algorithms import ddp_comm_hooks
