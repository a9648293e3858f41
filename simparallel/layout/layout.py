"""Layouts: the slice of a tensor that each rank holds. MindSpore's `Layout` and tuple strategies; pure integers.

One representation serves both front ends: a device matrix with named axes, for each dim of the
tensor the axes that cut it (the first listed is outermost), and the axes over which the tensor
still needs a sum. Slices, groups and replicas follow from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import Any

from simparallel.base.html import PALE, table
from simparallel.base.text_table import aligned
from simparallel.base.units import format_numbers
from simparallel.errors import LayoutError
from simparallel.layout.mesh import Group, Mesh, check_axes, is_int, shared_mesh

INTERLEAVED = "interleaved_parallel"
TensorMap = tuple[int | tuple[int, ...], ...]


@dataclass(frozen=True, init=False, repr=False)
class Layout:
    """A device matrix with named axes. A call with aliases returns the layout of a tensor over it.

    Args:
        device_matrix: size of each axis; rank to coordinate is row-major, last axis fastest.
        alias_name: one name per axis. An axis named "interleaved_parallel" must come last. It is virtual: it needs
            no devices, but splits the slice of each device into this many pieces. MindSpore sends the pieces
            through the network one after another, so that the communication of one overlaps the computation
            of the next. Here the slice is computed in one go, without overlap, and with the same values.
            `pieces` and `table` show the pieces.
        rank_list: the rank at each row-major position; 0 … n-1 by default.

    Attributes:
        tensor_map: for each dim the axis that cuts it, counted from the right of `device_matrix`;
            a tuple for several axes, -1 for none. None before the layout is called.
        partial: axes over which the tensor still needs a sum, in the order of `alias_name`.
        nested: axes that cut the slices of the axes before them, see `cut_slices`.

    Raises:
        LayoutError: malformed sizes, names or ranks.

    Example:
        >>> layout = sp.Layout((2, 2, 2), ("dp", "sp", "mp"))
        >>> x = layout("mp", ("sp", "dp"))
        >>> x.tensor_map, x.local_shape((32, 784)), x.slices(2, (32, 784))
        ((0, (1, 2)), (16, 196), (slice(0, 16, None), slice(392, 588, None)))
    """

    device_matrix: tuple[int, ...]
    alias_name: tuple[str, ...]
    rank_list: tuple[int, ...]
    tensor_map: TensorMap | None
    partial: tuple[str, ...]
    nested: tuple[str, ...]

    def __init__(
        self, device_matrix: tuple[int, ...], alias_name: tuple[str, ...], rank_list: Sequence[int] | None = None
    ) -> None:
        called = {"sizes_name": "device_matrix", "names_name": "alias_name"}
        check_axes("Layout", device_matrix, alias_name, **called)
        if INTERLEAVED in alias_name[:-1]:
            raise LayoutError(f"Layout: alias_name={alias_name!r}: {INTERLEAVED!r} must be the last alias.")
        sizes, names = _real(device_matrix, alias_name), _real(alias_name, alias_name)
        if rank_list is None:
            mesh = shared_mesh(sizes, names)
        elif isinstance(rank_list, (list, tuple, range)):
            mesh = Mesh(sizes, names, tuple(rank_list))
        else:
            raise LayoutError(f"Layout: rank_list={rank_list!r} must be a list of integers.")
        self._set(mesh, device_matrix, alias_name, mesh.ranks, None, (), ())

    @classmethod
    def of_mesh(cls, mesh: Mesh) -> Layout:
        """Make the Layout of a mesh, not yet called; it shares the mesh and its groups."""
        new = cls.__new__(cls)
        new._set(mesh, mesh.shape, mesh.axis_names, mesh.ranks, None, (), ())
        return new

    def _set(self, mesh: Mesh, *values: Any) -> None:
        """Set all fields, and `mesh`: layouts of equal axes share a mesh, and with it the cached groups."""
        # The dataclass is frozen, so plain assignment would fail.
        vars(self).update(zip(self.__dataclass_fields__, values, strict=True), mesh=mesh)

    def _derive(self, tensor_map: TensorMap, partial: tuple[str, ...], nested: tuple[str, ...] = ()) -> Layout:
        # Without __init__: the axes are valid already.
        new = Layout.__new__(Layout)
        new._set(self.mesh, self.device_matrix, self.alias_name, self.rank_list, tensor_map, partial, nested)
        return new

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, Any]:
        # Without cached properties: the cached hash would be wrong in another process, where strings hash differently.
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.device_matrix, self.alias_name, self.tensor_map, self.partial, self.nested))

    def __call__(self, *dims: str | tuple[str, ...]) -> Layout:
        """Return the layout of a tensor, a new object; this one does not change.

        Args:
            dims: for each dim of the tensor an alias, a tuple of aliases (the first is outermost:
                neighbouring chunks differ in the last one), or "None" for a dim that is not cut.
                Axes of size 1 are dropped.

        Raises:
            LayoutError: unknown alias, an alias used twice, or "interleaved_parallel" not last
                in its tuple.
        """
        tensor_map: list[int | tuple[int, ...]] = []
        used: list[str] = []
        for dim, entry in enumerate(dims):
            aliases = (entry,) if isinstance(entry, str) else entry
            if not isinstance(aliases, tuple) or not all(isinstance(alias, str) for alias in aliases):
                raise LayoutError(f"{self!r}: dim {dim} is {entry!r}; give an alias, a tuple of them or 'None'.")
            axes = [alias for alias in aliases if alias != "None"]
            self._check_aliases(axes, used)
            if INTERLEAVED in axes[:-1]:
                raise LayoutError(
                    f"{self!r}: dim {dim} is cut by {entry!r}; {INTERLEAVED!r} must end its tuple, so that the "
                    "pieces of a device are contiguous."
                )
            used += axes
            indices = [self.alias_name.index(axis) for axis in axes]
            # An axis of size 1 cuts nothing. Without it, layouts that cut alike are equal. MindSpore counts axes from
            # the right.
            cutting = tuple(len(self.device_matrix) - 1 - i for i in indices if self.device_matrix[i] > 1)
            tensor_map.append(cutting if len(cutting) > 1 else cutting[0] if cutting else -1)
        return self._derive(tuple(tensor_map), ())

    def with_partial(self, axes: str | Sequence[str]) -> Layout:
        """Return the same slices as addends of a sum over `axes`; () for no sum.

        Raises:
            LayoutError: unknown alias, an alias named twice, an axis that cuts a dim, or the virtual axis.
        """
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        self._check_aliases(axes, [alias for dim in self.axes_by_dim for alias in dim])
        if INTERLEAVED in axes:
            raise LayoutError(f"{self!r}: {INTERLEAVED!r} is virtual; no sum over devices can run along it.")
        # In the order of the axes and without those of size 1, so that equal sums make equal layouts.
        sizes = zip(self.alias_name, self.device_matrix, strict=True)
        partial = tuple(name for name, size in sizes if name in axes and size > 1)
        return self._derive(self._called_map(), partial, self.nested)

    def cut_slices(self, axis: str, dim: int = 0) -> Layout:
        """Return the layout in which an axis cuts each slice of `dim` once more, as by `torch.chunk` of the slice.

        For uneven slices this differs from a cut by several axes at once. With axes "a" and "b" of size 2, a dim of 10
        has slices of 3, 3, 3, 1 in `layout(("a", "b"))`, and of 3, 2, 3, 2 in `layout("a").cut_slices("b")`: there, the
        ranks along "b" together have one slice of "a".

        Raises:
            LayoutError: an unknown axis, or one that cuts a dim.
        """
        cut = self(*((*axes, axis) if i == dim else axes or "None" for i, axes in enumerate(self.axes_by_dim)))
        is_within = len(cut.axes_by_dim[dim]) > max(1, len(self.axes_by_dim[dim]))
        return self._derive(cut._called_map(), self.partial, (*self.nested, axis) if is_within else self.nested)

    def __repr__(self) -> str:
        in_order = self.rank_list == tuple(range(len(self.rank_list)))
        ranks = "" if in_order else f", rank_list={list(self.rank_list)!r}"
        text = f"Layout({self.device_matrix!r}, {self.alias_name!r}{ranks})"
        if self.tensor_map is not None:
            outer = [[axis for axis in axes if axis not in self.nested] for axes in self.axes_by_dim]
            dims = ["None" if not axes else axes[0] if len(axes) == 1 else tuple(axes) for axes in outer]
            text += f"({', '.join(map(repr, dims))})"
            for axis in self.nested:
                dim = next(dim for dim, axes in enumerate(self.axes_by_dim) if axis in axes)
                text += f".cut_slices({axis!r}, {dim})"
        return text + (f".with_partial({self.partial!r})" if self.partial else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the dict of MindSpore's `Layout.to_dict`. Raise LayoutError before the layout is called."""
        return {
            "device_matrix": self.device_matrix, "tensor_map": self._called_map(),
            "interleaved_parallel": INTERLEAVED in self.alias_name,
            "alias_name": self.alias_name, "rank_list": list(self.rank_list),
        }  # fmt: skip

    # --- derived values -----------------------------------------------------------------------

    @cached_property
    def mesh(self) -> Mesh:
        """The ranks and the axes made of devices, without the virtual axis."""
        names = _real(self.alias_name, self.alias_name)
        return Mesh(_real(self.device_matrix, self.alias_name), names, self.rank_list)

    @cached_property
    def axes_by_dim(self) -> tuple[tuple[str, ...], ...]:
        """For each dim the names of the axes that cut it, outermost first."""
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in self._called_map()]
        return tuple(tuple(self.alias_name[-1 - i] for i in entry if i >= 0) for entry in entries)

    @cached_property
    def cuts(self) -> tuple[int, ...]:
        """For each dim the number of slices over devices, without virtual pieces."""
        return tuple(prod(self.mesh.axis_size(axis) for axis in _real(a, a)) for a in self.axes_by_dim)

    @cached_property
    def _within(self) -> tuple[int, ...]:
        """For each dim into how many parts its nested axes cut each slice of the others."""
        nested = [[a for a in axes if a in self.nested] for axes in self.axes_by_dim]
        return tuple(prod(map(self.mesh.axis_size, axes)) for axes in nested)

    def local_shape(self, shape: tuple[int, ...], rank: int | None = None) -> tuple[int, ...]:
        """Return the shape of the rank's slice of a tensor of global `shape`; without a rank, of the largest slice.

        A dim is cut as by `torch.chunk`: n slices of ceil(size / n) elements, the last ones shorter or empty (10 over
        4: 3, 3, 3, 1; 2 over 4: 1, 1, 0, 0). Several axes cut a dim at once, with slices in the order of `chunk`: 10
        over ("a", "b") of 2 x 2 is 3, 3, 3, 1. PyTorch's DTensor cuts by one axis after the other: 3, 2, 3, 2.

        Raises:
            LayoutError: `shape` has another number of dims, the rank is unknown, or "interleaved_parallel" cuts a dim
                and its pieces do not divide the size.
        """
        self._check_divides(shape, all_dims=False)
        if rank is not None:
            return tuple(part.stop - part.start for part in self.slices(rank, shape))
        return tuple([_nested_span(*each, 0)[1] for each in zip(shape, self.cuts, self._within, strict=True)])

    def check_divides(self, shape: tuple[int, ...]) -> None:
        """Raise LayoutError unless all slices of a tensor of global `shape` have the same size."""
        self._check_divides(shape, all_dims=True)

    def _check_divides(self, shape: tuple[int, ...], all_dims: bool) -> None:
        cuts = self.cuts
        if not isinstance(shape, tuple) or len(shape) != len(cuts):
            raise LayoutError(f"{self!r} lays out {len(cuts)} dims, the tensor has shape {shape!r}.")
        for dim, (size, axes) in enumerate(zip(shape, self.axes_by_dim, strict=True)):
            # Slices of ranks may be uneven unless the caller forbids it; the pieces of a rank may never be.
            pieces = self._num_pieces(dim)
            parts = cuts[dim] * pieces
            if size % parts and (all_dims or pieces > 1):
                raise LayoutError(
                    f"{self!r}, shape {shape}: dim {dim} of size {size} is cut into {parts} by {axes!r}, but "
                    f"{parts} does not divide {size}. Use a size that {parts} divides, or leave dim {dim} "
                    "whole with 'None'."
                )

    def chunk(self, rank: int, dim: int) -> int:
        """Return the number of the rank's chunk of `dim`, 0 … cuts[dim] - 1. Raise LayoutError if either is unknown."""
        if not is_int(dim) or not -len(self.axes_by_dim) <= dim < len(self.axes_by_dim):
            raise LayoutError(f"{self!r} lays out {len(self.axes_by_dim)} dims; it has no dim {dim!r}.")
        axes = self.axes_by_dim[dim]
        return self.mesh.chunk(_real(axes, axes), rank)

    def all_chunks(self) -> list[tuple[int, ...]]:
        """Return the chunk numbers of every dim for each rank, in mesh order; much faster than `chunk` one by one."""
        by_dim = [self.mesh.chunks(_real(axes, axes)) for axes in self.axes_by_dim]
        return list(zip(*by_dim, strict=True)) if by_dim else [()] * self.mesh.size

    def slices(self, rank: int, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the index of the rank's slice of a tensor of global `shape`: `x[layout.slices(rank, x.shape)]`.

        Raises:
            LayoutError: unknown rank, or the shape does not fit.
        """
        self._check_divides(shape, all_dims=False)
        chunks = [self.chunk(rank, dim) for dim in range(len(shape))]
        parts = zip(shape, self.cuts, self._within, chunks, strict=True)
        return tuple(slice(*_nested_span(*each)) for each in parts)

    def spans(self, shape: tuple[int, ...]) -> list[tuple[tuple[int, int], ...]]:
        """Return where each chunk of each dim begins and ends."""
        return [_spans(*each) for each in zip(shape, self.cuts, self._within, strict=True)]

    def pieces(self, rank: int, shape: tuple[int, ...]) -> tuple[tuple[slice, ...], ...]:
        """Return the interleaved pieces of `slices`, in order; a single piece if no dim is interleaved."""
        whole = self.slices(rank, shape)
        # An axis cuts one dim at most, so the first interleaved dim is the only one.
        for dim, part in enumerate(whole):
            count = self._num_pieces(dim)
            if count > 1:
                size = (part.stop - part.start) // count
                starts = [part.start + i * size for i in range(count)]
                return tuple((*whole[:dim], slice(s, s + size), *whole[dim + 1 :]) for s in starts)
        return (whole,)

    def replica_groups(self) -> tuple[Group, ...]:
        """Return the groups of ranks with the same slice or, along a partial axis, with different addends of it."""
        used = {axis for axes in self.axes_by_dim for axis in axes}
        return self.mesh.groups([axis for axis in self.mesh.axis_names if axis not in used])

    def table(self, shape: tuple[int, ...], name: str = "x") -> str:
        """Format a table with a line for each rank: its device coordinates and its slice of `shape`.

        If a dim is interleaved, the line lists the pieces of the slice.
        """
        return "\n".join(aligned(self._slice_rows(shape, name), "><"))

    def _slice_rows(self, shape: tuple[int, ...], name: str) -> list[tuple[str, str, str]]:
        is_interleaved = any(INTERLEAVED in axes for axes in self.axes_by_dim)
        rows = [("rank", f"({', '.join(self.mesh.axis_names)})", "interleaved pieces" if is_interleaved else "slice")]
        for rank in self.rank_list:
            pieces = [", ".join(f"{p.start}:{p.stop}" for p in piece) for piece in self.pieces(rank, shape)]
            coordinate = f"({', '.join(map(str, self.mesh.coordinate(rank)))})"
            rows.append((str(rank), coordinate, " | ".join(f"{name}[{p}]" for p in pieces) if shape else name))
        return rows

    def slices_html(self, shape: tuple[int, ...]) -> str:
        """Return the slices of a tensor of global `shape` as HTML: a picture, and a line for each rank."""
        return self._picture() + table(self._slice_rows(shape, "x"), left=True)

    def _picture(self) -> str:
        """Return the chunks as a grid, with the ranks that hold them: the last dim across, all others down."""
        holders: dict[tuple[int, ...], list[int]] = {}
        for rank, chunk in zip(self.mesh.ranks, self.all_chunks(), strict=True):
            holders.setdefault(chunk, []).append(rank)
        across = list(range(self.cuts[-1])) if self.cuts else [0]
        rows = [["", *(f"dim {len(self.cuts) - 1}: {j}" if self.cuts else "" for j in across)]]
        colours: dict[tuple[int, int], str] = {}
        for i, chunk in enumerate(product(*map(range, self.cuts[:-1])), 1):
            found = [holders[(*chunk, j)[: len(self.cuts)]] for j in across]
            label = ", ".join(f"dim {dim}: {part}" for dim, part in enumerate(chunk))
            rows.append([label, *(format_numbers(ranks) for ranks in found)])
            colours |= {(i, j): PALE[ranks[0] % len(PALE)] for j, ranks in enumerate(found, 1)}
        return table(rows, colours=colours, notes=["numbers: the ranks that hold the slice"])

    def _repr_html_(self) -> str:
        """Return the layout as HTML, for notebooks: the slices and their ranks, or before the call the devices."""
        if self.tensor_map is not None:
            return table([], title=repr(self)) + self._picture()
        rows = [(str(rank), *map(str, self.mesh.coordinate(rank))) for rank in self.mesh.ranks]
        return table([("rank", *self.mesh.axis_names), *rows], title=repr(self))

    def _called_map(self) -> TensorMap:
        if self.tensor_map is None:
            raise LayoutError(f"{self!r} has no dims yet: call it with an alias or 'None' for each dim.")
        return self.tensor_map

    def _num_pieces(self, dim: int) -> int:
        return self.device_matrix[-1] if INTERLEAVED in self.axes_by_dim[dim] else 1

    def _check_aliases(self, axes: Sequence[str], used: Sequence[str]) -> None:
        for i, axis in enumerate(axes):
            if axis not in self.alias_name:
                raise LayoutError(f"{self!r}: there is no axis {axis!r} among {self.alias_name!r}.")
            if axis in used or axis in axes[:i]:
                raise LayoutError(f"{self!r}: the axis {axis!r} is used more than once; it cuts one dim or is partial.")


def chunk_span(size: int, cut: int, chunk: int) -> tuple[int, int]:
    """Return where chunk number `chunk` of a dim begins and ends; see `Layout.local_shape`.

    Example:
        >>> from simparallel.layout.layout import chunk_span
        >>> [chunk_span(10, 4, chunk) for chunk in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]
    """
    length = -(-size // cut)
    return min(chunk * length, size), min((chunk + 1) * length, size)


def _nested_span(size: int, cut: int, inner: int, chunk: int) -> tuple[int, int]:
    """Return the span of a chunk; of each of the `cut` / `inner` chunks of the dim there are `inner` smaller ones."""
    if inner == 1:
        return chunk_span(size, cut, chunk)
    start, stop = chunk_span(size, cut // inner, chunk // inner)
    first, last = chunk_span(stop - start, inner, chunk % inner)
    return start + first, start + last


@lru_cache(maxsize=1024)
def _spans(size: int, cut: int, inner: int) -> tuple[tuple[int, int], ...]:
    return tuple([_nested_span(size, cut, inner, chunk) for chunk in range(cut)])


def _real(values: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return `values` without the last one if `names` has the virtual axis, which always comes last."""
    return values[:-1] if INTERLEAVED in names else values


def divides(cuts: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether all slices of a tensor of this shape have the same size."""
    return not any(size % cut for size, cut in zip(shape, cuts, strict=True))
