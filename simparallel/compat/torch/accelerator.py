"""`torch.accelerator`: the devices of `torch.cuda`."""

from simparallel.compat.torch.cuda import *
from simparallel.compat.torch.cuda import current_device as current_device_index, set_device as set_device_index


class Accelerator(str):
    """A kind of devices, "cuda", which `torch.device` and `to` take."""

    type = "cuda"


def current_accelerator(check_available: bool = False) -> Accelerator:
    """Return the kind of the devices."""
    return Accelerator("cuda")
