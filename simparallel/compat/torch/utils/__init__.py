"""`torch.utils`."""

from simparallel.compat.torch.utils import data
from simparallel.compat.torch.utils.data import distributed as _distributed
