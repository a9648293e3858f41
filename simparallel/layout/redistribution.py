"""Redistribution of a tensor from one layout to another: the direct plan.

    1. Partial sums first. Where the target cuts a dim further along an axis of the sum, the sum is
       reduce-scattered into that dim; the other axes are all-reduced, on the smaller slices.
    2. Then every rank receives exactly the elements that it lacks (`boxes`). The step is named after its
       pattern: a slice (no communication), an all-gather, an all-to-all, a broadcast, or else messages.

For any two layouts of a mesh of any shape, every rank receives the lower bound of bytes. Greedy
planners, which go axis by axis, move 1.5 to 2.3 times as much over all pairs of layouts of an 8 x 8
tensor on a 2 x 2 x 2 mesh. A plan is pure data: the same on every rank, made without a process, in a
time that grows with the number of ranks, not with the number of pairs.

The target may have more, fewer or other ranks than the source: a rank outside of a layout holds
nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

from simparallel.algorithms import price
from simparallel.errors import LayoutError
from simparallel.layout.boxes import Box, Moves, Transfer, boxes_of, shape_of, size_of
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group, groups_text


@dataclass(frozen=True)
class Step:
    """One step of a plan, which all ranks run together.

    Attributes:
        kind: "all_reduce", "reduce_scatter", "slice", "all_gather", "all_to_all", "broadcast" or "messages".
        groups: the groups of ranks that communicate, each in the order of the chunks, for a broadcast with the
            root first; empty for "slice".
        layout: layout of the tensor afterwards.
        dims: dim of a reduce-scatter or an all-gather; (split, concat) of an all-to-all; () where the
            parts do not follow each other along one dim and are placed one by one.
        received: for each rank of the plan, in order, the number of elements that it receives; for an
            all-reduce, the number that it contributes.
        exchange: the transfers; None for the reductions.
    """

    kind: str
    groups: tuple[Group, ...]
    layout: Layout
    dims: tuple[int, ...]
    received: tuple[int, ...]
    exchange: Moves | None = field(default=None, repr=False, compare=False)

    @property
    def moves(self) -> tuple[Transfer, ...]:
        """All transfers, own parts included: at worst one for each pair of ranks. See `Moves.of` for a single rank."""
        return () if self.exchange is None else tuple(self.exchange.all())

    def received_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes that each rank receives, in the order of the plan's ranks; reductions count as in a ring."""
        if self.kind != "all_reduce":
            return tuple(count * itemsize for count in self.received)
        # A ring moves 2 (p - 1) / p vectors.
        share = price("direct", "all_reduce", len(self.groups[0]), 0).sent
        return tuple(round(share * count * itemsize) for count in self.received)

    def __str__(self) -> str:
        along = f" dim {', '.join(map(str, self.dims))}" if self.dims else ""
        who = f" over {groups_text(self.groups)}" if self.groups else ""
        return f"{self.kind}{along}{who}"


@dataclass(frozen=True)
class Redistribution:
    """The plan that takes a tensor of global `shape` from `source` to `target`.

    Attributes:
        steps: the steps in order; empty if there is nothing to do.
    """

    source: Layout
    target: Layout
    shape: tuple[int, ...]
    steps: tuple[Step, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part: the ranks of the source in their order, then those that only the target has."""
        return _all_ranks(self.source, self.target)

    def received_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes that each rank receives, in the order of `ranks`."""
        steps = [step.received_bytes(itemsize) for step in self.steps]
        return tuple(map(sum, zip(*steps, strict=True))) if steps else (0,) * len(self.ranks)

    @property
    def is_free(self) -> bool:
        """Whether no rank receives anything."""
        return not any(any(step.received) for step in self.steps)

    def __str__(self) -> str:
        return " + ".join(step.kind for step in self.steps) or "nothing"


@lru_cache(maxsize=16384)
def plan_redistribution(source: Layout, target: Layout, shape: tuple[int, ...]) -> Redistribution:
    """Make the direct plan.

    Args:
        source: current layout of the tensor; may be a partial sum along some axes.
        target: layout to reach. It may be a partial sum only along axes where `source` is one, on the same
            mesh: a value is never split into addends.
        shape: global shape of the tensor.

    Raises:
        LayoutError: a layout does not fit the shape, or `target` is partial along other axes than `source`.

    Cost: ring volumes of the reductions, and the lower bound of bytes for the movement.
    """
    return _plan(source, target, shape, True)


def plan_with_whole_sums(source: Layout, target: Layout, shape: tuple[int, ...]) -> Redistribution:
    """Make the direct plan with all-reduces only, no reduce-scatters: fewer steps, and more bytes."""
    return _plan(source, target, shape, False)


def _plan(source: Layout, target: Layout, shape: tuple[int, ...], scatters: bool) -> Redistribution:
    # Raises LayoutError if a layout does not fit the shape.
    source.local_shape(shape), target.local_shape(shape)
    if target.partial and (target.mesh != source.mesh or not set(target.partial) <= set(source.partial)):
        raise LayoutError(
            f"redistribute: {target!r} is partial along axes where {source!r} is not; a complete value is never split "
            "into addends."
        )
    steps: list[Step] = []
    layout = _finish_sums(source, target, shape, steps, scatters)
    # After the sums only the slices may differ; partial axes that are left belong to both layouts.
    if layout.with_partial(()) != target.with_partial(()):
        step = _move(layout, target, shape)
        if step is not None:
            steps.append(step)
    return Redistribution(source, target, shape, tuple(steps))


# --- sums -------------------------------------------------------------------------------------------------


def _finish_sums(source: Layout, target: Layout, shape: tuple[int, ...], steps: list[Step], scatters: bool) -> Layout:
    """Append steps that reduce along all partial axes that the target does not keep; return the layout afterwards.

    Args:
        source, target, shape: of the redistribution.
        steps: the steps are appended to this list.
        scatters: whether reduce-scatters may be used, and not all-reduces alone.
    """
    mesh = source.mesh
    left = [axis for axis in source.partial if axis not in target.partial]
    layout = source
    num_others = len(_all_ranks(source, target)) - mesh.size
    # First scatter into the dims that the target cuts anyway: this shrinks the slices that the final all-reduce sums.
    # To know what a rank keeps, `_leads_to` compares its old and its new slice, so both meshes need the same ranks.
    while scatters and left and set(target.mesh.ranks) == set(mesh.ranks):
        found = _scatter(layout, target, shape, left)
        if found is None:
            break
        dim, axes = found
        left = [axis for axis in left if axis not in axes]
        layout = _cut_further(layout, dim, axes, (*left, *target.partial))
        # As in a ring: a rank receives an addend of its new slice from each of the others.
        others = prod(mesh.axis_size(axis) for axis in axes) - 1
        counts = tuple(count * others for count in _held(layout, shape))
        steps.append(Step("reduce_scatter", mesh.groups(axes), layout, (dim,), counts))
    # All other axes take one all-reduce. Ranks of the target alone have nothing to add.
    if left:
        layout = layout.with_partial(target.partial)
        counts = _held(layout, shape) + (0,) * num_others
        steps.append(Step("all_reduce", mesh.groups(left), layout, (), counts))
    return layout


def _held(layout: Layout, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of elements in the slice of each rank of the layout."""
    return tuple(map(size_of, boxes_of(layout, shape).values()))


def _scatter(
    layout: Layout, target: Layout, shape: tuple[int, ...], left: Sequence[str]
) -> tuple[int, tuple[str, ...]] | None:
    """Return a dim that the target cuts further along axes of the sum, and as many of the axes `left` as fit, in order.

    None if there is no such dim.
    """
    # Greedy: extend the axes of each dim one by one, and take the dim with the most axes.
    best: tuple[int, tuple[str, ...]] | None = None
    for dim in range(len(shape)):
        axes: tuple[str, ...] = ()
        for _ in left:
            extended = next(
                (
                    (*axes, axis)
                    for axis in left
                    if axis not in axes and _leads_to(layout, target, shape, dim, (*axes, axis))
                ),
                None,
            )
            if extended is None:
                break
            axes = extended
        if axes and (best is None or len(axes) > len(best[1])):
            best = dim, axes
    return best


def _leads_to(layout: Layout, target: Layout, shape: tuple[int, ...], dim: int, axes: tuple[str, ...]) -> bool:
    """Return whether the slices after this cut still have every element of the present ones that their ranks need."""
    further = _cut_further(layout, dim, axes, ())
    # A reduce-scatter needs parts of equal size.
    if shape[dim] % further.cuts[dim] or not shape[dim]:
        return False
    now, then, need = boxes_of(layout, shape), boxes_of(further, shape), boxes_of(target, shape)
    for rank in layout.mesh.ranks:
        # The part of the present slice that the rank needs has to lie within its slice after the cut.
        (low, high), (start, stop), (need_start, need_stop) = now[rank][dim], then[rank][dim], need[rank][dim]
        if not (start <= max(low, need_start) and min(high, need_stop) <= stop):
            return False
    return True


def _cut_further(layout: Layout, dim: int, axes: tuple[str, ...], partial: tuple[str, ...]) -> Layout:
    dims = [(*own, *axes) if d == dim else own for d, own in enumerate(layout.axes_by_dim)]
    return layout.with_partial(())(*(own or "None" for own in dims)).with_partial(partial)


# --- movement -----------------------------------------------------------------------------------------------


def _move(source: Layout, target: Layout, shape: tuple[int, ...]) -> Step | None:
    have, need = boxes_of(source, shape), boxes_of(target, shape)
    moves = Moves(source, need, shape)
    counts = tuple(moves.received.get(rank, 0) for rank in _all_ranks(source, target))
    # Without communication: ranks keep their boxes or cut them smaller.
    if not any(counts):
        return None if have == need else Step("slice", (), target, (), counts, moves)
    groups = moves.groups
    # Start from messages, which are always possible, and look for a collective that moves the same parts.
    step = Step("messages", groups, target, (), counts, moves)
    # Collectives need parts of equal size. Ranks that receive nothing are the sources; with a single one in each
    # group, whose whole box the others need, the movement is a broadcast.
    sizes = {size for group in groups for rank in group for size in moves.sizes(rank)}
    if len(sizes) > 1:
        return step
    roots = [[rank for rank in group if not moves.num_sources(rank)] for group in groups]
    if all(len(of) == 1 and _is_broadcast(of[0], group, have, need) for of, group in zip(roots, groups, strict=True)):
        groups = tuple(
            (*of, *[rank for rank in group if rank not in of]) for of, group in zip(roots, groups, strict=True)
        )
        return replace(step, kind="broadcast", groups=groups)
    # In an all-gather and an all-to-all, every rank receives from all others of its group.
    is_full = all(moves.num_sources(rank) == len(group) - 1 for group in groups for rank in group)
    if not is_full or len({len(group) for group in groups}) > 1 or len(have) < len(counts):
        return step
    if sizes == {size_of(have[groups[0][0]])} and _are_alike(have, groups):
        return _as_all_gather(step, have, need)
    return _as_all_to_all(step, have, need)


def _is_broadcast(root: int, group: Group, have: dict[int, Box], need: dict[int, Box]) -> bool:
    """Return whether all other ranks of the group need exactly the box of the root."""
    return root in have and all(need.get(rank) == have[root] for rank in group if rank != root)


def _all_ranks(source: Layout, target: Layout) -> tuple[int, ...]:
    own = set(source.mesh.ranks)
    return (*source.mesh.ranks, *(rank for rank in target.mesh.ranks if rank not in own))


def _as_all_gather(step: Step, have: dict[int, Box], need: dict[int, Box]) -> Step:
    """Make the step an all-gather of whole slices; along a dim if the slices of each group follow each other there."""
    # An all-gather joins the slices in the order of the group.
    groups = tuple(tuple(sorted(group, key=lambda rank: have[rank])) for group in step.groups)
    dim = _common([_joined_dim(have, group) for group in groups])
    if dim is not None and not all(_is_union(need[rank], have, group, dim) for group in groups for rank in group):
        dim = None
    return replace(step, kind="all_gather", groups=groups, dims=() if dim is None else (dim,))


def _as_all_to_all(step: Step, have: dict[int, Box], need: dict[int, Box]) -> Step:
    """Make the step an all-to-all of equal parts; split along one dim and joined along another where possible."""
    # Member i receives part i of every slice, and joins the parts in the order of the group.
    groups = tuple(tuple(sorted(group, key=lambda rank: (need[rank], have[rank]))) for group in step.groups)
    concat, split = (
        _common([_joined_dim(have, group) for group in groups]),
        _common([_joined_dim(need, group) for group in groups]),
    )
    # The parts have to follow each other along `concat` in every new slice, and along `split` in every old one.
    dims: tuple[int, ...] = ()
    if split is not None and concat is not None and split != concat:
        is_union = all(
            _is_union(need[rank], have, group, concat, except_dim=split)
            and _is_union(have[rank], need, group, split, except_dim=concat)
            for group in groups
            for rank in group
        )
        dims = (split, concat) if is_union and _are_alike(have, groups) and _are_alike(need, groups) else ()
    return replace(step, kind="all_to_all", groups=groups, dims=dims)


def _are_alike(boxes: dict[int, Box], groups: tuple[Group, ...]) -> bool:
    """Return whether the boxes of these ranks have one shape, as collectives of equal parts require."""
    return len({shape_of(boxes[rank]) for group in groups for rank in group}) == 1


def _joined_dim(boxes: dict[int, Box], group: Group) -> int | None:
    """Return the dim along which the boxes of the group follow each other, in its order; None if there is none."""
    first = boxes[group[0]]
    differing = {d for rank in group for d, part in enumerate(boxes[rank]) if part != first[d]}
    if len(differing) != 1:
        return None
    dim = differing.pop()
    ends = [boxes[rank][dim] for rank in group]
    return dim if all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False)) else None


def _is_union(whole: Box, parts: dict[int, Box], group: Group, dim: int, except_dim: int | None = None) -> bool:
    """Return whether `whole` is the union of the parts along `dim`; `except_dim` is not compared."""
    union = tuple(
        (parts[group[0]][d][0], parts[group[-1]][d][1]) if d == dim else part for d, part in enumerate(parts[group[0]])
    )
    return all(a == b for d, (a, b) in enumerate(zip(whole, union, strict=True)) if d != except_dim)


def _common(values: Sequence[int | None]) -> int | None:
    return values[0] if len(set(values)) == 1 else None
