"""`torch.backends.cudnn`."""

from simparallel.compat.front import Settings

benchmark = deterministic = allow_tf32 = False
enabled = True
