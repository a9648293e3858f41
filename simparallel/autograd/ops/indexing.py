"""Indexing: `Slice` by integers and slices, `Index` by arrays of integers.

`split_index` translates the items of `x[...]` into these two ops, with NumPy's meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType, NoneType
from typing import Any

import numpy as np

from simparallel.arrays.captures import check_after
from simparallel.arrays.host.arrays import HostArrays
from simparallel.autograd.grad_mode import no_grad
from simparallel.autograd.methods import check_held, check_writable, function, method
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, as_dims, as_int, instance, normalize_dims
from simparallel.autograd.ops.promotion import operands
from simparallel.autograd.tape import mark_changed
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, assign, get_namespace, is_array, read_numbers
from simparallel.errors import DTypeError, InputError, OutOfRangeError, ShapeError
from simparallel.layout.rule import dim_names

# (start, stop, step) of a slice.
Triple = tuple[int | None, int | None, int | None]
# An item of `Slice`; None is a new dim.
Item = int | None | Triple


class Slice(Op):
    """y = x[items]: an integer drops a dim, None adds one, (start, stop, step) takes a part

    Only dims taken whole may be cut.

    Args:
        items: one entry for every dim of x (dims left out at the end are taken whole), and None
            for every new dim.
    """

    accumulates = True

    def __init__(self, items: tuple[Item, ...]) -> None:
        self.items = items
        self._key = tuple(slice(*item) if isinstance(item, tuple) else item for item in items)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = dim_names(len(shape))
        left, right = list(names), []
        dim = 0
        for item in self.items:
            if item is None:
                right.append("1")
                continue
            if dim == len(shape):
                raise OutOfRangeError(f"too many indices for a tensor of shape {shape}.")
            size = shape[dim]
            if isinstance(item, int):
                if not -size <= item < size:
                    raise OutOfRangeError(f"index {item} is outside of dim {dim} of shape {shape}.")
                left[dim] = f"{{{names[dim]}}}"
            else:
                steps = range(size)[slice(*item)]
                if steps == range(size):
                    right.append(names[dim])
                else:
                    left[dim] = f"{{{names[dim]}}}"
                    right.append(str(len(steps)))
            dim += 1
        return f"{' '.join(left)} -> {' '.join(right + names[dim:])}"

    def forward(self, ctx: Context, x: Array) -> Array:
        # The dims in memory order, outermost first.
        ctx.order = sorted(range(x.ndim), key=lambda dim: -x.strides[dim])
        return x[self._key]

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        """Return dx in the memory order of x, which spares the op that made x a copy."""
        if ctx.accumulate_into is not None:
            ctx.accumulate_into[self._key] += dy
            return (ctx.accumulate_into,)
        shape, order = ctx.plan.inputs[0].shape, ctx.order
        dx = ctx.xp.zeros([shape[dim] for dim in order], dtype=dy.dtype)
        dx = dx.transpose([order.index(dim) for dim in range(len(shape))])
        dx[self._key] = dy
        return (dx,)

    def work(self, x: Spec) -> Work:
        # A view.
        return Work(0, 0)

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # The gradients of all slices of a tensor are joined.
        return Work(0, 2 * plan.output.size_bytes)


class Index(Op):
    """y = x[..., indices, ...]: arrays of integers, broadcast together, select along `dims`

    The dims of the indices replace `dims` if these are neighbours, else they come first, as in NumPy.
    The gradients of an element selected several times add up. Where an indexed dim is cut, elements of
    other slices count as 0, so that y is a partial sum, as for `Embedding`.

    Args:
        dims: the indexed dims of x in ascending order, one for every array of indices.
    """

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = as_dims("Index: dims", tuple(dims))

    def _dims(self, ndim: int) -> tuple[int, ...]:
        dims = normalize_dims(self.dims, ndim)
        if not dims or any(d not in (given, given + ndim) for d, given in zip(dims, self.dims, strict=True)):
            raise ShapeError(f"dims {self.dims} must name at least one dim, in ascending order.")
        return dims

    def rule_for(self, shape: tuple[int, ...], *indices: tuple[int, ...]) -> str:
        dims = self._dims(len(shape))
        if len(dims) != len(indices):
            raise ShapeError(f"indexes {len(dims)} dims, got {len(indices)} arrays of indices.")
        names = dim_names(len(shape))
        right = [name for i, name in enumerate(names) if i not in dims]
        neighbours = dims == tuple(range(dims[0], dims[0] + len(dims)))
        right.insert(dims[0] if neighbours else 0, "...")
        return f"{', '.join([' '.join(names)] + ['...'] * len(indices))} -> {' '.join(right)}"

    def infer(self, x: Spec, *indices: Spec) -> Spec:
        for spec in indices:
            if spec.dtype.kind not in "iu":
                raise DTypeError(f"indices have dtype {spec.dtype}, expected integers; use astype('int64').")
        return Spec(super().infer(x, *indices).shape, x.dtype)

    def _key(self, ndim: int, indices: Sequence[Array]) -> tuple[Any, ...]:
        key: list[Any] = [slice(None)] * ndim
        for dim, array in zip(self._dims(ndim), indices, strict=True):
            key[dim] = array
        return tuple(key)

    def forward(self, ctx: Context, x: Array, *indices: Array) -> Array:
        ctx.inside = None
        names = dim_names(x.ndim)
        own = list(indices)
        for i, dim in enumerate(self._dims(x.ndim)):
            size = ctx.size(names[dim])
            _check_range(ctx.arrays, own[i], size, dim)
            if size != x.shape[dim]:
                own[i] = self._within(ctx, own[i].astype("int64"), dim, size)
        # A tuple: the tape checks arrays and tuples of arrays on `ctx` for writes before backward.
        ctx.indices = tuple(own)
        # An empty slice has no element to select.
        if not x.size:
            return ctx.xp.zeros(ctx.plan.output.shape, x.dtype)
        y = ctx.xp.take(x, own[0], axis=self.dims[0]) if len(own) == 1 else x[self._key(x.ndim, own)]
        return y if ctx.inside is None else self._masked(ctx, y)

    def _within(self, ctx: Context, indices: Array, dim: int, size: int) -> Array:
        """Convert indices to positions in this rank's slice of a cut dim, 0 outside of it; update `ctx.inside`."""
        local = indices + size * (indices < 0) - ctx.offset(dim_names(dim + 1)[dim])
        inside = (local >= 0) & (local < ctx.plan.inputs[0].shape[dim])
        ctx.inside = inside if ctx.inside is None else ctx.inside & inside
        return local * inside

    def _masked(self, ctx: Context, y: Array) -> Array:
        """Set y to 0 where an index points into another slice."""
        ndim = len(ctx.plan.inputs[0].shape)
        dims = self._dims(ndim)
        neighbours = dims == tuple(range(dims[0], dims[0] + len(dims)))
        behind = ndim - dims[-1] - 1 if neighbours else ndim - len(dims)
        inside = ctx.xp.reshape(ctx.inside, (*ctx.inside.shape, *(1,) * behind))
        return ctx.arrays.masked(y, ctx.xp.broadcast_to(inside, y.shape))

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        shape = ctx.plan.inputs[0].shape
        if ctx.inside is not None:
            dy = self._masked(ctx, dy)
        wide = "float32" if dy.dtype == "float16" else dy.dtype
        dx = ctx.xp.zeros(shape, dtype=wide)
        if dx.size:
            ctx.arrays.add_at(dx, self._key(len(shape), ctx.indices), dy.astype(wide, copy=False))
        return (dx.astype(dy.dtype, copy=False), *(None for _ in ctx.indices))

    def work(self, x: Spec, *indices: Spec) -> Work:
        moved = 2 * self.infer(x, *indices).size_bytes
        return Work(0, moved + sum(spec.size_bytes for spec in indices))

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.size_bytes // 8, 2 * work.size_bytes)


def _check_range(arrays: HostArrays, indices: Array, size: int, dim: int) -> None:
    """Raise OutOfRangeError for indices outside of a dim, which CuPy would wrap around; on a GPU at the next read."""
    if not indices.size:
        return
    least, most = indices.min(), indices.max()
    if arrays.reads_wait:
        check_after((least < -size) | (most >= size), lambda: _refuse(least, most, size, dim))
    elif not -size <= least.item() <= most.item() < size:
        _refuse(least, most, size, dim)


def _refuse(least: Array, most: Array, size: int, dim: int) -> None:
    least, most = read_numbers([least, most])
    raise OutOfRangeError(f"Index: indices {least} … {most} are outside of dim {dim} of size {size}.")


def split_index(items: tuple[Any, ...], shape: tuple[int, ...], is_indices: Any) -> tuple[Any, Any, Any]:
    """Split the items of `x[...]` into (items of `Slice`, dims of `Index`, arrays of `Index`).

    With an array among the items, integers count as arrays without dims, as in NumPy.

    Args:
        items: integers, slices, None, one Ellipsis, arrays of integers.
        shape: shape of x.
        is_indices: a function that returns True for arrays of indices.

    Raises:
        DTypeError: an item is none of these.
        OutOfRangeError: too many items, or more than one Ellipsis.
        InputError: the step of a slice is 0.
    """
    num_open = len(shape) - sum(item is not None and item is not ... for item in items)
    dots = [i for i, item in enumerate(items) if item is ...]
    if num_open < 0 or len(dots) > 1:
        raise OutOfRangeError(f"{len(items)} indices with {len(dots)} '...' do not fit shape {shape}.")
    at = dots[0] if dots else len(items)
    items = (*items[:at], *(slice(None),) * num_open, *items[at + 1 :])

    advanced = any(is_indices(item) for item in items)
    plain: list[Item] = []
    dims, arrays, dim = [], [], 0
    for item in items:
        if item is None:
            plain.append(None)
        elif isinstance(item, slice):
            plain.append(_triple(item))
        elif advanced:
            plain.append((None, None, None))
            dims.append(dim)
            arrays.append(item)
        else:
            plain.append(as_int("an index", item))
            continue
        dim += 1
    return tuple(plain), tuple(dims), arrays


def _triple(part: slice) -> Triple:
    start, stop, step = (
        None if value is None else as_int("a slice", value) for value in (part.start, part.stop, part.step)
    )
    if step == 0:
        raise InputError(f"{part!r}: the step of a slice is 0; -1 reads backwards.")
    return start, stop, step


# Items that `Slice` takes without conversion.
_PLAIN = frozenset((int, slice, NoneType, EllipsisType))


@function("__getitem__")
def getitem(x: Any, items: Any) -> Tensor:
    """Return `x[items]` as NumPy does, for integers, slices, None, `...`, arrays of integers, bool masks."""
    x = as_tensor(x)
    items = _without_masks(items if isinstance(items, tuple) else (items,), x)
    plain, dims, arrays = split_index(items, x.shape, lambda item: isinstance(item, Tensor))
    if any(item != (None, None, None) for item in plain) or not dims:
        x = instance(Slice, plain)(x)
    if not dims:
        return x
    return instance(Index, dims)(x, *(as_index(item, x) for item in arrays))


def _without_masks(items: tuple[Any, ...], x: Tensor) -> tuple[Any, ...]:
    """Turn arrays and lists into Tensors, and a mask into the positions where it is True, one array for each dim."""
    if _PLAIN.issuperset(map(type, items)):
        return items
    found = [_as_indices(item, x) for item in items]
    widths = [0 if item is None or item is ... else _width(item) for item in found]
    result: list[Any] = []
    # The dim of x that the next item indexes.
    first = 0
    for item, width in zip(found, widths, strict=True):
        if isinstance(item, Tensor) and item.dtype.kind == "b":
            covered = x.shape[first : first + width]
            if item.shape != covered:
                raise OutOfRangeError(
                    f"a mask of shape {item.shape} does not fit dims {first} … {first + width - 1} of a tensor of "
                    f"shape {x.shape}: the mask needs shape {covered}."
                )
            result += [Tensor._result(at, None, item._device) for at in item.data.nonzero()]
        else:
            result.append(item)
        first += x.ndim - sum(widths) if item is ... else width
    return tuple(result)


def _as_indices(item: Any, x: Tensor) -> Any:
    """Turn an array or a list into a Tensor; return other items unchanged."""
    if isinstance(item, list) or is_array(item):
        item = as_index(item, x)
    if isinstance(item, (bool, np.bool_)) or (isinstance(item, Tensor) and not item.ndim and item.dtype == bool):
        raise InputError(
            f"{item!r} is not an index: a mask has the shape of the dims from which it selects; x[None] adds a dim."
        )
    return item


def _width(item: Any) -> int:
    """Return the number of dims of x that an item indexes."""
    return item.ndim if isinstance(item, Tensor) and item.dtype.kind == "b" else 1


def as_index(value: Any, like: Tensor) -> Tensor:
    """Convert an array or a list of positions to a Tensor, a list with the array library of `like`."""
    if isinstance(value, Tensor) or is_array(value):
        return as_tensor(value)
    found = get_namespace(like.data).asarray(value)
    # NumPy takes an empty list for floats.
    return as_tensor(found if found.size else found.astype("int64"))


@function("take")
def take(x: Any, indices: Any, dim: int) -> Tensor:
    """Take the entries of `x` at `indices` (integers, any shape) along `dim`; the dims of `indices` replace `dim`."""
    x = as_tensor(x)
    return instance(Index, (dim,))(x, as_index(indices, x))


@function("split")
def split(x: Any, sizes: int | Sequence[int], dim: int = 0) -> list[Tensor]:
    """Split `x` along `dim` into parts of the given sizes, or of one size; the last part may be smaller.

    As in PyTorch, a single number is the size of a part. Use `chunk` to ask for a number of parts.

    Raises:
        ShapeError: the sizes do not add up to the size of `dim`, or one is negative.
    """
    x = as_tensor(x)
    (at,) = normalize_dims(dim, x.ndim)
    total = x.shape[at]
    if isinstance(sizes, (int, np.integer)):
        if sizes < 1:
            raise ShapeError(f"split: the size of a part is {sizes}, but must be positive.")
        sizes = [int(sizes)] * (total // int(sizes)) + [total % int(sizes)] * (total % int(sizes) > 0)
        sizes = sizes or [0]
    if sum(sizes) != total or any(size < 0 for size in sizes):
        raise ShapeError(f"split: sizes {list(sizes)} do not add up to {total}, the size of dim {dim}.")
    parts, start = [], 0
    for size in sizes:
        whole: tuple[Item, ...] = ((None, None, None),) * at
        parts.append(instance(Slice, (*whole, (start, start + size, None)))(x))
        start += size
    return parts


@function("chunk")
def chunk(x: Any, count: int, dim: int = 0) -> list[Tensor]:
    """Split `x` into `count` equal parts along `dim`.

    Raises:
        ShapeError: `count` does not divide the size of `dim`.
    """
    x = as_tensor(x)
    (at,) = normalize_dims(dim, x.ndim)
    if count < 1 or x.shape[at] % count:
        raise ShapeError(
            f"chunk: dim {dim} of shape {x.shape} cannot be split into {count} equal parts; use split for unequal ones."
        )
    return split(x, [x.shape[at] // count] * count, at)


@method("__setitem__")
def setitem(x: Tensor, items: Any, value: Any) -> None:
    """Assign x[items] = value, with NumPy's meaning."""
    what = "x[...] = y"
    check_writable(what, x, value, "build a new Tensor with where, cat or stack")
    x._check_whole(what)
    with no_grad():
        part = x.detach()[items]  # checks the items
    if isinstance(value, Tensor):
        x._array_of(what, value)  # checks layout and device
    _, y = operands(x, value)
    spare = max(y.ndim - part.ndim, 0)
    try:
        fits = np.broadcast_shapes(y.shape[spare:], part.shape) == part.shape and max(y.shape[:spare], default=1) == 1
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(f"{what}: y has shape {y.shape}, but the selected part has {part.shape}.")
    check_held(what, y, x)
    key = _key(items if isinstance(items, tuple) else (items,), get_namespace(x._data))
    # NumPy refuses extra dims of size 1 if a single element is assigned.
    x._data = assign(x._data, key, y._data.reshape(y.shape[spare:]))
    mark_changed((x,))


def _key(items: tuple[Any, ...], xp: Any) -> tuple[Any, ...]:
    """Convert the items of `x[items]` to an index of an array; a mask becomes the positions where it is true."""
    key: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            item = item._data
        elif isinstance(item, list):
            item = xp.asarray(item, dtype=None if item else "int64")
        if not is_array(item):
            key.append(item)
        elif item.dtype.kind == "b":
            key += item.nonzero()
        else:
            key.append(item if item.shape else item.item())
    return tuple(key)
