"""The collectives on shared memory: the algorithm called `direct`.

A body computes this rank's result from the payloads of all members, where they lie. It runs after
all have arrived and were found to make the same call, and it may write nothing but its own result.
A body that has to wait in between is a generator of conditions over its `Call`.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np

from simparallel.comm import adasum, header as h
from simparallel.comm.call import Body, BodySteps, Call, Payloads
from simparallel.comm.reduction import Reduction, reduce_arrays, reduce_into, reduce_stack, reduction
from simparallel.comm.segment import LINE, SLOT_BYTES, order, round_up
from simparallel.comm.transport import Condition

# Measured with two ranks on two cores; with more ranks than cores pieces do not pay, each of their waits is a turn.
PAIR_BYTES = 1 << 20  # up to this, two ranks both reduce everything
PIECE_BYTES = 2 << 20
Steps = Generator[Condition, None, Any]


_Views = tuple[list[np.ndarray], list[np.ndarray]]


class _SmallAllReduce:
    """Everybody reduces everything."""

    def __init__(self, rule: Reduction) -> None:
        self.rule = rule

    def __call__(self, payloads: Payloads, x: np.ndarray) -> np.ndarray:
        reduce_stack(self.rule, payloads.flat, payloads.rows, x)
        return x


class _PairAllReduce:
    """Two ranks: both reduce everything, which takes one wait less than to share the work."""

    copied = True

    def __init__(self, rule: Reduction, position: int) -> None:
        self.rule = rule
        self.position = position

    def __call__(self, payloads: Payloads, x: np.ndarray) -> np.ndarray:
        out = x.reshape(-1)  # a copy where there are gaps
        sources = list(payloads.flat)
        sources[self.position] = out  # less to read than what was exposed of it
        reduce_into(self.rule, sources, out)
        if not x.flags.c_contiguous:
            x[...] = out.reshape(x.shape)
        return x


class _LargeAllReduce:
    """Every rank reduces its part, and copies those of the others.

    A rank exposes only the parts that others reduce, and its result, side by side. It does that piece by piece,
    so that what it exposes stays in the cache; each piece takes one wait, for results and for the next piece at once.
    """

    def __init__(self, rule: Reduction, x: np.ndarray, size: int, piece_bytes: int | None) -> None:
        self.rule = rule
        self._kept: dict[Any, _Views] = {}
        self.step = max(1, min(x.nbytes, piece_bytes or x.nbytes) // x.itemsize)  # elements of a piece
        self.result_at = round_up(self.step * x.itemsize, LINE)
        # Always the same where there may be several pieces, see `Group.next_piece`.
        self.room_bytes = (
            2 * piece_bytes + LINE if piece_bytes else self.result_at + -(-x.size // size) * x.itemsize
        )

    def expose(self, call: Call) -> tuple[int, int]:
        """Show the first piece, and where the second one will be: (offset of the first, bytes)."""
        flat = call.kept = call.x.reshape(-1)  # a copy where there are gaps
        offset = call.group.next_piece(self.room_bytes)
        if flat.size > self.step:
            call.other_offset = call.group.other_piece(self.room_bytes)
        self._show(call, flat[: self.step], offset)
        return offset, flat[: self.step].nbytes

    def __call__(self, call: Call) -> Steps:
        group, x, me = call.group, call.x, call.group.position
        if group.size == 1:
            return x
        in_place = call.notes(h.ZERO_COPY)
        first, second = call.notes(h.OFFSET), call.notes(h.OTHER_OFFSET)
        flat = x.reshape(-1) if call.zero_copy else call.kept
        step = flat.size if all(in_place) else self.step
        for i, start in enumerate(range(0, flat.size, step)):
            own = flat[start : start + step]
            parts = [group.bounds(own.size, position) for position in range(group.size)]
            mine = parts[me]
            if any(in_place):
                sources, results = self._mixed(
                    group, first, second if i & 1 else first, in_place, flat, start, parts
                )
            else:
                sources, results = self._copies(group, tuple(second if i & 1 else first), own, parts)
            sources = [*sources[:me], own[mine], *sources[me + 1 :]]
            if call.zero_copy:
                reduce_into(self.rule, sources, own[mine])
            else:
                reduce_into(self.rule, sources, results[me], is_apart=True)
                own[mine] = results[me]
                if start + step < flat.size:
                    self._show(call, flat[start + step : start + 2 * step], group.next_piece(self.room_bytes))
            yield group.end_phase()
            order()
            for position, part in enumerate(parts):
                if position != me:
                    own[part] = results[position]
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        return x

    def _show(self, call: Call, own: np.ndarray, offset: int) -> None:
        """Copy the parts of a piece that others reduce."""
        group = call.group
        room = group.view(group.position, offset, own.shape, own.dtype)
        mine = group.bounds(own.size, group.position)
        for others in (slice(0, mine.start), slice(mine.stop, own.size)):
            room[others] = own[others]

    def _copies(self, group: Any, offsets: tuple[int, ...], own: np.ndarray, parts: list[slice]) -> _Views:
        """What members show of this rank's part, and their results; kept, as pieces come to the same places again."""
        key = offsets, own.size
        views = self._kept.get(key)
        if views is None:
            if len(self._kept) >= 8:
                self._kept.clear()
            views = self._kept[key] = [], []
            for position, offset in enumerate(offsets):
                self._add_copy(views, group, position, offset, own, parts)
        return views

    def _add_copy(
        self, views: _Views, group: Any, position: int, offset: int, own: np.ndarray, parts: list[slice]
    ) -> None:
        shape = (parts[position].stop - parts[position].start,)
        views[0].append(group.view(position, offset, own.shape, own.dtype)[parts[group.position]])
        views[1].append(group.view(position, offset + self.result_at, shape, own.dtype))

    def _mixed(
        self, group: Any, arrays: list[int], copies: list[int], in_place: list[int], flat: np.ndarray, start: int,
        parts: list[slice],
    ) -> _Views:  # fmt: skip
        """The same where some members' own arrays are read."""
        own = flat[start : start + parts[-1].stop]
        views: _Views = [], []
        for position, part in enumerate(parts):
            if in_place[position]:
                there = group.view(position, arrays[position], flat.shape, flat.dtype)[
                    start : start + own.size
                ]
                views[0].append(there[parts[group.position]])
                views[1].append(there[part])
            else:
                self._add_copy(views, group, position, copies[position], own, parts)
        return views


class Direct:
    """The bodies, for a position in a group."""

    size: int
    rank: int | None

    def all_reduce(self, x: np.ndarray, op: str) -> Any:
        rule = reduction(op, x.dtype)
        if x.nbytes <= SLOT_BYTES:
            return _SmallAllReduce(rule)
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            return _PairAllReduce(rule, self.rank or 0)
        return _LargeAllReduce(rule, x, self.size, PIECE_BYTES if self.size == 2 else None)

    def adasum(self, x: np.ndarray, layers: adasum.Layers) -> Body | BodySteps:
        return adasum.small(layers) if x.nbytes <= SLOT_BYTES else adasum.large(layers)

    def reduce(self, x: np.ndarray, root: int, op: str) -> Body:
        rule = reduction(op, x.dtype)

        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            if x.nbytes <= SLOT_BYTES:
                reduce_stack(rule, payloads.flat, payloads.rows, x)
            elif x.flags.c_contiguous:
                reduce_into(rule, payloads.flat, x.reshape(-1))
            else:
                x[...] = reduce_arrays(rule, payloads.arrays, x.dtype)
            return x

        return body if self.rank == root else _unchanged

    def broadcast(self, root: int) -> Body:
        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            x[...] = payloads.arrays[root]
            return x

        return _unchanged if self.rank == root else body

    def all_gather(self, dim: int) -> Body:
        return lambda payloads, x: np.concatenate(payloads.arrays, axis=dim)

    def reduce_scatter(self, x: np.ndarray, dim: int, op: str) -> Body:
        rule, piece = reduction(op, x.dtype), self._piece(x, dim)

        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            parts = [array[piece] for array in payloads.arrays]
            if dim == 0:
                out = np.empty(parts[0].shape, x.dtype)
                reduce_into(rule, [part.reshape(-1) for part in parts], out.reshape(-1))
                return out
            return reduce_arrays(rule, parts, x.dtype)

        return body

    def all_to_all(self, x: np.ndarray, split_dim: int, concat_dim: int) -> Body:
        piece = self._piece(x, split_dim)
        return lambda payloads, x: np.concatenate(
            [array[piece] for array in payloads.arrays], axis=concat_dim
        )

    def gather(self, root: int) -> Body:
        if self.rank != root:
            return _nothing
        return lambda payloads, x: [array.copy() for array in payloads.arrays]

    def scatter(self, root: int) -> BodySteps:
        def steps(call: Call) -> Steps:
            yield from ()  # the shape is not known before, so it takes the long way
            shape, dtype = h.decode_given(call.words_of(root))
            return call.peer(root, (self.size, *shape), dtype)[self.rank or 0, ...].copy()

        return steps

    def nothing(self) -> Body:
        return _nothing

    def bounds(self, size: int, position: int) -> slice:
        """The part of a vector that this position of the group reduces."""
        return slice(size * position // self.size, size * (position + 1) // self.size)

    def _piece(self, x: np.ndarray, dim: int) -> tuple[slice, ...]:
        """This rank's equal part along a dim."""
        return (slice(None),) * dim + (self.bounds(x.shape[dim], self.rank or 0),)


def _unchanged(payloads: Payloads, x: np.ndarray) -> np.ndarray:
    return x


def _nothing(payloads: Payloads, x: Any) -> None:
    return None
