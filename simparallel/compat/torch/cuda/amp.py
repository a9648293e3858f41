"""`torch.cuda.amp`: `torch.amp` for the device "cuda"."""

from functools import partial

from simparallel.compat.torch.amp import autocast as _autocast
from simparallel.optim import GradScaler

autocast = partial(_autocast, "cuda")
