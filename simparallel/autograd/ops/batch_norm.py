"""Batch normalisation (Ioffe and Szegedy 2015) for training and for inference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from simparallel.arrays.host import normalize
from simparallel.arrays.host.normalize import along_channels
from simparallel.arrays.host.sums import wider
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, check_float, instance
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused
from simparallel.base.checks import check_count
from simparallel.errors import InputError, ShapeError
from simparallel.layout.rule import dim_names
from simparallel.machine.achieved import CHANNEL_ITEMS_PER_S, OWN_BATCH_NORM
from simparallel.machine.device import DeviceWork


class AbstractNorm(Op):
    """A normalisation: y has the shape and the dtype of x, which is floating point."""

    fills_grad_buffers = True

    def infer(self, x: Spec, *others: Spec) -> Spec:
        check_float(x=x)
        return Spec(super().infer(x, *others).shape, x.dtype)

    def work(self, x: Spec, *affine: Spec) -> Work:
        return Work(7 * prod(x.shape), 9 * x.size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(9 * work.flops // 7, 12 * work.size_bytes // 9)

    def eager_work(self, plan: Plan) -> Work:
        # One pass reads x for the statistics, one reads it again and writes y; casts happen in registers.
        return Work(plan.work.flops, 3 * plan.inputs[0].size_bytes)

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # One pass reads dy and x for the sums, one reads both again and writes dx.
        flops = self.work_backward(needs, plan.work).flops
        return Work(flops, (2 + 3 * needs[0]) * plan.inputs[0].size_bytes)


class BatchNorm(AbstractNorm):
    """y = (x - mean) / sqrt(var + eps) * w + b.   x: (n, c, ...)   w, b: (c,), may be left out

    mean and var are computed for each channel of x, over all dims but c. These dims may be cut: the ranks then
    exchange sums, two of size c in forward and one of 2 c in backward. This is synchronised batch norm; there is no
    separate op for it. With `group_size`, each run of that many neighbouring slices has its own mean and var, as with
    MindSpore's attribute of this name: 1 is batch norm per device, without any exchange.

    With x̂ = (x - mean) r, r = 1 / sqrt(var + eps) and N elements a channel:
    dx = w r (dy - sum dy / N - x̂ sum(dy x̂) / N),  dw = sum(dy x̂),  db = sum dy.

    float16 is computed in float32; y has the dtype of x, not of w.

    Args:
        eps: added to the variance.
        observe: called in every forward as `observe(mean, var, count)`, with arrays (c,) and the number of elements
            per channel. The variance is biased, divided by `count`. With `group_size`, mean and var are averaged over
            all groups, so that they are equal on every rank; this takes one more exchange of 2 c.
        group_size: number of slices that share statistics, with the slices of n outermost; None for all. It must
            divide the number of slices, else the call raises StrategyError. A plain tensor is one slice.
        keeps_channels: forbid cuts of c, because the observer takes the statistics of all channels.

    Raises:
        InputError: `group_size` is less than 1.
    """

    def __init__(
        self,
        eps: float = 1e-5,
        observe: Callable[[Array, Array, int], None] | None = None,
        group_size: int | None = None,
        *,
        keeps_channels: bool = False,
    ) -> None:
        if group_size is not None:
            check_count("BatchNorm", "group_size", group_size)
        self.eps = eps
        self._observe, self._keeps_channels = observe, keeps_channels
        self.group_size = group_size

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        check_channels(shapes[0])
        inner = dim_names(len(shapes[0]) - 2)
        channels = "{c}" if self._keeps_channels else "c"
        left = " ".join([f"[n] {channels}", *(f"[{name}]" for name in inner)])
        return f"{left}{f', {channels}' * (len(shapes) - 1)} -> {' '.join(['n c', *inner])}"

    def forward(self, ctx: Context, x: Array, w: Array | None = None, b: Array | None = None) -> Array:
        xp, dtype = ctx.xp, wider(x.dtype)
        x = x.astype(dtype, copy=False)
        dims = ctx.dims = " ".join(["n", *dim_names(x.ndim - 2)])
        sums = ctx.sum_over(dims, ctx.arrays.channel_sums(x), self.group_size)
        # After the first sum: a context may count the elements during that exchange.
        count = ctx.count = ctx.sizes(dims, self.group_size)
        if count < 2:
            raise ShapeError(f"{self!r}: a single element per channel has no variance; x has shape {x.shape}.")
        ctx.x, ctx.mean, y, squares = ctx.arrays.centered(x, sums, count)
        squares = ctx.sum_over(dims, squares, self.group_size)
        mean, var, ctx.r, *weighted = fused(xp, normalize.channel_statistics)(sums, squares, w, count, self.eps)
        if self._observe is not None:
            self._observe(*self._mean_over_groups(ctx, mean, var), count)
        ctx.scale = weighted[0] if weighted else ctx.r
        ctx.arrays.map_channels(normalize.scale, [y, ctx.x], [ctx.scale, None, b, ctx.mean])
        return y.astype(ctx.plan.output.dtype, copy=False)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        # x in its own type, and the mean and 1 / sqrt(var + eps) of each channel.
        return (0,), 8 * plan.sizes["c"]

    def eager_kernels(
        self, work: DeviceWork, plan: Plan, needs: tuple[bool, ...] | None, memory_format: str
    ) -> DeviceWork:
        x, *affine = plan.inputs
        if affine and affine[0].dtype.itemsize == 2:
            work = work._replace(share=OWN_BATCH_NORM[needs is not None])
        if memory_format == "contiguous":
            # A block computes a channel.
            rate = x.shape[1] * CHANNEL_ITEMS_PER_S[needs is not None]
            work = work._replace(least_s=prod(x.shape) / rate if x.shape[1] else 0.0)
        return work

    def _mean_over_groups(self, ctx: Context, mean: Array, var: Array) -> tuple[Array, Array]:
        """Average the statistics over the groups: the running statistics must be equal on every rank."""
        if self.group_size is None:
            return mean, var
        share = prod(ctx.plan.sizes[dim] for dim in ctx.dims.split()) / ctx.sizes(ctx.dims)
        mean, var = ctx.sum_over(ctx.dims, ctx.xp.stack([mean, var]) * share)
        return mean, var

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x, r, scale = ctx.xp, ctx.x, ctx.r, ctx.scale
        dy = ctx.arrays.fusible(dy.astype(x.dtype, copy=False), x)
        means = [] if ctx.mean is None else [ctx.mean]
        # Sums of dy (db) and of dy x̂ (dw), together for a single exchange.
        sums, work = ctx.arrays.sums_of_channels(normalize.products, [dy, x], means)
        grads = [ctx.gradient(i, sums.dtype) for i in range(1, len(ctx.needs))]
        fused(xp, normalize.affine_gradients)(*sums, r, *(*grads, None, None)[:2])
        dx = None
        if ctx.needs[0]:
            totals = ctx.sum_over(ctx.dims, sums, self.group_size)
            work, dx = None if work is None else ctx.arrays.reusable(work), xp.empty_like(dy)
            of_channels = [scale, r, *totals, ctx.mean]
            ctx.arrays.map_channels(normalize.channel_gradient, [dx, dy, x, work], of_channels, ctx.count)
        return (dx, *grads)

    def exchanges(self, plan: Plan) -> Exchanges:
        x = plan.inputs[0]
        dims, dtype = " ".join(["n", *dim_names(len(x.shape) - 2)]), wider(x.dtype)
        both, one = (2, x.shape[1]), Asked(dims, "sum", (x.shape[1],), dtype, self.group_size)
        forward = [one, one]
        if self.group_size is not None and self._observe is not None:
            forward.append(Asked(dims, "sum", both, dtype))
        return Exchanges(tuple(forward), (Asked(dims, "sum", both, dtype, self.group_size),))


class BatchNormInference(Op):
    """y = (x - mean) / sqrt(var + eps) * w + b, mean and var given.   x: (n, c, ...)   the others: (c,)

    Inputs: x, mean, var, then w and b, which may be left out. Any dim may be cut, without an exchange.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        self.eps = eps

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        check_channels(shapes[0])
        names = " ".join(["n c", *dim_names(len(shapes[0]) - 2)])
        return f"{names}{', c' * (len(shapes) - 1)} -> {names}"

    def infer(self, x: Spec, *channels: Spec) -> Spec:
        check_float(x=x)
        return Spec(super().infer(x, *channels).shape, x.dtype)

    def forward(
        self, ctx: Context, x: Array, mean: Array, var: Array, w: Array | None = None, b: Array | None = None
    ) -> Array:
        dtype = wider(x.dtype)
        r = 1 / ctx.xp.sqrt(var.astype(dtype, copy=False) + self.eps)
        scale = r if w is None else (r * w).astype(dtype, copy=False)
        # Copy mean: it is the running mean, and a training batch may change it in place before backward.
        ctx.x, ctx.mean, ctx.r, ctx.w = x, mean.astype(dtype), r, w
        shift = -mean * scale if b is None else b - mean * scale
        y = ctx.xp.multiply(x, along_channels(scale, x.ndim), dtype=dtype)
        y += along_channels(shift, x.ndim)
        return y.astype(ctx.plan.output.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        r, w, needs = ctx.r, ctx.w, ctx.needs
        dy = dy.astype(r.dtype, copy=False)
        scale = r if w is None else (r * w).astype(r.dtype, copy=False)
        dx = dmean = dvar = dw = db = None
        if needs[0]:
            dx = dy * along_channels(scale, dy.ndim)
        if any(needs[1:]):
            db = ctx.arrays.channel_sums(dy)
            centered = ctx.x - along_channels(ctx.mean, dy.ndim)
            centered *= dy
            dw = ctx.arrays.channel_sums(centered) * r
            dmean, dvar = -scale * db, -0.5 * scale * r * dw
        return (dx, dmean, dvar, dw, db)[: len(needs)]

    def work(self, x: Spec, *channels: Spec) -> Work:
        return Work(2 * prod(x.shape), 4 * x.size_bytes)


def check_channels(shape: tuple[int, ...]) -> None:
    """Raise ShapeError unless there are a batch and a channel dim."""
    if len(shape) < 2:
        raise ShapeError(f"x needs dims (n, c, ...), got shape {shape}.")


def present(*values: Any) -> list[Tensor]:
    """Convert the inputs before the first None to Tensors. Raise InputError if others follow it."""
    tensors: list[Tensor] = []
    for i, value in enumerate(values):
        if value is None:
            if any(later is not None for later in values[i:]):
                raise InputError("a bias needs a weight: pass both, or the weight alone.")
            break
        tensors.append(as_tensor(value))
    return tensors


@function()
def batch_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    mean: Any = None,
    var: Any = None,
    eps: float = 1e-5,
    observe: Callable[[Any, Any, int], None] | None = None,
) -> Tensor:
    """Normalise each channel of x (n, c, ...), with its own statistics or with the given ones.

    Args:
        x: floating point.
        weight: (c,) or None.
        bias: (c,) or None.
        mean: (c,), given together with `var`; None to use mean and variance of x.
        var: (c,).
        eps: added to the variance.
        observe: called with the statistics of x, see `BatchNorm`.

    Raises:
        InputError: one of `mean` and `var` without the other.
    """
    affine = present(weight, bias)
    if (mean is None) is not (var is None):
        name, missing = ("var", "mean") if mean is None else ("mean", "var")
        raise InputError(
            f"batch_norm: {name} was given without {missing}; give both, or neither to use the statistics of x."
        )
    if mean is not None:
        given = as_tensor(mean), as_tensor(var)
        return instance(BatchNormInference, eps)(as_tensor(x), *given, *affine)
    op = instance(BatchNorm, eps) if observe is None else BatchNorm(eps, observe)
    return op(as_tensor(x), *affine)
