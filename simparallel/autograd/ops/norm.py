"""Normalisation within each sample: layer norm, RMS norm, group norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.arrays.host import normalize
from simparallel.arrays.host.sums import wider
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Plan, Spec, Work, instance
from simparallel.autograd.ops.batch_norm import AbstractNorm, check_channels, present
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused
from simparallel.base.checks import check_count
from simparallel.errors import ShapeError
from simparallel.layout.rule import dim_names
from simparallel.machine.achieved import ROW_NORM
from simparallel.machine.device import DeviceWork


class AbstractRowNorm(AbstractNorm):
    """A normalisation over the last `num_dims` dims, which may be cut. float16 is computed in float32.

    Args:
        num_dims: number of dims at the end to normalise over.
        eps: added under the square root.

    Raises:
        InputError: `num_dims` is less than 1.
    """

    def __init__(self, num_dims: int = 1, eps: float | None = 1e-5) -> None:
        self.num_dims = check_count(self.name, "num_dims", num_dims)
        self.eps = eps

    @property
    def _names(self) -> list[str]:
        return [f"e{i}" for i in range(self.num_dims)]

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        names = self._names
        completed = " ".join(f"[{name}]" for name in names)
        affine = f", {' '.join(names)}" * (len(shapes) - 1)
        return f"... {completed}{affine} -> ... {' '.join(names)}"

    def infer(self, x: Spec, *affine: Spec) -> Spec:
        spec = super().infer(x, *affine)
        if 0 in x.shape[len(x.shape) - self.num_dims :]:
            raise ShapeError(f"there is nothing to normalise over, x has shape {x.shape}.")
        return spec

    def _rows(self, ctx: Context, x: Array) -> Array:
        """Reshape x to (rows, elements normalised together), in the dtype to compute in."""
        ctx.dims = " ".join(self._names)
        ctx.count = ctx.sizes(ctx.dims)
        start = x.ndim - self.num_dims
        rows = x.astype(wider(x.dtype), copy=False)
        return rows.reshape(prod(x.shape[:start]), prod(x.shape[start:]))

    def _means(self, plan: Plan, count: int) -> Asked:
        """Describe an exchange of `count` means for each row."""
        x = plan.inputs[0]
        rows = x.shape[: len(x.shape) - self.num_dims]
        return Asked(" ".join(self._names), "sum", (count, *rows), wider(x.dtype))

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(11 * work.flops // 7, 14 * work.size_bytes // 9)

    def eager_work(self, plan: Plan) -> Work:
        # A row stays in on-chip memory between its statistics and its result.
        return Work(plan.work.flops, 2 * plan.inputs[0].size_bytes)

    def eager_kernels(
        self, work: DeviceWork, plan: Plan, needs: tuple[bool, ...] | None, memory_format: str
    ) -> DeviceWork:
        return work._replace(share=ROW_NORM.get(plan.inputs[0].dtype.itemsize, 1.0))

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        # Statistics of each row in float32.
        shape = plan.inputs[0].shape
        return (0,), 8 * prod(shape[: len(shape) - self.num_dims])

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # One kernel reads dy and x and writes dx, another one reads both for the gradients of weight and bias.
        flops, passes = self.work_backward(needs, plan.work).flops, 3 * needs[0] + 2 * any(needs[1:])
        return Work(flops, passes * plan.inputs[0].size_bytes)


class LayerNorm(AbstractRowNorm):
    """y = (x - mean) / sqrt(var + eps) * w + b, over the last dims (Ba et al. 2016, "Layer normalization")

    x: (..., e)   w, b: (e,), may be left out; e stands for `num_dims` dims. With
    x̂ = (x - mean) r, r = 1 / sqrt(var + eps), g = dy w and means over e:
    dx = r (g - mean(g) - x̂ mean(g x̂)),  dw = sum(dy x̂),  db = sum dy.

    Raises:
        InputError: `num_dims` is below 1.
    """

    def forward(self, ctx: Context, x: Array, w: Array | None = None, b: Array | None = None) -> Array:
        xp = ctx.xp
        x_RE = self._rows(ctx, x)
        one_E = ctx.arrays.ones(x_RE.shape[1], x_RE)
        # A product with ones is the fastest sum.
        sums = ctx.sum_over(ctx.dims, ctx.arrays.matmul(x_RE, one_E))
        # y holds first the squares, then the result.
        ctx.x_hat, y = fused(xp, normalize.centered)(x_RE, sums[:, None], ctx.count)
        _, r = fused(xp, normalize.spread)(ctx.sum_over(ctx.dims, ctx.arrays.matmul(y, one_E)), ctx.count, self.eps)
        ctx.r = r[:, None]
        ctx.w, b = (v if v is None else v.reshape(-1).astype(y.dtype, copy=False) for v in (w, b))
        fused(xp, normalize.normalize)(y, ctx.x_hat, ctx.r, ctx.w, b)
        return y.reshape(x.shape).astype(x.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x_hat = ctx.xp, ctx.x_hat
        dy_RE = dy.reshape(x_hat.shape).astype(x_hat.dtype, copy=False)
        work = dy_RE * x_hat
        dx = dw = db = None
        if len(ctx.needs) > 1 and ctx.needs[1]:
            dw = ctx.gradient(1, work.dtype)
            ctx.arrays.sum_rows(work, out=dw.reshape(-1))
        if len(ctx.needs) == 3 and ctx.needs[2]:
            db = ctx.gradient(2, dy_RE.dtype)
            ctx.arrays.sum_rows(dy_RE, out=db.reshape(-1))
        if ctx.needs[0]:
            w = ctx.arrays.ones(x_hat.shape[1], x_hat) if ctx.w is None else ctx.w
            sums = xp.empty((2, len(work)), work.dtype)
            ctx.arrays.matmul(dy_RE, w, out=sums[0])
            ctx.arrays.matmul(work, w, out=sums[1])
            sums = ctx.sum_over(ctx.dims, sums)[..., None]
            gradient = fused(xp, normalize.row_gradient)
            dx = gradient(dy_RE, x_hat, ctx.r, ctx.w, *sums, ctx.count, ctx.arrays.reusable(work))
            dx = dx.reshape(dy.shape)
        return (dx, dw, db)[: len(ctx.needs)]

    def exchanges(self, plan: Plan) -> Exchanges:
        return Exchanges((self._means(plan, 1),) * 2, (self._means(plan, 2),))


class RMSNorm(AbstractRowNorm):
    """y = x / sqrt(mean(x²) + eps) * w, over the last dims (Zhang and Sennrich 2019)

    x: (..., e)   w: (e,), may be left out; e stands for `num_dims` dims. With
    r = 1 / sqrt(mean(x²) + eps) and g = dy w:  dx = r (g - x r² mean(g x)),  dw = sum(dy x r).

    Args:
        num_dims: number of dims at the end to normalise over.
        eps: added under the square root; None takes the machine epsilon of x's dtype.
    """

    def __init__(self, num_dims: int = 1, eps: float | None = None) -> None:
        super().__init__(num_dims, eps)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        if len(shapes) > 2:
            raise ShapeError(f"takes x and w, got {len(shapes)} tensors")
        return super().rule_for(*shapes)

    def forward(self, ctx: Context, x: Array, w: Array | None = None) -> Array:
        xp = ctx.xp
        ctx.x_RE = x_RE = self._rows(ctx, x)
        eps = float(np.finfo(x.dtype).eps) if self.eps is None else self.eps
        y = x_RE * x_RE
        squares = ctx.sum_over(ctx.dims, ctx.arrays.matmul(y, ctx.arrays.ones(x_RE.shape[1], x_RE)))
        _, r = fused(xp, normalize.spread)(squares, ctx.count, eps)
        ctx.r = r[:, None]
        ctx.w = None if w is None else w.reshape(-1).astype(y.dtype, copy=False)
        fused(xp, normalize.scale)(y, x_RE, ctx.r, ctx.w, None)
        return y.reshape(x.shape).astype(x.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x_RE, r = ctx.xp, ctx.x_RE, ctx.r
        dy_RE = dy.reshape(x_RE.shape).astype(x_RE.dtype, copy=False)
        work = dy_RE * x_RE
        dx = dw = None
        if len(ctx.needs) > 1 and ctx.needs[1]:
            dw = ctx.gradient(1, work.dtype)
            ctx.arrays.matmul(r[:, 0], work, out=dw.reshape(-1))
        if ctx.needs[0]:
            w = ctx.arrays.ones(x_RE.shape[1], x_RE) if ctx.w is None else ctx.w
            sums = ctx.sum_over(ctx.dims, ctx.arrays.matmul(work, w))[:, None]
            dx = fused(xp, normalize.root_gradient)(dy_RE, x_RE, r, ctx.w, sums, ctx.count, ctx.arrays.reusable(work))
            dx = dx.reshape(dy.shape)
        return (dx, dw)[: len(ctx.needs)]

    def exchanges(self, plan: Plan) -> Exchanges:
        return Exchanges((self._means(plan, 1),), (self._means(plan, 1),))


class GroupNorm(AbstractNorm):
    """y = (x - mean) / sqrt(var + eps) * w + b, over each group of channels (Wu and He 2018)

    x: (n, c, ...)   w, b: (c,), may be left out. The channels form `num_groups` groups of
    neighbours. A cut of c separates whole groups first; the dims after c may be cut, too.
    Gradients as for LayerNorm.

    Args:
        num_groups: number of groups; must divide the number of channels.
        eps: added under the square root.

    Raises:
        InputError: `num_groups` is less than 1.
    """

    def __init__(self, num_groups: int, eps: float = 1e-5) -> None:
        self.num_groups = check_count("GroupNorm", "num_groups", num_groups)
        self.eps = eps

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        check_channels(shapes[0])
        groups, (size, rest) = self.num_groups, divmod(shapes[0][1], self.num_groups)
        if rest:
            raise ShapeError(f"{shapes[0][1]} channels do not form {groups} equal groups.")
        channels = f"(g={groups} k={size})"
        inner = dim_names(len(shapes[0]) - 2)
        left = " ".join(["n", channels, *(f"[{name}]" for name in inner)])
        return f"{left}{f', {channels}' * (len(shapes) - 1)} -> {' '.join(['n (g k)', *inner])}"

    def infer(self, x: Spec, *affine: Spec) -> Spec:
        spec = super().infer(x, *affine)
        if 0 in x.shape[1:]:
            raise ShapeError(f"there is nothing to normalise over, x has shape {x.shape}.")
        return spec

    def forward(self, ctx: Context, x: Array, w: Array | None = None, b: Array | None = None) -> Array:
        xp, dtype = ctx.xp, wider(x.dtype)
        num_rows, num_channels = x.shape[:2]
        num_inner, size = prod(x.shape[2:]), ctx.plan.sizes["k"]
        ctx.dims = " ".join(["k", *dim_names(x.ndim - 2)])
        ctx.count = ctx.sizes(ctx.dims)
        rows, inner = num_rows * (num_channels // size), size * num_inner
        # Samples, groups, channels of a group, pixels.
        shape = num_rows, num_channels // size, size, num_inner
        x_NGKS = xp.ascontiguousarray(x, dtype=dtype).reshape(shape)
        one_I = ctx.arrays.ones(inner, x_NGKS)

        def per_group(values: Array) -> Array:
            return values.reshape(*shape[:2], 1, 1)

        sums = ctx.sum_over(ctx.dims, ctx.arrays.matmul(x_NGKS.reshape(rows, inner), one_I))
        ctx.x_hat, y = fused(xp, normalize.centered)(x_NGKS, per_group(sums), ctx.count)
        squares = ctx.sum_over(ctx.dims, ctx.arrays.matmul(y.reshape(rows, inner), one_I))
        _, r = fused(xp, normalize.spread)(squares, ctx.count, self.eps)
        ctx.r = per_group(r)
        ctx.w, b = (v if v is None else v.astype(dtype, copy=False).reshape(*shape[1:3], 1) for v in (w, b))
        fused(xp, normalize.normalize)(y, ctx.x_hat, ctx.r, ctx.w, b)
        return y.reshape(x.shape).astype(x.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x_hat = ctx.xp, ctx.x_hat
        dy_NGKS = dy.astype(x_hat.dtype, copy=False).reshape(x_hat.shape)
        work = dy_NGKS * x_hat
        sums_NGK = xp.stack([dy_NGKS.sum(axis=3), work.sum(axis=3)])  # of dy, of dy x̂
        dx = None
        if ctx.needs[0]:
            weighted = sums_NGK if ctx.w is None else sums_NGK * ctx.w[..., 0]
            num_groups = x_hat.shape[0] * x_hat.shape[1]
            sums = ctx.sum_over(ctx.dims, weighted.sum(axis=3).reshape(2, num_groups)).reshape(2, *ctx.r.shape)
            gradient = fused(xp, normalize.row_gradient)
            dx = gradient(dy_NGKS, x_hat, ctx.r, ctx.w, *sums, ctx.count, ctx.arrays.reusable(work)).reshape(dy.shape)
        sums_NC = sums_NGK.reshape(2, *dy.shape[:2])
        grads = [ctx.gradient(i, sums_NC.dtype) for i in range(1, len(ctx.needs))]
        return (dx, *(ctx.arrays.sum_rows(sums_NC[1 - i], grad) for i, grad in enumerate(grads)))

    def exchanges(self, plan: Plan) -> Exchanges:
        x, size = plan.inputs[0], plan.sizes["k"]
        groups = x.shape[0], x.shape[1] // max(size, 1)
        dims, dtype = " ".join(["k", *dim_names(len(x.shape) - 2)]), wider(x.dtype)
        forward = Asked(dims, "sum", groups, dtype)
        return Exchanges((forward, forward), (Asked(dims, "sum", (2, *groups), dtype),))


@function()
def layer_norm(x: Any, weight: Any = None, bias: Any = None, num_dims: int = 1, eps: float = 1e-5) -> Tensor:
    """Normalise x over the last `num_dims` dims; weight and bias have the shape of these dims.

    Args:
        x: any shape, floating point.
        weight, bias: factor and summand of each element of these dims; None for 1 and 0.
        num_dims: number of last dims.
        eps: added under the square root.
    """
    return instance(LayerNorm, num_dims, eps)(as_tensor(x), *present(weight, bias))


@function()
def rms_norm(x: Any, weight: Any = None, num_dims: int = 1, eps: float | None = None) -> Tensor:
    """Divide x by its root mean square over the last `num_dims` dims; the weight has the shape of these dims.

    Args:
        x: any shape, floating point.
        weight: factor of each element of these dims; None for 1.
        num_dims: number of last dims.
        eps: added under the square root; None takes the machine epsilon of x's dtype.
    """
    return instance(RMSNorm, num_dims, eps)(as_tensor(x), *present(weight))


@function()
def group_norm(x: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    """Normalise each group of channels of x (n, c, ...); weight and bias are (c,).

    Args:
        x: (n, c, ...), floating point.
        num_groups: number of groups; it divides c.
        weight, bias: of each channel, (c,); None for 1 and 0.
        eps: added under the square root.
    """
    return instance(GroupNorm, num_groups, eps)(as_tensor(x), *present(weight, bias))
