"""`torch.cuda`: the devices of this rank's node, simulated if there is no GPU."""

from __future__ import annotations

from typing import Any

from simparallel.backend import device_count as _gpus, manual_seed, manual_seed as manual_seed_all
from simparallel.clock.cuda import cuda_device
from simparallel.clock.recorder import current_recorder
from simparallel.compat.torch.cuda import amp
from simparallel.world.rank import get_local_rank, get_local_world_size


def is_available() -> bool:
    """Return True: there are GPUs, or simulated devices."""
    return True


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True: programs with `torch.bfloat16` run, in float32."""
    return True


def device_count() -> int:
    """Return the number of devices of this node."""
    # Without a GPU, the simulated devices of all ranks of the node.
    return _gpus() or get_local_world_size() * _devices_per_rank()


def current_device() -> int:
    """Return the number of this rank's first device on its node."""
    return get_local_rank() * _devices_per_rank()


def set_device(device: Any) -> None:
    """Check that the device belongs to this rank; the current device is always the rank's first one.

    Raises:
        InputError: the device belongs to another rank.
    """
    cuda_device(device)


def synchronize(device: Any = None) -> None:
    """Wait for the device: a no-op, because operations are complete when they return."""


def empty_cache() -> None:
    """Release unused memory: a no-op, because memory is released when it is freed."""


def _devices_per_rank() -> int:
    recorder = current_recorder()
    return (recorder.num_devices if recorder else None) or 1
