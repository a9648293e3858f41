"""`torch.optim.lr_scheduler`: `sp.optim.lr_scheduler` has PyTorch's names and arguments."""

from simparallel.optim.lr_scheduler import *
