"""`arrays_of`: the kernels for the library of an array, and functions of arrays that may be in several places."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from simparallel.arrays.captures import running
from simparallel.arrays.cuda.arrays import CudaArrays
from simparallel.arrays.host.arrays import Call, HostArrays
from simparallel.backend import Array, get_namespace
from simparallel.machine.devices import Device


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
    return kernels_of[get_namespace(array)].device_of(array)


def for_each(compute: Callable[..., None], calls: Iterable[Call], **settings: Any) -> None:
    """Call `compute(xp, *arrays, *numbers, **settings)` for each of the tensors, see `HostArrays.for_each`."""
    by_kernels: dict[HostArrays, list[Call]] = {}
    for call in calls:
        by_kernels.setdefault(arrays_of(call[0][0]), []).append(call)
    for kernels, members in by_kernels.items():
        kernels.for_each(compute, members, **settings)


def totals(arrays: Sequence[Array], here: Callable[[Array], Any], in_kernel: Callable[..., Array]) -> list[Any]:
    """Return a number for each array, see `HostArrays.totals`."""
    found: list[Any] = [None] * len(arrays)
    by_kernels: dict[HostArrays, list[int]] = {}
    for i, array in enumerate(arrays):
        by_kernels.setdefault(arrays_of(array), []).append(i)
    for kernels, places in by_kernels.items():
        for i, total in zip(places, kernels.totals([arrays[i] for i in places], here, in_kernel), strict=True):
            found[i] = total
    return found


# --- of this rank -------------------------------------------------------------------------------


def uploaded(host: np.ndarray) -> Array:
    """Return a host array on this rank's GPU, copied beside its computation; in host memory, the array itself."""
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
