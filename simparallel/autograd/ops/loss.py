"""Losses of scores of classes, with integer labels or probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import Any

from simparallel.arrays.host.sums import exponentials, extreme, wider
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, check_float, instance
from simparallel.autograd.ops.embedding import one_hot
from simparallel.autograd.ops.labels import Picked, pick
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, fused
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.layout.rule import dim_names

REDUCTIONS = ("mean", "sum", "none")


def check_reduction(who: str, reduction: Any) -> str:
    """Return `reduction`. Raise InputError if it is not one of REDUCTIONS."""
    if not isinstance(reduction, str) or reduction not in REDUCTIONS:
        by_name = "" if isinstance(reduction, str) else " Pass the weights of the classes by name: weight=..."
        raise InputError(f"{who}: reduction={reduction!r:.80}, choose from {', '.join(REDUCTIONS)}.{by_name}")
    return reduction


@cache
def _rows_of(ndim: int) -> str:
    """Return the names of the dims of scores (n, v, d0, ...) but that of the classes."""
    return " ".join(["n", *dim_names(ndim - 2)])


def _as_rows(scores: Array) -> Array:
    """Return scores (n, v, d0, ...) as rows (n d0 ..., v)."""
    n, v, *inner = scores.shape
    return scores.transpose(0, *range(2, scores.ndim), 1).reshape(n * prod(inner), v)


def _as_scores(rows: Array, shape: tuple[int, ...]) -> Array:
    """Return rows (n d0 ..., v) as scores (n, v, d0, ...) of this shape."""
    n, v, *inner = shape
    return rows.reshape(n, *inner, v).transpose(0, -1, *range(1, len(shape) - 1))


class AbstractLabelLoss(Op):
    """A loss of scores (n, v) and integer labels (n,), with an optional weight (v,) for each class.

    Scores may be (n, v, d0, ...), with labels (n, d0, ...): a row is then the scores of one label.

    Args:
        reduction: "mean", "sum" or "none". The mean divides by the global number of rows; with
            weights or ignored rows, by the global sum of the weights of all rows not ignored.
            The mean of no rows is 0.
        ignore_index: rows with this label are ignored; None ignores none.
    """

    def __init__(self, reduction: str = "mean", ignore_index: int | None = None) -> None:
        self.reduction = check_reduction(self.name, reduction)
        self.ignore_index = ignore_index

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        rows, weight = _rows_of(len(shapes[0])), ", [v]" if len(shapes) == 3 else ""
        return f"n [v]{rows[1:]}, {rows}{weight} -> {rows if self.reduction == 'none' else ''}"

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        if len(shapes) < 2:
            return None
        rows, labels = shapes[:2]
        if len(rows) < 2:
            return f"the scores of the classes have shape {rows}, expected (n, classes), or (n, classes, ...)"
        if labels == rows:
            return (
                f"labels have the shape {labels} of the scores, as one-hot vectors have; give the number of the class, "
                "labels.argmax(1), or use softmax_cross_entropy_with_logits"
            )
        if len(rows) > 2 and labels != (rows[0], *rows[2:]):
            return f"rows {rows} (n, v, ...) need labels (n, ...), got {labels}."
        if len(rows) == 2 and len(labels) != 1:
            flat = "; labels.reshape(-1) has it" if prod(labels) == rows[0] else ""
            return (
                f"labels have shape {labels}, expected one for each row of the scores {rows}: shape ({rows[0]},){flat}"
            )
        if labels[0] != rows[0]:
            return f"the scores {rows} have {rows[0]} rows, but there are {labels[0]} labels: give one for each row"
        if len(shapes) == 2:
            return None
        return f"the weights have shape {shapes[2]}, expected one for each of the {rows[1]} classes: ({rows[1]},)"

    def infer(self, rows: Spec, labels: Spec, *weight: Spec) -> Spec:
        if labels.dtype.kind not in "iu":
            raise DTypeError(f"labels have dtype {labels.dtype}, expected integers; use labels.astype('int64').")
        if rows.dtype.kind != "f":
            raise DTypeError(f"logits have dtype {rows.dtype}, expected floating point.")
        shape = super().infer(rows, labels, *weight).shape
        return Spec(shape, rows.dtype)

    def _reduce(self, ctx: Context, losses: Array, kept: Array | None, row_weight: Array | None) -> Array:
        """Reduce the losses of the rows; keep the divisor and the weight of each row for backward."""
        if kept is not None:
            row_weight = kept.astype(losses.dtype) if row_weight is None else row_weight * kept
            losses = ctx.xp.where(kept, losses, ctx.xp.zeros_like(losses))
        # None: every row has weight 1.
        ctx.row_weight = row_weight
        ctx.divisor = 1
        if self.reduction == "none":
            return losses.astype(ctx.plan.output.dtype, copy=False).reshape(ctx.plan.output.shape)
        if self.reduction == "mean":
            rows = _rows_of(len(ctx.plan.inputs[0].shape))
            ctx.divisor = max(prod(map(ctx.size, rows.split())), 1)
            if row_weight is not None:
                total = ctx.sum_over(rows, row_weight.sum())
                ctx.divisor = ctx.xp.where(total == 0, ctx.xp.ones_like(total), total)
        return (losses.sum() / ctx.divisor).astype(ctx.plan.output.dtype)

    def _sums(self, plan: Plan, count: int) -> tuple[Asked, ...]:
        """Describe the exchanges: `count` sums over the classes for each row, and the divisor of the mean."""
        scores, labels, *weight = plan.inputs
        dtype = wider(scores.dtype)
        sums = Asked("v", "sum", (count, prod(labels.shape)), dtype)
        is_weighted = bool(weight) or self.ignore_index is not None
        divisor = Asked(_rows_of(len(scores.shape)), "sum", (), dtype)
        return (sums, divisor) if is_weighted and self.reduction == "mean" else (sums,)

    def _row_dy(self, ctx: Context, dy: Array, dtype: Any) -> Array:
        """Return the cotangent of each row's loss, (rows,) or (1,)."""
        # The divisor may exceed the largest float16, so divide in the wider dtype.
        dy = dy.astype(dtype, copy=False).reshape(-1)
        return dy if self.reduction == "none" else dy / ctx.divisor

    def work(self, scores: Spec, labels: Spec, *weight: Spec) -> Work:
        num_rows = prod(labels.shape)
        return Work(max(2 * num_rows, 1), num_rows * scores.dtype.itemsize + labels.size_bytes)


class CrossEntropy(AbstractLabelLoss):
    """loss = -w[label] log softmax(logits)[label].   logits: (n, v)   labels: (n,) integers   w: (v,) or absent

    Logits may be (n, v, d0, ...), with labels (n, d0, ...).

    With label smoothing e (Szegedy et al. 2016, "Rethinking the Inception architecture", section 7)
    the target is (1 - e) at the label plus e / v on every class; the weights then apply to the
    term of each class, as in PyTorch. No gradient flows to the weights.

    Log-softmax and loss are fused: log-sum-exp with the maximum of each row, so that no finite
    logit gives NaN or infinity. The class dim may be cut: the ranks exchange the maximum of each
    row, then its sum of exponentials and its label's logit in one collective (Shoeybi et al. 2019,
    "Megatron-LM", section 3), and nothing in backward.

    Args:
        reduction: "mean", "sum", or "none" for the loss of each row.
        ignore_index: a label whose rows count neither in the loss nor in the mean.
        label_smoothing: e, in 0 … 1.

    Raises:
        InputError: an unknown reduction, or label_smoothing outside of 0 … 1.
        LabelError: in forward, a label is not a class; on a GPU when the host next reads a value.
    """

    def __init__(self, reduction: str = "mean", ignore_index: int | None = None, label_smoothing: float = 0.0) -> None:
        super().__init__(reduction, ignore_index)
        if not 0 <= label_smoothing <= 1:
            raise InputError(f"CrossEntropy: label_smoothing={label_smoothing!r} must be within 0 … 1.")
        self.label_smoothing = label_smoothing

    def forward(self, ctx: Context, logits: Array, labels: Array, weight: Array | None = None) -> Array:
        xp, smoothing = ctx.xp, self.label_smoothing
        dtype = xp.promote_types(logits.dtype, "float32")
        if logits.ndim > 2:
            logits = _as_rows(logits)
        num_rows, num_local = logits.shape
        picked = ctx.picked = pick(ctx, labels, num_local, self.ignore_index, self.name)
        largest = ctx.max_over("v", extreme(xp, logits, 1))  # (n, 1)
        # (n, v): x - largest, needed for smoothing only, and its exponentials
        keeps_shifted = smoothing > 0
        *shifted, ctx.exps = fused(xp, exponentials, dtype=dtype, keeps_shifted=keeps_shifted)(logits, largest)

        # Rows of `sums`, each (n,): the sum of exponentials; the label's logit; with weights, the label's
        # weight; with smoothing, the sum of all (weighted) logits and the sum of all weights.
        sums = xp.empty((2 + (weight is not None) + 2 * (smoothing > 0), num_rows), dtype=dtype)
        ctx.exps.sum(axis=1, out=sums[0])
        sums[1] = picked.of(ctx, logits, num_rows)
        is_whole = picked.rows.shape[0] == num_rows
        # Only for the rows whose labels are in this slice.
        sums[1] -= largest[:, 0] if is_whole else picked.of(ctx, xp.broadcast_to(largest, logits.shape), num_rows)
        if weight is not None:
            ctx.weight = weight = weight.astype(dtype, copy=False)
            sums[2] = picked.of(ctx, weight, num_rows)
        if smoothing:
            sums[-2] = shifted[0].sum(axis=1) if weight is None else ctx.arrays.matmul(shifted[0], weight)
            sums[-1] = num_local if weight is None else weight.sum()
        sums = ctx.sum_over("v", sums)

        ctx.total = sums[0]
        log_total = xp.log(sums[0])
        losses = log_total - sums[1]
        row_weight = None if weight is None else sums[2]
        if row_weight is not None:
            losses *= row_weight
        if smoothing:
            losses *= 1 - smoothing
            losses += (smoothing / ctx.size("v")) * (sums[-1] * log_total - sums[-2])
            ctx.all_weights = sums[-1]
        return self._reduce(ctx, losses, picked.kept, row_weight)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        exps, picked, smoothing = ctx.exps, ctx.picked, self.label_smoothing
        row_dy = self._row_dy(ctx, dy, exps.dtype)
        at_label = row_dy if ctx.row_weight is None else row_dy * ctx.row_weight
        # dlogits = everywhere * softmax - at_label at the label, minus the smoothed target on every class.
        everywhere = at_label
        if smoothing:
            at_label = (1 - smoothing) * at_label
            each = (smoothing / ctx.size("v")) * row_dy
            if picked.kept is not None:
                each = each * picked.kept
            everywhere = at_label + each * ctx.all_weights
        dlogits = exps * (everywhere / ctx.total)[:, None]
        if smoothing:
            dlogits -= each[:, None] if len(ctx.needs) == 2 else each[:, None] * ctx.weight
        _subtract_at(ctx, dlogits, picked, at_label)
        if len(shape := ctx.plan.inputs[0].shape) > 2:
            dlogits = _as_scores(dlogits, shape)
        return (dlogits, None, None)[: len(ctx.needs)]

    def exchanges(self, plan: Plan) -> Exchanges:
        logits, labels, *weight = plan.inputs
        largest = Asked("v", "max", (prod(labels.shape), 1), logits.dtype)
        count = 2 + len(weight) + 2 * (self.label_smoothing > 0)
        return Exchanges((largest, *self._sums(plan, count)))

    def work(self, logits: Spec, labels: Spec, *weight: Spec) -> Work:
        # Per element: maximum, subtraction, exponential (10 by convention), sum, division.
        return Work(14 * prod(logits.shape), 4 * logits.size_bytes + labels.size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(work.flops // 14 * 2, work.size_bytes // 2)

    def eager_work(self, plan: Plan) -> Work:
        # A log-softmax, whose rows stay in on-chip memory, and a look-up.
        return Work(plan.work.flops, 2 * plan.inputs[0].size_bytes + plan.inputs[1].size_bytes)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        # The logarithms.
        return (1,), plan.inputs[0].size_bytes

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # The look-up's gradient is written whole; with the logarithms it becomes that of the logits.
        return Work(self.work_backward(needs, plan.work).flops, 4 * plan.inputs[0].size_bytes)


class NLL(AbstractLabelLoss):
    """loss = -w[label] logp[label].   logp: (n, v) log-probabilities   labels: (n,) integers   w: (v,) or absent

    logp may be (n, v, d0, ...), with labels (n, d0, ...). The class dim may be cut: the ranks exchange the label's
    element. No gradient flows to the weights.

    Args:
        reduction: "mean", "sum", or "none" for the loss of each row.
        ignore_index: a label whose rows count neither in the loss nor in the mean.
    """

    def forward(self, ctx: Context, logp: Array, labels: Array, weight: Array | None = None) -> Array:
        dtype = wider(logp.dtype)
        logp = _as_rows(logp)
        num_rows, num_local = logp.shape
        picked = ctx.picked = pick(ctx, labels, num_local, self.ignore_index, self.name)
        sums = ctx.xp.zeros((1 + (weight is not None), num_rows), dtype=dtype)
        sums[0] = picked.of(ctx, logp, num_rows)
        if weight is not None:
            sums[1] = picked.of(ctx, weight, num_rows)
        sums = ctx.sum_over("v", sums)
        row_weight = None if weight is None else sums[1]
        losses = -sums[0] if row_weight is None else -sums[0] * row_weight
        return self._reduce(ctx, losses, picked.kept, row_weight)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        logp, labels, *_ = ctx.plan.inputs
        row_dy = self._row_dy(ctx, dy, wider(logp.dtype))
        dlogp = ctx.xp.zeros((prod(labels.shape), logp.shape[1]), dtype=logp.dtype)
        _subtract_at(ctx, dlogp, ctx.picked, row_dy if ctx.row_weight is None else row_dy * ctx.row_weight)
        return (_as_scores(dlogp, logp.shape), None, None)[: len(ctx.needs)]

    def exchanges(self, plan: Plan) -> Exchanges:
        return Exchanges(self._sums(plan, len(plan.inputs) - 1))


class SoftmaxCrossEntropyWithLogits(Op):
    """loss = -sum over v of labels * log softmax(logits).   logits, labels: (n, v) or (n, v, d0, ...)

    The labels are probabilities, or any weights of the classes. The loss is finite for all finite
    logits. The class dim may be cut: the ranks exchange the maximum, then three sums in one
    collective, and nothing in backward.

    Args:
        reduction: "mean" over all rows (the global number of rows), "sum" or "none".
    """

    def __init__(self, reduction: str = "mean") -> None:
        self.reduction = check_reduction(self.name, reduction)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        rows = _rows_of(len(shapes[0]))
        return f"n [v]{rows[1:]}, n [v]{rows[1:]} -> {rows if self.reduction == 'none' else ''}"

    def infer(self, logits: Spec, labels: Spec) -> Spec:
        check_float(logits=logits, labels=labels)
        return super().infer(logits, labels)

    def forward(self, ctx: Context, logits: Array, labels: Array) -> Array:
        xp, dtype = ctx.xp, wider(ctx.plan.output.dtype)
        logits, labels = _as_rows(logits), _as_rows(labels)
        largest = ctx.max_over("v", extreme(xp, logits, 1))
        shifted = xp.subtract(logits, largest, dtype=dtype)
        exps = xp.exp(shifted)
        ctx.labels = labels
        sums = xp.stack([exps.sum(axis=1), ctx.arrays.einsum("nv,nv->n", shifted, labels), labels.sum(axis=1)])
        sums = ctx.sum_over("v", sums)
        ctx.label_sum, log_total = sums[2], xp.log(sums[0])
        losses = log_total * sums[2] - sums[1]
        ctx.softmax = xp.divide(exps, sums[0][:, None], out=exps)
        if ctx.needs[1]:
            ctx.logp = xp.subtract(shifted, log_total[:, None], out=shifted)
        if self.reduction != "none":
            losses = losses.sum() / self._divisor(ctx)
        return losses.astype(ctx.plan.output.dtype, copy=False).reshape(ctx.plan.output.shape)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        shape = ctx.plan.inputs[0].shape
        # The divisor may exceed the largest float16, so divide in the wider dtype.
        row_dy = dy.astype(ctx.softmax.dtype, copy=False).reshape(-1, 1)
        row_dy = row_dy / self._divisor(ctx)
        dlogits = dlabels = None
        if ctx.needs[0]:
            dlogits = ctx.softmax * ctx.label_sum[:, None]
            dlogits -= ctx.labels
            dlogits *= row_dy
            dlogits = _as_scores(dlogits, shape)
        if ctx.needs[1]:
            dlabels = _as_scores(ctx.logp * -row_dy, shape)
        return dlogits, dlabels

    def _divisor(self, ctx: Context) -> int:
        return max(ctx.sizes(_rows_of(len(ctx.plan.inputs[0].shape))), 1) if self.reduction == "mean" else 1

    def exchanges(self, plan: Plan) -> Exchanges:
        (n, _, *inner), dtype = plan.inputs[0]
        num_rows = n * prod(inner)
        sums = Asked("v", "sum", (3, num_rows), wider(plan.output.dtype))
        return Exchanges((Asked("v", "max", (num_rows, 1), dtype), sums))

    def work(self, logits: Spec, labels: Spec) -> Work:
        # Per element: maximum, subtraction, exponential (10 by convention), sum, division, product, sum.
        return Work(17 * prod(logits.shape), 5 * logits.size_bytes + 2 * labels.size_bytes)


def _subtract_at(ctx: Context, target: Array, picked: Picked, values: Array) -> None:
    """Subtract values[i] from target[i, label i], for the labels in this slice."""
    if values.shape[0] != target.shape[0] or picked.rows.shape[0] != values.shape[0]:
        values = ctx.xp.broadcast_to(values, target.shape[:1])[picked.rows]
    target[picked.rows, picked.columns] -= values.astype(target.dtype, copy=False)


def reducing(op: Any, reduction: Any, *settings: Any) -> Any:
    """Return the loss op with these settings, after checking them."""
    try:
        return instance(op, reduction, *settings)
    except TypeError:  # an array in place of `reduction` cannot be a key of the cache
        check_reduction(op.name, reduction)
        raise


def _label_loss(op: Any, scores: Any, labels: Any, weight: Any) -> Tensor:
    return op(scores, labels) if weight is None else op(scores, labels, as_tensor(weight).detach())


@function()
def cross_entropy(
    logits: Any,
    labels: Any,
    reduction: str = "mean",
    *,
    weight: Any = None,
    ignore_index: int | None = None,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return -log softmax(logits)[label].   logits: (n, v) or (n, v, ...)   labels: (n,) or (n, ...), 0 … v-1

    Floating-point labels with the shape of the logits are probabilities p of the classes; the loss is then
    -sum of p log softmax(logits) over the classes.

    Args:
        logits: floating point.
        labels: integers, or probabilities.
        reduction: "mean", "sum" or "none".
        weight: (v,), the weight of each class.
        ignore_index: rows with this label are ignored. The default is None, not PyTorch's -100: a label outside of
            the classes is an error unless the caller names it here.
        label_smoothing: this share of the target is spread evenly over all classes.
    """
    op = reducing(CrossEntropy, reduction, ignore_index, label_smoothing)
    x, target = as_tensor(logits), as_tensor(labels)
    if target._data.dtype.kind == "f" and x.ndim > 1 and target.shape == x.shape:
        return _probability_loss(x, target, op, weight)
    return _label_loss(op, x, target, weight)


def _probability_loss(x: Tensor, target: Tensor, op: Any, weight: Any) -> Tensor:
    """Return the cross-entropy with class probabilities; the mean divides by the number of rows, as in PyTorch."""
    if op.ignore_index is not None:
        raise InputError("cross_entropy: ignore_index applies to labels, but the target holds probabilities.")
    if op.label_smoothing:
        target = target * (1 - op.label_smoothing) + op.label_smoothing / x.shape[1]
    if weight is not None:
        target = target * as_tensor(weight).detach().reshape(-1, *(1,) * (x.ndim - 2))
    return reducing(SoftmaxCrossEntropyWithLogits, op.reduction)(x, target)


@function()
def nll_loss(
    logp: Any, labels: Any, reduction: str = "mean", *, weight: Any = None, ignore_index: int | None = None
) -> Tensor:
    """Return -logp[label], for log-probabilities. Arguments as for `cross_entropy`."""
    return _label_loss(reducing(NLL, reduction, ignore_index), as_tensor(logp), as_tensor(labels), weight)


@function()
def softmax_cross_entropy_with_logits(logits: Any, labels: Any, reduction: str = "mean") -> Tensor:
    """Return -sum of labels * log softmax(logits).   logits, labels: (n, v)

    Args:
        logits: scores of the classes, (n, v).
        labels: probabilities of the classes, (n, v).
        reduction: "mean" over the rows, "sum", or "none" for the loss of each row.
    """
    return reducing(SoftmaxCrossEntropyWithLogits, reduction)(as_tensor(logits), as_tensor(labels))


@function()
def cross_entropy_expand(logits: Any, labels: Any, sparse: bool = True) -> Tensor:
    """Return the mean cross-entropy, computed by a chain of small ops that can be sharded one by one.

    The ops are those of MindSpore's `SoftmaxCrossEntropyExpand`: ReduceMax, Sub, Exp, ReduceSum, OneHot, Mul,
    ReduceSum, ReduceMean. MindSpore takes the logarithm after the division, and gives log(0) * 0 = NaN for a float32
    logit more than about 104 below the largest of its row. Here the logarithm of the sum is subtracted instead:
    log(e^z / s) = z - log s, which is finite.

    Args:
        logits: (n, v) floating point.
        labels: (n,) integers if `sparse`, else (n, v) probabilities.
        sparse: see `labels`.

    Raises:
        ShapeError: logits that are not (n, v).
    """
    z = as_tensor(logits)
    if z.ndim != 2:
        raise ShapeError(f"cross_entropy_expand: logits have shape {z.shape}, expected (n, v).")
    # Softmax does not depend on a shift of its row, so the maximum needs no gradient.
    z = z - z.max(-1, keepdim=True).detach()
    log_p = z - z.exp().sum(-1, keepdim=True).log()
    target = one_hot(labels, z.shape[1], dtype=z.dtype) if sparse else as_tensor(labels)
    return -(log_p * target).sum(-1).mean()
