"""all_reduce of large arrays on shared memory: every rank reduces its part, and copies the others' results."""

from __future__ import annotations

from collections import deque
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms.reduction import reduce_into, reduction
from simparallel.comm.call import Body, Call, Settings
from simparallel.comm.memory.segment import LINE, round_up
from simparallel.comm.transport import order
from simparallel.comm.work import Steps
from simparallel.errors import SharedMemoryError

if TYPE_CHECKING:
    from simparallel.comm.group import Group

MAX_VIEWS = 64
TRY_EVERY = 128  # calls between two trials of both alternatives
MOST_AT_ONCE_BYTES = 64 << 20  # larger arrays are exposed in pieces only, which takes less memory

_Views = tuple[list[np.ndarray], list[np.ndarray], list[slice]]


class Choice:
    """The choice between pieces and the whole at once, by recent timings. The group's first rank chooses for all.

    Pieces stay in the cache. That is twice as fast if the ranks' cores share one, and half as fast if they do not:
    then a cache line costs more to fetch from the other core than from memory. The scheduler decides on which cores
    the ranks run and may change it, so both alternatives are tried again from time to time.
    """

    def __init__(self) -> None:
        self._calls = 0
        # Of the last calls in pieces, and at once. The minimum counts: anything above it is other load of the machine.
        self._times_ns: tuple[deque[int], deque[int]] = deque([0], maxlen=8), deque([0], maxlen=8)

    def all_at_once(self) -> bool:
        """Count a call, and return the choice for the call after it."""
        self._calls += 1
        turn = self._calls % TRY_EVERY
        # Two calls of each: the first may have to reload data that the other alternative has evicted from the cache.
        return turn >= 2 if turn < 4 else min(self._times_ns[1]) < min(self._times_ns[0])

    def took(self, time_ns: int, all_at_once: bool) -> None:
        """Record the duration of a call."""
        times_ns = self._times_ns[all_at_once]
        # Older timings may no longer be true.
        if self._calls % TRY_EVERY <= 4:
            times_ns.clear()
        times_ns.append(time_ns)


class LargeAllReduce(Body):
    """all_reduce for large arrays of one shape.

    A rank exposes the parts that other ranks reduce, and its result behind them. It does so piece by piece where that
    pays: then the exposed memory stays in the cache, and each piece takes a single wait, which covers the results of
    one piece and the copy of the next.

    Args:
        group, x, settings: as `Body`.
        piece_bytes: size of a piece; None for one piece of everything.
    """

    def __init__(self, group: Group, x: np.ndarray, settings: Settings, piece_bytes: int | None) -> None:
        super().__init__(group, x, settings)
        self.rule, size = reduction(settings.op, x.dtype, "all_reduce"), group.size
        self.step = max(1, min(x.nbytes, piece_bytes or x.nbytes) // x.itemsize)  # elements of a piece
        in_pieces = self.step < x.size
        self._choice = Choice() if in_pieces and x.nbytes <= MOST_AT_ONCE_BYTES else None
        self._all_at_once = not in_pieces
        # Offset of the result behind the exposed data, for each way to expose it. The result has its own cache lines,
        # because peers still read the data while it is written. A whole payload has room for two results behind it,
        # used alternately if other ranks expose pieces.
        self.results_at = {h.IN_PIECES: round_up(self.step * x.itemsize, LINE), h.ALL_COPIED: round_up(x.nbytes, LINE)}
        self.result_bytes = round_up(-(-self.step // size) * x.itemsize, LINE)
        whole_result_bytes = max(-(-x.size // size) * x.itemsize, 2 * self.result_bytes * in_pieces)
        self.room_bytes = {
            h.IN_PIECES: self.results_at[h.IN_PIECES] + self.result_bytes,
            h.ALL_COPIED: self.results_at[h.ALL_COPIED] + whole_result_bytes,
        }
        self._kept: dict[Any, _Views] = {}

    def expose(self, call: Call) -> tuple[int, int]:
        """Expose the first piece and the offset of the second, or everything. Returns (offset of the first, bytes)."""
        start_ns = perf_counter_ns()
        views = self.group.views
        if views.reads_in_place(call):
            return super().expose(call)
        flat = call.x.reshape(-1)  # a copy if x is not contiguous
        staging, piece = views.staging, flat[: self.step]
        if self._choice is not None and self.position == 0:
            call.wish = int(self._choice.all_at_once())
        if self._all_at_once:
            try:
                room_bytes = self.room_bytes[h.ALL_COPIED]
                offset = staging.next(staging.place_bytes(room_bytes), room_bytes)
                call.shown, piece = h.ALL_COPIED, flat
            except SharedMemoryError:
                if self._choice is None:
                    raise
        # Also the fallback if there is not enough memory for the whole.
        if call.shown == h.IN_PIECES:
            offset, call.other_offset = staging.next_piece(self.room_bytes[h.IN_PIECES])
        views.show_to_others(piece, offset)
        call.kept = flat, perf_counter_ns() - start_ns
        return offset, piece.nbytes

    def run(self, call: Call) -> Steps:
        views, x, me = self.group.views, call.moved(), self.position
        if views.size == 1:
            return x
        ways, first, second = (tuple(call.notes(word)) for word in (h.SHOWN, h.OFFSET, h.OTHER_OFFSET))
        if self._choice is not None:
            self._all_at_once = bool(call.notes(h.WISH)[0])
        flat, spent_ns = (x.reshape(-1), 0) if call.zero_copy else call.kept
        # The body reads further pieces from `out`, which `moved` has filled.
        if call.out is not None:
            flat = x.reshape(-1)
        start_ns = perf_counter_ns() - spent_ns
        step = flat.size if all(ways) else self.step
        if h.IN_PIECES in ways and h.ALL_COPIED in ways:
            # Some rank lacked the memory for its whole payload, so all of them work piece by piece. A rank that
            # exposed the whole, without its own part, adds that part now: another rank may reduce it in a piece.
            if call.shown == h.ALL_COPIED:
                part = views.bounds(flat.size, me)
                views.arenas(flat.dtype).one(me, first[me], flat.size)[part] = flat[part]
            yield views.end_phase()
            order()
        for i, start in enumerate(range(0, flat.size, step)):
            own = flat[start : start + step]
            offsets = tuple(
                at + start * own.itemsize if way else other if i & 1 else at
                for way, at, other in zip(ways, first, second, strict=True)
            )
            sources, results, parts = self._views(ways, offsets, i, own)
            # `mine` is reduced into shared memory, for the peers, and copied back to this rank's array.
            mine, result = own[parts[me]], results[me]
            sources = [*sources[:me], mine, *sources[me + 1 :]]
            reduce_into(self.rule, sources, result, is_apart=not call.zero_copy)
            if not call.zero_copy:
                mine[...] = result
                if start + step < flat.size and call.shown == h.IN_PIECES:
                    following, _ = views.staging.next_piece(self.room_bytes[h.IN_PIECES])
                    views.show_to_others(flat[start + step : start + 2 * step], following)
            # One wait for two things: all results of this piece, and the next piece of every rank.
            yield views.end_phase()
            order()
            for position, part in enumerate(parts):
                if position != me:
                    own[part] = results[position]
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        if self._choice is not None and not call.zero_copy:
            self._choice.took(perf_counter_ns() - start_ns, h.ALL_COPIED in ways)
        return x

    def _views(self, ways: tuple[int, ...], offsets: tuple[int, ...], number: int, own: np.ndarray) -> _Views:
        """Return the members' data for this rank's part of a piece, their results, and the parts; views are kept."""
        key = ways, offsets, number, own.size
        views = self._kept.get(key)
        if views is None:
            if len(self._kept) >= MAX_VIEWS:
                self._kept.clear()
            views_of = self.group.views
            arenas, parts = views_of.arenas(own.dtype), [views_of.bounds(own.size, i) for i in range(views_of.size)]
            sources = [array[parts[self.position]] for array in arenas.flat(offsets, own.size)]
            results = []
            for position, (way, offset, part) in enumerate(zip(ways, offsets, parts, strict=True)):
                if way == h.OWN_ARRAY:
                    at = offset + part.start * own.itemsize
                elif way == h.IN_PIECES:
                    at = offset + self.results_at[way]
                else:
                    begin = offset - number * self.step * own.itemsize
                    at = begin + self.results_at[way] + (number & 1) * self.result_bytes
                results.append(arenas.one(position, at, part.stop - part.start))
            views = self._kept[key] = sources, results, parts
        return views
