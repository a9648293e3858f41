"""`torch.optim`: `sp.optim` has PyTorch's names and arguments."""

from simparallel.optim import *  # noqa: F403
from simparallel.optim import lr_scheduler
