"""`torch.nn.functional`: `sp.functions` has PyTorch's names and arguments."""

from simparallel.functions import *  # noqa: F403
