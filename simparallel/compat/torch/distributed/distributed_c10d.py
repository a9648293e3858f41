"""`torch.distributed.distributed_c10d`: the names of `torch.distributed`."""

from simparallel.compat.torch.distributed import *
