"""Losses, norms, look-ups and attention, in the most naive form."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from op_records.record import TF, OpCall, new, record, reduction, torch
from simparallel.autograd.ops.dropout import mask
from simparallel.testing.strategies import (
    INTEGERS,
    POSITIVE_FLOATS,
    POSITIVE_INTEGERS,
    Draw,
    Shape,
    arrays,
    broadcastable_shapes,
    operand,
    shapes,
)

REDUCTIONS = ("mean", "sum", "none")


def softmax(x, dim=-1):
    return np.exp(x) / np.exp(x).sum(dim, keepdims=True)


def _ids(shape: Shape, size: int) -> Any:
    return st.sampled_from((np.int64, np.int32, np.uint8)).flatmap(
        lambda dtype: arrays(shape, dtype, values=tuple(range(size)))
    )


def reduced(op, losses, count=None):
    count = losses.size if count is None else count
    return {"mean": losses.sum() / (count or 1), "sum": losses.sum(), "none": losses}[op.reduction]


def label_loss(op, logp, labels, weight=None):
    logp, num_classes = np.moveaxis(logp, 1, -1), logp.shape[1]
    weight = np.ones(num_classes) if weight is None else weight
    kept = np.ones(labels.shape) if op.ignore_index is None else labels != op.ignore_index
    target = np.eye(num_classes)[np.where(kept, labels, 0).astype(int)]
    smoothing = getattr(op, "label_smoothing", 0)
    target_mix = (1 - smoothing) * target + smoothing / num_classes
    return reduced(op, -(target_mix * weight * logp).sum(-1) * kept, ((target @ weight) * kept).sum())


def torch_label_loss(function, op, x, labels, weight=None, **settings):
    labels = labels.long()
    ignored = -100 if op.ignore_index is None else op.ignore_index  # PyTorch always ignores one label
    weight = None if weight is None else weight.to(x.dtype)
    each = torch.ones(x.shape[1]) if weight is None else weight
    count = each[labels[labels != ignored]].sum()
    how = reduction(op, count)
    return function(x, labels, weight, ignore_index=ignored, reduction=how, **settings)


def _positive(shape: Shape, dtype: Any, exact: bool) -> Any:
    return arrays(shape, dtype, values=POSITIVE_INTEGERS if exact else POSITIVE_FLOATS)


def torch_element_loss(name):
    return lambda op, x, target: getattr(TF, name)(x, target, reduction=reduction(op, x.numel()))


def torch_binary_cross_entropy_with_logits(op, x, target, p=None):
    """Write out `p`: PyTorch has no gradient for its `pos_weight`."""
    if p is None:
        return TF.binary_cross_entropy_with_logits(x, target, reduction=reduction(op, x.numel()))
    losses = -p * target * TF.logsigmoid(x) - (1 - target) * TF.logsigmoid(-x)
    return {"mean": torch.mean, "sum": torch.sum, "none": lambda y: y}[reduction(op, x.numel())](losses)


def huber(d, width):
    return np.where(np.abs(d) <= width, d * d / 2, width * (np.abs(d) - width / 2))


def per_channel(x, *affine):
    w, b = (*affine, *(1, 0)[len(affine) :])
    return np.moveaxis(np.moveaxis(x, 1, -1) * w + b, -1, 1)


def normalized(x, dims, eps):
    return (x - x.mean(dims, keepdims=True)) / np.sqrt(x.var(dims, keepdims=True) + eps)


def torch_batch_norm_inference(op, x, mean, var, w=None, b=None):
    """Write out the formula: `batch_norm` has no gradient for the given mean and variance."""
    mean, var, w, b = (None if t is None else t.reshape(-1, *(1,) * (x.ndim - 2)) for t in (mean, var, w, b))
    y = (x - mean) / torch.sqrt(var + op.eps)
    y = y if w is None else y * w
    return y if b is None else y + b


def torch_batch_norm(op, x, *wb):
    if not x.shape[1]:  # PyTorch refuses an image without channels
        return torch_batch_norm_inference(op, x, x.new_zeros(0), x.new_ones(0), *wb)
    return TF.batch_norm(x, None, None, *wb, training=True, eps=op.eps)


def row_norm(x, *affine):
    w, b = (*affine, *(1, 0)[len(affine) :])
    return x * w + b


def last(op):
    return tuple(range(-op.num_dims, 0))


def group_norm(op, x, *affine):
    groups = x.reshape(len(x), op.num_groups, x.shape[1] // op.num_groups, *x.shape[2:])
    return per_channel(normalized(groups, tuple(range(2, groups.ndim)), op.eps).reshape(x.shape), *affine)


def torch_one_hot(op, ids):
    kind = getattr(torch, op.dtype.name)
    return (TF.one_hot(ids.long(), op.num_classes) * (op.on - op.off) + op.off).to(kind)


def dropout(op, x, call):
    keep = mask(op.seed, op.stream, int(call), op.p, x.shape, (0,) * x.ndim, x.shape)
    return x * keep / ((1 - op.p) or 1)


def attention(op, q, k, v, mask=0):
    scale = q.shape[-1] ** -0.5 if op.scale is None else op.scale
    scores = np.einsum("...td,...sd->...ts", q, k) * scale + mask
    hidden = np.triu(np.ones(scores.shape[-2:]), 1) * op.causal
    return np.einsum("...ts,...se->...te", softmax(np.where(hidden, -np.inf, scores)), v)


def torch_attention(op, q, k, v, mask=None):
    """Broadcast first: PyTorch adds the mask in place, and does not broadcast it for empty results."""
    tensors = [q, k, v] if mask is None else [q, k, v, mask]
    leading = torch.broadcast_shapes(*(t.shape[:-2] for t in tensors))
    q, k, v, *_ = tensors = [t.expand(*leading, *t.shape[-2:]) for t in tensors]
    mask, causal = (None if mask is None else tensors[3]), op.causal
    if causal and mask is not None:  # PyTorch takes only one of the two
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
        mask, causal = mask.masked_fill(hidden, -torch.inf), False
    return TF.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=op.scale)


@record(
    near={
        "Softmax": (lambda op, x: softmax(x, op.dim), lambda op, x: torch.softmax(x, op.dim)),
        "LogSoftmax": (lambda op, x: np.log(softmax(x, op.dim)), lambda op, x: torch.log_softmax(x, op.dim)),
    }
)
@st.composite
def _softmax(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    shape = list(draw(shapes(1)))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] = draw(st.integers(1, 4))
    return new(name, dim), [draw(operand(tuple(shape), dtype, exact))]


@record(
    near={
        "CrossEntropy": (
            lambda op, x, *rest: label_loss(op, np.log(softmax(x, 1)), *rest),
            lambda op, *inputs: torch_label_loss(TF.cross_entropy, op, *inputs, label_smoothing=op.label_smoothing),
        ),
        "NLL": (label_loss, lambda op, *inputs: torch_label_loss(TF.nll_loss, op, *inputs)),
    }
)
@st.composite
def _label_loss(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    reduction = draw(st.sampled_from(REDUCTIONS))
    num_rows, num_classes = draw(st.integers(0, 4)), draw(st.integers(1, 5))
    ignore_index = draw(st.sampled_from((None, -100, 0)))
    settings = [reduction, ignore_index]
    if name == "CrossEntropy":
        settings.append(draw(st.sampled_from((0.0, 0.25, 1.0))))
    inner = draw(shapes(0, 2))
    labels = draw(_ids((num_rows, *inner), num_classes))
    if ignore_index == -100 and labels.size:
        labels = labels.astype(np.int64)
        labels.flat[draw(st.integers(0, labels.size - 1))] = -100
    inputs = [draw(operand((num_rows, num_classes, *inner), dtype, exact)), labels]
    if draw(st.booleans()):  # class weights as integers, so that no gradient is checked for them
        inputs.append(draw(arrays((num_classes,), np.int64, values=(1, 2, 3, 0))))
    return new(name, *settings), inputs


@record(
    near={
        "SoftmaxCrossEntropyWithLogits": (
            lambda op, x, t: reduced(op, -(t * np.log(softmax(x, 1))).sum(1)),
            lambda op, x, labels: TF.cross_entropy(x, labels, reduction=reduction(op, x[:, 0].numel())),
        )
    }
)
@st.composite
def _dense_loss(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    shape = (draw(st.integers(0, 4)), draw(st.integers(1, 5)), *draw(shapes(0, 2)))
    inputs = [draw(operand(shape, dtype, exact)) for _ in range(2)]
    return new(name, draw(st.sampled_from(REDUCTIONS))), inputs


@record(
    near={
        "MSE": (lambda op, x, t: reduced(op, (x - t) ** 2), torch_element_loss("mse_loss")),
        "L1": (lambda op, x, t: reduced(op, np.abs(x - t)), torch_element_loss("l1_loss")),
        "BinaryCrossEntropy": (
            lambda op, x, t: reduced(op, -t * np.log(x) - (1 - t) * np.log(1 - x)),
            torch_element_loss("binary_cross_entropy"),
        ),
        "BinaryCrossEntropyWithLogits": (
            lambda op, x, t, p=1: reduced(op, (1 - t) * np.log(1 + np.exp(x)) + p * t * np.log(1 + np.exp(-x))),
            torch_binary_cross_entropy_with_logits,
        ),
    }
)
@st.composite
def _element_loss(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    shape = draw(shapes())
    x = draw(operand(shape, dtype, exact))
    if name == "L1" and not exact:  # keep away from the kink, where both are equal
        target = x + draw(operand(shape, dtype, exact))
    else:
        target = draw(arrays(shape, dtype, values=(0, 1, 0.25, 0.5)))
    if name == "BinaryCrossEntropy":
        x = draw(arrays(shape, dtype, values=(0.125, 0.25, 0.5, 0.75, 0.875)))
    inputs = [x, target]
    if name == "BinaryCrossEntropyWithLogits" and draw(st.booleans()):
        inputs.append(draw(_positive(shape, dtype, exact)))
    return new(name, draw(st.sampled_from(REDUCTIONS))), inputs


@record(
    near={
        "Huber": (
            lambda op, x, t: reduced(op, huber(x - t, op.delta)),
            lambda op, x, target: TF.huber_loss(x, target, reduction(op, x.numel()), op.delta),
        ),
        "SmoothL1": (
            lambda op, x, t: reduced(op, huber(x - t, op.beta) / op.beta if op.beta else np.abs(x - t)),
            lambda op, x, target: TF.smooth_l1_loss(x, target, reduction=reduction(op, x.numel()), beta=op.beta),
        ),
    }
)
@st.composite
def _robust_loss(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    shape = draw(shapes())
    width = draw(st.sampled_from((1.0, 0.25, 4) if name == "Huber" else (1.0, 0.25, 4, 0.0)))
    x = draw(operand(shape, dtype, True))
    # Away from 0 and from the widths, where the slope has a kink; the small integers of `exact` include both.
    target = x + draw(arrays(shape, dtype, values=INTEGERS if exact else (0.1, -0.1, 0.5, -0.5, 2.5, -2.5, 5, -5)))
    return new(name, draw(st.sampled_from(REDUCTIONS)), width), [x, target]


@record(
    near={
        "BatchNorm": (
            lambda op, x, *wb: per_channel(normalized(x, (0, *range(2, x.ndim)), op.eps), *wb),
            torch_batch_norm,
        ),
        "BatchNormInference": (
            lambda op, x, m, v, *wb: per_channel(
                per_channel(x, 1 / np.sqrt(v + op.eps), -m / np.sqrt(v + op.eps)), *wb
            ),
            torch_batch_norm_inference,
        ),
    }
)
@st.composite
def _batch_norm(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    inner = draw(shapes(0, 2, min_size=1, max_size=3))
    num_rows = draw(st.integers(2 if name == "BatchNorm" else 0, 4))
    num_channels = draw(st.integers(0, 3))
    channels = (num_channels,)
    x = draw(operand((num_rows, num_channels, *inner), dtype, exact))
    inputs = [x]
    if name == "BatchNormInference":
        inputs += [draw(operand(channels, dtype, exact)), draw(_positive(channels, dtype, exact))]
    inputs += [draw(operand(channels, dtype, exact)) for _ in range(draw(st.integers(0, 2)))]
    return new(name, draw(st.sampled_from((1e-1, 1.0)))), inputs


@record(
    near={
        "LayerNorm": (
            lambda op, x, *wb: row_norm(normalized(x, last(op), op.eps), *wb),
            lambda op, x, *wb: TF.layer_norm(x, x.shape[-op.num_dims :], *wb, eps=op.eps),
        ),
        "RMSNorm": (
            lambda op, x, *w: row_norm(x / np.sqrt((x * x).mean(last(op), keepdims=True) + op.eps), *w),
            lambda op, x, *w: TF.rms_norm(x, x.shape[-op.num_dims :], *w, eps=op.eps),
        ),
    }
)
@st.composite
def _row_norm(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    normalized = draw(shapes(1, 2, min_size=1))
    x = draw(operand((*draw(shapes(0, 2)), *normalized), dtype, exact))
    num_affine = draw(st.integers(0, 2 if name == "LayerNorm" else 1))
    affine = [draw(operand(normalized, dtype, exact)) for _ in range(num_affine)]
    return new(name, len(normalized), draw(st.sampled_from((1e-1, 1.0)))), [x, *affine]


@record(near={"GroupNorm": (group_norm, lambda op, x, *wb: torch.group_norm(x, op.num_groups, *wb, eps=op.eps))})
@st.composite
def _group_norm(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    num_groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels = (num_groups * size,)
    x = draw(operand((draw(st.integers(0, 3)), *channels, *draw(shapes(0, 2, min_size=1))), dtype, exact))
    affine = [draw(operand(channels, dtype, exact)) for _ in range(draw(st.integers(0, 2)))]
    return new(name, num_groups, draw(st.sampled_from((1e-1, 1.0)))), [x, *affine]


@record(
    moved={
        "Embedding": (
            lambda op, ids, table: table[ids],
            lambda op, ids, table: TF.embedding(ids.long(), table, op.padding_idx),
        )
    }
)
@st.composite
def _embedding(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    num_rows, width = draw(st.integers(1, 4)), draw(st.integers(0, 3))
    ids = draw(_ids(draw(shapes(0, 2)), num_rows))
    return new(name), [ids, draw(operand((num_rows, width), dtype, exact))]


@record(moved={"OneHot": (lambda op, ids: np.where(np.eye(op.num_classes)[ids], op.on, op.off), torch_one_hot)})
@st.composite
def _one_hot(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    size = draw(st.integers(1, 5))
    return new(name, size, *draw(st.sampled_from(((), (3.0, -1.0))))), [draw(_ids(draw(shapes(0, 2)), size))]


@record(
    near={
        "Dropout": (dropout, "what is dropped is a function of the element's global index, not of PyTorch's generator")
    }
)
@st.composite
def _dropout(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    op = new(name, draw(st.sampled_from((0.5, 0.0, 0.25, 1.0))), draw(st.integers(0, 3)), "a stream")
    call = np.array(draw(st.integers(0, 5)), np.int64)
    return op, [draw(operand(draw(shapes()), dtype, exact)), call]


def turned(op, x):
    half = x.shape[-1] // 2
    angles = np.arange(x.shape[-2])[:, None] * op.base ** (-np.arange(half) / half)
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([pairs.real, pairs.imag], -1)


def torch_turned(op, x):
    half = x.shape[-1] // 2
    rows, pairs = (torch.arange(size, dtype=torch.float64) for size in (x.shape[-2], half))
    angles = rows[:, None] * op.base ** (-pairs / max(half, 1))
    cos, sin = (each.to(x.dtype) for each in (torch.cos(angles), torch.sin(angles)))
    return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


@record(near={"RotaryEmbedding": (turned, torch_turned)})
@st.composite
def _rotary(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    leading, rows, half = draw(shapes()), draw(st.integers(0, 3)), draw(st.integers(0, 2))
    op = new(name, draw(st.sampled_from((100.0, 10_000.0))))
    return op, [draw(operand((*leading, rows, 2 * half), dtype, exact))]


@record(near={"ScaledDotProductAttention": (attention, torch_attention)})
@st.composite
def _attention(draw: Draw, name: str, dtype: Any, exact: bool) -> OpCall:
    num_queries, num_keys, d, e = (draw(st.integers(low, 3)) for low in (0, 1, 1, 0))
    leading = draw(broadcastable_shapes(4, 2))
    dims = [(num_queries, d), (num_keys, d), (num_keys, e), (num_queries, num_keys)]
    num_inputs = draw(st.integers(3, 4))
    operands = [(*lead, *dim) for lead, dim in zip(leading, dims, strict=True)][:num_inputs]
    op = new(name, draw(st.booleans()), draw(st.sampled_from((None, 0.5))))
    return op, [draw(operand(shape, dtype, exact)) for shape in operands]
