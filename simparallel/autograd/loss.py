"""Losses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from simparallel.autograd.op import Context, Op, Spec, Work
from simparallel.backend import Array, get_namespace
from simparallel.errors import DTypeError, InputError, LabelError

REDUCTIONS = ("mean", "sum", "none")


class CrossEntropy(Op):
    """loss = -log softmax(logits)[label].   logits: (n, v)   labels: (n,) integers

    Fused and safe: log-sum-exp with each row's own maximum, so that no finite logit gives NaN
    or infinity. The class dim may be cut: the row's maximum, its sum of exponentials and its
    label's logit are then exchanged (Shoeybi et al. 2019, "Megatron-LM", section 3), and
    nothing in backward.

    Args:
        reduction: "mean" over all rows (the global number of rows), "sum" or "none".
    """

    def __init__(self, reduction: str = "mean") -> None:
        if reduction not in REDUCTIONS:
            raise InputError(f"CrossEntropy: reduction={reduction!r}, choose from {', '.join(REDUCTIONS)}.")
        self.reduction = reduction

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        return "n [v], n -> n" if self.reduction == "none" else "n [v], n -> "

    def infer(self, logits: Spec, labels: Spec) -> Spec:
        if labels.dtype.kind not in "iu":
            raise DTypeError(f"labels have dtype {labels.dtype}, need integers; use labels.astype('int64').")
        if logits.dtype.kind != "f":
            raise DTypeError(f"logits have dtype {logits.dtype}, need floating point.")
        shape = super().infer(logits, labels).shape
        return Spec(shape, logits.dtype)

    def forward(self, ctx: Context, logits: Array, labels: Array) -> Array:
        xp = ctx.xp
        num_rows, num_local = logits.shape
        _check_labels(labels, ctx.size("v"))
        local = labels.astype("int64", copy=False) - ctx.offset("v")
        inside = (local >= 0) & (local < num_local)  # all True unless the class dim is cut
        ctx.rows, ctx.columns = xp.arange(num_rows)[inside], local[inside]

        largest = ctx.max_over("v", logits.max(axis=1, keepdims=True))  # (n, 1)
        shifted = logits - largest  # (n, v), <= 0
        target = xp.zeros(num_rows, dtype=logits.dtype)
        target[ctx.rows] = shifted[ctx.rows, ctx.columns]
        target = ctx.sum_over("v", target)
        exps = xp.exp(shifted, out=shifted)
        total = ctx.sum_over("v", exps.sum(axis=1, keepdims=True))  # (n, 1), >= 1
        losses = xp.log(total[:, 0]) - target
        exps /= total
        ctx.softmax = exps
        if self.reduction == "none":
            return losses
        return losses.sum() / self._divisor(ctx)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        row_dy = dy if self.reduction == "none" else (dy / self._divisor(ctx)).reshape(1)
        dlogits = ctx.softmax * row_dy[:, None]
        dlogits[ctx.rows, ctx.columns] -= ctx.xp.broadcast_to(row_dy, (dlogits.shape[0],))[ctx.rows]
        return dlogits, None

    def _divisor(self, ctx: Context) -> int:
        return ctx.size("n") if self.reduction == "mean" else 1

    def work(self, logits: Spec, labels: Spec) -> Work:
        # per element: maximum, subtraction, exponential (10 by convention), sum, division
        return Work(14 * prod(logits.shape), 4 * logits.size_bytes + labels.size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.flops // 14 * 2, work.size_bytes // 2)


def _check_labels(labels: Array, num_classes: int) -> None:
    if labels.size == 0 or (labels.min() >= 0 and labels.max() < num_classes):
        return
    xp = get_namespace(labels)
    position = int(xp.argmax((labels < 0) | (labels >= num_classes)))
    label = int(labels[position])
    raise LabelError(
        f"CrossEntropy: label {label} at position {position} is outside of the {num_classes} classes "
        f"0 … {num_classes - 1}. Fix the labels, or widen the last layer to {max(label + 1, num_classes)} outputs.",
        label=label, position=position, num_classes=num_classes,
    )  # fmt: skip
