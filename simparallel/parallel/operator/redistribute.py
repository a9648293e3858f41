"""Execute the plan of a redistribution: this rank's part of it, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from simparallel import collectives
from simparallel.backend import Array, get_namespace
from simparallel.comm import Communicator, Group
from simparallel.layout.boxes import Box, box_of, shape_of, size_of, within
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import Redistribution, Step
from simparallel.layout.sharding import Placement

# Tag of the messages, far from the tags that users choose.
_TAG = 1 << 61

Move = Callable[[Array], Array]


class GroupCache:
    """The groups of one rank by their members; each is created when it is first used.

    Creating a group is a collective over all ranks, so all of them must create the same groups in the same order. They
    do, because all execute the same plans. If only some of the ranks execute a plan, its groups are created by their
    members alone.
    """

    def __init__(self, communicator: Communicator, ranks: tuple[int, ...]) -> None:
        self._communicator = communicator
        self._is_local = ranks != communicator.world.ranks
        self._groups: dict[tuple[int, ...], Group] = {communicator.world.ranks: communicator.world}

    def __getitem__(self, ranks: tuple[int, ...]) -> Group:
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = self._communicator.new_group(ranks, self._is_local)
        return group

    def mine(self, all_of_them: tuple[tuple[int, ...], ...]) -> Group | None:
        """Create all groups, which must not overlap; return the one that contains this rank."""
        # A group of other ranks is created, too, because creating it is a collective over all ranks.
        me = self._communicator.rank
        made = [self[ranks] for ranks in all_of_them if not self._is_local or me in ranks]
        return next((group for group in made if group.rank is not None), None)


def compile_moves(plan: Redistribution, rank: int, groups: GroupCache) -> list[Move]:
    """Compile the rank's part of the plan: one function of its slice per step. Collective: yes (it creates groups)."""
    moves, layout = [], plan.source
    for step in plan.steps:
        # Messages go from rank to rank and need no group.
        group = None if step.kind == "messages" else groups.mine(step.groups)
        have, need = held(layout, rank, plan.shape), held(step.layout, rank, plan.shape)
        moves.append(_compile(step, rank, group, have, need, plan.shape))
        layout = step.layout
    return moves


def reshaping(moves: list[Move], plan: Redistribution, target: Placement, rank: int) -> list[Move]:
    """Wrap the moves: reshape this rank's slice to the plan's common shape, move, then reshape to the target shape."""
    # A slice has the same elements in the same order in all three shapes, so both reshapes are free.
    ends = (plan.source, plan.shape), (target.layout, target.shape)
    boxes = [held(layout, rank, shape) for layout, shape in ends]
    before, after = (
        (0,) * max(len(shape), 1) if box is None else shape_of(box) for box, (_, shape) in zip(boxes, ends, strict=True)
    )
    return [lambda x: x.reshape(before), *moves, lambda x: x.reshape(after)]


def held(layout: Layout, rank: int, shape: tuple[int, ...]) -> Box | None:
    """Return the box that the rank holds; None if it is not a rank of the layout and holds nothing."""
    return box_of(layout, rank, shape) if rank in layout.mesh.ranks else None


def nothing(x: Array, ndim: int) -> Array:
    """Return the empty array of a rank that holds no part of a tensor."""
    # At least one dim: a 0-dim array would hold an element.
    return get_namespace(x).zeros((0,) * max(ndim, 1), x.dtype)


def _compile(
    step: Step, rank: int, group: Group | None, have: Box | None, need: Box | None, shape: tuple[int, ...]
) -> Move:
    ndim, is_empty = len(shape), need is not None and not size_of(need)
    is_idle = not any(step.received) or (group is None and step.kind != "messages")
    # In a reduction all ranks of the group have equal slices, so all of them can skip an empty one.
    if is_empty and (is_idle or step.exchange is None):
        return partial(_empty, shape=shape_of(need or ()))
    if step.exchange is None:
        # Only other ranks take part in this sum.
        if group is None:
            return lambda x: x
        # An all-reduce works in place, and x may be a view, or kept for backward.
        if step.kind == "all_reduce":
            return lambda x: collectives.all_reduce(x.copy(), "sum", group)
        return lambda x: collectives.reduce_scatter(x, step.dims[0], "sum", group)
    # Nothing arrives: this rank drops its slice, keeps it, or cuts it smaller.
    if is_idle:
        if need is None:
            return partial(nothing, ndim=ndim)
        assert have is not None
        return partial(_slice, index=within(need, have))
    if step.kind == "broadcast" and group is not None:
        shape = shape_of(have if group.rank == 0 and have is not None else need or ())
        return partial(_broadcast, shape=shape, wants=None if need is None else shape_of(need), group=group)
    assert group is not None or step.kind == "messages"
    # Parts that follow each other along one dim: the collective itself puts them in place.
    if step.kind == "all_gather" and step.dims:
        return lambda x: collectives.all_gather(x, step.dims[0], group)
    if step.kind == "all_to_all" and step.dims:
        return lambda x: collectives.all_to_all(x, step.dims[0], step.dims[1], group)
    # Any other step is assembled part by part: find the parts to receive, to keep and to send.
    mine = step.exchange.of(rank)
    gets = {move.source: within(move.box, need) for move in mine if need is not None and move.target == rank}
    own = next((within(move.box, have) for move in mine if have is not None and move.source == move.target), None)
    gives = {
        move.target: within(move.box, have) for move in mine if have is not None and move.source == rank != move.target
    }
    # Both collectives exchange parts of one size, `count`; messages may have any sizes.
    exchange: Any = {"all_gather": _gathered, "all_to_all": _exchanged, "messages": by_messages}[step.kind]
    # Every rank sends its whole slice; `gives` then indexes the wanted part of each received slice.
    if step.kind == "all_gather":
        held_by = {source: step.exchange.have(source) or () for source in gets}
        gives = {move.source: within(move.box, held_by[move.source]) for move in mine if move.target == rank}
    count = next((size_of(move.box) for move in mine if move.source != move.target), 0)
    places = None if own is None else (gets.pop(rank), own)
    return partial(
        assemble,
        shape=(0,) * max(ndim, 1) if need is None else shape_of(need),
        own=places,
        exchange=exchange(gives, gets, group, count),
    )


def _empty(x: Array, shape: tuple[int, ...]) -> Array:
    return get_namespace(x).empty(shape, x.dtype)


def _broadcast(x: Array, shape: tuple[int, ...], wants: tuple[int, ...] | None, group: Group) -> Array:
    """Broadcast from the group's first rank, which itself may need none of the data afterwards."""
    y = x.copy() if group.rank == 0 else _empty(x, shape)
    y = collectives.broadcast(y, group.ranks[0], group)
    if wants is None:
        return nothing(y, len(shape))
    return y if wants == shape else _empty(y, wants)


def _slice(x: Array, index: tuple[slice, ...]) -> Array:
    return get_namespace(x).ascontiguousarray(x[index]) if x.ndim else x


def assemble(
    x: Array,
    shape: tuple[int, ...],
    own: tuple[tuple[slice, ...], tuple[slice, ...]] | None,
    exchange: Callable[[Array, Array], None],
) -> Array:
    """Return a new slice: a part of this rank's slice x, and the parts that `exchange` receives.

    Args:
        x: this rank's slice.
        shape: of the new slice.
        own: index of the part in the new slice, and in x; None if x has no part of it.
        exchange: takes x and the new slice; it sends parts of x, and writes the received parts.
    """
    y = get_namespace(x).empty(shape, x.dtype)
    if own is not None:
        y[own[0]] = x[own[1]]
    exchange(x, y)
    return y


# Rank -> index of a part of an array.
Parts = dict[int, tuple[slice, ...]]


def _shape(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in index)


# The next three return the `exchange` of `assemble`. `gives`: receiving rank -> the part of x that it gets; `gets`:
# sending rank -> the place of its part in the new slice; `count`: elements of a part.


def _gathered(gives: Parts, gets: Parts, group: Group, count: int) -> Callable[[Array, Array], None]:
    """Return an exchange that gathers the whole slices of all ranks; here `gives` has the wanted part of each."""
    parts = [(group.ranks.index(source), gives[source], index) for source, index in gets.items()]

    def exchange(x: Array, y: Array) -> None:
        given = collectives.all_gather(x[None], 0, group)
        for row, part, index in parts:
            y[index] = given[row][part]

    return exchange


def _exchanged(gives: Parts, gets: Parts, group: Group, count: int) -> Callable[[Array, Array], None]:
    """Return an exchange of one row of `count` elements between all ranks; rows that no rank needs hold zeros."""
    rows_out = [(group.ranks.index(target), index) for target, index in gives.items()]
    rows_in = [(group.ranks.index(source), index, _shape(index)) for source, index in gets.items()]
    # A rank's row to itself is never read, so it may stay uninitialised.
    is_full = len(rows_out) == group.size - 1

    def exchange(x: Array, y: Array) -> None:
        xp = get_namespace(x)
        rows = (xp.empty if is_full else xp.zeros)((group.size, count), x.dtype)
        for row, index in rows_out:
            rows[row] = x[index].reshape(-1)
        rows = collectives.all_to_all(rows, 0, 0, group)
        for row, index, shape in rows_in:
            y[index] = rows[row].reshape(shape)

    return exchange


def by_messages(
    gives: Parts, gets: Parts, group: Group | None = None, count: int = 0
) -> Callable[[Array, Array], None]:
    """Return an exchange by messages from rank to rank, of parts of any sizes."""
    shapes = {source: _shape(index) for source, index in gets.items()}

    def exchange(x: Array, y: Array) -> None:
        for source, part in swap(x, gives, shapes).items():
            y[gets[source]] = part

    return exchange


def swap(x: Array, gives: Parts, shapes: dict[int, tuple[int, ...]]) -> dict[int, Array]:
    """Send parts of x as messages; return the received parts, of x's dtype, by sending rank.

    Args:
        x: this rank's slice.
        gives: receiving rank -> index of the part of x to send.
        shapes: sending rank -> shape of the part to receive.

    Collective: waits for all sending ranks, and until all receiving ranks have taken their parts.
    """
    xp = get_namespace(x)
    arriving = {source: xp.empty(shape, x.dtype) for source, shape in shapes.items()}
    # Post all receives first, then all sends, so that no order of ranks can deadlock.
    works = [collectives.irecv(part, source, _TAG) for source, part in arriving.items()]
    works += [collectives.isend(xp.ascontiguousarray(x[index]), target, _TAG) for target, index in gives.items()]
    for work in works:
        work.wait()
    return arriving
