"""`torch.nn.modules`: the names of `torch.nn`."""

from simparallel.compat.torch.nn import *
