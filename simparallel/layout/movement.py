"""The communication between two layouts in closed form, for searches that price many pairs of layouts.

`redistribution` plans a movement rank by rank. Where axes nest, the number of a rank has digits in a mixed radix, and an
axis of either layout is a run of digits. A dim is then cut by a sequence of digits, the outermost first; digits that
both layouts begin with do not matter. Of the others,

    digits that only the source has     are gathered: their ranks exchange parts,
    digits that only the target has     are sliced: each rank keeps a part of what it has.

Where a dim has both, parts go as messages to some of the ranks, and there is no closed form.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod
from typing import NamedTuple

from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group, Mesh

# (distance between neighbours, number of values) of a digit of the rank's number.
Digit = tuple[int, int]


class Movement(NamedTuple):
    """What `plan_redistribution` does between two layouts without partial sums, in one step.

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
        """Return the groups of ranks that communicate; those of ranks 0 … device_num - 1."""
        return groups_of(self.digits, device_num)


@lru_cache(maxsize=4096)
def groups_of(digits: tuple[Digit, ...], device_num: int) -> tuple[Group, ...]:
    """Return the groups of ranks that differ in these digits alone."""
    offsets = [0]
    for stride, count in digits:
        offsets = [offset + stride * i for offset in offsets for i in range(count)]
    origins = (r for r in range(device_num) if all(r // stride % count == 0 for stride, count in digits))
    return tuple(tuple(sorted(origin + offset for offset in offsets)) for origin in origins)


@lru_cache(maxsize=1 << 18)
def movement(source: Layout, target: Layout) -> Movement | None:
    """Return the movement between two layouts; None if there is no closed form.

    Args:
        source, target: layouts of the ranks 0 … n-1 in order, without partial sums. Their cuts divide the shape.

    Cost: about 10 us, whatever the number of ranks.
    """
    bounds = _common_bounds(source.mesh, target.mesh)
    if bounds is None:
        return None
    gathered: set[Digit] = set()
    sliced: set[Digit] = set()
    for before, after in zip(_digits(source, bounds), _digits(target, bounds), strict=True):
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


@lru_cache(maxsize=4096)
def _common_bounds(a: Mesh, b: Mesh) -> tuple[int, ...] | None:
    """Return the strides at which an axis of either mesh begins, ascending; None unless each divides the next."""
    if a.size != b.size or not (_is_plain(a) and _is_plain(b)):
        return None
    strides = {prod(mesh.shape[i:]) for mesh in (a, b) for i in range(len(mesh.shape) + 1)}
    bounds = tuple(sorted(strides))
    return bounds if all(high % low == 0 for low, high in zip(bounds, bounds[1:], strict=False)) else None


@lru_cache(maxsize=4096)
def _is_plain(mesh: Mesh) -> bool:
    return mesh.ranks == tuple(range(mesh.size))


@lru_cache(maxsize=1 << 16)
def _digits(layout: Layout, bounds: tuple[int, ...]) -> tuple[tuple[Digit, ...], ...]:
    """Return for each dim the digits that cut it, the outermost first."""
    mesh = layout.mesh
    digits = [(low, high // low) for low, high in zip(bounds, bounds[1:], strict=False)][::-1]
    found = []
    for axes in layout.axes_by_dim:
        own: list[Digit] = []
        for axis in axes:
            i = mesh.axis_names.index(axis)
            low, high = prod(mesh.shape[i + 1 :]), prod(mesh.shape[i:])
            own += [digit for digit in digits if low <= digit[0] < high]
        found.append(tuple(own))
    return tuple(found)
