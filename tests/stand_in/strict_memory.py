"""The stand-in for CuPy's memory pools: they count the bytes of device arrays that own memory, up to their limit.

The arrays themselves are NumPy's. Each holds a block of the pool until it is freed; the pool does not refer to arrays.
Only new arrays of a capture lie in the memory of their blocks, see `array_in`: a graph overwrites memory that its
capture has freed and used again. Names, arguments and results follow CuPy 14.2. CuPy's pools also split and join
blocks; these do not.
"""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np

_addresses = itertools.count(1 << 48, 1 << 40)
# CuPy rounds sizes up to this many bytes.
_ROUND_BYTES = 512


class OutOfMemoryError(MemoryError):
    """A pool has reached its limit."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes, limit set to: {limit:,} "
            "bytes)."
        )


class Memory:
    """Memory of a device: its size, and its bytes once an array of a capture lies there."""

    def __init__(self, size: int) -> None:
        self.size, self.ptr = size, next(_addresses)

    @cached_property
    def content(self) -> bytearray:
        return bytearray(self.size)


class _Block:
    """A block of a pool, given back when its array is freed. It is its own pointer and memory."""

    def __init__(self, memory: Any, pool: MemoryPool) -> None:
        self.size, self.ptr, self._memory, self._pool = memory.size, memory.ptr, memory, weakref.ref(pool)

    @property
    def mem(self) -> _Block:
        return self

    @property
    def content(self) -> bytearray:
        return self._memory.content

    def __del__(self) -> None:
        pool = self._pool()
        if pool is not None:
            pool._take_back(self._memory)


class PinnedMemory(bytearray):
    """Pinned host memory, as a buffer of bytes."""


class MemoryPool:
    """A pool that keeps the memory of freed arrays for others of the same size.

    Args:
        allocator: size -> pointer to new memory of a device.
    """

    def __init__(self, allocator: Callable[[int], Any] | None = None) -> None:
        self._allocator = allocator
        self._free: dict[int, list[Any]] = {}
        self._total = self._used = self._limit = 0
        # Any thread may free an array, even one that is allocating.
        self._lock = threading.RLock()

    def malloc(self, size: int) -> Any:
        size = -(-size // _ROUND_BYTES) * _ROUND_BYTES
        with self._lock:
            kept = self._free.get(size)
            memory = kept.pop() if kept else self._new(size)
            self._used += size
        return _Block(memory, self)

    def _new(self, size: int) -> Any:
        for give_back in (self.free_all_blocks, gc.collect, self.free_all_blocks):
            if not self._limit or self._total + size <= self._limit:
                break
            give_back()
        if self._limit and self._total + size > self._limit:
            raise OutOfMemoryError(size, self._total, self._limit)
        self._total += size
        return Memory(size) if self._allocator is None else self._allocator(size).mem

    def _take_back(self, memory: Any) -> None:
        with self._lock:
            self._used -= memory.size
            self._free.setdefault(memory.size, []).append(memory)

    def free_all_blocks(self, stream: Any = None) -> None:
        with self._lock:
            self._total -= sum(size * len(kept) for size, kept in self._free.items())
            self._free.clear()

    def used_bytes(self) -> int:
        return self._used

    def free_bytes(self) -> int:
        return self._total - self._used

    def total_bytes(self) -> int:
        return self._total

    def set_limit(self, size: int | None = None, fraction: float | None = None) -> None:
        self._limit = size or 0

    def get_limit(self) -> int:
        return self._limit


class _Thread(threading.local):
    allocator: Callable[[int], Any] | None = None


_thread = _Thread()


@contextmanager
def using_allocator(allocator: Callable[[int], Any] | None = None) -> Iterator[None]:
    """Allocate the arrays of this thread by `allocator` inside the block."""
    before, _thread.allocator = _thread.allocator, allocator
    try:
        yield
    finally:
        _thread.allocator = before


def memory_of_array(size: int) -> Any:
    """Return the memory that an array of `size` bytes holds; None without an allocator."""
    return None if _thread.allocator is None or size == 0 else _thread.allocator(size)


def array_in(block: Any, like: np.ndarray) -> np.ndarray:
    """Return an array in the memory of a block, with the shape, dtype and order of `like`."""
    return np.ndarray(like.shape, like.dtype, block.content, strides=np.empty_like(like).strides)
