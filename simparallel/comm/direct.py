"""The collectives on shared memory: the algorithm called `direct`.

A body computes this rank's result from the payloads of all members, where they lie. It runs after
all have arrived and were found to make the same call, and it may write nothing but its own result.
A body that has to wait in between is a generator of conditions over its `Call`.
"""

from __future__ import annotations

from collections.abc import Generator
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.comm import adasum, header as h
from simparallel.comm.call import ALL_COPIED, IN_PIECES, Body, BodySteps, Call
from simparallel.comm.reduction import Reduction, reduce_arrays, reduce_into, reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.comm.staging import Payloads, Staging
from simparallel.comm.transport import Condition
from simparallel.errors import SharedMemoryError

if TYPE_CHECKING:
    from simparallel.comm.group import Group

# Measured with two ranks on two cores; with more ranks than cores pieces do not pay, each of their waits is a turn.
PAIR_BYTES = 1 << 20  # up to this, two ranks both reduce everything
PIECE_BYTES = 2 << 20
MAX_VIEWS = 64
TRY_EVERY = 128  # calls
MOST_AT_ONCE_BYTES = 64 << 20  # more is shown in pieces only, which takes less memory
Steps = Generator[Condition, None, Any]


_Views = tuple[list[np.ndarray], list[np.ndarray], list[slice]]


class _SmallAllReduce:
    """Everybody reduces everything."""

    def __init__(self, rule: Reduction) -> None:
        self.rule = rule

    def __call__(self, payloads: Payloads, x: np.ndarray) -> np.ndarray:
        reduce_stack(self.rule, payloads, x)
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


class _Choice:
    """In pieces or all at once: what took less time lately.

    Pieces stay in the cache. That is three times faster where the ranks' cores share one, and twice slower
    where they do not: there, lines that the other core has are dearer than memory. Which cores a process gets
    is nobody's choice here, and changes, so both ways are tried again from time to time.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._times_ns = [0, 0]  # of the last call in pieces, and all at once

    def all_at_once(self) -> bool:
        """For the next call."""
        turn = self._calls % TRY_EVERY
        self._calls += 1
        # Two calls each way: the first one may have to fetch what the other way has pushed out of the cache.
        return turn >= 2 if turn < 4 else self._times_ns[1] < self._times_ns[0]

    def took(self, time_ns: int, all_at_once: bool) -> None:
        """How long a call took that every rank made in the same way."""
        self._times_ns[all_at_once] = time_ns


class _LargeAllReduce:
    """Every rank reduces its part, and copies those of the others.

    A rank shows the parts that others reduce; its result takes the place of its own part. Piece by piece where that
    pays: what it shows stays in the cache then, and each piece takes one wait, for results and for the next
    piece at once.

    Args:
        rule: how to reduce.
        x: arrays look like this.
        staging: where this rank shows it.
        piece_bytes: of the pieces; None for one of everything.
    """

    def __init__(self, rule: Reduction, x: np.ndarray, staging: Staging, piece_bytes: int | None) -> None:
        self.rule = rule
        if piece_bytes is None or not staging.place_bytes(piece_bytes):
            piece_bytes = x.nbytes
        self.step = max(1, min(x.nbytes, piece_bytes) // x.itemsize)  # elements of a piece
        self.place_bytes = staging.place_bytes(self.step * x.itemsize)
        self._choice = _Choice() if piece_bytes < x.nbytes <= MOST_AT_ONCE_BYTES else None
        self._kept: dict[Any, _Views] = {}

    def expose(self, call: Call) -> tuple[int, int]:
        """Show the first piece, and where the next ones will be, or all: (offset of the first, bytes)."""
        start_ns = perf_counter_ns()
        flat = call.x.reshape(-1)  # a copy where there are gaps
        staging, offset = call.group.staging, -1
        if self._choice and self._choice.all_at_once():
            try:
                offset = staging.next(0, flat.nbytes)
                call.shown, piece = ALL_COPIED, flat
            except SharedMemoryError:
                self._choice = None
        if offset < 0:
            piece = flat[: self.step]
            offset = staging.next(self.place_bytes, self.step * flat.itemsize)
            if flat.size > self.step:
                call.ring_at = staging.ring_at
        call.group.show_to_others(piece, offset)
        call.kept = flat, perf_counter_ns() - start_ns
        return offset, piece.nbytes

    def __call__(self, call: Call) -> Steps:
        group, x, me = call.group, call.x, call.group.position
        if group.size == 1:
            return x
        ways, first, rings = call.notes(h.SHOWN), call.notes(h.OFFSET), call.notes(h.RING_AT)
        flat, spent_ns = (x.reshape(-1), 0) if call.zero_copy else call.kept
        start_ns = perf_counter_ns() - spent_ns
        step = flat.size if all(ways) else self.step
        staging, place_bytes = group.staging, self.place_bytes
        if (
            IN_PIECES in ways and ALL_COPIED in ways
        ):  # what is nobody's part of the whole may be one of a piece
            if call.shown == ALL_COPIED:
                mine = group.bounds(flat.size, me)
                group.arenas(flat.dtype).one(me, first[me], flat.size)[mine] = flat[mine]
            yield group.end_phase()
            order()
        for i, start in enumerate(range(0, flat.size, step)):
            own, turn = flat[start : start + step], self._turn(i, flat.size)
            offsets = tuple(
                at + start * own.itemsize if way or not start else staging.nth(at, ring, place_bytes, turn)
                for way, at, ring in zip(ways, first, rings, strict=True)
            )
            sources, results, parts = self._views(group, offsets, own)
            mine, result = own[parts[me]], results[me]
            sources = [*sources[:me], mine, *sources[me + 1 :]]
            reduce_into(self.rule, sources, result, is_apart=not call.zero_copy)
            if not call.zero_copy:
                mine[...] = result
                if start + step < flat.size and call.shown == IN_PIECES:
                    following = staging.nth(first[me], rings[me], place_bytes, self._turn(i + 1, flat.size))
                    group.show_to_others(flat[start + step : start + 2 * step], following)
                    staging.take(following, place_bytes)
            yield group.end_phase()
            order()
            for position, part in enumerate(parts):
                if position != me:
                    own[part] = results[position]
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        if self._choice and ways.count(ways[0]) == group.size and not call.zero_copy:
            self._choice.took(perf_counter_ns() - start_ns, call.shown == ALL_COPIED)
        return x

    def _turn(self, number: int, size: int) -> int:
        """Which place a piece takes: two by turns, and a shorter last one another.

        When a piece is shown, peers may still read the results of the one before the last. Those lie where equal
        pieces show nothing, and are written when everybody has the results in between.
        """
        return number & 1 if (number + 1) * self.step <= size else 2

    def _views(self, group: Group, offsets: tuple[int, ...], own: np.ndarray) -> _Views:
        """What members show of this rank's part, their results, and the parts; kept, as places come again."""
        key = offsets, own.size
        views = self._kept.get(key)
        if views is None:
            if len(self._kept) >= MAX_VIEWS:
                self._kept.clear()
            parts = [group.bounds(own.size, position) for position in range(group.size)]
            shown = group.arenas(own.dtype).flat(offsets, own.size)
            sources = [array[parts[group.position]] for array in shown]
            results = [array[part] for array, part in zip(shown, parts, strict=True)]
            views = self._kept[key] = sources, results, parts
        return views


class Direct:
    """The bodies, for a position in a group."""

    size: int
    rank: int | None
    staging: Staging

    def all_reduce(self, x: np.ndarray, op: str) -> Any:
        rule = reduction(op, x.dtype)
        if x.nbytes <= SLOT_BYTES:
            return _SmallAllReduce(rule)
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            return _PairAllReduce(rule, self.rank or 0)
        return _LargeAllReduce(rule, x, self.staging, PIECE_BYTES if self.size == 2 else None)

    def adasum(self, x: np.ndarray, layers: adasum.Layers) -> Body | BodySteps:
        return adasum.small(layers) if x.nbytes <= SLOT_BYTES else adasum.large(layers)

    def reduce(self, x: np.ndarray, root: int, op: str) -> Body:
        rule = reduction(op, x.dtype)

        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            if x.nbytes <= SLOT_BYTES:
                reduce_stack(rule, payloads, x)
            elif x.flags.c_contiguous:
                reduce_into(rule, payloads.flat, x.reshape(-1))
            else:
                x[...] = reduce_arrays(rule, payloads.arrays, x.dtype)
            return x

        return body if self.rank == root else _unchanged

    def broadcast(self, root: int) -> Body:
        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            x[...] = payloads.one(root)
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
