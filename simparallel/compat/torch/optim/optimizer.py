"""`torch.optim.optimizer`: the names of `torch.optim`."""

from simparallel.compat.torch.optim import *
