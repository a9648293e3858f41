"""Redistribution across a reshape: the cuts before and after it, expressed as cuts of one common shape.

A reshape keeps the elements in row-major order, so a slice of a cut dim is the same elements under other dims. The
common shape has a boundary wherever a cut dim of either shape begins. In this shape the slices of both layouts are
boxes, and an ordinary redistribution takes one to the other with the fewest bytes. Example: (32, 16, 14, 14) with its
rows in two slices, wanted as (32, 3136) with its columns in eight slices. The common shape is (32, 16, 196), with
dim 2 in two slices, wanted with dim 1 in eight slices.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from simparallel.layout.layout import Layout, divides
from simparallel.layout.mesh import Mesh


class Common(NamedTuple):
    """Two layouts of one tensor, before and after a reshape, and their common shape."""

    source: Layout
    target: Layout
    shape: tuple[int, ...]


@lru_cache(maxsize=16384)
def common_shape(source: Layout, shape: tuple[int, ...], target: Layout, new_shape: tuple[int, ...]) -> Common | None:
    """Express the layouts of a tensor before and after a reshape as layouts of one shape.

    Args:
        source: current layout of the tensor.
        shape: current global shape.
        target: layout to reach in `new_shape`.
        new_shape: global shape after the reshape, with the same number of elements.

    Returns:
        None if in no shape the slices of both are boxes, as for (4, 6) cut along dim 1 and (6, 4) cut along dim 1; also
        None for slices of unequal size.
    """
    if shape == new_shape:
        return Common(source, target, shape)
    if not (divides(source.cuts, shape) and divides(target.cuts, new_shape)):
        return None
    # A boundary is the number of elements of a cut dim with all dims inside of it. The boundaries have to divide
    # each other: the quotients are the sizes of the common shape.
    total = prod(shape)
    starts = {total, *_starts(source, shape), *_starts(target, new_shape)} if total else {0}
    bounds = sorted(starts, reverse=True)
    if any(high % low for high, low in pairwise(bounds)):
        return None
    sizes = (*(high // low for high, low in pairwise(bounds)), bounds[-1])
    before = _cut(source, shape, bounds, sizes)
    after = _cut(target, new_shape, bounds, sizes)
    return None if before is None or after is None else Common(before, after, sizes)


def _starts(layout: Layout, shape: tuple[int, ...]) -> list[int]:
    """Return the number of elements of each cut dim together with all dims inside of it."""
    return [prod(shape[d:]) for d, cut in enumerate(layout.cuts) if cut > 1]


def _cut(layout: Layout, shape: tuple[int, ...], bounds: list[int], sizes: tuple[int, ...]) -> Layout | None:
    """Return a layout with the same slices for a tensor of the shape `sizes`; None if a cut does not fit.

    Args:
        layout, shape: of the tensor.
        bounds: for each of the new dims the elements of it together with all dims inside of it.
        sizes: of the new dims. An axis that cuts several of them is split into axes "name.0", "name.1", …
    """
    mesh = layout.mesh
    split: dict[str, list[int]] = {axis: [] for axis in mesh.axis_names}
    dims: list[tuple[str, ...]] = [()] * len(sizes)
    for d, axes in enumerate(layout.axes_by_dim):
        if not bounds[0] or layout.cuts[d] == 1:
            continue
        i, taken = bounds.index(prod(shape[d:])), 1
        for axis in axes:
            # The virtual axis is not in the mesh and cuts nothing.
            left = mesh.axis_size(axis) if axis in split else 1
            while left > 1:
                if taken == sizes[i]:
                    i, taken = i + 1, 1
                part = gcd(left, sizes[i] // taken)
                # A slice would end within one position of this dim.
                if part == 1:
                    return None
                dims[i] = (*dims[i], f"{axis}.{len(split[axis])}")
                split[axis].append(part)
                left, taken = left // part, taken * part
    names, parts = [], []
    # The refined mesh has the same ranks in the same order: an axis of 4 that was split is two neighbouring axes of 2.
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        own = split[axis] or [size]
        names += [f"{axis}.{k}" for k in range(len(own))]
        parts += own
    # Axes that cut nothing are not split; partial axes are among them.
    refined = Layout.of_mesh(Mesh(tuple(parts), tuple(names), mesh.ranks))
    return refined(*(own or "None" for own in dims)).with_partial([f"{axis}.0" for axis in layout.partial])
