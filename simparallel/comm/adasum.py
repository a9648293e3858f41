"""`all_reduce(op="adasum")` on shared memory: each rank takes its slice of the elements through the tree.

A rank reads its slice of every rank's vector where it lies. At each level of the tree the pairs of
slices give partial products <a,b>, <a,a>, <b,b>, a few numbers a layer; these are summed over the
ranks, in the order of the group, so everybody joins the pairs with the same coefficients. Log2 n such
small sums later a rank has its slice of the result, and copies the others' slices.

The sums go through the group's slot, which a large payload leaves free. It has two halves that are used
in turn: whoever writes one for the second time has seen everybody write the other, so all have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.comm.call import Body, BodySteps, Call, Payloads
from simparallel.comm.reduction import reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.summation import QUIET, WIDE, Moments, coefficients, is_safe, moments, tree

if TYPE_CHECKING:
    from simparallel.comm.group import Group

CACHED = 1 << 15  # elements that go through a step together: four blocks of float64 fit the cache of a core
_HALF = SLOT_BYTES // 2 // WIDE.itemsize
_SUM = reduction("sum", WIDE)

Layers = tuple[int, ...]  # sizes of the parts of a flat vector, each summed by itself


def small(layers: Layers) -> Body:
    """Everybody does the whole tree."""

    def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
        x[...] = whole(payloads.flat, layers).reshape(x.shape)
        return x

    return body


def large(layers: Layers) -> BodySteps:
    """Everybody takes a slice through the tree."""

    def steps(call: Call) -> Any:
        group, x = call.group, call.x
        if group.size == 1:
            return x
        me, parts = group.position, call.payloads().flat
        mine = group.bounds(x.size, me)
        slices = SliceTree([part[mine] for part in parts], list(segments(layers, mine)))
        rounds = _Rounds(group, call)
        found = slices.first_moments(len(layers))
        while len(slices.rows) > 1:
            total = yield from rounds.sum(found)
            if x.dtype.itemsize == WIDE.itemsize and not _all_safe(total):
                return (yield from _one_by_one(group, parts, x, layers))
            found = slices.join(total, parts[me][mine])
        yield group.end_phase()
        order()
        target = x.reshape(-1)  # a copy where there are gaps
        for position, part in enumerate(parts):
            if not (call.zero_copy and position == me):
                piece = group.bounds(x.size, position)
                target[piece] = part[piece]
        if not x.flags.c_contiguous:
            x[...] = target.reshape(x.shape)
        return x

    return steps


@QUIET
def whole(vectors: Sequence[np.ndarray], layers: Layers) -> np.ndarray:
    """Adasum of flat vectors, layer by layer; a new vector of their dtype."""
    out = np.empty(vectors[0].size, vectors[0].dtype)
    start = 0
    for size in layers:
        out[start : start + size] = tree([v[start : start + size].astype(WIDE) for v in vectors])
        start += size
    return out


def segments(layers: Layers, part: slice) -> Iterator[tuple[int, int, int]]:
    """What a part of a vector has of its layers: (number of the layer, start and stop in the part)."""
    start = 0
    for layer, size in enumerate(layers):
        low, high = max(start, part.start), min(start + size, part.stop)
        if low < high:
            yield layer, low - part.start, high - part.start
        start += size


class SliceTree:
    """The tree on one slice of the elements, level by level.

    Blocks of elements go through a whole step, conversion to float64, joining and the products of the
    next level, while they are in the cache.

    Args:
        rows: the slice of each rank's vector, flat; only read.
        parts: its segments, see `segments`.

    Attributes:
        rows: those of the level.
    """

    def __init__(self, rows: list[np.ndarray], parts: list[tuple[int, int, int]]) -> None:
        self.rows = rows
        self._parts = parts
        longest = max((stop - start for _, start, stop in parts), default=0)
        self._scratch = np.empty((4, min(CACHED, longest)))

    @QUIET
    def first_moments(self, num_layers: int) -> np.ndarray:
        """Partial moments of the pairs: (pairs, layers, 3)."""
        found = np.zeros((len(self.rows) // 2, num_layers, 3))
        for pair, sums in enumerate(found):
            for layer, piece in self._blocks():
                a, b = (self._load(2 * pair + i, piece, i) for i in (0, 1))
                sums[layer] += moments(a, b)
        return found

    @QUIET
    def join(self, total: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Replace pairs of rows by their Adasum, the last one into `out`; returns the next pairs' moments.

        Args:
            total: the moments of the pairs over all elements.
            out: what is made of the last pair; may be the memory of a row.
        """
        rows, count = self.rows, len(total)
        is_last = len(rows) == 2
        joined = [out] if is_last else [np.empty(out.size) for _ in range(count)]
        joined += rows[2 * count :]
        found = np.zeros((len(joined) // 2, total.shape[1], 3))
        factors = {
            layer: [coefficients(Moments(*map(float, total[pair, layer]))) for pair in range(count)]
            for layer, _, _ in self._parts
        }
        for first in range(0, len(joined), 2):  # what the next level's pair is made of
            for layer, piece in self._blocks():
                pair = []
                for i, target in enumerate(range(first, min(first + 2, len(joined)))):
                    if target >= count:  # it had no partner
                        pair.append(self._load(2 * target, piece, 2 * i))
                        continue
                    (first_factor, second_factor), row = factors[layer][target], joined[target]
                    a, b = (self._load(2 * target + j, piece, 2 * i + j) for j in (0, 1))
                    a = np.multiply(a, first_factor, out=self._room(2 * i, piece))
                    b = np.multiply(b, second_factor, out=self._room(2 * i + 1, piece))
                    if is_last:
                        row[piece] = np.add(a, b, out=a)
                    else:
                        pair.append(np.add(a, b, out=row[piece]))
                if len(pair) == 2:
                    found[first // 2, layer] += moments(*pair)
        self.rows = joined
        return found

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        for layer, start, stop in self._parts:
            for begin in range(start, stop, CACHED):
                yield layer, slice(begin, min(begin + CACHED, stop))

    def _room(self, number: int, piece: slice) -> np.ndarray:
        return self._scratch[number, : piece.stop - piece.start]

    def _load(self, row: int, piece: slice, number: int) -> np.ndarray:
        """A block as float64: where it lies, or converted into scratch memory."""
        values = self.rows[row][piece]
        if values.dtype == WIDE:
            return values
        room = self._room(number, piece)
        room[...] = values
        return room


class _Rounds:
    """Small sums over the ranks, inside a collective."""

    def __init__(self, group: Group, call: Call) -> None:
        self._group, self._number = group, 0
        self._slots = group.slots(call.seq & 1, 2 * _HALF, WIDE)

    def sum(self, values: np.ndarray) -> Any:
        """The sum of the ranks' values, in the order of the group: equal on all ranks, bit for bit."""
        flat, total = values.reshape(-1), np.empty(values.size)
        _, slots, rows = self._slots
        for start in range(0, flat.size, _HALF):
            stop = min(start + _HALF, flat.size)
            half = (self._number & 1) * _HALF
            place = slice(half, half + stop - start)
            slots[self._group.position][place] = flat[start:stop]
            self._number += 1
            yield self._group.end_phase()
            order()
            parts = [slot[place] for slot in slots]
            reduce_stack(_SUM, parts, None if rows is None else rows[:, place], total[start:stop])
        return total.reshape(values.shape)


def _all_safe(total: np.ndarray) -> bool:
    return all(is_safe(Moments(*map(float, found))) for found in total.reshape(-1, 3))


def _one_by_one(group: Group, parts: Sequence[np.ndarray], x: np.ndarray, layers: Layers) -> Any:
    """Where squares leave the range of float64, on every rank alike: everybody makes the whole result."""
    result = whole(parts, layers)
    yield group.end_phase()  # nobody reads x any more
    x[...] = result.reshape(x.shape)
    return x
