"""`GpuMemory`: the memory pool of a rank on its GPU, whose limit makes a real GPU as small as a described device.

A pool keeps the memory of freed arrays for later ones, because taking memory from the GPU is slow. Each rank has a pool
of its own: CuPy sets the allocator for a thread, so this works for ranks that are threads, too.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from simparallel.base.units import format_bytes
from simparallel.errors import DeviceOutOfMemoryError


class Account(Protocol):
    """The owner of a device, and its live bytes by category, as the recorder counts them."""

    who: str
    live: dict[str, int]


class GpuMemory:
    """A memory pool on a GPU.

    Args:
        cuda: `cupy.cuda`, or a stand-in's.

    Attributes:
        peak_bytes: peak in this run of the bytes that the pool holds: its arrays, and memory kept for later ones.
        limit_bytes: limit of these bytes; CUPY_GPU_MEMORY_LIMIT by default, None for the whole GPU.
        account: the counted arrays, for errors; None if there is no count.
    """

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda
        self._pool = cuda.MemoryPool(self._grow)
        self._default_bytes = int(self._pool.get_limit())
        self._has_grown = False
        self.peak_bytes = 0
        self.limit_bytes: int | None = None
        self.account: Account | None = None

    def limit_to(self, limit_bytes: int | None) -> None:
        """Set the limit; None for the default."""
        size = self._default_bytes if limit_bytes is None else limit_bytes
        self._pool.set_limit(size=size)
        self.limit_bytes = size or None

    @property
    def taken_bytes(self) -> int:
        """The bytes of the GPU that the pool holds now."""
        return int(self._pool.total_bytes())

    def allocate(self, size: int) -> Any:
        """Return a pointer to memory for an array of `size` bytes; CuPy calls this for each array.

        Raises:
            DeviceOutOfMemoryError: the pool has no room, even after it has freed its unused memory.
        """
        try:
            pointer = self._pool.malloc(size)
        except self._cuda.memory.OutOfMemoryError:
            raise self._out_of_memory(size) from None
        if self._has_grown:
            self._has_grown = False
            self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return pointer

    def _grow(self, size: int) -> Any:
        self._has_grown = True
        return self._cuda.MemoryPointer(self._cuda.Memory(size), 0)

    def summary(self) -> dict[str, Any]:
        """Return plain numbers: `{"peak_bytes": …, "limit_bytes": …}`."""
        return {"peak_bytes": self.peak_bytes, "limit_bytes": self.limit_bytes}

    def _out_of_memory(self, size_bytes: int) -> DeviceOutOfMemoryError:
        who, live = ("this rank", {}) if self.account is None else (self.account.who, dict(self.account.live))
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in live.items() if size) or "nothing"
        taken = f"its memory pool holds {format_bytes(self.taken_bytes)} (measured)"
        if self.limit_bytes is None:
            why = f"{taken}, and the GPU has no more: other ranks and programs use it, too"
        else:
            why = f"{taken} of {format_bytes(self.limit_bytes)}"
        return DeviceOutOfMemoryError(
            f"{who}: the GPU has no room for another {format_bytes(size_bytes)}: {why}. Counted by category: {held}; "
            "the rest of the pool is work arrays and gaps. Use a smaller batch or model, checkpoint activations, or "
            "give the devices more memory (device_memory=).",
            needed_bytes=size_bytes,
            limit_bytes=self.limit_bytes,
            live=live,
            layer="",
            pool_bytes=self.taken_bytes,
        )

    def is_empty(self) -> bool:
        """Free the unused memory of the pool; return whether none is left."""
        self._pool.free_all_blocks()
        return self.taken_bytes == 0


# (cuda, number of the GPU) -> pools of ended runs. A pool has to outlive its arrays, which a program may keep.
_idle: dict[tuple[Any, int], list[GpuMemory]] = {}
_lock = threading.Lock()


@contextmanager
def use_memory(cuda: Any, number: int) -> Iterator[GpuMemory]:
    """Allocate this thread's arrays from a pool of their own inside the block.

    Pools of earlier runs first free their unused memory. The pool of the block is empty: arrays that an earlier run of
    a warm rank has left behind stay in the pool of that run.
    """
    # Models and tapes have reference cycles, which keep their arrays alive until then.
    gc.collect()
    with _lock:
        idle = _idle.setdefault((cuda, number), [])
        empty = [memory for memory in idle if memory.is_empty()]
        memory = empty[0] if empty else GpuMemory(cuda)
        if empty:
            idle.remove(memory)
    memory.peak_bytes = 0
    try:
        with cuda.using_allocator(memory.allocate):
            yield memory
    finally:
        memory.account = None
        with _lock:
            idle.append(memory)
