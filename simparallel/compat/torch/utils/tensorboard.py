"""`torch.utils.tensorboard`."""

from importlib import import_module
from typing import Any


def SummaryWriter(*args: Any, **settings: Any) -> Any:
    """Return a `tensorboardX.SummaryWriter`, which writes TensorBoard's files without PyTorch.

    Raises:
        ModuleNotFoundError: tensorboardX is not installed.
    """
    return import_module("tensorboardX").SummaryWriter(*args, **settings)
