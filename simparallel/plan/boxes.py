"""Boxes of a tensor: which part a rank holds, which it needs, and from whom it gets what it lacks.

A layout cuts a tensor into a grid of equal boxes; each rank holds one, and ranks that hold the same
one are replicas. Going from one layout to another, a rank needs one box; what of it lies outside of
the box it holds comes, box by box of the old grid, from one replica each. So it receives every
element it lacks exactly once, and nothing else: no plan can move less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from simparallel.layout import Layout
from simparallel.mesh import Group

Box = tuple[tuple[int, int], ...]  # (start, stop) of every dim


class Transfer(NamedTuple):
    """A box that one rank sends to another, or keeps (`source == target`)."""

    source: int
    target: int
    box: Box


def box_of(layout: Layout, rank: int, shape: tuple[int, ...]) -> Box:
    """What the rank holds."""
    return tuple((part.start, part.stop) for part in layout.slices(rank, shape))


def size_of(box: Box) -> int:
    """Number of elements."""
    return prod(stop - start for start, stop in box)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def meet(a: Box, b: Box) -> Box:
    """The common part; of size 0 where there is none."""
    return tuple((max(p, r), max(max(p, r), min(q, s))) for (p, q), (r, s) in zip(a, b, strict=True))


def within(box: Box, whole: Box) -> tuple[slice, ...]:
    """The box as an index into an array that holds `whole`."""
    return tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(box, whole, strict=True))


def transfers(source: Layout, needs: Mapping[int, Box], shape: tuple[int, ...]) -> list[Transfer]:
    """Who gives what to whom, own parts included, in the order of receiving and then sending ranks.

    Of several replicas a rank asks the one that has its own number among its replicas, so that
    neighbours ask different ones, and all ranks work out the same answer.

    Args:
        source: how the tensor lies.
        needs: for each rank the box it needs; boxes may overlap.
        shape: of the tensor.
    """
    cut = source.local_shape(shape)
    holders: dict[Box, list[int]] = {}
    for rank in source.mesh.ranks:
        holders.setdefault(box_of(source, rank, shape), []).append(rank)
    found = []
    for rank, need in needs.items():
        have = box_of(source, rank, shape)
        number = holders[have].index(rank)
        ranges = [
            range(start // size, -(-stop // size)) if start < stop else range(0)
            for (start, stop), size in zip(need, cut, strict=True)
        ]
        for chunk in product(*ranges):
            box = tuple((i * size, (i + 1) * size) for i, size in zip(chunk, cut, strict=True))
            owners = holders[box]
            owner = rank if box == have else owners[number % len(owners)]
            found.append(Transfer(owner, rank, meet(need, box)))
    return found


def received(moves: Iterable[Transfer], ranks: Iterable[int]) -> tuple[int, ...]:
    """Number of elements that each of the ranks receives from others."""
    counts = dict.fromkeys(ranks, 0)
    for move in moves:
        if move.source != move.target:
            counts[move.target] += size_of(move.box)
    return tuple(counts.values())


def partners(moves: Sequence[Transfer]) -> tuple[Group, ...]:
    """Ranks that give each other something, directly or through others."""
    leader: dict[int, int] = {}

    def find(rank: int) -> int:
        while leader.setdefault(rank, rank) != rank:
            rank = leader[rank]
        return rank

    for move in moves:
        if move.source != move.target:
            a, b = find(move.source), find(move.target)
            leader[max(a, b)] = min(a, b)
    members: dict[int, list[int]] = {}
    for rank in sorted(leader):
        members.setdefault(find(rank), []).append(rank)
    return tuple(tuple(group) for group in members.values())
