"""`torch.nn.functional`: `sp.functions` has PyTorch's names and arguments."""

from simparallel.autograd.functions import *  # noqa: F403
