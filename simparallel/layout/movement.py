"""The communication between two layouts in closed form, for searches that price many pairs of layouts.

`redistribution` plans a movement rank by rank. Here ranks are written as numbers in a mixed radix, such that each axis
of either layout is a run of digits; this is possible if the axes nest. A layout then cuts a dim by a sequence of
digits, the outermost first. Where two layouts cut a dim by sequences with a common prefix, the prefix needs no
communication. Of the digits behind it,

    those of the source    are gathered: ranks that differ in them exchange parts,
    those of the target    are sliced: each rank keeps a part of what it has.

If a dim has both, parts are sent as messages between some of the ranks, and there is no closed form.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group, Mesh

# (distance between neighbours, number of values) of a digit of the rank's number.
Digit = tuple[int, int]
Digits = tuple[tuple[Digit, ...], ...]


class Movement(NamedTuple):
    """The one step of `plan_redistribution` between two layouts without partial sums.

    Attributes:
        kind: "nothing", "slice", "all_gather" or "all_to_all".
        digits: the digits along which ranks communicate; they span the groups.
        kept: a rank keeps one of this many parts of what it has, and so of what it receives.
    """

    kind: str
    digits: tuple[Digit, ...] = ()
    kept: int = 1

    @property
    def group_size(self) -> int:
        return prod(count for _, count in self.digits)

    def groups(self, device_num: int) -> tuple[Group, ...]:
        """Return the groups of ranks that communicate, among ranks 0 … device_num - 1."""
        return groups_of(self.digits, device_num)


@lru_cache(maxsize=4096)
def groups_of(digits: tuple[Digit, ...], device_num: int) -> tuple[Group, ...]:
    """Return the groups of ranks that differ in these digits alone."""
    offsets = [0]
    for stride, count in digits:
        offsets = [offset + stride * i for offset in offsets for i in range(count)]
    origins = (r for r in range(device_num) if all(r // stride % count == 0 for stride, count in digits))
    return tuple(tuple(sorted(origin + offset for offset in offsets)) for origin in origins)


@lru_cache(maxsize=1 << 16)
def digits_of(layout: Layout) -> Digits | None:
    """Return for each dim the digits that cut it, the outermost first; layouts with equal digits have equal slices.

    Return None for a partial sum, and for a layout of other ranks than 0 … n-1 in order. Adjacent digits are merged
    into one.
    """
    mesh = layout.mesh
    if layout.partial or not _is_plain(mesh):
        return None
    found = []
    for axes in layout.axes_by_dim:
        own: list[Digit] = []
        for i in map(mesh.axis_names.index, axes):
            stride, count = prod(mesh.shape[i + 1 :]), mesh.shape[i]
            if own and own[-1][0] == stride * count:
                own[-1] = stride, count * own[-1][1]
            elif count > 1:
                own.append((stride, count))
        found.append(tuple(own))
    return tuple(found)


@lru_cache(maxsize=1 << 18)
def movement(source: Digits, target: Digits) -> Movement | None:
    """Return the movement between two layouts, given by `digits_of`; None if there is no closed form.

    The layouts have the same ranks and no partial sums, and their cuts divide the shape.

    Cost: about 10 us, whatever the number of ranks.
    """
    ends = {end for dim in (*source, *target) for stride, count in dim for end in (stride, stride * count)}
    bounds = sorted(ends)
    # Axes nest if each end divides the next.
    if any(high % low for low, high in pairwise(bounds)):
        return None
    gathered: set[Digit] = set()
    sliced: set[Digit] = set()
    for before, after in zip(source, target, strict=True):
        if before == after:
            continue
        before, after = _split(before, bounds), _split(after, bounds)
        same = 0
        while same < min(len(before), len(after)) and before[same] == after[same]:
            same += 1
        if before[same:] and after[same:]:
            return None
        gathered.update(before[same:])
        sliced.update(after[same:])
    if not gathered:
        return Movement("slice") if sliced else Movement("nothing")
    kept = prod(count for _, count in sliced)
    return Movement("all_gather" if kept == 1 else "all_to_all", tuple(sorted(gathered, reverse=True)), kept)


def _split(digits: tuple[Digit, ...], bounds: Sequence[int]) -> tuple[Digit, ...]:
    """Return the digits, split at each bound (a stride) that lies inside of one; the outermost first."""
    found: list[Digit] = []
    for stride, count in digits:
        inner = [bound for bound in bounds if stride <= bound <= stride * count]
        found += [(low, high // low) for low, high in pairwise(inner)][::-1]
    return tuple(found)


@lru_cache(maxsize=4096)
def _is_plain(mesh: Mesh) -> bool:
    return mesh.ranks == tuple(range(mesh.size))
