"""Staging memory: the places where a rank's payload is copied for its peers, and the peers' views of them.

    slots   two fixed places of SLOT_BYTES for small payloads; every rank knows their offsets beforehand
    ring    larger payloads take the next place, and start over where the end of the ring is reached
    rooms   two places of any size, used alternately, for payloads that are too large for the ring
    pieces  two places, used alternately, for payloads exposed piece by piece, see `direct_large`

A store to a cache line that another core has just read has to invalidate that core's copy first, which costs up to
ten times a store to a line that no other core holds. The ring is therefore larger than the caches private to one
core: when a place comes round again, the peers have evicted it. (Two ranks, 64 KiB, copy and read: 15 us with two
places, 7.6 us with a ring of 2 MiB; where the cores share no cache 45 us, and 25 us with 4 MiB.)

A place may be reused once every rank has arrived at the following collective, because a rank arrives only after it
has finished the previous one. So the last place but one is always free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from simparallel.algorithms.reduction import Reduction
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import LINE, SLOT_BYTES, SharedSegment

# Measured with 2, 4 and 8 ranks on two cores that share a cache of 32 MiB. With more ranks than cores a ring gains
# little, and nothing if it leaves less of that cache to the ranks' data.
PAIR_RING_BYTES, RING_BYTES = 4 << 20, 512 << 10
SMALLEST_PLACE_BYTES = 16 << 10
# Views kept for places that come round again.
MAX_PLACES = 64


class Staging:
    """One rank's staging memory for one group.

    Args:
        arena: the rank's arena.
        slot: number of the group.
        size: number of ranks in the group.

    Attributes:
        slots: offsets of the two slots in the arena, equal on all ranks.
    """

    def __init__(self, arena: Arena, slot: int, size: int) -> None:
        self.slots = arena.reserve_slots(slot)
        self._arena = arena
        # A small arena gets a smaller ring, or none: then all payloads use the rooms.
        most = 1 << (arena.segment.arena_bytes // 16).bit_length()
        self.ring_bytes = min(PAIR_RING_BYTES if size == 2 else RING_BYTES, most)
        self._ring_at = -1
        self._start = self._end = 0  # bounds of the last place in the ring
        self._rooms = [(0, 0), (0, 0)]  # (offset, bytes)
        self._turn = self._piece = 0
        # Offset of the two places of pieces, by their size.
        self._pairs: dict[int, int] = {}

    def place_bytes(self, size_bytes: int) -> int:
        """Return the size of the ring's places for so many bytes (a power of two), or 0 if they do not fit the ring.

        The ring holds at least four of them, so the next place is never the last one, whatever sizes alternate.
        """
        place = max(SMALLEST_PLACE_BYTES, 1 << (size_bytes - 1).bit_length())
        return place if 4 * place <= self.ring_bytes else 0

    def next(self, place_bytes: int, size_bytes: int) -> int:
        """Return the offset of the next place.

        Args:
            place_bytes: result of `place_bytes`.
            size_bytes: bytes of the payload.

        Raises:
            SharedMemoryError: no memory.
        """
        if not place_bytes:
            return self._next_room(size_bytes)
        if self._ring_at < 0:
            self._ring_at = self._arena.allocate(self.ring_bytes)
        # Places are aligned to their size, so the same offsets come round again and their views can be kept.
        start = (self._end + place_bytes - 1) & -place_bytes
        is_end = start >= min(self.ring_bytes, MAX_PLACES * place_bytes)
        # Wrap, unless the last place is at the start: then there is room behind it, and the start is still in use.
        if is_end and self._start >= place_bytes:
            start = 0
        self._start, self._end = start, start + place_bytes
        return self._ring_at + start

    def next_piece(self, room_bytes: int) -> tuple[int, int]:
        """Return the offsets of the next piece and of the piece after it.

        A piece and the results of another piece of the same size must not share memory: when a piece is exposed,
        peers may still read the results of the last piece but one.
        """
        first_at = self._pairs.get(room_bytes)
        if first_at is None:
            first_at = self._pairs[room_bytes] = self._arena.allocate(2 * room_bytes)
        self._piece = 1 - self._piece
        places = first_at, first_at + room_bytes
        return places[self._piece], places[1 - self._piece]

    def _next_room(self, size_bytes: int) -> int:
        which = self._turn = 1 - self._turn
        offset, room = self._rooms[which]
        if room < size_bytes:
            if room:
                self._arena.free(offset)
                self._rooms[which] = (0, 0)
            offset = self._arena.allocate(size_bytes)
            self._rooms[which] = (offset, size_bytes)
        return offset

    def release(self) -> None:
        """Free everything but the slots. Only when no rank can read it any more."""
        for which, (offset, size_bytes) in enumerate(self._rooms):
            if size_bytes:
                self._arena.free(offset)
            self._rooms[which] = (0, 0)
        for offset in self._pairs.values():
            self._arena.free(offset)
        self._pairs.clear()
        if self._ring_at >= 0:
            self._arena.free(self._ring_at)
        self._ring_at, self._start, self._end = -1, 0, 0


class Payloads:
    """The payloads that the members of a group expose, in the order of the group. Each form is made lazily.

    Attributes:
        flat: one 1-D array for each member.
        arrays: the same in their own shape.
        rows: all of them as one array (P, n), n at least 2, or None if they are not evenly spaced in memory.
    """

    __slots__ = ("_arenas", "_offsets", "_shape", "_size", "arrays", "flat", "rows")

    flat: Sequence[np.ndarray]
    arrays: Sequence[np.ndarray]
    rows: np.ndarray | None

    def __init__(self, arenas: Arenas | None, offsets: Sequence[int], size: int, shape: tuple[int, ...]) -> None:
        self._arenas = arenas
        self._offsets = offsets
        self._size = size
        self._shape = shape

    def __getattr__(self, name: str) -> Any:
        # Called for a form that is not set yet: compute it once; later reads find the attribute.
        arenas = self._arenas
        assert arenas is not None  # `of` sets all three forms
        if name == "flat":
            value: Any = arenas.flat(self._offsets, self._size)
        elif name == "arrays":
            flat = self.flat
            value = flat if len(self._shape) == 1 else [part.reshape(self._shape) for part in flat]
        elif name == "rows":
            value = arenas.rows(self._offsets, self._size)
        else:
            raise AttributeError(name)
        setattr(self, name, value)
        return value

    def __len__(self) -> int:
        return len(self._offsets)

    def one(self, position: int) -> np.ndarray:
        """Return one member's payload in its own shape; the others need not expose any."""
        if self._arenas is None:
            return self.arrays[position]
        return self._arenas.one(position, self._offsets[position], self._size).reshape(self._shape)

    def with_own(self, position: int, x: np.ndarray) -> Sequence[np.ndarray]:
        """Return all payloads; for large arrays, x in place of this rank's own, which may not be exposed."""
        if x.nbytes <= SLOT_BYTES:
            return self.arrays
        arrays = list(self.arrays)
        arrays[position] = x
        return arrays

    def pieces(self, piece: tuple[slice, ...], position: int, x: np.ndarray) -> list[np.ndarray]:
        """Return the same piece of all payloads, the rank's own x included."""
        return [array[piece] for array in self.with_own(position, x)]

    def part(self, place: slice) -> Payloads:
        """Return the same elements of every payload."""
        found = Payloads.of([array[place] for array in self.flat])
        found.rows = None if self.rows is None else self.rows[:, place]
        return found

    @classmethod
    def of(cls, arrays: Sequence[np.ndarray]) -> Payloads:
        """Wrap existing arrays, wherever they are stored."""
        found = cls(None, range(len(arrays)), 0, ())
        found.arrays, found.flat, found.rows = arrays, [array.reshape(-1) for array in arrays], None
        return found


class Arenas:
    """The arenas of a group's ranks as arrays of one dtype, so that a payload is a slice of one.

    Args:
        segment: the mapping that contains the arenas.
        ranks: their ranks, in the order of the group.
        dtype: dtype of the elements.
    """

    def __init__(self, segment: SharedSegment, ranks: Sequence[int], dtype: np.dtype) -> None:
        self._segment, self._ranks, self._dtype = segment, ranks, dtype
        self._item = item = dtype.itemsize
        self._whole: list[np.ndarray] = []
        self._rows: np.ndarray | None = None
        # An offset need not be a multiple of the element size: view each payload.
        if not item or LINE % item:
            return
        count = segment.arena_bytes // item
        self._whole = [segment.array(rank, 0, (count,), dtype) for rank in ranks]
        # Evenly spaced arenas: one strided array (P, count) sees all of them, so one ufunc call reduces all payloads.
        steps = {later - at for at, later in pairwise(map(segment.arena_at, ranks))}
        # Backwards, some versions of NumPy add the rows from the last to the first.
        if len(steps) == 1 and (spacing := steps.pop()) > 0:
            self._rows = np.lib.stride_tricks.as_strided(
                self._whole[0], (len(ranks), count), (spacing, item), writeable=False
            )

    def one(self, position: int, offset: int, size: int) -> np.ndarray:
        """Return `size` elements at an offset of one of the arenas."""
        if not self._whole:
            return self._segment.array(self._ranks[position], offset, (size,), self._dtype)
        first = offset // self._item
        return self._whole[position][first : first + size]

    def flat(self, offsets: Sequence[int], size: int) -> list[np.ndarray]:
        """Return `size` elements at one offset in each arena."""
        if not self._whole:
            return [self.one(position, offset, size) for position, offset in enumerate(offsets)]
        item = self._item
        return [
            whole[offset // item : offset // item + size] for whole, offset in zip(self._whole, offsets, strict=True)
        ]

    def rows(self, offsets: Sequence[int], size: int) -> np.ndarray | None:
        """Return the payloads as rows of one array; a single element is stored twice, see `reduce_stack`."""
        first = offsets[0]
        # Payloads at different offsets have no constant stride.
        if self._rows is None or not size or any(offset != first for offset in offsets):
            return None
        first //= self._item
        return self._rows[:, first : first + max(2, size)]


def reduce_stack(rule: Reduction, payloads: Payloads, out: np.ndarray) -> None:
    """Reduce the ranks' payloads into `out`, which has as many elements, in any shape.

    For few elements, where the overhead of ufunc calls dominates: all ranks are reduced by one call, if possible.
    `payloads.rows` has a single element twice, because on a single column `reduce` would add the ranks in pairs, and
    not in their order.
    """
    if out.size == 0:
        return
    ufunc, loop = rule.ufunc, rule.loop
    is_plain = rule.is_plain and out.flags.c_contiguous
    target = out.reshape(-1) if is_plain else np.empty(out.size, rule.accumulate)
    count = len(payloads)
    rows = payloads.rows if count > 2 else None
    # For two ranks a single call of the ufunc is cheaper than `reduce`.
    if count == 2 and is_plain:
        flat = payloads.flat
        ufunc(flat[0], flat[1], out=target)
    elif rows is None:
        flat = payloads.flat
        target[...] = flat[0]
        for part in flat[1:]:
            ufunc(target, part, out=target, dtype=loop)
    elif out.size == 1:
        target[0] = ufunc.reduce(rows, 0, loop)[0]
    else:
        ufunc.reduce(rows, 0, loop, target)
    if rule.is_mean:
        target /= count
    if not is_plain:
        out[...] = target.reshape(out.shape)
