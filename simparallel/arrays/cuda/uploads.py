"""`Uploads`: copies of host arrays to a GPU that run beside its computation.

A copy runs on a stream of its own, from pinned host memory, which the GPU reads while the host goes on, into a staging
array on the GPU. The compute stream waits for its event, and then copies the staging array into a new one. So the copy
does not wait for pending operations of the compute stream, and the host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.backend import Array

_SMALLEST_BYTES = 512


class _Slot:
    """Staging buffers for one array: pinned on the host, and on the GPU.

    Attributes:
        host, staging: uint8 arrays of the same size.
        copied: event after the copy to `staging`: `host` may be written again.
        moved: event after the copy from `staging`, which may be written again.
    """

    def __init__(self, xp: Any, cuda: Any, size: int) -> None:
        self.host = np.ndarray((size,), np.uint8, buffer=cuda.alloc_pinned_memory(size))
        self.staging: Array = xp.empty(size, np.uint8)
        self.copied, self.moved = cuda.Event(disable_timing=True), cuda.Event(disable_timing=True)


class Uploads:
    """Copies of host arrays to a GPU.

    Args:
        xp: the array library of the GPU.
        compute: the current stream of the thread, which will use the arrays.
        copies: the stream of the copies.
    """

    def __init__(self, xp: Any, compute: Any, copies: Any) -> None:
        self._xp, self._cuda, self._compute, self._copies = xp, xp.cuda, compute, copies
        # Size in bytes, a power of two -> slots of that size, as many as there were unfinished copies at once.
        self._slots: dict[int, list[_Slot]] = {}

    def copy(self, host: np.ndarray) -> Array:
        """Return a new array on the GPU with the values of a host array, which may change afterwards.

        Raises:
            DeviceOutOfMemoryError: the GPU has no room.
        """
        if host.nbytes == 0:
            return self._xp.asarray(host)
        slot = self._slot(host.nbytes)
        np.copyto(slot.host[: host.nbytes].view(host.dtype).reshape(host.shape), host)
        copies, runtime = self._copies, self._cuda.runtime
        copies.wait_event(slot.moved)
        runtime.memcpyAsync(
            slot.staging.data.ptr, slot.host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, copies.ptr
        )
        slot.copied.record(copies)
        self._compute.wait_event(slot.copied)
        array = slot.staging[: host.nbytes].view(host.dtype).reshape(host.shape).copy()
        slot.moved.record(self._compute)
        return array

    def _slot(self, size: int) -> _Slot:
        size = max(_SMALLEST_BYTES, 1 << (size - 1).bit_length())
        slots = self._slots.setdefault(size, [])
        for slot in slots:
            if slot.copied.done:
                return slot
        slot = _Slot(self._xp, self._cuda, size)
        # Earlier operations may still use the memory that the staging array now has.
        slot.moved.record(self._compute)
        slots.append(slot)
        return slot
