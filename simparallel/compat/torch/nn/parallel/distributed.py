"""`torch.nn.parallel.distributed`: the names of `torch.nn.parallel`, and `_MixedPrecision`."""

from simparallel.compat.torch.nn.parallel import *
from simparallel.parallel import MixedPrecision as _MixedPrecision
