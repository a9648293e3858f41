"""`torch.optim`: `sp.optim` has PyTorch's names and arguments."""

from simparallel.optim import *
from simparallel.optim import lr_scheduler
