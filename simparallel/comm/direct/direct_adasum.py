"""`all_reduce(op="adasum")` on shared memory: each rank computes the whole tree for its slice of the elements.

A rank reads its slice of every rank's vector in place, and computes the slice's contribution to the products
<a,b>, <a,a>, … of the vectors, a few numbers for each layer. These are summed over the ranks, in the order of the
group, so all ranks combine the vectors with the same factors. After at most ⌈log2 p⌉ such sums over p ranks, a rank
has its slice of the result, and copies the others' slices.

The sums go through the group's slot, which a large payload does not use. Its two halves are used alternately: a rank
that writes one half again has seen all ranks write the other half since, so all of them have read the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.algorithms.reduction import reduction
from simparallel.base import blas
from simparallel.base.adasum import (
    LEAST,
    QUIET,
    WIDE,
    Layers,
    Moments,
    Segment,
    coefficients,
    is_safe,
    moments,
    segments,
    whole,
)
from simparallel.comm.call import Body, Call, Settings
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.memory.staging import Payloads, reduce_stack
from simparallel.comm.transport import order
from simparallel.comm.views import Views
from simparallel.comm.work import Steps

if TYPE_CHECKING:
    from simparallel.comm.group import Group

# Elements processed together, so that they stay in the cache.
CACHED = 1 << 16
# Elements of each row in a strip: large, for few BLAS calls, or small enough that BLAS does not use several threads.
STRIP, SHORT_STRIP = 1 << 13, 1 << 11
_HALF = SLOT_BYTES // 2 // WIDE.itemsize
_SUM = reduction("sum", WIDE)


class SmallAdasum(Body):
    """Every rank computes the whole tree."""

    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.layers: Layers = settings.sizes or (x.size,)

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        target = x if out is None else out
        target[...] = whole(peers.flat, self.layers).reshape(x.shape)
        return target


class LargeAdasum(Body):
    """Every rank computes the tree for its slice.

    It exposes the slices that others need, and its result; its own slice it reads from its own array.
    """

    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.layers: Layers = settings.sizes or (x.size,)
        self.mine = group.views.bounds(x.size, group.position)
        self.segments = list(segments(self.layers, self.mine))

    def expose(self, call: Call) -> tuple[int, int]:
        """Expose this rank's vector without its own slice. Returns (offset, bytes)."""
        views = self.group.views
        if views.reads_in_place(call):
            return super().expose(call)
        flat = call.kept = call.x.reshape(-1)  # a copy if x is not contiguous
        offset = views.staging.next(call.plan.place_bytes, flat.nbytes)
        # This rank's own slice of the exposed vector stays free: it receives the result.
        views.show_to_others(flat, offset)
        return offset, flat.nbytes

    def run(self, call: Call) -> Steps:
        views, x = self.group.views, call.moved()
        if views.size == 1:
            return x
        me, mine, shown = self.position, self.mine, call.payloads().flat
        flat = x.reshape(-1) if call.zero_copy or call.out is not None else call.kept
        rows = [flat[mine] if position == me else part[mine] for position, part in enumerate(shown)]
        slices = SliceTree(rows, self.segments, len(self.layers))
        # Squares of float16 and float32 always fit in float64; those of float64 may overflow or vanish.
        rounds, checks = _Rounds(views, call.seq), x.dtype.itemsize == WIDE.itemsize
        while len(slices.rows) > 1:
            total = yield from rounds.sum(slices.products())
            if checks and not _all_safe(total[..., _SQUARES]):
                return (yield from self._one_by_one(call, flat, shown))
            if slices.plan(total):
                measured = yield from rounds.sum(slices.measure_halves())
                if checks and not _all_safe(measured[..., 1:]):
                    return (yield from self._one_by_one(call, flat, shown))
                slices.set_halves(measured)
            # The last level writes the result where peers read it, and to this rank's own array.
            slices.join(shown[me][mine], None if call.zero_copy else flat[mine])
        yield views.end_phase()
        order()
        for position, part in enumerate(shown):
            if position != me:
                piece = views.bounds(flat.size, position)
                flat[piece] = part[piece]
        if not x.flags.c_contiguous:
            x[...] = flat.reshape(x.shape)
        return x

    def _one_by_one(self, call: Call, flat: np.ndarray, shown: Sequence[np.ndarray]) -> Any:
        """Compute the whole result on every rank; used if squares leave the range of float64, on all ranks alike."""
        views, x = self.group.views, call.x
        if not call.zero_copy:
            shown[self.position][self.mine] = flat[self.mine]
        # Now all vectors are exposed entirely.
        yield views.end_phase()
        order()
        result = whole(shown, self.layers)
        yield views.end_phase()  # now no rank reads x any more
        x[...] = result.reshape(x.shape)
        return x


class SliceTree:
    """Adasum's tree on one slice of the elements, two levels at a time.

    Rows are taken in fours. For four rows a, b, c, d their ten products suffice: A(a, b) and A(c, d) are linear
    combinations of rows, so their products follow from those of the rows, and A(A(a, b), A(c, d)) is a combination of
    the four rows with known factors. If A(a, b) or A(c, d) nearly vanishes, cancellation makes its derived products
    inexact; for such layers both halves are computed, and their products summed in one more exchange.

    Args:
        rows: the slice of each rank's vector, flat; only read.
        parts: the slice's segments, see `segments`.
        num_layers: number of layers of the whole vector.

    Attributes:
        rows: the rows of the current level.
    """

    def __init__(self, rows: list[np.ndarray], parts: list[Segment], num_layers: int) -> None:
        self.rows = rows
        self._num_layers = num_layers
        self._strip = STRIP if blas.is_single_threaded() else SHORT_STRIP
        self._blocks = list(_blocks(parts, self._strip))
        longest = max((piece.stop - piece.start for _, piece in self._blocks), default=0)
        self._scratch, self._room = np.empty(longest * min(4, len(rows))), np.empty(longest)
        # The block loaded in the scratch memory: its first row and start, and its strips.
        self._held: tuple[tuple[int, int], np.ndarray] | None = None
        # Views of the scratch memory by (rows, size) of a block: its strips, and the strips of each row.
        self._views: dict[tuple[int, int], tuple[np.ndarray, list[np.ndarray], tuple[int, ...]]] = {}
        self._joins: list[list[_Join]] = []  # by four and by layer

    @QUIET
    def products(self) -> np.ndarray:
        """Return the slice's contribution to the products of each four: (fours, layers, 10)."""
        fours = self._fours()
        grams = np.zeros((len(fours), self._num_layers, 4, 4))
        for gram, four in zip(grams, fours, strict=True):
            if len(four) == 1:
                continue
            sums = np.zeros((self._num_layers, len(four), len(four), 1))
            for layer, piece in self._blocks:
                sums[layer] += _grams(self._load(four, piece))
            # A product that is 0 means that the row vanishes, or that its squares underflow: the two have different
            # results.
            if not (squares := sums[..., 0].diagonal(axis1=1, axis2=2)).all():
                for layer, i in np.argwhere(squares == 0.0):
                    if any(four[i][piece].any() for at, piece in self._blocks if at == layer):
                        # The row is not zero, but its squares underflow.
                        sums[layer, i, i] = LEAST
            gram[:, : len(four), : len(four)] = sums[..., 0]
        return grams[..., _FIRST, _SECOND]

    def plan(self, total: np.ndarray) -> bool:
        """Compute the factors of all rows from the complete products; return whether some of them are inexact."""
        self._joins = [
            [_Join(len(four), found) for found in sums]
            for four, sums in zip(self._fours(), total.tolist(), strict=True)
        ]
        return any(join.is_inexact for joins in self._joins for join in joins)

    @QUIET
    def measure_halves(self) -> np.ndarray:
        """Return the slice's contribution to the products of the halves A(a, b) and A(c, d), for inexact joins.

        Returns:
            (fours, layers, 3), zeros for the other joins.
        """
        found = np.zeros((len(self._joins), self._num_layers, 3))
        for sums, four, joins in zip(found, self._fours(), self._joins, strict=True):
            for layer, piece in self._blocks:
                if joins[layer].is_inexact:
                    sums[layer] += moments(*self._halves(four, joins[layer], piece))
        return found

    def set_halves(self, total: np.ndarray) -> None:
        """Set the factors of the halves of inexact joins from the complete products."""
        for joins, sums in zip(self._joins, total.tolist(), strict=True):
            for join, found in zip(joins, sums, strict=True):
                join.halves = coefficients(Moments(*found))

    @QUIET
    def join(self, out: np.ndarray, copy: np.ndarray | None = None) -> None:
        """Replace each four by its Adasum.

        Args:
            out: receives the result of the last level; may be the memory of a row.
            copy: receives it as well.
        """
        fours, joined = self._fours(), []
        for four, joins in zip(fours, self._joins, strict=True):
            if len(four) == 1:
                joined.append(four[0])
                continue
            is_last = len(fours) == 1
            target = out if is_last else np.empty(out.size)
            # The last block is loaded, others may still be in the cache.
            for layer, piece in reversed(self._blocks):
                joint = target[piece]
                joint[...] = self._joined(four, joins[layer], piece)
                if is_last and copy is not None:
                    copy[piece] = joint
            joined.append(target)
        self.rows, self._held = joined, None

    def _joined(self, four: list[np.ndarray], join: _Join, piece: slice) -> np.ndarray:
        room = self._room[: piece.stop - piece.start]
        if not join.is_inexact:
            strips = self._load(four, piece)
            np.matmul(join.factors[None], strips, out=room.reshape(len(strips), 1, -1))
            return room
        first, second = self._halves(four, join, piece)
        first *= join.halves[0]
        second *= join.halves[1]
        return np.add(first, second, out=room)

    def _halves(self, four: list[np.ndarray], join: _Join, piece: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return A(a, b) and A(c, d) on a block."""
        strips, self._held = self._load(four, piece), None
        strips *= join.first_factors[:, None]
        # Not `matmul`, which fuses multiply and add in one rounding: g and -g have to give exactly 0.
        first, second = strips[:, 0] + strips[:, 1], strips[:, 2]
        return first.reshape(-1), (second + strips[:, 3] if len(four) == 4 else second).reshape(-1)

    def _fours(self) -> list[list[np.ndarray]]:
        return [self.rows[i : i + 4] for i in range(0, len(self.rows), 4)]

    def _load(self, rows: list[np.ndarray], piece: slice) -> np.ndarray:
        """Return a block of some rows as float64 strips, in the scratch memory: (strips, rows, elements)."""
        key, size = (id(rows[0]), piece.start), piece.stop - piece.start
        if self._held is not None and self._held[0] == key:
            return self._held[1]
        views = self._views.get((len(rows), size))
        if views is None:
            strips = self._scratch[: size * len(rows)].reshape(-1, len(rows), min(self._strip, size))
            columns = [strips[:, i] for i in range(len(rows))]
            views = self._views[len(rows), size] = strips, columns, columns[0].shape
        strips, columns, shape = views
        for row, column in zip(rows, columns, strict=True):
            column[...] = row[piece].reshape(shape)
        self._held = key, strips
        return strips


def _grams(strips: np.ndarray) -> np.ndarray:
    """Return all products of the rows, summed over the strips: (rows, rows, 1). strips: (number, rows, n)

    Equal rows have equal products, bit for bit, in both branches.
    """
    rows = strips.shape[1]
    if rows == 4 and blas.has_small_kernel():
        # Twice as fast with such a kernel. A plain (4, n) @ (n, 4) is not, because NumPy calls `syrk` for it.
        pairs = strips.reshape(len(strips), 2, 2, -1)
        return np.add.reduce(np.matmul(pairs, strips.transpose(0, 2, 1)[:, None])).reshape(rows, rows, 1)
    return np.add.reduce(np.matmul(strips[:, None], strips[..., None]))  # row by row


def _blocks(parts: list[Segment], strip: int) -> Iterator[tuple[int, slice]]:
    """Yield (layer, slice) of blocks of up to `CACHED` elements: whole strips, or a remainder shorter than one."""
    for layer, start, stop in parts:
        end = stop - (stop - start) % strip
        for begin in range(start, end, CACHED):
            yield layer, slice(begin, min(begin + CACHED, end))
        if end < stop:
            yield layer, slice(end, stop)


# The ten pairs of four rows, in the order of their products; rows that are not there have products of 0.
_FIRST = np.array([0, 0, 1, 2, 2, 3, 0, 0, 1, 1])
_SECOND = np.array([0, 1, 1, 2, 3, 3, 2, 3, 2, 3])
_SQUARES = [0, 2, 3, 5]  # the squared norms among them
_CANCELLED = 0.125  # fraction of the squared norm that orthogonal rows would give


class _Join:
    """The factors that combine up to four rows of a layer.

    Args:
        count: number of rows.
        found: their products, in the order of `_FIRST` and `_SECOND`.

    Attributes:
        first_factors: factors of the rows in A(a, b) and A(c, d), or c.
        factors: factors of the rows in the whole.
        is_inexact: `factors` have lost digits; `halves` has to be found from the products of A(a, b) and A(c, d).
        halves: factors of A(a, b) and A(c, d) in the whole.
    """

    __slots__ = ("factors", "first_factors", "halves", "is_inexact")

    def __init__(self, count: int, found: list[float]) -> None:
        aa, ab, bb, cc, cd, dd, ac, ad, bc, bd = found
        a, b = coefficients(Moments(ab, aa, bb))
        if count == 2:
            self.first_factors = self.factors = np.array((a, b))
            self.is_inexact, self.halves = False, (1.0, 1.0)
            return
        c, d = coefficients(Moments(cd, cc, dd))
        first, first_apart = a * a * aa + 2 * a * b * ab + b * b * bb, a * a * aa + b * b * bb
        second, second_apart = c * c * cc + 2 * c * d * cd + d * d * dd, c * c * cc + d * d * dd
        # Cancellation: the squared norm is much smaller than its terms, so most of its digits are lost.
        self.is_inexact = first < _CANCELLED * first_apart or second < _CANCELLED * second_apart
        dot = a * (c * ac + d * ad) + b * (c * bc + d * bd)
        left, right = self.halves = coefficients(Moments(dot, first, second))
        self.first_factors = np.array((a, b, c, d)[:count])
        self.factors = np.array((left * a, left * b, right * c, right * d)[:count])


class _Rounds:
    """Small sums over the ranks, inside a collective."""

    def __init__(self, views: Views, seq: int) -> None:
        self._views, self._number = views, 0
        self._slots = views.slots(seq & 1, 2 * _HALF, WIDE)

    def sum(self, values: np.ndarray) -> Any:
        """Return the sum of the ranks' values, in the order of the group: equal on all ranks, bit for bit."""
        flat, total = values.reshape(-1), np.empty(values.size)
        slots = self._slots
        for start in range(0, flat.size, _HALF):
            stop = min(start + _HALF, flat.size)
            half = (self._number & 1) * _HALF
            place = slice(half, half + stop - start)
            # The last use of this half was two phases ago, so all ranks have read it.
            slots.flat[self._views.position][place] = flat[start:stop]
            self._number += 1
            yield self._views.end_phase()
            order()
            reduce_stack(_SUM, slots.part(place), total[start:stop])
        return total.reshape(values.shape)


def _all_safe(squares: np.ndarray) -> bool:
    return all(is_safe(Moments(0.0, value, value)) for value in squares.ravel().tolist())
