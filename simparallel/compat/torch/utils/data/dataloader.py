"""`torch.utils.data.dataloader`: the names of `torch.utils.data`."""

from simparallel.compat.torch.utils.data import *
