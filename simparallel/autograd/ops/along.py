"""Ops along one dim: running sums, reversal, gather and scatter, the largest elements."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function, method
from simparallel.autograd.op import (
    AbstractConstant,
    Context,
    Op,
    Spec,
    Work,
    as_dims,
    as_int,
    instance,
    normalize_dims,
    reduced_dims,
)
from simparallel.autograd.ops.indexing import as_index
from simparallel.autograd.ops.labels import Words, check_labels
from simparallel.autograd.ops.promotion import as_like, at_least_1d, spread
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.layout.rule import dim_names

POSITIONS = Words("position", "positions", "places along the dim", "make that dim {} long", "")


class AbstractAlong(Op):
    """An op along one dim.

    Args:
        dim: the dim; negative ones count from the end.
    """

    def __init__(self, dim: int) -> None:
        self.dim = as_int(f"{self.name}: dim", dim)

    def _axis(self, ndim: int) -> int:
        if not ndim:
            raise ShapeError("a tensor without dims has no dim to work along; use x.reshape(1)")
        return normalize_dims(self.dim, ndim)[0]

    def _names(self, shape: tuple[int, ...], form: str) -> list[str]:
        """Name the dims; `form`, such as "{}", is applied to the name of `self.dim`."""
        names = dim_names(len(shape))
        axis = self._axis(len(shape))
        names[axis] = form.format(names[axis])
        return names


class CumSum(AbstractAlong):
    """y[i] = x[0] + … + x[i] along `dim`

    The dim may be cut: a rank adds the sums of the slices before its own. Small integers are summed in the platform
    integer, as in NumPy; float16 is summed in float32.
    """

    linear = True

    def rule_for(self, shape: tuple[int, ...]) -> str:
        return f"{' '.join(self._names(shape, '[{}]'))} -> {' '.join(dim_names(len(shape)))}"

    def infer(self, x: Spec) -> Spec:
        return Spec(super().infer(x).shape, np.cumsum(np.zeros(1, x.dtype)).dtype)

    def forward(self, ctx: Context, x: Array) -> Array:
        return self._run(ctx, x, ctx.plan.output.dtype, backwards=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self._run(ctx, dy, dy.dtype, backwards=True),)

    def _run(self, ctx: Context, x: Array, dtype: np.dtype, backwards: bool) -> Array:
        """Return the running sum, from the end if `backwards`."""
        axis = self._axis(x.ndim)
        order = (*(slice(None),) * axis, slice(None, None, -1 if backwards else None))
        y = ctx.xp.cumsum(x[order], axis=axis, dtype=wider(dtype))
        name, size = f"d{axis}", x.shape[axis]
        mine, count = ctx.part(name)
        if count > 1:
            # Each rank fills in the total of its own slice; the sum over ranks gives all totals to every rank.
            shape = [1 if d == axis else length for d, length in enumerate(x.shape)]
            totals = ctx.xp.zeros((count, *shape), y.dtype)
            if size:
                totals[mine] = y[(*(slice(None),) * axis, slice(size - 1, None))]
            totals = ctx.sum_over(name, totals)
            y += (totals[mine + 1 :] if backwards else totals[:mine]).sum(axis=0)
        return y[order].astype(dtype)


class Flip(Op):
    """y = x in reverse order along `dim`, which may not be cut

    Args:
        dim: dim or dims to reverse; None means all.
    """

    linear = True
    flops_per_element = 0

    def __init__(self, dim: int | tuple[int, ...] | None = None) -> None:
        self.dim = as_dims("Flip: dim", dim)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names, dims = dim_names(len(shape)), reduced_dims(self.dim, len(shape))
        left = [f"{{{name}}}" if i in dims else name for i, name in enumerate(names)]
        return f"{' '.join(left)} -> {' '.join(left)}"

    def forward(self, ctx: Context, x: Array) -> Array:
        dims = reduced_dims(self.dim, x.ndim)
        return x[tuple(slice(None, None, -1 if i in dims else None) for i in range(x.ndim))].copy()

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self.forward(ctx, dy),)


def _check_positions(spec: Spec) -> None:
    if spec.dtype.kind not in "iu":
        raise DTypeError(f"the index has dtype {spec.dtype}, expected integers; use .astype('int64').")


def _grid(xp: Any, index: Array, axis: int) -> tuple[Array, ...]:
    """Return a key that selects x[…, index[…, i, …], …]: every other dim is indexed by its own positions."""
    shape = index.shape
    grid = [
        xp.arange(size).reshape([-1 if i == dim else 1 for i in range(len(shape))]) for dim, size in enumerate(shape)
    ]
    grid[axis] = index
    return tuple(grid)


class GatherD(AbstractAlong):
    """y[…, i, …] = x[…, index[…, i, …], …] along `dim`.   index: integers, of x's shape except along `dim`

    The gradients of an element picked several times add up. The dim may not be cut; other dims may.
    """

    def rule_for(self, shape: tuple[int, ...], index: tuple[int, ...]) -> str:
        if len(shape) != len(index):
            raise ShapeError(f"x {shape} and index {index} need the same number of dims")
        picked = " ".join(self._names(shape, "k"))
        return f"{' '.join(self._names(shape, '{{{}}}'))}, {picked} -> {picked}"

    def infer(self, x: Spec, index: Spec) -> Spec:
        _check_positions(index)
        return Spec(super().infer(x, index).shape, x.dtype)

    def forward(self, ctx: Context, x: Array, index: Array) -> Array:
        axis = self._axis(x.ndim)
        check_labels(ctx.arrays, index, x.shape[axis], None, self.name, POSITIONS)
        ctx.index = index
        return ctx.xp.take_along_axis(x, index, axis)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        dx = ctx.xp.zeros(ctx.plan.inputs[0].shape, wider(dy.dtype))
        ctx.arrays.add_at(dx, _grid(ctx.xp, ctx.index, self._axis(dy.ndim)), dy.astype(dx.dtype, copy=False))
        return dx.astype(dy.dtype, copy=False), None

    def work(self, x: Spec, index: Spec) -> Work:
        return Work(0, index.size_bytes + 2 * self.infer(x, index).size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.size_bytes // 8, work.size_bytes)


class Scatter(AbstractAlong):
    """y = x, with y[…, index[…, i, …], …] = src[…, i, …] or +=.   index, src: of x's shape except along `dim`

    Of several elements with one index, the last in row-major order wins and gets the gradient; with `reduce="add"`
    all of them are added to x. The dim may not be cut; other dims may.

    Args:
        dim: the indexed dim.
        reduce: None to replace, "add" to add.

    Raises:
        InputError: another name in `reduce`.
    """

    def __init__(self, dim: int, reduce: str | None = None) -> None:
        super().__init__(dim)
        if reduce not in (None, "add"):
            raise InputError(f"Scatter: reduce={reduce!r}, choose None or 'add'.")
        self.reduce = reduce

    def rule_for(self, shape: tuple[int, ...], index: tuple[int, ...], src: tuple[int, ...]) -> str:
        if not len(shape) == len(index) == len(src):
            raise ShapeError(f"x {shape}, index {index} and src {src} need the same number of dims")
        whole, placed = " ".join(self._names(shape, "{{{}}}")), " ".join(self._names(shape, "{{k}}"))
        return f"{whole}, {placed}, {placed} -> {whole}"

    def infer(self, x: Spec, index: Spec, src: Spec) -> Spec:
        _check_positions(index)
        return Spec(super().infer(x, index, src).shape, np.result_type(x.dtype, src.dtype))

    def forward(self, ctx: Context, x: Array, index: Array, src: Array) -> Array:
        xp, axis, dtype = ctx.xp, self._axis(x.ndim), ctx.plan.output.dtype
        check_labels(ctx.arrays, index, x.shape[axis], None, self.name, POSITIONS)
        ctx.index, ctx.last = index, None
        if self.reduce == "add":
            # CuPy cannot add smaller integers in place; the sum in 64 bits is the same.
            y = x.astype(wider(dtype) if dtype.kind == "f" else "int64", order="C")
            ctx.arrays.add_at(y, _grid(xp, index, axis), src.astype(y.dtype, copy=False))
            return y.astype(dtype, copy=False)
        # For every position in y: the row-major number of the last element of src written there, -1 for none.
        number = xp.arange(index.size).reshape(index.shape)
        ctx.last = xp.full(x.shape, -1)
        xp.maximum.at(ctx.last, _grid(xp, index, axis), number)
        if not index.size:
            return x.astype(dtype)
        return xp.where(ctx.last < 0, x, src.reshape(-1)[xp.maximum(ctx.last, 0)]).astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, axis, dx, dsrc = ctx.xp, self._axis(dy.ndim), None, None
        if ctx.needs[0]:
            dx = dy if ctx.last is None else xp.where(ctx.last < 0, dy, xp.zeros_like(dy))
        if ctx.needs[2]:
            dsrc = xp.take_along_axis(dy, ctx.index, axis)
            if ctx.last is not None:
                number = xp.arange(ctx.index.size).reshape(ctx.index.shape)
                stays = xp.take_along_axis(ctx.last, ctx.index, axis) == number
                dsrc = xp.where(stays, dsrc, xp.zeros_like(dsrc))
        return dx, None, dsrc

    def work(self, x: Spec, index: Spec, src: Spec) -> Work:
        y = self.infer(x, index, src)
        return Work(
            prod(x.shape) + prod(src.shape), x.size_bytes + y.size_bytes + index.size_bytes + 2 * src.size_bytes
        )


class TopK(AbstractAlong, AbstractConstant):
    """y = positions of the k largest x along `dim`, int64, the largest first; equal elements by ascending position

    NaN counts as the largest. `functions.topk` also gives the values. The dim may not be cut.

    Args:
        k: number of elements.
        dim: the dim along which elements are compared.
        largest: False for the smallest, the smallest first.
    """

    def __init__(self, k: int, dim: int = -1, largest: bool = True) -> None:
        super().__init__(dim)
        self.k, self.largest = as_int("TopK: k", k), bool(largest)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        size = shape[self._axis(len(shape))]
        if not 0 <= self.k <= size:
            raise ShapeError(f"k={self.k} must be 0 … {size}, the size of dim {self.dim} of x, shape {shape}")
        return f"{' '.join(self._names(shape, '{{{}}}'))} -> {' '.join(self._names(shape, str(self.k)))}"

    def infer(self, x: Spec) -> Spec:
        return Spec(super().infer(x).shape, np.dtype(np.int64))

    def forward(self, ctx: Context, x: Array) -> Array:
        axis = self._axis(x.ndim)
        first = (*(slice(None),) * axis, slice(None, self.k))
        if not self.largest:
            return ctx.xp.argsort(x, axis=axis, kind="stable")[first].astype("int64")
        # Sort the reversed dim: a stable ascending sort, read backwards, then has equal elements by ascending position.
        back = (*(slice(None),) * axis, slice(None, None, -1))
        order = x.shape[axis] - 1 - ctx.xp.argsort(x[back], axis=axis, kind="stable")
        return order[back][first].astype("int64")

    def work(self, x: Spec) -> Work:
        size = max(x.shape[self._axis(len(x.shape))], 2)
        return Work(prod(x.shape) * (size - 1).bit_length(), x.size_bytes + self.infer(x).size_bytes)


@function("cumsum")
def cumsum(x: Any, dim: int) -> Tensor:
    """Return the running sum along `dim`: x[0], x[0] + x[1], …"""
    return at_least_1d(instance(CumSum, dim), x, dim)


@function()
def flip(x: Any, dim: int | tuple[int, ...] | None = None) -> Tensor:
    """Reverse `x` along `dim` (all dims by default)."""
    return instance(Flip, as_dims("flip: dim", dim))(as_tensor(x))


@method("flip")
def _flip_dims(x: Any, *dims: int) -> Tensor:
    """Reverse the tensor along `dims`."""
    return flip(x, spread("flip: dims", dims))


@function("gather")
def gather(x: Any, dim: int, index: Any) -> Tensor:
    """Return y[…, i, …] = x[…, index[…, i, …], …] along `dim`, as `torch.gather`.

    Args:
        x: the tensor.
        dim: the indexed dim.
        index: integers, with as many dims as x; at most as long as x in all dims but `dim`.
    """
    x, index = as_tensor(x), as_index(index, as_tensor(x))
    if x.ndim == index.ndim and x.ndim:
        (axis,) = normalize_dims(as_int("gather: dim", dim), x.ndim)
        if any(index.shape[i] < x.shape[i] for i in range(x.ndim) if i != axis):
            x = x[tuple(slice(None) if i == axis else slice(size) for i, size in enumerate(index.shape))]
    return instance(GatherD, dim)(x, index)


@function("scatter")
def scatter(x: Any, dim: int, index: Any, src: Any, reduce: str | None = None) -> Tensor:
    """Copy `x` and set y[…, index[…, i, …], …] = src[…, i, …] along `dim`, as `torch.scatter`.

    Args:
        x: the tensor.
        dim: the indexed dim.
        index: integers, with as many dims as x; as long as x in all dims but `dim`.
        src: a tensor at least as long as the index in each dim, or a number.
        reduce: None replaces elements of x, and the last of several with one index wins; "add" adds all to x.
    """
    x = as_tensor(x)
    index, src = as_index(index, x), as_like(src, x)
    if src.ndim == 0 and index.ndim:
        src = src.expand(*index.shape)
    elif src.ndim == index.ndim and any(s > i for s, i in zip(src.shape, index.shape, strict=True)):
        src = src[tuple(slice(size) for size in index.shape)]
    return instance(Scatter, dim, reduce)(x, index, src)


@function("scatter_add")
def scatter_add(x: Any, dim: int, index: Any, src: Any) -> Tensor:
    """Call `scatter`, adding to the elements of `x` instead of replacing them."""
    return scatter(x, dim, index, src, "add")


class Largest(NamedTuple):
    """The result of `topk` and `sort`."""

    values: Tensor
    indices: Tensor


@function("topk")
def topk(x: Any, k: int, dim: int = -1, largest: bool = True) -> Largest:
    """Return the k largest (or smallest) elements along `dim` in order, with their positions; see `TopK`."""
    x = as_tensor(x)
    if not x.ndim and dim in (0, -1):
        found = topk(x.reshape(1), k, 0, largest)
        return Largest(*(y.reshape() if k == 1 else y for y in found))
    indices = instance(TopK, k, dim, largest)(x)
    return Largest(gather(x, dim, indices), indices)


@function("sort")
def sort(x: Any, dim: int = -1, descending: bool = False) -> Largest:
    """Sort the elements along `dim`; return them with their positions. Equal elements keep their order.

    Args:
        x: any shape.
        dim: the dim along which the elements move.
        descending: put the largest first.
    """
    x = as_tensor(x)
    (axis,) = normalize_dims(as_int("sort: dim", dim), max(x.ndim, 1))
    return topk(x, x.shape[axis] if x.ndim else 1, axis, descending)
