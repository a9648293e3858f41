"""`torch.utils.data.distributed`: the names of `torch.utils.data`."""

from simparallel.compat.torch.utils.data import *
