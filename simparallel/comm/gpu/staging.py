"""Host copies of GPU arrays, in the rank's shared memory, where collectives on the host read and write them in place.

One block is pinned, so that the GPU copies to and from it at full speed. It holds one copy at a time, and grows to its
size, up to `LARGEST_BYTES`; other copies are in memory that is not pinned.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import Any

import numpy as np

from simparallel.arrays.cuda.device import Gpu
from simparallel.backend import Array
from simparallel.comm.memory.arena import Arena
from simparallel.errors import SharedMemoryError

# Pinning takes milliseconds, and pinned memory cannot be swapped out.
LARGEST_BYTES = 256 << 20


class PinnedStaging:
    """The pinned block of a rank.

    Args:
        arena: the rank's shared memory.
        gpu: the rank's GPU.
    """

    def __init__(self, arena: Arena, gpu: Gpu) -> None:
        self._arena, self._gpu = arena, gpu
        self._block: np.ndarray | None = None
        self._taken: Any = lambda: None  # weak reference to the copy in the block

    def copy_of(self, array: Array) -> np.ndarray:
        """Return a host copy of a GPU array; the host waits until it is complete."""
        host = self._take(array.shape, array.dtype)
        self._gpu.synchronize("a copy to the host")
        array.get(out=host)
        return host

    def _take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape)) * dtype.itemsize
        if 0 < size <= LARGEST_BYTES and self._taken() is None:
            if self._block is None or self._block.nbytes < size:
                self.release()
                self._pin(max(1 << 20, 1 << (size - 1).bit_length()))
            if self._block is not None:
                host = self._block[:size].view(dtype).reshape(shape)
                self._taken = weakref.ref(host)
                return host
        try:
            return self._arena.empty(shape, dtype)
        except SharedMemoryError:
            return np.empty(shape, dtype)

    def _pin(self, size: int) -> None:
        # Without the memory, or the right to pin it, copies are not pinned.
        with suppress(SharedMemoryError, self._gpu.cuda.runtime.CUDARuntimeError):
            block = self._arena.empty((size,), np.dtype(np.uint8))
            self._gpu.cuda.runtime.hostRegister(block.ctypes.data, size, 0)
            self._block = block

    def release(self) -> None:
        """Unpin and free the block."""
        if self._block is not None:
            self._gpu.cuda.runtime.hostUnregister(self._block.ctypes.data)
            self._block = None
