"""Ranks on a mesh with named axes: coordinates and ordered groups. Pure integers.

Ranks fill the mesh row by row, the last axis fastest. A group is an *ordered* tuple of ranks: its
order is the order of the chunks that the ranks hold, and so the order of the parts in a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from simparallel.errors import LayoutError

Coordinate = tuple[int, ...]
Group = tuple[int, ...]

# Messages list up to this many groups in full, and a group of up to twice as many ranks.
MOST_SHOWN = 8


def is_int(value: object) -> bool:
    """Return whether `value` is an int but not a bool, which is a subclass of int in Python."""
    return isinstance(value, int) and not isinstance(value, bool)


def groups_text(groups: Sequence[Group]) -> str:
    """Format groups for a message; long lists are cut to the first entries and the number of the others.

    Example:
        >>> from simparallel.layout.mesh import groups_text
        >>> groups_text(sp.Mesh((256, 2), ("dp", "mp")).groups("dp"))
        '[0, 2, 4, 6, …, 510], [1, 3, 5, 7, …, 511]'
    """
    shown = groups if len(groups) <= MOST_SHOWN else groups[:2]
    more = f" and {len(groups) - len(shown)} more groups" if len(shown) < len(groups) else ""
    return ", ".join(map(_group_text, shown)) + more


def _group_text(group: Group) -> str:
    if len(group) <= 2 * MOST_SHOWN:
        return str(list(group))
    return f"[{', '.join(map(str, group[:4]))}, …, {group[-1]}]"


def plain_cuts(value: Any) -> Any:
    """Convert NumPy integers in nested tuples to ints; return other values unchanged."""
    # A named tuple is no tuple of cuts: leave it to the checks that follow.
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(plain_cuts(entry) for entry in value)
    return int(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value


def check_axes(who: str, sizes: object, names: object, *, sizes_name: str, names_name: str) -> None:
    """Check the sizes and the names of axes; `sizes_name` and `names_name` are the caller's names for them.

    Raises:
        LayoutError: they are not tuples or differ in length, a size is below 1, or a name is empty,
            "None", repeated or not a str.
    """
    if not isinstance(sizes, tuple):
        raise LayoutError(f"{who}: {sizes_name}={sizes!r} must be a tuple of integers, such as (2, 4).")
    if not isinstance(names, tuple):
        raise LayoutError(f"{who}: {names_name}={names!r} must be a tuple of names, such as ('dp', 'mp').")
    for i, size in enumerate(sizes):
        if not is_int(size) or size < 1:
            raise LayoutError(f"{who}: {sizes_name}[{i}]={size!r} must be an integer of 1 or more.")
    for i, name in enumerate(names):
        if not isinstance(name, str) or name in ("", "None"):
            raise LayoutError(
                f"{who}: {names_name}[{i}]={name!r} must be a non-empty str other than 'None', "
                "which stands for a dim that is not cut."
            )
        if name in names[:i]:
            raise LayoutError(f"{who}: {names_name}={names!r} repeats {name!r}; give each axis its own name.")
    if len(sizes) != len(names):
        raise LayoutError(
            f"{who}: {sizes_name}={sizes!r} has {len(sizes)} axes, {names_name}={names!r} names "
            f"{len(names)}; give one name per axis."
        )


@dataclass(frozen=True, init=False, repr=False)
class Mesh:
    """Ranks arranged along named axes.

    Args:
        shape: size of each axis; () is the mesh of one rank.
        axis_names: one name per axis.
        ranks: the rank at each row-major position; 0 … size-1 by default.

    Raises:
        LayoutError: sizes, names or ranks are malformed.

    Example:
        >>> mesh = sp.Mesh((2, 4), ("dp", "mp"))
        >>> mesh.coordinate(6), mesh.group("dp", rank=6), mesh.group("mp", rank=6)
        ((1, 2), (2, 6), (4, 5, 6, 7))
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]

    def __init__(
        self, shape: tuple[int, ...], axis_names: tuple[str, ...], ranks: tuple[int, ...] | None = None
    ) -> None:
        check_axes("Mesh", shape, axis_names, sizes_name="shape", names_name="axis_names")
        size = prod(shape)
        ranks = tuple(range(size)) if ranks is None else ranks
        if not isinstance(ranks, tuple):
            raise LayoutError(f"Mesh: ranks={ranks!r} must be a tuple of integers.")
        for i, rank in enumerate(ranks):
            if not is_int(rank) or rank < 0:
                raise LayoutError(f"Mesh: ranks[{i}]={rank!r} must be an integer of 0 or more.")
        if len(ranks) != size:
            raise LayoutError(f"Mesh: {len(ranks)} ranks do not fill shape {shape}, which needs {size}.")
        if len(set(ranks)) != size:
            twice = next(rank for i, rank in enumerate(ranks) if rank in ranks[:i])
            raise LayoutError(f"Mesh: ranks= lists rank {twice} twice; list each rank once.")
        # The dataclass is frozen, so plain assignment would fail.
        vars(self).update(shape=shape, axis_names=axis_names, ranks=ranks)

    def __repr__(self) -> str:
        in_order = self.ranks == tuple(range(self.size))
        ranks = "" if in_order else f", ranks={self.ranks!r}"
        return f"Mesh({self.shape!r}, {self.axis_names!r}{ranks})"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks along `axis`. Raise LayoutError for an unknown axis."""
        return self.shape[self._axis_index(axis)]

    def coordinate(self, rank: int) -> Coordinate:
        """Return the position of `rank`, one number per axis. Raise LayoutError for an unknown rank."""
        if not is_int(rank) or rank not in self._positions:
            raise LayoutError(f"{self!r}: rank {rank!r} is not in the mesh; its ranks are {self.ranks}.")
        position = self._positions[rank]
        coordinate = []
        # The last axis varies fastest.
        for size in reversed(self.shape):
            position, index = divmod(position, size)
            coordinate.append(index)
        return tuple(reversed(coordinate))

    def group(self, axes: str | Sequence[str], rank: int) -> Group:
        """Return the ranks that agree with `rank` on every axis that is not in `axes`.

        Args:
            axes: a name or several; the first is outermost, so that the order of the group is
                the chunk order of a dim cut by `axes`.
            rank: a member of the group.

        Raises:
            LayoutError: an axis is unknown or named twice, or the rank is unknown.
        """
        indices, coordinate = self._axis_indices(axes), self.coordinate(rank)
        # The member at coordinate 0 along all these axes.
        origin = self._positions[rank] - sum(coordinate[i] * self._strides[i] for i in indices)
        return tuple([self.ranks[origin + offset] for offset in self._offsets(indices)])

    def part(self, axes: Sequence[str], rank: int) -> Mesh:
        """Return the ranks of `group(axes, rank)` as a mesh of these axes. Raises as `group`."""
        return Mesh(tuple(map(self.axis_size, axes)), tuple(axes), self.group(axes, rank))

    def groups(self, axes: str | Sequence[str]) -> tuple[Group, ...]:
        """Return all groups along `axes`, each in the order of `group`; together they hold every rank once.

        Raises:
            LayoutError: an axis is unknown or named twice.
        """
        # Cached: every collective along the axes asks again.
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        found = self._groups.get(names)
        if found is None:
            # A group is an origin and all offsets along `axes`; the origins are the offsets along the other axes.
            indices = self._axis_indices(names)
            inner = self._offsets(indices)
            outer = self._offsets([i for i in range(len(self.shape)) if i not in indices])
            found = tuple([tuple([self.ranks[origin + offset] for offset in inner]) for origin in outer])
            self._groups[names] = found
        return found

    def chunk(self, axes: Sequence[str], rank: int) -> int:
        """Return the chunk number of `rank` along `axes`, the first outermost. Raises LayoutError, as `chunks`."""
        # A mixed-radix number, a digit for each axis.
        coordinate, number = self.coordinate(rank), 0
        for i in self._axis_indices(axes):
            number = number * self.shape[i] + coordinate[i]
        return number

    def chunks(self, axes: Sequence[str]) -> tuple[int, ...]:
        """Return, for each rank in mesh order, its chunk number along `axes`, the first outermost.

        Raises:
            LayoutError: an axis is unknown or named twice.
        """
        # One mixed-radix number per rank, a digit for each axis, without a coordinate tuple per rank.
        numbers = [0] * self.size
        for i in self._axis_indices(axes):
            size, stride = self.shape[i], self._strides[i]
            numbers = [n * size + p // stride % size for p, n in enumerate(numbers)]
        return tuple(numbers)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without cached properties: the cached hash would be wrong in another process, where strings hash differently.
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.axis_names, self.ranks))

    @cached_property
    def _groups(self) -> dict[tuple[str, ...], tuple[Group, ...]]:
        return {}

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    @cached_property
    def _strides(self) -> tuple[int, ...]:
        """Distance in `ranks` between neighbours along each axis."""
        return tuple(prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def _offsets(self, indices: Sequence[int]) -> list[int]:
        """Return the distances in `ranks` from an origin to all positions along these axes, the last axis fastest."""
        offsets = [0]
        for i in indices:
            steps = range(0, self.shape[i] * self._strides[i], self._strides[i])
            offsets = [offset + step for offset in offsets for step in steps]
        return offsets

    def _axis_index(self, axis: str) -> int:
        if axis not in self.axis_names:
            raise LayoutError(f"{self!r}: axis {axis!r} is unknown; the axes are {self.axis_names!r}.")
        return self.axis_names.index(axis)

    def _axis_indices(self, axes: str | Sequence[str]) -> list[int]:
        indices = [self._axis_index(axis) for axis in ([axes] if isinstance(axes, str) else axes)]
        if len(set(indices)) != len(indices):
            raise LayoutError(f"{self!r}: axes {axes!r} name an axis twice; name each axis once.")
        return indices


@lru_cache(maxsize=4096)
def shared_mesh(shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    """Return the mesh of ranks 0 … size-1; equal arguments share one object, and so its cached groups."""
    return Mesh(shape, axis_names)
