"""Folding: ranks with the same program, at the same place in it, run once for all of them.

A *representative* runs, and stands for the other ranks of its class: a collective of 2,048 ranks waits for the
representatives among its members, and takes their headers, payloads and times for those of the ranks that they stand
for. So each group of a representative needs one representative of every class of its members.

Which ranks are alike is found by running them. A first run of rank 0, the last rank, and ranks that the hardware makes
different, such as a straggler, shows their groups. Then the first and the last member of every group of a
representative run, too, and those of the groups of these. Ranks that have no group but the world are compared among
themselves. If two that are next to each other in a group have equal events at equal times, the ranks between them are
taken to be like the first; if not, the rank in the middle runs, too. A rank that is sent a message, or is the root of a
collective, runs as well. So do all members of a collective whose parts may have any sizes, and the ranks at which the
sizes of known parts, of objects, of slices of stored parameters, or of matrices that a rank owns change. This finds
programs that differ by the ranks' places in their groups; it does not find one rank in the middle that does something
else on its own (`if get_rank() == 5: ...`): for such programs there is `fold=False`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.clock.event import Event
from simparallel.comm.memory.segment import SLOT_BYTES, THREAD_ARENA_BYTES, ControlMap, SharedSegment
from simparallel.comm.transport import AbstractTransport
from simparallel.comm.views import Views
from simparallel.machine.cluster import ClusterSpec


class NotRunError(BaseException):
    """A representative needs a rank that does not run. Not an `Exception`, which a program might catch."""


class _FoldedMap(ControlMap):
    """The control map of the representatives, indexed by their ranks in the whole world."""

    # Set right after the construction; the fields of a map are frozen.
    places: dict[int, int]
    needed: set[int]
    whole: ControlMap

    def place(self, rank: int) -> int:
        place = self.places.get(rank)
        if place is None:
            self.needed.add(rank)
            raise NotRunError(f"rank {rank} does not run")
        return place

    def running(self, ranks: Sequence[int]) -> Sequence[int]:
        return [rank for rank in ranks if rank in self.places]

    @property
    def max_world_groups(self) -> int:
        return self.whole.max_world_groups

    @property
    def local_groups(self) -> int:
        # As many in all as the ranks have together.
        return -(-self.whole.local_groups * self.whole.world_size // self.world_size)


class FoldedSegment(SharedSegment):
    """The memory of the representatives of a world: it has no place for other ranks.

    Args:
        world_size: number of all ranks.
        ranks: the representatives, ascending; rank 0 is one of them.

    Attributes:
        needed: ranks that a representative asked for and that do not run.
        groups: the members of all groups that were made, in order.
        has_local_groups: whether members alone made a group, so that other groups may be unknown.
        known: purposes of collectives with uneven parts whose sizes are known for all ranks.
        shared: (slot, members) of a group -> what the views of all its members share.
    """

    def __init__(self, world_size: int, ranks: Sequence[int]) -> None:
        control, self.needed = _FoldedMap(len(ranks)), set[int]()
        whole, places = ControlMap(world_size), {rank: place for place, rank in enumerate(ranks)}
        control.__dict__.update(places=places, needed=self.needed, whole=whole)
        slots_bytes = control.max_groups * 2 * SLOT_BYTES
        super().__init__(len(ranks), arena_bytes=THREAD_ARENA_BYTES + slots_bytes, control=control)
        self.world_size, self.ranks = world_size, tuple(ranks)
        self.groups: dict[tuple[int, ...], None] = {}
        self.has_local_groups = False
        self.known: set[str] = set()
        self.shared: dict[tuple[int, tuple[int, ...]], tuple[list[int], list[list[int]], list[Any]]] = {}

    def need(self, ranks: Iterable[int], purpose: str = "") -> None:
        """Note that these ranks have to run, see `SharedSegment.need`. Raise NotRunError if any of them does not."""
        if purpose:
            self.known.add(purpose)
        missing = set(ranks).difference(self.ranks)
        self.needed |= missing
        if missing:
            raise NotRunError(f"rank {min(missing)} does not run")


class FoldedViews(Views):
    """The views of a group whose members share representatives: each member is read at its representative's place."""

    def __init__(self, transport: AbstractTransport, slot: int, ranks: tuple[int, ...]) -> None:
        segment = transport.segment
        assert isinstance(segment, FoldedSegment)
        segment.groups[ranks] = None
        segment.has_local_groups |= slot >= segment.map.max_world_groups
        run = set(segment.ranks)
        super().__init__(transport, slot, tuple(filter(run.__contains__, ranks)))
        # Headers, marks and times are those of the representatives; payloads and notes are asked for by position.
        self.position, self.size = ranks.index(transport.rank), len(ranks)
        # What has an entry for each member is made once for all of them.
        found = segment.shared.get((slot, ranks))
        if found is None:
            members = represented(ranks, run)
            places = [dict(zip(self.ranks, notes, strict=True)) for notes in self.notes]
            self.notes = [[place[rank] for rank in members] for place in places]
            found = members, self.notes, [self._reader(h.OFFSET, parity) for parity in (0, 1)]
            segment.shared[slot, ranks] = found
        self.members, self.notes, readers = found
        self.offsets = [each._replace(offsets=read) for each, read in zip(self.offsets, readers, strict=True)]


def represented(ranks: Sequence[int], run: set[int]) -> list[int]:
    """Return each member's representative: the last that runs up to its place in the group; before any, the first."""
    return _filled([rank if rank in run else None for rank in ranks])


def _filled(known: Sequence[int | None]) -> list[int]:
    """Replace each None by the number before it; before any number, by the first."""
    last = next(one for one in known if one is not None)
    return [last := last if one is None else one for one in known]


# --- choosing representatives -------------------------------------------------------------------------


def alike(events: Iterable[Event], ranks: Iterable[int]) -> dict[int, int]:
    """Return rank -> the first of the ranks that have the same events at the same times."""
    of_rank: dict[int, list[Any]] = {rank: [] for rank in ranks}
    for event in events:
        of_rank[event.rank].append((
            event.name, event.kind, event.step, event.sim_start_ps, event.sim_end_ps, event.flops, event.size_bytes,
            len(event.group), event.device, event.live_bytes, event.algorithm,
        ))  # fmt: skip
    first: dict[Any, int] = {}
    # Communication that overlaps is recorded when it ends, which orders it differently on ranks that wait elsewhere.
    return {rank: first.setdefault(tuple(sorted(found)), rank) for rank, found in of_rank.items()}


def first_guess(cluster: ClusterSpec) -> set[int]:
    """Return the ends of the world, the ranks that the described hardware makes different, and their neighbours.

    `wanted` would find the ends and the neighbours itself, in further runs, but not the ranks that differ.
    """
    special = {int(rank) for where in (*cluster.stragglers, *cluster.slow_links) for rank in np.atleast_1d(where)}
    near = {rank + step for rank in special for step in (-1, 0, 1)}
    return ({0, cluster.world_size - 1} | near) & set(range(cluster.world_size))


def wanted(segment: FoldedSegment, classes: Mapping[int, int]) -> set[int]:
    """Return the ranks that have to run, besides those that did, to tell which ranks are alike.

    Args:
        segment: of the run so far; it has the groups.
        classes: representative -> the first one with the same events at the same times.
    """
    inner, rest = _inner(segment)
    found = _ends(segment.groups, classes) | {*rest[:1], *rest[-1:]}
    for group in (*inner, rest):
        found |= between(group, classes)
    if found <= classes.keys():
        # A group's collectives join the clocks of the members that run: each class of its members has to be among them.
        stands_for = assigned(segment)
        for group in inner:
            joined = {classes[rank] for rank in group if rank in classes}
            one_of_class = {classes[stands_for[rank]]: rank for rank in group}
            found |= {rank for number, rank in one_of_class.items() if number not in joined}
    return found


def _inner(segment: FoldedSegment) -> tuple[list[tuple[int, ...]], Sequence[int]]:
    """Return the groups of representatives, and the ranks that have no group but the world, as far as these are known.

    The world has the classes of all other groups: to bisect it, too, would only find them again.
    """
    smaller = [group for group in segment.groups if 1 < len(group) < segment.world_size]
    inner = [group for group in smaller if not set(segment.ranks).isdisjoint(group)]
    if not inner:
        return [], range(segment.world_size)
    rest = () if segment.has_local_groups else sorted({*range(segment.world_size)}.difference(*smaller))
    return inner, rest


def _ends(groups: Iterable[tuple[int, ...]], ranks: Iterable[int]) -> set[int]:
    """Return the first and last member of every group that these ranks reach: their groups, the groups of those, …"""
    of_rank: dict[int, list[tuple[int, ...]]] = {}
    for group in groups:
        for rank in group:
            of_rank.setdefault(rank, []).append(group)
    found, due = set[int](), {*ranks}
    while due:
        ends = {end for group in of_rank.pop(due.pop(), ()) for end in (group[0], group[-1])}
        due |= ends - found
        found |= ends
    return found


def between(group: Sequence[int], values: Mapping[int, Any]) -> set[int]:
    """Return the ranks in the middle between members with different values, where no other has one.

    Args:
        group: ranks, in the group's order.
        values: rank -> anything; for some members.
    """
    known = [(place, values[rank]) for place, rank in enumerate(group) if rank in values]
    return {group[(p + q) // 2] for (p, a), (q, b) in pairwise(known) if a != b and q - p > 1}


def continued(found: set[int], run: set[int], world_size: int) -> set[int]:
    """Return the ranks, and those that follow them at equal distances: a chain of messages shows one rank in each run.

    Args:
        found: ranks that have to run.
        run: ranks that ran.
        world_size: number of all ranks.
    """
    following: set[int] = set()
    for rank in found:
        steps = (rank - other for other in run if 2 * other - rank in run)
        if step := min(steps, key=abs, default=0):
            length = next(n for n in range(2, len(run) + 2) if rank - n * step not in run)
            following.update(range(rank, rank + length * step, step))
    return found | following & set(range(world_size))


def assigned(segment: FoldedSegment) -> list[int]:
    """Return the representative of every rank of the world."""
    stands_for = {rank: rank for rank in segment.ranks}
    # Each group fills the places between its representatives; the ranks so found help to fill other groups. Ranks
    # without a group are like each other, rather than like members of a group next to them.
    groups = sorted((group for group in (*segment.groups, _inner(segment)[1]) if len(group) > 1), key=len)
    while True:
        before = len(stands_for)
        for group in groups:
            known = [stands_for.get(rank) for rank in group]
            if None in known and set(known) != {None}:
                stands_for |= zip(group, _filled(known), strict=True)
        if len(stands_for) == before:
            break
    world = range(segment.world_size)
    if len(stands_for) < segment.world_size:
        stands_for |= dict(zip(world, represented(world, set(segment.ranks)), strict=True)) | stands_for
    return [stands_for[rank] for rank in world]
