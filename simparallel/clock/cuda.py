"""The meaning of `cuda:k`: a real GPU, or a simulated device in its place."""

from __future__ import annotations

from typing import Any

from simparallel.backend import device_count
from simparallel.clock.notes import note_once
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError
from simparallel.machine.devices import FIRST, SIM, Device


def cuda_device(index: Any = None) -> Device:
    """Return the device of this rank that is GPU number `index` of its node.

    With CuPy and a GPU it is that GPU, otherwise a simulated device: with d devices per rank, the node's GPU k is
    sim:(k - local rank * d) of its rank.

    Args:
        index: number of the GPU on the node, or the name of a device; None and "cuda" for the rank's first device.

    Raises:
        InputError: the GPU belongs to another rank, or there is no such device.
    """
    if index is not None and (not isinstance(index, int) or isinstance(index, bool)):
        device = Device(index)
        if device.type == SIM:
            return device
        index = None if index == "cuda" else device.index
    if device_count() > 0:
        return Device("cuda", index or 0)
    note_once("there is no GPU: cuda:k means a simulated device of this rank.")
    # A program of one rank may name any device; with several ranks, a GPU belongs to the rank that has its number.
    recorder = current_recorder()
    if recorder is None or recorder.cluster.world_size == 1:
        return Device(SIM, index or 0)
    count = recorder.num_devices or 1
    first = recorder.local_rank * count
    if index is not None and not first <= index < first + count:
        raise InputError(
            f"cuda:{index} belongs to another rank: rank {recorder.rank} owns cuda:{first}"
            + (f" to cuda:{first + count - 1}" if count > 1 else "")
            + " of its node. Choose by the local rank, or give the ranks more devices (devices_per_rank=)."
        )
    return FIRST if index is None else Device(SIM, index - first)
