"""Ops that move elements without computing: reshape, flatten, permute, redistribute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import mul
from typing import Any

from simparallel.autograd.methods import function, method
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, as_dims, instance
from simparallel.autograd.ops.promotion import spread
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import LayoutError, ShapeError
from simparallel.layout.layout import Layout
from simparallel.layout.rule import dim_names


class AbstractView(Op):
    """A view: the same elements in the same order, with other dims."""

    linear = True

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.reshape(ctx.plan.output.shape)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy.reshape(ctx.plan.inputs[0].shape),)

    def work(self, x: Spec) -> Work:
        return Work(0, 0)


class Reshape(AbstractView):
    """y = x in another shape, row-major; one size may be -1.

    The rule states which dims survive. Both shapes are split into the smallest runs of equal product. A run of one
    dim on each side keeps that dim. Dims that are merged, split or both, as in (6, 128) -> (2, 384), have common
    factors, here 2 * 3 * 128, and may be cut along the outermost ones. Without common factors, as in
    (4, 6) -> (6, 4), no dim of the run may be cut.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = as_dims("Reshape: a size", tuple(shape))

    def target(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the new shape with -1 resolved.

        Raises:
            ShapeError: the numbers of elements differ, or the shape holds a second -1 or another negative size.
        """
        size, known = math.prod(shape), math.prod(s for s in self.shape if s != -1)
        if self.shape.count(-1) > 1 or any(s < -1 for s in self.shape):
            raise ShapeError(f"target {self.shape} may contain one -1 and no other negative size.")
        if -1 in self.shape and known and size % known == 0:
            return tuple(size // known if s == -1 else s for s in self.shape)
        if size != known or -1 in self.shape:
            raise ShapeError(f"cannot reshape {shape} with {size} elements to {self.shape}.")
        return self.shape

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = dim_names(len(shape))
        target = self.target(shape)
        runs = [(list(range(len(shape))), list(target))] if 0 in shape else _runs(shape, target)
        left: list[str] = []
        right: list[str] = []
        for sources, sizes in runs:
            run = [names[i] for i in sources]
            if len(run) == 1 and len(sizes) > 1 and 0 not in shape:
                factors = [f"{run[0]}_{i}" for i in range(len(sizes))]
                left.append(f"({' '.join(f'{f}={s}' for f, s in zip(factors, sizes, strict=True))})")
                right += factors
            elif run and len(sizes) == 1 and 0 not in shape:
                left += run
                right.append(run[0] if len(run) == 1 else f"({' '.join(run)})")
            elif run and sizes and (common := _common_factors([shape[i] for i in sources], sizes)):
                named = {bound: f"{run[0]}_{i}" for i, bound in enumerate(common)}
                left += _in_factors([shape[i] for i in sources], common, named, sized=True)
                right += _in_factors(sizes, common, named, sized=False)
            else:
                left += [f"{{{name}}}" for name in run]
                right += map(str, sizes)
        return f"{' '.join(left)} -> {' '.join(right)}"

    def infer(self, x: Spec) -> Spec:
        return Spec(self.target(x.shape), x.dtype)


class Flatten(AbstractView):
    """y = x as a matrix: dim 0 stays, all other dims are merged into one.   x: (n, ...)   y: (n, k)"""

    def rule_for(self, shape: tuple[int, ...]) -> str:
        if not shape:
            raise ShapeError("a tensor without dims has no dim 0 to keep.")
        first, *rest = dim_names(len(shape))
        merged = "1" if not rest else rest[0] if len(rest) == 1 else f"({' '.join(rest)})"
        return f"{' '.join([first, *rest])} -> {first} {merged}"


class Redistribute(Op):
    """y = x in another layout over the devices; on one device, x itself

    Args:
        layout: layout of y; None for a plain tensor, whole on every device.
    """

    linear = True
    rule = "... -> ..."

    def __init__(self, layout: Layout | None = None) -> None:
        self.layout = layout

    def forward(self, ctx: Context, x: Array) -> Array:
        # The interpreter handles sharded tensors, so x is a plain one.
        if self.layout is not None:
            raise LayoutError(
                f"redistribute: a tensor of shape {x.shape} is not sharded; use distribute_tensor(x, layout)."
            )
        return x

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy,)

    def work(self, x: Spec) -> Work:
        return Work(0, 0)


def _common_factors(a: Sequence[int], b: Sequence[int]) -> dict[int, int]:
    """Factor both shapes into common factors, outermost first; {} if that is not possible.

    Each dim is the product of consecutive factors. Keys are the products of all factors up to and including this one:
    _common_factors((6, 128), (2, 384)) is {2: 2, 6: 3, 768: 128}.
    """
    bounds = sorted({*accumulate(a, mul), *accumulate(b, mul)} - {1})
    if 0 in bounds or any(high % low for low, high in pairwise(bounds)):
        return {}
    return {high: high // low for low, high in pairwise([1, *bounds])}


def _in_factors(sizes: Sequence[int], common: dict[int, int], names: dict[int, str], sized: bool) -> list[str]:
    """Write each dim in the syntax of a rule; if `sized`, a dim of several factors states their sizes."""
    words, start = [], 1
    for stop in accumulate(sizes, mul):
        own = [bound for bound in common if start < bound <= stop]
        parts = [f"{names[bound]}={common[bound]}" if sized and len(own) > 1 else names[bound] for bound in own]
        words.append(f"({' '.join(parts)})" if len(own) > 1 else parts[0] if parts else "1")
        start = stop
    return words


def _runs(a: tuple[int, ...], b: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Split both shapes into the smallest runs of equal product: (positions in a, sizes in b)."""
    runs, i, j = [], 0, 0
    while i < len(a) or j < len(b):
        sources, sizes, product_a, product_b = [], [], 1, 1
        if i < len(a):
            sources, product_a, i = [i], a[i], i + 1
        if j < len(b):
            sizes, product_b, j = [b[j]], b[j], j + 1
        while product_a != product_b:
            if product_a < product_b:
                sources.append(i)
                product_a, i = product_a * a[i], i + 1
            else:
                sizes.append(b[j])
                product_b, j = product_b * b[j], j + 1
        runs.append((sources, sizes))
    return runs


class Permute(Op):
    """y = x with its dims in the order `dims`"""

    linear = True
    flops_per_element = 0

    def __init__(self, dims: tuple[int, ...]) -> None:
        self.dims = as_dims("Permute: dims", tuple(dims))

    def _order(self, ndim: int) -> tuple[int, ...]:
        order = tuple(d + ndim if d < 0 else d for d in self.dims)
        if sorted(order) != list(range(ndim)):
            raise ShapeError(f"dims {self.dims} must name each of the {ndim} dims once.")
        return order

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = dim_names(len(shape))
        return f"{' '.join(names)} -> {' '.join(names[d] for d in self._order(len(shape)))}"

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.transpose(self._order(x.ndim))

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        order = self._order(dy.ndim)
        return (dy.transpose(tuple(order.index(i) for i in range(dy.ndim))),)

    def eager_work(self, plan: Plan) -> Work:
        # A view: kernels take any order.
        return Work(0, 0)


@function("reshape view")
def reshape(x: Any, *sizes: int | Sequence[int]) -> Tensor:
    """Give `x` another shape, in row-major order; one size may be -1. A view where NumPy can do so, else a copy."""
    return instance(Reshape, spread("reshape: a size", sizes))(as_tensor(x))


@function("flatten")
def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the dims `start_dim … end_dim` into one.

    Args:
        x: any shape.
        start_dim, end_dim: the first and the last of these dims; negative ones count from the end.

    Raises:
        ShapeError: x lacks these dims.
    """
    x = as_tensor(x)
    first, last = (d + x.ndim if d < 0 else d for d in (start_dim, end_dim))
    if x.ndim and not 0 <= first <= last < x.ndim:
        raise ShapeError(f"flatten: a tensor of shape {x.shape} has no dims {start_dim} … {end_dim}.")
    merged = math.prod(x.shape[first : last + 1])
    return reshape(x, *x.shape[:first], merged, *x.shape[last + 1 :])


@function("permute")
def permute(x: Any, *dims: int) -> Tensor:
    """Put the dims of `x` in the order `dims`."""
    return instance(Permute, spread("permute: dims", dims))(as_tensor(x))


@function("transpose")
def transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    """Swap two dims of `x`.

    Args:
        x: at least two dims.
        dim0, dim1: the dims to swap.

    Raises:
        ShapeError: x lacks one of the dims.
    """
    x = as_tensor(x)
    order = list(range(x.ndim))
    try:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    except IndexError:
        raise ShapeError(f"transpose: dim {dim0} or {dim1} is out of range for shape {x.shape}.") from None
    return permute(x, *order)


@function("redistribute")
def redistribute(x: Any, layout: Layout | None) -> Tensor:
    """Redistribute the sharded tensor x to `layout`; None gathers it into a plain tensor on every rank.

    The layout may lie over other ranks of the run (`rank_list`), fewer or more; ranks outside of it hold nothing.
    A tensor over some of the ranks can be kept and redistributed again; most ops take only tensors over all ranks.

    Collective: yes, where anything moves; every rank of the run makes the call.

    Raises:
        LayoutError: a plain tensor, a layout that does not fit, or ranks that are not in the run.
    """
    return instance(Redistribute, layout)(as_tensor(x))


@method("to_local")
def to_local(x: Any, grad_layout: Layout | None = None) -> Tensor:
    """Return this rank's slice of the sharded tensor x as a plain tensor, differentiably; return a plain x itself.

    Later ops compute with the slice alone; `from_local` makes a sharded tensor of their result. If x is an unfinished
    sum, the slice is this rank's addend.

    Args:
        x: the tensor.
        grad_layout: layout of the gradients of the ranks' slices; by default the layout of x. Give an unfinished sum if
            several ranks hold the same slice and use it for different parts of the loss.

    Collective: no; yes in backward if the gradient has to move.

    Raises:
        LayoutError: grad_layout gives slices of another shape, or the call is inside of `AutoParallel`, where every
            rank holds all of a plain tensor.
    """
    tensor = as_tensor(x)
    return tensor if tensor.interpreter is None else tensor.interpreter.to_local(tensor, grad_layout)
