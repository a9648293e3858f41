"""all_reduce of large arrays on shared memory: every rank reduces its part, and copies the others' results."""

from __future__ import annotations

from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms.reduction import reduce_into
from simparallel.comm.call import Body, Call
from simparallel.comm.group import Group
from simparallel.comm.memory.segment import LINE, round_up
from simparallel.comm.plan import Settings
from simparallel.comm.transport import order
from simparallel.comm.work import Steps

MAX_VIEWS = 64

_Views = tuple[list[np.ndarray], list[np.ndarray], list[slice]]


class LargeAllReduce(Body):
    """all_reduce for large arrays of one shape.

    A rank exposes the parts that other ranks reduce, and its result behind them. It may do so piece by piece: then the
    exposed memory stays in the cache, and each piece takes a single wait, which covers the results of one piece and
    the copy of the next.

    Args:
        group, x, settings: as `Body`.
        piece_bytes: size of a piece; None for one piece of everything.
    """

    def __init__(self, group: Group, x: np.ndarray, settings: Settings, piece_bytes: int | None) -> None:
        super().__init__(group, x, settings)
        self.step = max(1, min(x.nbytes, piece_bytes or x.nbytes) // x.itemsize)  # elements of a piece
        self.is_one_piece = self.step >= x.size
        # Offset of the result behind the exposed data. It has its own cache lines, because peers still read the data
        # while it is written.
        self.result_at = round_up(self.step * x.itemsize, LINE)
        self.room_bytes = self.result_at + round_up(-(-self.step // group.size) * x.itemsize, LINE)
        self._kept: dict[Any, _Views] = {}

    def expose(self, call: Call) -> tuple[int, int]:
        """Expose the first piece, and the offset of the second. Returns (offset of the first, its bytes)."""
        views = self.group.views
        if views.reads_in_place(call):
            return super().expose(call)
        call.kept = call.x.reshape(-1)  # a copy if x is not contiguous
        piece, staging = call.kept[: self.step], views.staging
        if self.is_one_piece:
            # Not `next_piece`, which keeps two places for each size. Arrays of one piece may have many sizes, and share
            # the memory of `next`.
            offset = staging.next(staging.place_bytes(self.room_bytes), self.room_bytes)
        else:
            offset, call.other_offset = staging.next_piece(self.room_bytes)
        views.show_to_others(piece, offset)
        return offset, piece.nbytes

    def run(self, call: Call) -> Steps:
        views, x, me = self.group.views, call.moved(), self.position
        if views.size == 1:
            return x
        in_place = tuple(way == h.OWN_ARRAY for way in call.notes(h.EXPOSURE))
        first, second = call.notes(h.OFFSET), call.notes(h.OTHER_OFFSET)
        # The body reads further pieces from `out`, which `moved` has filled.
        flat = x.reshape(-1) if call.zero_copy or call.out is not None else call.kept
        # Nothing is copied piece by piece where peers read all arrays in place.
        step = flat.size if all(in_place) else self.step
        for i, start in enumerate(range(0, flat.size, step)):
            own = flat[start : start + step]
            offsets = tuple(
                at + start * own.itemsize if is_own else other if i & 1 else at
                for is_own, at, other in zip(in_place, first, second, strict=True)
            )
            sources, results, parts = self._views(in_place, offsets, own)
            # `mine` is reduced into shared memory, for the peers, and copied back to this rank's array.
            mine, result = own[parts[me]], results[me]
            sources = [*sources[:me], mine, *sources[me + 1 :]]
            reduce_into(self.rule, sources, result, is_disjoint=not call.zero_copy)
            if not call.zero_copy:
                mine[...] = result
                following = flat[start + step : start + 2 * step]
                if following.size:
                    views.show_to_others(following, views.staging.next_piece(self.room_bytes)[0])
            # One wait for two things: all results of this piece, and the next piece of every rank.
            yield views.end_phase()
            order()
            for position, part in enumerate(parts):
                if position != me:
                    own[part] = results[position]
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        return x

    def _views(self, in_place: tuple[bool, ...], offsets: tuple[int, ...], own: np.ndarray) -> _Views:
        """Return the members' data for this rank's part of a piece, their results, and the parts; views are kept."""
        key = in_place, offsets, own.size
        views = self._kept.get(key)
        if views is None:
            if len(self._kept) >= MAX_VIEWS:
                self._kept.clear()
            views_of = self.group.views
            arenas, parts = views_of.arenas(own.dtype), [views_of.bounds(own.size, i) for i in range(views_of.size)]
            sources = [array[parts[self.position]] for array in arenas.flat(offsets, own.size)]
            results = []
            for position, (is_own, offset, part) in enumerate(zip(in_place, offsets, parts, strict=True)):
                at = part.start * own.itemsize if is_own else self.result_at
                results.append(arenas.one(position, offset + at, part.stop - part.start))
            views = self._kept[key] = sources, results, parts
        return views
