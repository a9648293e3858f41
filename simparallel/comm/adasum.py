"""`all_reduce(op="adasum")` on shared memory: each rank takes its slice of the elements through the tree.

A rank reads its slice of every rank's vector where it lies, and finds what its slice contributes to the products
<a,b>, <a,a>, … of the vectors, a few numbers a layer. These are summed over the ranks, in the order of the
group, so everybody joins the vectors with the same factors. After at most log2 n such small sums a rank has its
slice of the result, and copies the others' slices.

The sums go through the group's slot, which a large payload leaves free. It has two halves that are used
in turn: whoever writes one for the second time has seen everybody write the other, so all have read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.comm.call import Body, BodySteps, Call
from simparallel.comm.reduction import reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.comm.staging import Payloads
from simparallel.summation import BLOCK, QUIET, WIDE, Moments, coefficients, is_safe, moments, product, tree

if TYPE_CHECKING:
    from simparallel.comm.group import Group

CACHED = 1 << 16  # elements that go through a step together
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
        slices = SliceTree([part[mine] for part in parts], list(segments(layers, mine)), len(layers))
        rounds, checks = _Rounds(group, call), x.dtype.itemsize == WIDE.itemsize
        while len(slices.rows) > 1:
            total = yield from rounds.sum(slices.products())
            if checks and not _all_safe(total[..., _SQUARES]):
                return (yield from _one_by_one(group, parts, x, layers))
            vague = slices.plan(total)
            if vague:
                closer = yield from rounds.sum(slices.closer(vague))
                if checks and not _all_safe(closer[:, 1:]):
                    return (yield from _one_by_one(group, parts, x, layers))
                for join, found in zip(vague, closer.tolist(), strict=True):
                    join.settle(Moments(*found))
            slices.join(parts[me][mine])
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
    """The tree on one slice of the elements, two levels at a time.

    Rows go in fours. Of four rows a, b, c, d ten products say all: A(a, b) and A(c, d) are sums of rows, so their
    products follow from those of the rows, and A(A(a, b), A(c, d)) is a sum of the four rows with known factors.
    Where A(a, b) or A(c, d) nearly vanishes, the products that follow have lost their digits; of these layers
    both are made, and measured in one more exchange.

    Args:
        rows: the slice of each rank's vector, flat; only read.
        parts: its segments, see `segments`.
        num_layers: of the whole vector.

    Attributes:
        rows: those of the level.
    """

    def __init__(self, rows: list[np.ndarray], parts: list[tuple[int, int, int]], num_layers: int) -> None:
        self.rows = rows
        self._parts, self._num_layers = parts, num_layers
        longest = max((stop - start for _, start, stop in parts), default=0)
        self._scratch = np.empty((5, min(CACHED, longest)))
        self._joins: list[list[_Join]] = []  # of each four, of each layer

    @QUIET
    def products(self) -> np.ndarray:
        """What the slice contributes to the products of each four: (fours, layers, 10)."""
        found = np.zeros((len(self._fours()), self._num_layers, len(_PAIRS)))
        for sums, four in zip(found, self._fours(), strict=True):
            pairs = [(p, i, j) for p, (i, j) in enumerate(_PAIRS) if j < len(four) > 1]
            apart = np.zeros((len(_PAIRS), CACHED // BLOCK, 1, 1))
            for layer, piece in self._blocks():
                rows = list(self._load(four, piece))
                if rows[0].size == CACHED:  # in one go, which costs less than `product`
                    lying = [row.reshape(-1, 1, BLOCK) for row in rows]
                    standing = [row.reshape(-1, BLOCK, 1) for row in rows]
                    for p, i, j in pairs:
                        np.matmul(lying[i], standing[j], out=apart[p])
                    some = apart.sum(axis=(1, 2, 3))
                    if some[_SQUARES[: len(rows)]].all():
                        sums[layer] += some
                        continue
                for p, i, j in pairs:
                    sums[layer, p] += product(rows[i], rows[j])
        return found

    def plan(self, total: np.ndarray) -> list[_Join]:
        """Find the factors of all rows from the products over all elements; returns those that need a closer look."""
        fours = self._fours()
        self._joins = [
            [_Join(len(four), found) for found in sums]
            for four, sums in zip(fours, total.tolist(), strict=True)
        ]
        return [join for joins in self._joins for join in joins if join.is_vague]

    @QUIET
    def closer(self, vague: list[_Join]) -> np.ndarray:
        """Partial moments of the two halves of each of these, made for this: (number, 3)."""
        found = np.zeros((len(vague), 3))
        number = {id(join): i for i, join in enumerate(vague)}
        for four, joins in zip(self._fours(), self._joins, strict=True):
            for layer, piece in self._blocks():
                if joins[layer].is_vague:
                    found[number[id(joins[layer])]] += moments(*self._halves(four, joins[layer], piece))
        return found

    @QUIET
    def join(self, out: np.ndarray) -> None:
        """Replace each four by its Adasum, the last one into `out`, which may be the memory of a row."""
        fours, joined = self._fours(), []
        for four, joins in zip(fours, self._joins, strict=True):
            if len(four) == 1:
                joined.append(four[0])
                continue
            target = out if len(fours) == 1 else np.empty(out.size)
            for layer, piece in self._blocks():
                target[piece] = self._joined(four, joins[layer], piece)
            joined.append(target)
        self.rows = joined

    def _joined(self, four: list[np.ndarray], join: _Join, piece: slice) -> np.ndarray:
        room = self._scratch[4, : piece.stop - piece.start]
        if not join.is_vague:
            return np.dot(join.factors, self._load(four, piece), out=room)
        first, second = self._halves(four, join, piece)
        first *= join.halves[0]
        second *= join.halves[1]
        return np.add(first, second, out=first)

    def _halves(self, four: list[np.ndarray], join: _Join, piece: slice) -> list[np.ndarray]:
        """A(a, b) and A(c, d) on a block."""
        rows, factors = list(self._load(four, piece)), join.first_factors
        for row, factor in zip(rows, factors, strict=True):
            row *= factor
        # Not by `dot`, which rounds once for a product and a sum: g and -g have to give exactly 0.
        return [rows[0] + rows[1], rows[2] + rows[3] if len(rows) == 4 else rows[2]]

    def _fours(self) -> list[list[np.ndarray]]:
        return [self.rows[i : i + 4] for i in range(0, len(self.rows), 4)]

    def _blocks(self) -> Iterator[tuple[int, slice]]:
        for layer, start, stop in self._parts:
            for begin in range(start, stop, CACHED):
                yield layer, slice(begin, min(begin + CACHED, stop))

    def _load(self, rows: list[np.ndarray], piece: slice) -> np.ndarray:
        """A block of some rows as float64."""
        block = self._scratch[: len(rows), : piece.stop - piece.start]
        for target, row in zip(block, rows, strict=True):
            target[...] = row[piece]
        return block


_PAIRS = ((0, 0), (0, 1), (1, 1), (2, 2), (2, 3), (3, 3), (0, 2), (0, 3), (1, 2), (1, 3))
_SQUARES = [0, 2, 3, 5]  # of them, the squared norms
_VAGUE = 0.125  # of what two rows would give together if they were orthogonal


class _Join:
    """How up to four rows of a layer are joined.

    Args:
        count: of the rows.
        found: their products, in the order of `_PAIRS`.

    Attributes:
        first_factors: of the rows in A(a, b) and A(c, d), or c.
        factors: of the rows in the whole.
        is_vague: the factors are not to be trusted; `halves` has to be found by measuring A(a, b) and A(c, d).
    """

    __slots__ = ("factors", "first_factors", "halves", "is_vague")

    def __init__(self, count: int, found: list[float]) -> None:
        aa, ab, bb, cc, cd, dd, ac, ad, bc, bd = found
        self.is_vague, self.halves = False, (1.0, 1.0)
        a, b = coefficients(Moments(ab, aa, bb))
        c, d = (1.0, 0.0) if count < 4 else coefficients(Moments(cd, cc, dd))
        self.first_factors = np.array((a, b, c, d)[: max(count, 2)])
        self.factors = self.first_factors
        if count < 3:
            return
        first, first_apart = a * a * aa + 2 * a * b * ab + b * b * bb, a * a * aa + b * b * bb
        second, second_apart = c * c * cc + 2 * c * d * cd + d * d * dd, c * c * cc + d * d * dd
        self.is_vague = first < _VAGUE * first_apart or second < _VAGUE * second_apart
        dot = a * (c * ac + d * ad) + b * (c * bc + d * bd)
        if not self.is_vague:
            left, right = coefficients(Moments(dot, first, second))
            self.factors = np.array((left * a, left * b, right * c, right * d)[:count])

    def settle(self, found: Moments) -> None:
        """Take the moments of A(a, b) and A(c, d)."""
        self.halves = coefficients(found)


class _Rounds:
    """Small sums over the ranks, inside a collective."""

    def __init__(self, group: Group, call: Call) -> None:
        self._group, self._number = group, 0
        self._slots = group.slots(call.seq & 1, 2 * _HALF, WIDE)

    def sum(self, values: np.ndarray) -> Any:
        """The sum of the ranks' values, in the order of the group: equal on all ranks, bit for bit."""
        flat, total = values.reshape(-1), np.empty(values.size)
        slots = self._slots
        for start in range(0, flat.size, _HALF):
            stop = min(start + _HALF, flat.size)
            half = (self._number & 1) * _HALF
            place = slice(half, half + stop - start)
            slots.flat[self._group.position][place] = flat[start:stop]
            self._number += 1
            yield self._group.end_phase()
            order()
            reduce_stack(_SUM, slots.part(place), total[start:stop])
        return total.reshape(values.shape)


def _all_safe(squares: np.ndarray) -> bool:
    return all(is_safe(Moments(0.0, value, value)) for value in squares.ravel().tolist())


def _one_by_one(group: Group, parts: Sequence[np.ndarray], x: np.ndarray, layers: Layers) -> Any:
    """Where squares leave the range of float64, on every rank alike: everybody makes the whole result."""
    result = whole(parts, layers)
    yield group.end_phase()  # nobody reads x any more
    x[...] = result.reshape(x.shape)
    return x
