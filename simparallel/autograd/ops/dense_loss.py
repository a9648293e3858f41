"""Losses of an input and a target of the same shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, Work, check_float
from simparallel.autograd.ops.cast import cast
from simparallel.autograd.ops.loss import check_reduction, reducing
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, has_data
from simparallel.errors import InputError
from simparallel.layout.rule import dim_names


class AbstractElementLoss(Op):
    """A loss of each element of x and target, and of further inputs of the same shape, then reduced.

    Args:
        reduction: "mean" over all elements (their global number), "sum" or "none".
    """

    flops_per_element = 3

    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = check_reduction(self.name, reduction)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        names = " ".join(dim_names(len(shapes[0])))
        return f"{', '.join([names] * len(shapes))} -> {names if self.reduction == 'none' else ''}"

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        if len(shapes) < 2 or shapes[0] == shapes[1]:
            return None
        x, target = shapes[:2]
        way_out = f"target.reshape({x})" if prod(x) == prod(target) else "make the shapes equal"
        return f"x has shape {x}, but target has {target}: {way_out}"

    def infer(self, x: Spec, target: Spec, *more: Spec) -> Spec:
        check_float(x=x, target=target, **{f"input {i}": spec for i, spec in enumerate(more, 2)})
        return super().infer(x, target, *more)

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        """Compute the loss of each element, in a new array."""
        raise TypeError(f"{self.name} does not define _losses")

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        """Compute the derivative of each loss with respect to input `wanted` (0: x, 1: target), in a new array."""
        raise TypeError(f"{self.name} does not define _slopes")

    def forward(self, ctx: Context, x: Array, target: Array) -> Array:
        return self._reduced(ctx, x, target)

    def _reduced(self, ctx: Context, *arrays: Array) -> Array:
        """Compute the losses in the wider dtype, and reduce them."""
        dtype = ctx.plan.output.dtype
        ctx.dtype = wider(dtype)
        losses = self._losses(ctx, *[array.astype(ctx.dtype, copy=False) for array in arrays])
        if self.reduction != "none":
            losses = losses.sum() / self._divisor(ctx)
        return losses.astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        each = dy.astype(ctx.dtype, copy=False) / self._divisor(ctx)
        grads: list[Array | None] = [None] * len(ctx.needs)
        for i, needed in enumerate(ctx.needs):
            if needed:
                slopes = self._slopes(ctx, i)
                slopes *= each
                grads[i] = slopes
        return grads

    def _divisor(self, ctx: Context) -> int:
        if self.reduction != "mean":
            return 1
        return max(ctx.sizes(" ".join(dim_names(len(ctx.plan.inputs[0].shape)))), 1)

    def work(self, *inputs: Spec) -> Work:
        flops = self.flops_per_element * prod(inputs[0].shape)
        return Work(max(flops, 1), 2 * sum(spec.size_bytes for spec in inputs))


class MSE(AbstractElementLoss):
    """loss = (x - target) ** 2

    Args:
        reduction: "mean", "sum", or "none" for the loss of each element.
    """

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        ctx.difference = x - target
        return ctx.difference * ctx.difference

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        return ctx.difference * (-2 if wanted else 2)


class L1(AbstractElementLoss):
    """loss = |x - target|; the gradient at 0 is 0

    Args:
        reduction: "mean", "sum", or "none" for the loss of each element.
    """

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        difference = x - target
        ctx.sign = ctx.xp.sign(difference)
        return abs(difference)

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        return -ctx.sign if wanted else ctx.sign.copy()


class BinaryCrossEntropyWithLogits(AbstractElementLoss):
    """loss = max(x, 0) - x target + ln(1 + e ** -|x|), x a logit and target in 0 … 1

    Equal to -target ln s - (1 - target) ln(1 - s) with s = 1 / (1 + e ** -x), and finite for all
    finite x. Backward: dx = s - target. With a third input p of the same shape, the loss is
    -p target ln s - (1 - target) ln(1 - s), and dx = (1 - target + p target) s - p target.

    Args:
        reduction: "mean", "sum", or "none" for the loss of each element.
    """

    # An exponential and a logarithm, by convention 10 each, and the arithmetic.
    flops_per_element = 25

    def forward(self, ctx: Context, x: Array, target: Array, p: Array | None = None) -> Array:
        return self._reduced(ctx, x, target, *(() if p is None else (p,)))

    def _losses(self, ctx: Context, x: Array, target: Array, p: Array | None = None) -> Array:
        xp = ctx.xp
        ctx.x, ctx.target, ctx.p = x, target, p
        # In (0, 1]: never overflows.
        small = xp.exp(-abs(x))
        losses = xp.log1p(small)
        if ctx.needs[0]:
            sigmoid = xp.where(x < 0, small, xp.ones_like(small))
            small += 1
            sigmoid /= small
            ctx.sigmoid = sigmoid
        # The losses of a target of 1, -ln s, and of a target of 0, -ln(1 - s).
        if p is not None:
            ctx.ones, ctx.zeros = losses - xp.minimum(x, 0), losses + xp.maximum(x, 0)
            return p * target * ctx.ones + (1 - target) * ctx.zeros
        losses += xp.maximum(x, 0)
        losses -= x * target
        return losses

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        if ctx.p is None:
            return -ctx.x if wanted else ctx.sigmoid - ctx.target
        if wanted == 0:
            weighted = ctx.p * ctx.target
            return (1 - ctx.target + weighted) * ctx.sigmoid - weighted
        return ctx.p * ctx.ones - ctx.zeros if wanted == 1 else ctx.target * ctx.ones


class BinaryCrossEntropy(AbstractElementLoss):
    """loss = -target ln x - (1 - target) ln(1 - x), x a probability and target in 0 … 1

    As in PyTorch, a logarithm is at least -100, and the denominator of
    dx = (x - target) / (x (1 - x)) is at least 1e-12. For logits, BinaryCrossEntropyWithLogits is
    both safer and faster.

    Args:
        reduction: "mean", "sum", or "none" for the loss of each element.

    Raises:
        InputError: in forward, x holds values outside of 0 … 1, or NaN.
    """

    # Two logarithms, by convention 10 each, and the arithmetic.
    flops_per_element = 25

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        xp = ctx.xp
        if has_data(x) and x.size and not (x.min() >= 0 and x.max() <= 1):
            raise InputError(
                f"BinaryCrossEntropy: x holds {float(x.min())} … {float(x.max())}, expected probabilities in 0 … 1. "
                "Apply a sigmoid first, or use BinaryCrossEntropyWithLogits."
            )
        ctx.x, ctx.target = x, target
        # Not 0 in float32, and its logarithm is below -100.
        tiny = 1e-44
        log_x = xp.maximum(xp.log(xp.maximum(x, tiny)), -100)
        log_rest = xp.maximum(xp.log(xp.maximum(1 - x, tiny)), -100)
        log_x -= log_rest
        if ctx.needs[1]:
            ctx.slope = -log_x
        log_x *= target
        log_x += log_rest
        log_x *= -1
        return log_x

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        if wanted:
            return ctx.slope.copy()
        slopes = ctx.x - ctx.target
        slopes /= ctx.xp.maximum(ctx.x * (1 - ctx.x), 1e-12)
        return slopes


class Huber(AbstractElementLoss):
    """loss = d² / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = x - target (Huber 1964)

    Args:
        reduction: "mean" over all elements (their global number), "sum" or "none".
        delta: a finite number above 0.

    Raises:
        InputError: an unknown reduction or a bad `delta`.
    """

    flops_per_element = 6

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = _check_width(self.name, "delta", delta)
        if not self.delta:
            raise InputError(f"Huber: delta={delta!r} must be above 0.")

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        ctx.difference = x - target
        return _huber(ctx, self.delta)

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        return _clipped(ctx, self.delta, -1.0 if wanted else 1.0)


class SmoothL1(AbstractElementLoss):
    """loss = d² / (2 beta) where |d| < beta, else |d| - beta / 2, with d = x - target (Girshick 2015, "Fast R-CNN")

    Args:
        reduction: "mean" over all elements (their global number), "sum" or "none".
        beta: a finite number of 0 or more; 0 gives `L1`.

    Raises:
        InputError: an unknown reduction or a bad `beta`.
    """

    flops_per_element = 6

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = _check_width(self.name, "beta", beta)

    def _losses(self, ctx: Context, x: Array, target: Array) -> Array:
        ctx.difference = x - target
        return _huber(ctx, self.beta) / self.beta if self.beta else abs(ctx.difference)

    def _slopes(self, ctx: Context, wanted: int) -> Array:
        sign = -1.0 if wanted else 1.0
        return _clipped(ctx, self.beta, sign / self.beta) if self.beta else sign * ctx.xp.sign(ctx.difference)


def _huber(ctx: Context, width: float) -> Array:
    """Return s (|d| - s / 2) with s = min(|d|, width): both branches in one formula."""
    far = abs(ctx.difference)
    near = ctx.xp.minimum(far, width)
    far -= 0.5 * near
    far *= near
    return far


def _clipped(ctx: Context, width: float, factor: float) -> Array:
    slopes = ctx.xp.clip(ctx.difference, -width, width)
    slopes *= factor
    return slopes


def _check_width(who: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise InputError(f"{who}: {name}={value!r} must be a finite number of 0 or more.")
    return float(value)


@function()
def mse_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Return (x - target) ** 2 for two tensors of one shape.

    Args:
        x, target: two tensors of one shape.
        reduction: "mean", "sum", or "none" for the loss of each element.
    """
    return reducing(MSE, reduction)(as_tensor(x), as_tensor(target))


@function()
def l1_loss(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Return |x - target| for two tensors of one shape.

    Args:
        x, target: two tensors of one shape.
        reduction: "mean", "sum", or "none" for the loss of each element.
    """
    return reducing(L1, reduction)(as_tensor(x), as_tensor(target))


@function()
def binary_cross_entropy(x: Any, target: Any, reduction: str = "mean") -> Tensor:
    """Return -target ln x - (1 - target) ln(1 - x) for probabilities x; logarithms are at least -100.

    Args:
        x: probabilities, any shape.
        target: probabilities, the shape of x.
        reduction: "mean", "sum", or "none" for the loss of each element.
    """
    return reducing(BinaryCrossEntropy, reduction)(as_tensor(x), as_tensor(target))


@function()
def binary_cross_entropy_with_logits(x: Any, target: Any, reduction: str = "mean", *, pos_weight: Any = None) -> Tensor:
    """Return the binary cross-entropy of sigmoid(x), finite for every finite x.

    Args:
        x: logits, floating point.
        target: of the same shape, 0 … 1.
        reduction: "mean", "sum" or "none".
        pos_weight: the weight of the term -target ln sigmoid(x). It broadcasts to the shape of x, so (c,) holds one
            weight for each class of x (n, c).
    """
    op, x = reducing(BinaryCrossEntropyWithLogits, reduction), as_tensor(x)
    if pos_weight is None:
        return op(x, as_tensor(target))
    return op(x, as_tensor(target), cast(pos_weight, x.dtype).expand(*x.shape))


@function()
def huber_loss(x: Any, target: Any, reduction: str = "mean", delta: float = 1.0) -> Tensor:
    """Return d² / 2 where |d| <= delta, else delta (|d| - delta / 2), with d = x - target of one shape.

    Args:
        x, target: two tensors of one shape.
        reduction: "mean", "sum", or "none" for the loss of each element.
        delta: where the square turns into a line, above 0.
    """
    return reducing(Huber, reduction, delta)(as_tensor(x), as_tensor(target))


@function()
def smooth_l1_loss(x: Any, target: Any, reduction: str = "mean", beta: float = 1.0) -> Tensor:
    """Return d² / (2 beta) where |d| < beta, else |d| - beta / 2, with d = x - target of one shape.

    Args:
        x, target: two tensors of one shape.
        reduction: "mean", "sum", or "none" for the loss of each element.
        beta: where the square turns into a line, 0 or more; 0 gives `l1_loss`.
    """
    return reducing(SmoothL1, reduction, beta)(as_tensor(x), as_tensor(target))
