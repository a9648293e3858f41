"""`torch.utils`."""

from simparallel.compat.torch.utils import data
