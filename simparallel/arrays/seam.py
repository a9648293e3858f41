"""`arrays_of`: the kernels for the library of an array, and functions of arrays that may be in several places."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from simparallel.arrays.captures import running
from simparallel.arrays.cuda.arrays import CudaArrays
from simparallel.arrays.host.arrays import Call, HostArrays
from simparallel.backend import Array, get_namespace, gpu_of
from simparallel.machine.devices import CUDA, Device


class _Kernels(dict[Any, HostArrays]):
    """The kernels of each namespace, made when they are first asked for."""

    def __missing__(self, xp: Any) -> HostArrays:
        kernels = self[xp] = (CudaArrays if hasattr(xp, "cuda") else HostArrays)(xp)
        return kernels


kernels_of = _Kernels()


def arrays_of(*arrays: Array) -> HostArrays:
    """Return the kernels for these arrays: those of a GPU if one of them is there."""
    return kernels_of[get_namespace(*arrays)]


def device_of(array: Array) -> Device | None:
    """Return the GPU of an array; None in host memory, which is that of any simulated device."""
    gpu = gpu_of(array)
    return None if gpu is None else Device(CUDA, gpu)


def for_each(compute: Callable[..., None], calls: Sequence[Call], **settings: Any) -> None:
    """Call `compute(xp, *arrays, *numbers, **settings)` for each of the tensors, see `HostArrays.for_each`."""
    for kernels, places in _by_device([arrays[0] for arrays, _ in calls]):
        kernels.for_each(compute, [calls[i] for i in places], **settings)


def totals(arrays: Sequence[Array], here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> list[Any]:
    """Return `HostArrays.total` of each array as a number. The host waits once for each GPU."""
    found: dict[int, Any] = {}
    for kernels, places in _by_device(arrays):
        found |= zip(places, kernels.totals([arrays[i] for i in places], here, in_kernel), strict=True)
    return [found[i] for i in range(len(arrays))]


def _by_device(arrays: Sequence[Array]) -> Iterator[tuple[HostArrays, list[int]]]:
    """Yield the kernels and the places of the arrays of each device."""
    by_device: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        by_device.setdefault((arrays_of(array), gpu_of(array)), []).append(i)
    for (kernels, _), places in by_device.items():
        yield kernels, places


# --- of this rank -------------------------------------------------------------------------------


def uploaded(host: np.ndarray) -> Array:
    """Copy a host array to this rank's GPU on a stream of its own. Return the array itself if the rank has no GPU."""
    # A capture refuses copies from the host; it would not see one on another stream.
    return host if running.device is None or running.capture is not None else running.device.uploads.copy(host)


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """Show the block as a range, if this thread's rank is on a GPU and ranges are switched on."""
    nvtx = None if running.device is None else running.device.nvtx
    if nvtx is None:
        yield
        return
    nvtx.RangePush(name)
    try:
        yield
    finally:
        nvtx.RangePop()
