"""`torch.distributed.pipelining.stage`: the names of `torch.distributed.pipelining`."""

from simparallel.compat.torch.distributed.pipelining import *
