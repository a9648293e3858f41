"""Checks of the callers' arguments before anything is published: bad input is an error on its rank alone.

Also checks of `out`. It may be x, a part of x, or overlap it in any way: the result is as if x had been copied before.
Peers then read a copy, except where no peer reads the elements that are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from simparallel.base.checks import is_integer
from simparallel.comm.call_group import CallGroup
from simparallel.comm.collective import GATHER, Collective
from simparallel.comm.plan import Settings
from simparallel.errors import DTypeError, InputError, ShapeError


def check_array(op: str, x: Any, *, written: bool = False, name: str = "") -> None:
    if type(x) is not np.ndarray:
        _check_kind(op, x, name)
    if x.dtype.hasobject:
        raise DTypeError(
            f"{op}: arrays of Python objects cannot be sent; use a collective of objects, such as all_gather_object."
        )
    if written and not x.flags.writeable:
        raise InputError(f"{op}: writes its result into the array, but this one is read-only; pass a copy.")


def _check_kind(op: str, x: Any, name: str) -> None:
    """Refuse non-arrays, masked arrays and np.matrix; other subclasses of ndarray may be sent."""
    what = f"{name} must be" if name else "needs"
    if not isinstance(x, np.ndarray):
        raise InputError(f"{op}: {what} an array, got {type(x).__name__}; use np.asarray(...).")
    if isinstance(x, np.ma.MaskedArray):
        raise InputError(
            f"{op}: {what} a plain array, got one with a mask, which would not be sent; use x.filled(...)."
        )
    if isinstance(x, np.matrix):
        raise InputError(f"{op}: {what} a plain array, got a matrix, which cannot be flattened; use np.asarray(x).")


def check_dim(op: str, x: np.ndarray, dim: int, divided_by: int = 1) -> int:
    if not is_integer(dim):
        raise InputError(f"{op}: dim={dim!r} is not an integer.")
    if not -x.ndim <= dim < x.ndim:
        raise ShapeError(f"{op}: dim {dim} is out of range for shape {x.shape}; a scalar needs reshape(1) first.")
    dim = int(dim) % x.ndim
    if x.shape[dim] % divided_by:
        raise ShapeError(
            f"{op}: dim {dim} of shape {x.shape} has size {x.shape[dim]}, which the {divided_by} ranks of the "
            f"group do not divide; pad it to {-(-x.shape[dim] // divided_by) * divided_by}."
        )
    return dim


def check_splits(op: str, x: np.ndarray, dim: int, splits: Any, count: int) -> tuple[int, ...]:
    """Check the sizes of the parts of x along a dim, one for each of `count` ranks, and return them."""
    sizes = check_sizes(f"{op}: input_splits", splits, count)
    if sum(sizes) != x.shape[dim]:
        raise ShapeError(f"{op}: input_splits add up to {sum(sizes)}, but dim {dim} of x has size {x.shape[dim]}.")
    return sizes


def check_sizes(what: str, sizes: Any, count: int) -> tuple[int, ...]:
    """Check that there is one size for each rank, and return the sizes.

    Raises:
        InputError: anything else was given.
    """
    found = list(sizes) if isinstance(sizes, Sequence | np.ndarray) else sizes
    if not isinstance(found, list) or len(found) != count or not all(is_integer(n) and n >= 0 for n in found):
        raise InputError(f"{what}={sizes!r} must be {count} sizes, integers of 0 or more: one for each rank.")
    return tuple(map(int, found))


def check_layers(x: np.ndarray, layers: Sequence[int]) -> tuple[int, ...]:
    sizes = tuple(layers)
    if not all(is_integer(size) and size >= 0 for size in sizes):
        raise InputError(f"adasum: layers={sizes} must be sizes, integers of 0 or more.")
    if x.ndim != 1 or sum(sizes) != x.size:
        raise ShapeError(f"adasum: layers of {sum(sizes)} elements do not fill x of shape {x.shape}.")
    return tuple(map(int, sizes))


def position_of(op: str, group: Any, rank: Any) -> int:
    # A mere `in` would accept 1.0 and True for rank 1.
    if not is_integer(rank) or rank not in group.ranks:
        raise InputError(f"{op}: rank {rank!r} is not a member of {group.name} (ranks {group.ranks}).")
    return group.ranks.index(rank)


def check_parts(arrays: Sequence[np.ndarray] | None, size: int, *, uneven: bool = False) -> list[np.ndarray]:
    if arrays is None or len(arrays) != size:
        count = "None" if arrays is None else f"{len(arrays)} arrays"
        raise InputError(f"scatter: the source passes one array for each of the {size} ranks, got {count}.")
    for i, part in enumerate(arrays):
        check_array("scatter", part)
        first = arrays[0]
        is_alike = (part.ndim, part.shape[1:], part.dtype) == (first.ndim, first.shape[1:], first.dtype)
        if not is_alike or (part.shape != first.shape and not uneven) or (uneven and not part.ndim):
            rule = "one dtype, and one shape but for the size of dim 0" if uneven else "one shape and dtype"
            raise ShapeError(
                f"scatter: all parts need {rule}; part 0 is {first.dtype} {first.shape}, part {i} is {part.dtype} "
                f"{part.shape}.{'' if uneven else ' Other sizes of dim 0 need uneven=True.'}"
            )
    dtype = arrays[0].dtype
    return list(arrays) if dtype.isnative else [part.astype(native(dtype)) for part in arrays]


def native(dtype: np.dtype) -> np.dtype:
    """Return the dtype in this machine's byte order, which new result arrays have."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


# --- arrays for results --------------------------------------------------------------------------------


def check_out(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, name: str = "out") -> None:
    check_array(op, out, written=True, name=name)
    check_form(op, out, shape, dtype, name)


def check_form(op: str, out: Any, shape: tuple[int, ...], dtype: np.dtype, name: str = "out") -> None:
    """Check shape and dtype of an array for a result."""
    if out.shape != shape:
        raise ShapeError(f"{op}: {name} has shape {out.shape}, but the result has {shape}.")
    if out.dtype != dtype:
        raise DTypeError(f"{op}: {name} has dtype {out.dtype}, but the result has {dtype}; results are not cast.")


def check_rows(op: str, out: Any, size: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    """Check an `out` that has one array for each rank: a list of arrays, or the rows of one array."""
    if not isinstance(out, (list, tuple, np.ndarray)) or np.shape(out)[:1] == () or len(out) != size:
        found = f"{len(out)} of them" if isinstance(out, (list, tuple)) else f"a {type(out).__name__}"
        if isinstance(out, np.ndarray):
            found = f"an array of shape {out.shape}"
        raise InputError(
            f"{op}: out takes one array for each of the {size} ranks, as a list or as the rows of one array, got "
            f"{found}."
        )
    rows = rows_of(out)
    for i, row in enumerate(rows):
        check_out(op, row, shape, dtype, f"out[{i}]")
    if isinstance(out, np.ndarray) and out.flags.c_contiguous:
        # Rows of a contiguous array cannot overlap.
        return
    for (i, first), (j, second) in combinations(enumerate(rows), 2):
        if np.may_share_memory(first, second) and np.shares_memory(first, second):
            raise InputError(f"{op}: out[{i}] and out[{j}] share memory, so one would overwrite the other.")


def check_only_at(op: str, root: int, group: Any, out: Any) -> None:
    if out is not None and group.rank != root:
        raise InputError(
            f"{op}: only rank {group.ranks[root]} gets the result; rank {group.ranks[group.rank]} must pass out=None."
        )


def check_result(what: Collective, group: CallGroup, x: np.ndarray, out: Any, settings: Settings) -> bool:
    """Check the `out` of a collective; return whether peers and body need a copy of x, because out overlaps it.

    They need none where x is its own part of out, or out its own part of x, or both are the same array: then no
    element is written that is still read.
    """
    if what is GATHER:
        check_rows(what.name, out, group.size, x.shape, x.dtype)
        return may_overlap(x, out)
    dims, sizes = settings.dims, settings.sizes
    check_out(what.name, out, what.result_shape(x, group.position, group.size, dims, sizes), x.dtype)
    # A large all_reduce in place exposes its results in x, too; with an out, x has to stay unchanged.
    if what.in_place == "all":
        return True
    # Bounds of the memory are enough here: a false alarm costs one copy.
    if not np.may_share_memory(x, out):
        return False
    mine, result = x, out
    if what.divides and not what.multiplies:
        mine = x[own_piece(x, dims[0], group, sizes)]
    elif what.multiplies and not what.divides:
        result = out[own_piece(out, dims[0], group)]
    return what.in_place != "" or what.divides == what.multiplies or not is_same_place(mine, result)


def may_overlap(x: np.ndarray, out: Any) -> bool:
    """Return whether x may share memory with an array, or with any array of a list."""
    return any(np.may_share_memory(x, part) for part in ([out] if isinstance(out, np.ndarray) else out))


def rows_of(out: Any) -> Sequence[np.ndarray]:
    """Return the arrays for the ranks' results: the entries of a list, or the rows of an array."""
    return [out[i, ...] for i in range(len(out))] if isinstance(out, np.ndarray) else out


def own_piece(
    x: np.ndarray, dim: int, group: Any, splits: Sequence[int] | None = None, position: int | None = None
) -> tuple[slice, ...]:
    """Return the index of a member's part of x along a dim, with these sizes or equal ones.

    `position`: the member's; by default this rank's, or the first member's if this rank is none.
    """
    rank = (group.rank or 0) if position is None else position
    if splits is None:
        step = x.shape[dim] // group.size
        start, stop = rank * step, (rank + 1) * step
    else:
        start, stop = sum(splits[:rank]), sum(splits[: rank + 1])
    return (slice(None),) * dim + (slice(start, stop),)


def is_same_place(x: np.ndarray, y: np.ndarray) -> bool:
    """Return whether both arrays have the same elements in memory."""
    mine, other = x.__array_interface__, y.__array_interface__
    return mine["data"][0] == other["data"][0] and (x.shape, x.strides) == (y.shape, y.strides)
