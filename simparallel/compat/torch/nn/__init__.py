"""`torch.nn`: `sp.nn` has PyTorch's names and arguments."""

from simparallel.compat.torch.nn import functional, parallel, utils
from simparallel.nn import *  # noqa: F403
from simparallel.nn import SyncBatchNorm, init
from simparallel.parallel import DataParallel
