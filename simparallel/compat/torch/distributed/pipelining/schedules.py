"""`torch.distributed.pipelining.schedules`: the names of `torch.distributed.pipelining`."""

from simparallel.compat.torch.distributed.pipelining import *
