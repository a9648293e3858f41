"""One rank's memory in the shared segment: the slots of its groups, then a heap."""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque

import numpy as np

from simparallel.comm.memory.segment import LINE, SLOT_BYTES, SharedSegment, round_up
from simparallel.errors import SharedMemoryError


class Arena:
    """The heap of one rank: first fit over a free list in private memory.

    Only its owner allocates; peers learn offsets from notes.
    """

    def __init__(self, segment: SharedSegment, rank: int) -> None:
        self.segment = segment
        self.rank = rank
        # The slots of all groups come first, at fixed offsets that every rank can compute.
        self._heap_at = segment.map.max_groups * 2 * SLOT_BYTES
        self._free: list[tuple[int, int]] = [(self._heap_at, segment.arena_bytes - self._heap_at)]
        self._reserved_to = 0
        self._sizes: dict[int, int] = {}
        # Finalizers run on whichever thread drops the last reference, even in the middle of `allocate` (garbage
        # collection), so `free` must never wait for the lock.
        self._lock = threading.Lock()
        self._given_back: deque[int] = deque()

    def reserve_slots(self, group: int) -> tuple[int, int]:
        """Reserve the even and the odd slot of a group; return their offsets, which are equal on every rank."""
        start = group * 2 * SLOT_BYTES
        self._fallocate(start, 2 * SLOT_BYTES)
        return start, start + SLOT_BYTES

    def allocate(self, size_bytes: int) -> int:
        """Allocate `size_bytes` of memory, aligned to a cache line; return its offset.

        Raises:
            SharedMemoryError: the arena or the machine is full.
        """
        size = round_up(max(size_bytes, 1), LINE)
        with self._lock:
            self._merge()
            fitting = next((i for i, (_, length) in enumerate(self._free) if length >= size), None)
            if fitting is None:
                raise SharedMemoryError(
                    f"rank {self.rank}: {size} bytes of shared memory do not fit its arena of "
                    f"{self.segment.arena_bytes} bytes; free shared arrays or pass a larger arena_bytes.",
                    needed_bytes=size,
                    available_bytes=max((n for _, n in self._free), default=0),
                )
            start, length = self._free[fitting]
            self._fallocate_to(start + size)
            if length == size:
                del self._free[fitting]
            else:
                self._free[fitting] = (start + size, length - size)
            self._sizes[start] = size
            return start

    def free(self, offset: int) -> None:
        """Free memory of `allocate`; neighbours are merged now or at the next `allocate`."""
        self._given_back.append(offset)
        if self._lock.acquire(blocking=False):
            try:
                self._merge()
            finally:
                self._lock.release()

    def _merge(self) -> None:
        while self._given_back:
            offset = self._given_back.popleft()
            # Neighbours are joined, so that memory freed in pieces can be allocated as a whole.
            merged: list[tuple[int, int]] = []
            for start, length in sorted([*self._free, (offset, self._sizes.pop(offset))]):
                if merged and merged[-1][0] + merged[-1][1] == start:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((start, length))
            self._free = merged

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a new array in the arena; its memory is freed with its last view."""
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes == 0:
            return np.empty(shape, dtype)
        offset = self.allocate(size_bytes)
        # The finalizer is on the owner of the bytes: every view of the array keeps it alive.
        owner = self.segment.array(self.rank, offset, (size_bytes,), np.dtype(np.uint8))
        weakref.finalize(owner, self.free, offset).atexit = False
        return owner.view(dtype).reshape(shape)

    def offset_of(self, x: np.ndarray) -> int | None:
        """Return the offset of `x` in this arena, or None if peers cannot read it in place.

        They cannot if it is stored elsewhere, is not contiguous, or does not begin at a multiple of its item size:
        peers view an arena as an array of elements, see `staging.Arenas`.
        """
        offset = x.__array_interface__["data"][0] - self.segment.address - self.segment.arena_at(self.rank)
        if 0 <= offset < self.segment.arena_bytes and x.flags.c_contiguous:
            item = x.itemsize
            return None if item and LINE % item == 0 and offset % item else offset
        return None

    def _fallocate_to(self, end: int) -> None:
        if end > self._reserved_to:
            start = max(self._reserved_to, self._heap_at)
            # Pages are reserved a megabyte at a time, to save system calls.
            stop = min(round_up(end, 1 << 20), self.segment.arena_bytes)
            self._fallocate(start, stop - start)
            self._reserved_to = stop

    def _fallocate(self, start: int, length: int) -> None:
        self.segment.reserve(self.rank, self.segment.arena_at(self.rank) + start, length)
