"""Sums, means and products. A cut dim leaves a sum or a mean Partial; a product may not be cut along its dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np

from simparallel.arrays.host.sums import divided, wider
from simparallel.autograd.dims import Dims
from simparallel.autograd.methods import function, reduction
from simparallel.autograd.op import Context, Op, Spec, Work, as_dims, instance, reduced_dims
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.layout.rule import dim_names


class AbstractReduce(Op):
    """A reduction over dims.

    Args:
        dim: dim or dims to reduce; None means all.
        keepdim: keep reduced dims with size 1.

    Attributes:
        mark: form of the reduced dims in the rule.
        result_of: NumPy's reduction, which says what dtype the result has; None for the dtype of x.
    """

    mark: ClassVar[str] = "{}"
    result_of: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> None:
        self.dim = as_dims(f"{self.name}: dim", dim)
        self.keepdim = keepdim

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names, reduced = dim_names(len(shape)), self._dims(len(shape))
        kept = ["1" if i in reduced else name for i, name in enumerate(names) if self.keepdim or i not in reduced]
        marked = [self.mark.format(name) if i in reduced else name for i, name in enumerate(names)]
        return f"{' '.join(marked)} -> {' '.join(kept)}"

    def infer(self, x: Spec) -> Spec:
        spec = super().infer(x)
        return spec if self.result_of is None else Spec(spec.shape, self.result_of(np.zeros(1, x.dtype)).dtype)

    def work(self, x: Spec) -> Work:
        return Work(math.prod(x.shape), x.size_bytes + self.infer(x).size_bytes)

    def _dims(self, ndim: int) -> tuple[int, ...]:
        return reduced_dims(self.dim, ndim)

    def _wide(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape with the reduced dims of size 1."""
        dims = self._dims(len(shape))
        return tuple(1 if i in dims else size for i, size in enumerate(shape))

    def _names(self, ctx: Context) -> str:
        """Return the names of the reduced dims, for `ctx`."""
        return self._names_of(len(ctx.plan.inputs[0].shape))

    def _names_of(self, ndim: int) -> str:
        names = dim_names(ndim)
        return " ".join(names[i] for i in self._dims(ndim))

    def _spread(self, ctx: Context, dy: Array) -> Array:
        """Broadcast dy along the reduced dims (a view)."""
        shape = ctx.plan.inputs[0].shape
        return ctx.xp.broadcast_to(dy.reshape(self._wide(shape)), shape)


class Sum(AbstractReduce):
    """y = sum of x over `dim`

    Small integers are summed in the platform integer, as in NumPy; float16 is summed in float32.

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    linear = True
    result_of = staticmethod(np.sum)

    def forward(self, ctx: Context, x: Array) -> Array:
        dims = self._dims(x.ndim)
        if x.dtype != "float16":
            return x.sum(axis=dims, keepdims=self.keepdim)
        return x.sum(axis=dims, keepdims=self.keepdim, dtype="float32").astype("float16")

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self._spread(ctx, dy),)


class Mean(AbstractReduce):
    """y = sum of x over `dim` / global number of elements summed

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    linear = True
    result_of = staticmethod(np.mean)

    def forward(self, ctx: Context, x: Array) -> Array:
        dtype = ctx.plan.output.dtype
        # A sum in float16 overflows long before its mean does.
        wide = np.result_type(dtype, np.float32)
        total = x.sum(axis=self._dims(x.ndim), keepdims=self.keepdim, dtype=wide)
        return (total / ctx.sizes(self._names(ctx))).astype(dtype)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self._spread(ctx, divided(dy, ctx.sizes(self._names(ctx)))),)


class Prod(AbstractReduce):
    """y = product of x over `dim`; the reduced dims may not be cut

    The gradient of an element is the product of all others, also where some are 0. Small integers are multiplied in
    the platform integer, as in NumPy; float16 is multiplied in float32.

    Args:
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """

    mark = "{{{}}}"
    result_of = staticmethod(np.prod)

    def forward(self, ctx: Context, x: Array) -> Array:
        dims, dtype = self._dims(x.ndim), ctx.plan.output.dtype
        ctx.x = x
        return x.prod(axis=dims, keepdims=self.keepdim, dtype=wider(dtype)).astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x = ctx.xp, ctx.x
        dims = self._dims(x.ndim)
        order = (*(i for i in range(x.ndim) if i not in dims), *dims)
        moved = x.transpose(order).astype(wider(dy.dtype), copy=False)
        rows = moved.reshape(math.prod(moved.shape[: x.ndim - len(dims)]), math.prod(moved.shape[x.ndim - len(dims) :]))
        # The product of all other elements: those before, times those after. Without a division, zeros do no harm.
        others = xp.ones_like(rows)
        others[:, 1:] = xp.cumprod(rows[:, :-1], axis=1)
        others[:, :-1] *= xp.cumprod(rows[:, :0:-1], axis=1)[:, ::-1]
        back = [order.index(i) for i in range(x.ndim)]
        return ((others.reshape(moved.shape).transpose(back) * self._spread(ctx, dy)).astype(dy.dtype, copy=False),)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(4 * work.flops * needs.count(True), 4 * work.size_bytes * needs.count(True))


@function("sum", reduction)
def sum(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Sum `x` over `dim` (all dims by default).

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(Sum, as_dims("sum: dim", dim), keepdim)(as_tensor(x))


@function("mean", reduction)
def mean(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Average `x` over `dim` (all dims by default).

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(Mean, as_dims("mean: dim", dim), keepdim)(as_tensor(x))


@function("prod")
def prod(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Multiply the elements over `dim` (all dims by default).

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return instance(Prod, as_dims("prod: dim", dim), keepdim)(as_tensor(x))


@function("any", reduction)
def any(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Test whether any element over `dim` (all dims by default) is not 0; False for no elements.

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return _count(as_tensor(x) != 0, dim, keepdim) > 0


@function("all", reduction)
def all(x: Any, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Test whether no element over `dim` (all dims by default) is 0; True for no elements.

    Args:
        x: any shape.
        dim: a dim, or a tuple of them; None for all.
        keepdim: keep these dims, with size 1.
    """
    return _count(as_tensor(x) == 0, dim, keepdim) == 0


def _count(x: Tensor, dim: Dims, keepdim: bool) -> Tensor:
    return instance(Sum, as_dims("any, all: dim", dim), keepdim)(x)
