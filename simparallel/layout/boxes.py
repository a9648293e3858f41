"""Boxes of a tensor: the parts that ranks hold, the parts that they need, and the transfers in between.

A layout cuts a tensor into a grid of boxes of equal size; the last ones along a dim may be smaller or empty. Each
rank holds one box; ranks with the same box are replicas. To reach another layout, a rank needs another box. The
elements that it lacks arrive in parts, one for each box of the old grid, each part from one replica. So a rank
receives every missing element exactly once and nothing else: no plan can move less.

The replicas of each box are numbered. The ranks with one number together hold one copy of the tensor, and exchange only
among themselves: a rank receives from the replicas with its own number, so that neighbours use different replicas. All
transfers follow from arithmetic: questions about a single rank, or about the number of elements that each rank
receives, need no list of all transfers, which has a million entries for an all-to-all of 1024 ranks.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import product
from math import prod
from operator import itemgetter
from typing import Any, NamedTuple

from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group

# (start, stop) of every dim.
Box = tuple[tuple[int, int], ...]
# Position of a box in the grid of a layout, one number for every dim.
Chunk = tuple[int, ...]


class Transfer(NamedTuple):
    """A box that one rank sends to another, or keeps (`source == target`)."""

    source: int
    target: int
    box: Box


def box_of(layout: Layout, rank: int, shape: tuple[int, ...]) -> Box:
    """Return the box that the rank holds."""
    return tuple((part.start, part.stop) for part in layout.slices(rank, shape))


def boxes_of(layout: Layout, shape: tuple[int, ...]) -> dict[int, Box]:
    """Return the box of each rank."""
    spans = layout.spans(shape)
    return {
        rank: tuple([parts[i] for parts, i in zip(spans, chunk, strict=True)])
        for rank, chunk in zip(layout.mesh.ranks, layout.all_chunks(), strict=True)
    }


def size_of(box: Box) -> int:
    """Return the number of elements in a box."""
    return prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def intersection(a: Box, b: Box) -> Box:
    """Return the intersection of two boxes, of size 0 if they do not overlap."""
    # The stop is never below the start: the sizes of disjoint boxes are 0, not negative.
    return tuple((max(p, r), max(max(p, r), min(q, s))) for (p, q), (r, s) in zip(a, b, strict=True))


def within(box: Box, whole: Box) -> tuple[slice, ...]:
    """Return the box as an index into an array that holds `whole`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, whole, strict=True))


class _Along(NamedTuple):
    """The chunks of one dim that a box overlaps.

    Attributes:
        chunks: their numbers.
        lengths: the length of the overlap with each of them.
        counts: (length, number of overlaps of this length).
    """

    chunks: Sequence[int]
    lengths: list[int]
    counts: tuple[tuple[int, int], ...]


class Moves:
    """The transfers that give each rank the box it needs.

    Args:
        source: current layout of the tensor.
        needs: the box of each receiving rank; boxes may overlap. Ranks outside of `source`, which hold nothing, may
            need a box, too.
        shape: global shape of the tensor.
    """

    def __init__(self, source: Layout, needs: Mapping[int, Box], shape: tuple[int, ...]) -> None:
        self.source, self.needs, self.shape = source, needs, shape
        # For each dim the span of each chunk.
        self._grid = source.spans(shape)
        self._holders: dict[Chunk, list[int]] = {}
        # Each rank's number among the ranks that hold the same box: the copy of the tensor that it belongs to.
        self._number: dict[int, int] = {}
        self._chunk: dict[int, Chunk] = {}
        # Cache of `_counts`.
        self._counts_of: dict[Any, Counter[int]] = {}
        # Cache of `_parts`: most boxes share their span along a dim with others.
        self._along: dict[tuple[int, int, int], _Along] = {}
        for rank, chunk in zip(source.mesh.ranks, source.all_chunks(), strict=True):
            holders = self._holders.setdefault(chunk, [])
            self._chunk[rank], self._number[rank] = chunk, len(holders)
            holders.append(rank)
        # Ranks that hold nothing receive from the copies in turn.
        copies = len(source.mesh.ranks) // max(len(self._holders), 1)
        for i, rank in enumerate(rank for rank in needs if rank not in self._number):
            self._number[rank] = i % copies

    @property
    def num_elements(self) -> int:
        """Number of elements in the box of a rank of the source, the largest number where they differ."""
        return prod(self.source.local_shape(self.shape))

    def have(self, rank: int) -> Box | None:
        """Return the box that the rank holds; None for a rank outside of the source."""
        chunk = self._chunk.get(rank)
        return None if chunk is None else self._box(chunk)

    def of(self, rank: int) -> list[Transfer]:
        """List the transfers to the rank, including the part that it keeps, then those to others, by target."""
        mine = self._chunk.get(rank)
        given = []
        if mine is not None:
            box, number = self._box(mine), self._number[rank]
            # Only ranks of the same copy receive from this replica.
            for other, need in self.needs.items():
                if other != rank and self._number[other] == number and size_of(part := intersection(need, box)):
                    given.append(Transfer(rank, other, part))
        return [*self._incoming(rank), *given]

    def all(self) -> list[Transfer]:
        """List all transfers in the order of their targets: at worst one for each pair of ranks."""
        return [move for rank in self.needs for move in self._incoming(rank)]

    @cached_property
    def received(self) -> dict[int, int]:
        """For each receiving rank, the number of elements that it receives from others."""
        return {rank: size_of(need) - self._own(rank, need) for rank, need in self.needs.items()}

    @cached_property
    def given(self) -> dict[int, int]:
        """For each rank of the source, the number of elements that it sends to others."""
        counts = dict.fromkeys(self._chunk, 0)
        for rank, need in self.needs.items():
            if not self.received[rank]:
                continue
            number = self._number[rank]
            parts = [zip(along.chunks, along.lengths, strict=True) for along in self._parts(need)]
            # The part in a chunk is a box: the product of its lengths.
            for part in product(*parts):
                source = self._holders[tuple([i for i, _ in part])][number]
                if source != rank:
                    counts[source] += prod(length for _, length in part)
        return counts

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Groups of ranks that exchange elements, directly or through others; () if no rank does."""
        # Union-find. The representative of a group is its lowest rank.
        leader: dict[int, int] = {}

        def find(rank: int) -> int:
            while leader.setdefault(rank, rank) != rank:
                # Path halving keeps the chains short.
                leader[rank] = rank = leader[leader[rank]]
            return rank

        def join(a: int, b: int) -> None:
            a, b = find(a), find(b)
            leader[max(a, b)] = min(a, b)

        seen = set()
        for rank, need in self.needs.items():
            spans, number = tuple([along.chunks for along in self._parts(need)]), self._number[rank]
            if not self.num_sources(rank):
                continue
            first = self._holders[tuple(span[0] for span in spans)][number]
            join(rank, first)
            # Ranks of one copy that need the same chunks have the same sources: join these once.
            if (number, spans) not in seen:
                seen.add((number, spans))
                for chunk in product(*spans):
                    join(self._holders[chunk][number], first)
        members: dict[int, list[int]] = {}
        for rank in sorted(leader):
            members.setdefault(find(rank), []).append(rank)
        return tuple(tuple(group) for group in members.values())

    def num_sources(self, rank: int) -> int:
        """Return the number of other ranks that the rank receives from; 0 if it needs nothing."""
        need = self.needs.get(rank)
        return 0 if need is None else sum(self._counts(rank, need).values())

    def sizes(self, rank: int) -> set[int]:
        """Return the sizes, in elements, of the parts that the rank receives from others."""
        need = self.needs.get(rank)
        return set() if need is None else {size for size, count in self._counts(rank, need).items() if count}

    def _counts(self, rank: int, need: Box) -> Counter[int]:
        """Return size in elements -> number of parts of this size that the rank receives from others for its `need`."""
        own = self._own(rank, need)
        # There are usually few different distributions of lengths, so cache the results.
        key = own, tuple([along.counts for along in self._parts(need)])
        counts = self._counts_of.get(key)
        if counts is None:
            # Lengths along one dim combine with all lengths along the others: multiply the distributions dim by dim,
            # from the box of no dims, which has one element.
            counts = Counter({1: 1})
            for lengths in key[1]:
                counts = _products(counts, Counter(dict(lengths)))
            # One of the parts is in the rank's own chunk and is not sent.
            if own:
                counts[own] -= 1
            self._counts_of[key] = counts
        return counts

    def _own(self, rank: int, need: Box) -> int:
        """Return the number of elements that the rank both needs and holds."""
        chunk = self._chunk.get(rank)
        if chunk is None:
            return 0
        count = 1
        for (start, stop), spans, i in zip(need, self._grid, chunk, strict=True):
            count *= max(0, min(stop, spans[i][1]) - max(start, spans[i][0]))
        return count

    def _incoming(self, rank: int) -> list[Transfer]:
        need = self.needs.get(rank)
        if need is None:
            return []
        number = self._number[rank]
        return [
            Transfer(self._holders[chunk][number], rank, intersection(need, self._box(chunk)))
            for chunk in product(*(along.chunks for along in self._parts(need)))
        ]

    def _parts(self, need: Box) -> list[_Along]:
        """Return, for each dim, the chunks that the box overlaps."""
        found = []
        for dim, (start, stop) in enumerate(need):
            along = self._along.get((dim, start, stop))
            if along is None:
                spans = self._grid[dim]
                # Begin with the last chunk that starts at or before the box. Of empty chunks, which start where they
                # end, this skips all but the last.
                first = max(bisect_right(spans, start, key=itemgetter(0)) - 1, 0)
                last = bisect_left(spans, stop, lo=first, key=itemgetter(0)) if start < stop else first
                lengths = [min(stop, b) - max(start, a) for a, b in spans[first:last]]
                chunks: Sequence[int] = range(first, last)
                if 0 in lengths:
                    chunks = tuple([i for i, n in zip(chunks, lengths, strict=True) if n])
                    lengths = [n for n in lengths if n]
                counts = ((lengths[0], 1),) if len(lengths) == 1 else tuple(Counter(lengths).items())
                along = self._along[dim, start, stop] = _Along(chunks, lengths, counts)
            found.append(along)
        return found

    def _box(self, chunk: Chunk) -> Box:
        return tuple([spans[i] for spans, i in zip(self._grid, chunk, strict=True)])


def _products(a: Counter[int], b: Counter[int]) -> Counter[int]:
    # m parts of size x and n of size y, along different dims, meet in m * n parts of size x * y.
    found: Counter[int] = Counter()
    for x, m in a.items():
        for y, n in b.items():
            found[x * y] += m * n
    return found
