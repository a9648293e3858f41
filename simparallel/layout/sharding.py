"""Sharding of an op: slices, partial sums and groups that follow from cuts of its named dims. Pure integers.

An op is a loop nest over named dims (`rule`). Cutting a dim over axes of a mesh cuts every tensor
that has it. From this alone follow

    the slice of every tensor on each rank,
    the axes along which the output is a partial sum: they cut summed dims,
    the axes along which the gradient of an input is a partial sum: they cut dims that the input lacks.

No code here depends on a particular op, and backward needs no statement of its own. The choice of the
cuts is separate: `strategy` reads them from a user's strategy or from the layouts of the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod

from simparallel.errors import StrategyError
from simparallel.layout.layout import Layout, chunk_span
from simparallel.layout.mesh import Group, Mesh
from simparallel.layout.rule import Place, Shape, bind, places

# Named dim -> axes that cut it, the first outermost.
Cuts = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Sharding:
    """One call of an op, with its named dims cut over the axes of a mesh.

    Args:
        rule: text of the op's rule for these shapes.
        shapes: global shapes of the inputs.
        mesh: the devices.
        cuts: for each cut dim its axes.

    A cut need not divide the size of its dim (see `Layout.local_shape`), unless the dim is merged with others or
    windows slide over it.

    Raises:
        StrategyError: a dim that may not be cut is cut, an axis cuts two dims, or a cut does not divide a size that it
            must divide.
    """

    rule: str
    shapes: tuple[Shape, ...]
    mesh: Mesh
    cuts: Cuts

    def __post_init__(self) -> None:
        uncuttable = self._uncuttable
        owner: dict[str, str] = {}
        for name, axes in self.cuts.items():
            if name in uncuttable:
                raise StrategyError(f"{uncuttable[name]} may not be cut, but {axes!r} would cut it.")
            for axis in axes:
                if axis in owner:
                    raise StrategyError(
                        f"axis {axis!r} cuts both dim {owner[axis]!r} and dim {name!r} of the op; an axis may cut "
                        "only one."
                    )
                owner[axis] = name
        for t, tensor in enumerate((*self.inputs, self.output)):
            for place in tensor:
                # An inner factor of a merged dim may be cut only if all outer ones are cut into single elements:
                # else its slices would not be contiguous in the merged dim.
                whole = True
                for name, size in zip(place.names, place.sizes, strict=True):
                    cut = self.cut(name)
                    if cut > 1 and not whole:
                        raise StrategyError(
                            f"dim {name!r} is an inner part of a merged dim (sizes {place.sizes}) and may not be cut: "
                            "its parts would not be contiguous. Cut the outermost dim."
                        )
                    whole = whole and cut == size
                    has_to_divide = len(place.names) > 1 or place.kind == "window"
                    if cut > 1 and (not size or (has_to_divide and size % cut)):
                        where = f"input {t}" if t < len(self.inputs) else "the output"
                        raise StrategyError(
                            f"dim {name!r} has size {size} in {where}, which its cut {cut} does not divide."
                        )

    @property
    def inputs(self) -> tuple[tuple[Place, ...], ...]:
        """The dims of every input."""
        return places(self.rule, self.shapes)[0]

    @property
    def output(self) -> tuple[Place, ...]:
        """The dims of the output."""
        return places(self.rule, self.shapes)[1]

    def cut(self, name: str) -> int:
        """Return the number of slices of a named dim."""
        return prod(self.mesh.axis_size(axis) for axis in self.cuts.get(name, ()))

    # --- derived values -----------------------------------------------------------------------------

    @cached_property
    def input_layouts(self) -> tuple[Layout, ...]:
        """The layout that each input must have."""
        return tuple(self._layout(tensor) for tensor in self.inputs)

    @cached_property
    def output_layout(self) -> Layout:
        """The layout of the output, partial along the axes where it still needs a sum."""
        # The op itself finishes sums over completed dims. A dict serves as a set with a fixed order.
        kept = {name for place in self.output for name in place.names}
        summed = {
            name: None
            for tensor in self.inputs
            for place in tensor
            if place.kind != "completed"
            for name in place.names
            if name not in kept
        }
        return self._layout(self.output).with_partial(self.axes(" ".join(summed)))

    def gradient_axes(self, i: int) -> tuple[str, ...]:
        """Return the axes along which the gradient of input `i` needs a sum: they cut dims that it lacks."""
        # Ranks along such an axis hold the same slice and use it in different parts of the loop nest; the gradient of
        # the slice is the sum over all of them.
        own = {name for place in self.inputs[i] for name in place.names}
        lacking = {axis for name, axes in self.cuts.items() if name not in own for axis in axes}
        return tuple(axis for axis in self.mesh.axis_names if axis in lacking)

    def axes(self, dims: str) -> tuple[str, ...]:
        """Return the axes that cut any of these dims, in the order of the dims."""
        return tuple(axis for name in dims.split() for axis in self.cuts.get(name, ()))

    def groups(self, axes: tuple[str, ...], group_size: int | None = None) -> tuple[Group, ...]:
        """Return the groups of ranks along the axes, in the order of the slices, or runs of `group_size` ranks of each.

        Raises:
            StrategyError: `group_size` does not divide the groups.
        """
        groups = self.mesh.groups(axes)
        size = len(groups[0])
        if group_size is None:
            return groups
        if size % group_size:
            raise StrategyError(
                f"group_size={group_size} does not divide the {size} slices of the dims that are completed. Use a "
                f"divisor of {size}, or cut these dims into a multiple of {group_size}."
            )
        # Neighbours in a group hold neighbouring slices, so a run of ranks completes a contiguous part of the dims.
        return tuple(g[i : i + group_size] for g in groups for i in range(0, size, group_size))

    def count(self, dims: str, rank: int, group_size: int) -> int:
        """Return the number of elements along `dims` in all slices of the rank's run of `group_size` ranks."""
        names = dims.split()
        group = next(g for g in self.groups(self.axes(dims), group_size) if rank in g)
        return sum(prod(stop - start for start, stop in (self.span(n, r) for n in names)) for r in group)

    def chunk(self, name: str, rank: int) -> int:
        """Return the number of the rank's slice of a named dim."""
        return self.mesh.chunk(self.cuts.get(name, ()), rank)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Global size of every named dim; for a window dim, its size in the input."""
        found = bind(self.rule, self.shapes)
        made = {n: size for place in self.output for n, size in zip(place.names, place.sizes, strict=True)}
        # Inputs win: under a window the output has another size.
        return made | found

    def span(self, name: str, rank: int) -> tuple[int, int]:
        """Return where the rank's slice of a named dim begins and ends."""
        return chunk_span(self.sizes[name], self.cut(name), self.chunk(name, rank))

    def local_shape(self, tensor: tuple[Place, ...], rank: int) -> Shape:
        """Return the shape of the rank's slice of an input or the output."""
        shape = []
        for place in tensor:
            size, rest = divmod(place.size, prod(self.cut(name) for name in place.names))
            # Only a dim of one name can have unequal slices: cuts of merged dims and of windows divide the size.
            if rest:
                start, stop = self.span(place.names[0], rank)
                size = stop - start
            shape.append(size)
        return tuple(shape)

    def _layout(self, tensor: tuple[Place, ...]) -> Layout:
        dims = [tuple(axis for name in place.names for axis in self.cuts.get(name, ())) for place in tensor]
        return layout_of(self.mesh)(*(axes or "None" for axes in dims))

    @cached_property
    def _uncuttable(self) -> dict[str, str]:
        """Named dims that may not be cut, each with a text that names its tensor and position, for messages."""
        found: dict[str, str] = {}
        for t, tensor in enumerate((*self.inputs, self.output)):
            where = f"input {t}" if t < len(self.inputs) else "the output"
            for d, place in enumerate(tensor):
                if place.kind == "whole":
                    found |= dict.fromkeys(place.names, f"dim {d} of {where} ({place.names[0]!r})")
        return found


@lru_cache(maxsize=4096)
def layout_of(mesh: Mesh) -> Layout:
    """Return the Layout of the mesh, not yet called; one object for each mesh."""
    return Layout.of_mesh(mesh)


@dataclass(frozen=True, eq=False)
class Placement:
    """The layout and the global shape of a sharded tensor. Equal placements are one object.

    Get it from `placement` and compare it with `is`, so that a step finds its plans without comparing layouts.

    Attributes:
        source: for a reshaped tensor whose elements have not moved yet, their placement in the old shape; else None.
    """

    layout: Layout
    shape: Shape
    source: Placement | None = None

    @cached_property
    def is_whole(self) -> bool:
        """Whether every rank of the layout holds the whole tensor: no dim is cut, and no sum is partial."""
        return not self.layout.partial and all(cut == 1 for cut in self.layout.cuts)

    @cached_property
    def local_shape(self) -> Shape:
        """Shape of the largest slice."""
        return self.layout.local_shape(self.shape)

    @cached_property
    def local_shapes(self) -> dict[int, Shape]:
        """Shape of every rank's slice."""
        return {rank: self.layout.local_shape(self.shape, rank) for rank in self.layout.mesh.ranks}

    @property
    def shapes_text(self) -> str:
        """The distinct shapes of the slices, as text."""
        return ", ".join(dict.fromkeys(map(str, self.local_shapes.values())))

    @cached_property
    def uncut(self) -> Placement:
        """Placement of the whole tensor on every rank of the same mesh."""
        layout = self.layout
        return placement(layout.with_partial(())(*["None"] * len(self.shape)), self.shape)

    @cached_property
    def settled(self) -> Placement:
        """This placement after the elements have moved, without `source`."""
        return placement(self.layout, self.shape)

    @cached_property
    def gradient(self) -> Placement:
        """Placement of the tensor's gradient: the same slices, with all sums finished."""
        return placement(self.layout.with_partial(()), self.shape)


@lru_cache(maxsize=65536)
def placement(layout: Layout, shape: Shape, source: Placement | None = None) -> Placement:
    """Return the Placement of a tensor. Raise LayoutError if the layout does not fit the shape."""
    # Raises LayoutError if the layout does not fit.
    layout.local_shape(shape)
    return Placement(layout, shape, source)


def unfinished(place: Placement, axes: tuple[str, ...]) -> Placement:
    """Return the placement of a gradient of `place` that is still to be summed over `axes`."""
    return placement(place.layout.with_partial(axes), place.shape) if axes else place.gradient


def spread(place: Place, axes: tuple[str, ...], mesh: Mesh) -> dict[str, tuple[str, ...]] | None:
    """Assign the axes that cut a dim to its factors, outermost first; None if they do not fit.

    A merged dim (c h) is cut along c until c is cut into single elements, and only then along h.
    """
    if len(place.names) == 1:
        return {place.names[0]: axes}
    found: dict[str, tuple[str, ...]] = {}
    left = list(axes)
    for name, size in zip(place.names, place.sizes, strict=True):
        taken = 1
        while left and size % (taken * mesh.axis_size(left[0])) == 0:
            taken *= mesh.axis_size(left[0])
            found[name] = (*found.get(name, ()), left.pop(0))
        # An inner factor may be cut only if the outer ones are cut into single elements.
        if taken != size:
            break
    return None if left else found
