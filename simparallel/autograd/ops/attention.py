"""Scaled dot-product attention as one op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, check_float, instance
from simparallel.autograd.ops.dropout import dropout
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, get_namespace, number_on
from simparallel.errors import DTypeError, ShapeError
from simparallel.layout.rule import broadcast
from simparallel.machine.products import MatrixProduct


class ScaledDotProductAttention(Op):
    """y = softmax(q k.T * scale + mask) v, row by row (Vaswani et al. 2017, "Attention is all you need")

    q: (..., t, d)   k: (..., s, d)   v: (..., s, e)   mask: (..., t, s), may be left out   y: (..., t, e)

    The leading dims (batch, heads) broadcast and may be cut, and so may the queries t and the
    features e of v; the keys s and the features d of q and k must be whole on each rank.

    Backward keeps the inputs and the softmax p. With dp = dy v.T and D = rowsum(dp * p):
    dv = p.T dy,  ds = p * (dp - D),  dq = ds k * scale,  dk = ds.T q * scale,  dmask = ds.
    A query that sees no key gives 0. Scores are stored transposed, (..., s, t): operations on the
    row of one query then run over contiguous rows of all queries. On a GPU, scores of more than
    `ctx.arrays.work_bytes` are computed for blocks of queries, and of more than `scores_bytes` again in backward
    instead of kept (Dao et al. 2022, "FlashAttention").

    Args:
        causal: query i sees the keys 0 … i only, with positions in the whole tensor.
        scale: None for 1 / sqrt(d).
    """

    is_matrix_product = True

    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        self.causal = causal
        self.scale = scale

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        mask = ", ... t {s}" if len(shapes) == 4 else ""
        return f"... t {{d}}, ... {{s}} {{d}}, ... {{s}} e{mask} -> ... t e"

    def infer(self, q: Spec, k: Spec, v: Spec, *mask: Spec) -> Spec:
        check_float(q=q, k=k, v=v)
        if mask and mask[0].dtype.kind not in "fb":
            raise DTypeError(f"mask has dtype {mask[0].dtype}, expected floating point or bool.")
        spec = super().infer(q, k, v, *mask)
        if 0 in (q.shape[-1], k.shape[-2]):
            raise ShapeError(f"k has shape {k.shape}; at least one key with one feature is needed.")
        return Spec(spec.shape, np.result_type(q.dtype, k.dtype, v.dtype))

    def _scale(self, ctx: Context) -> float:
        return 1 / math.sqrt(ctx.size("d")) if self.scale is None else self.scale

    def forward(self, ctx: Context, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        xp = ctx.xp
        dtype = ctx.dtype = wider(ctx.plan.output.dtype)
        ctx.q, ctx.k, ctx.v = q, k, v = [array.astype(dtype, copy=False) for array in (q, k, v)]
        ctx.blocks, ctx.mask, ctx.p_ST = self._blocks(ctx, q, k), mask, None
        if len(ctx.blocks) == 1:
            p_ST = self._softmax(ctx, q, k, mask, 0)
            y = _matmul(ctx.arrays, p_ST.swapaxes(-1, -2), v, q)
            if p_ST.nbytes <= ctx.arrays.scores_bytes:
                ctx.mask, ctx.p_ST = None, p_ST
        else:
            shape = ctx.plan.output.shape
            y = xp.empty_like(q, shape=shape) if q.ndim == len(shape) else xp.empty(shape, dtype)
            for queries, keys in ctx.blocks:
                seen = None if mask is None else mask[..., queries, keys]
                p_ST = self._softmax(ctx, q[..., queries, :], k[..., keys, :], seen, queries.start)
                ctx.arrays.matmul(p_ST.swapaxes(-1, -2), v[..., keys, :], out=y[..., queries, :])
        return y.astype(ctx.plan.output.dtype, copy=False)

    def _blocks(self, ctx: Context, q: Array, k: Array) -> list[tuple[slice, slice]]:
        """Return the queries and the keys of each block; one block in host memory."""
        num_queries, num_keys = q.shape[-2], k.shape[-2]
        row_bytes = prod(ctx.plan.output.shape[:-2]) * num_keys * q.dtype.itemsize
        num_blocks = max(1, math.ceil(row_bytes * num_queries / max(ctx.arrays.work_bytes, 1)))
        if num_blocks == 1:
            return [(slice(0, num_queries), slice(0, num_keys))]
        # Blocks of about the same size.
        count, blocks = -(-num_queries // num_blocks), []
        for start in range(0, num_queries, count):
            stop = min(start + count, num_queries)
            # Later keys are hidden from all queries of this block.
            last = min(ctx.offset("t") + stop, num_keys) if self.causal else num_keys
            blocks.append((slice(start, stop), slice(0, last)))
        return blocks

    def _softmax(self, ctx: Context, q: Array, k: Array, mask: Array | None, start: int) -> Array:
        """Return the softmax (..., s, t) of the queries from `start` on over the keys."""
        xp, dtype = ctx.xp, ctx.dtype
        # The transposed copy of q includes the scale, which spares a pass over the scores.
        scores_ST = ctx.arrays.matmul(k, ctx.arrays.scaled_transpose(q, self._scale(ctx)))
        if mask is not None:
            if mask.dtype == "bool":
                mask = xp.where(mask, number_on(xp, 0, dtype), -math.inf)
            scores_ST = _add(scores_ST, mask.swapaxes(-1, -2))
        first = ctx.offset("t") + start if self.causal else None
        return ctx.arrays.column_softmax(scores_ST, first, mask is not None)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, inputs, needs = ctx.xp, (ctx.q, ctx.k, ctx.v), ctx.needs
        dy = dy.astype(ctx.dtype, copy=False)
        mask_shape = ctx.plan.inputs[3].shape if len(needs) == 4 else ()
        if len(ctx.blocks) == 1:
            p_ST = self._softmax(ctx, *inputs[:2], ctx.mask, 0) if ctx.p_ST is None else ctx.p_ST
            return self._gradients(ctx, *inputs, mask_shape, p_ST, dy)
        shapes = [*(array.shape for array in inputs), mask_shape]
        grads = [xp.zeros(shape, ctx.dtype) if need else None for shape, need in zip(shapes, needs, strict=False)]
        for queries, keys in ctx.blocks:
            places = (..., queries, slice(None)), (..., keys, slice(None)), (..., keys, slice(None))
            q, k, v = (array[place] for array, place in zip(inputs, places, strict=True))
            mask = None if ctx.mask is None else ctx.mask[..., queries, keys]
            p_ST = self._softmax(ctx, q, k, mask, queries.start)
            shape = () if mask is None else mask.shape
            parts = self._gradients(ctx, q, k, v, shape, p_ST, dy[..., queries, :])
            for grad, part, place in zip(grads, parts, (*places, (..., queries, keys)), strict=False):
                if grad is not None:
                    grad[place] += part
        return grads

    def _gradients(
        self, ctx: Context, q: Array, k: Array, v: Array, mask_shape: tuple[int, ...], p_ST: Array, dy: Array
    ) -> Sequence[Array | None]:
        needs, scale = ctx.needs, self._scale(ctx)
        dq = dk = dv = dmask = None
        if needs[2]:
            dv = ctx.arrays.unbroadcast(_matmul(ctx.arrays, p_ST, dy, v), v.shape)
        if needs[0] or needs[1] or needs[3:] == (True,):
            # The mask is added to the scaled scores, so its gradient is ds without the scale.
            inner = 1.0 if needs[3:] == (True,) else scale
            ds_ST = ctx.arrays.matmul(v, ctx.arrays.scaled_transpose(dy, inner))
            # D also equals rowsum(dy * y), but with that form dp - D loses all digits where p is nearly 1.
            ds_ST = ctx.arrays.column_softmax_gradient(ds_ST, p_ST)
            if needs[3:] == (True,):
                dmask = ctx.arrays.unbroadcast(ds_ST.swapaxes(-1, -2), mask_shape)
                ds_ST = ds_ST * scale
            if needs[0]:
                dq = ctx.arrays.unbroadcast(_matmul(ctx.arrays, ds_ST.swapaxes(-1, -2), k, q), q.shape)
            if needs[1]:
                dk = ctx.arrays.unbroadcast(_matmul(ctx.arrays, ds_ST, q, k), k.shape)
        return (dq, dk, dv, dmask)[: len(needs)]

    def work(self, q: Spec, k: Spec, v: Spec, *mask: Spec) -> Work:
        y = self.infer(q, k, v, *mask)
        scores = prod(y.shape[:-1]) * k.shape[-2]
        # Two products; per score: mask, maximum, subtraction, exponential (10 by convention), sum.
        flops = scores * (2 * q.shape[-1] + 2 * v.shape[-1] + 13 + bool(mask) + self.causal)
        moved = sum(spec.size_bytes for spec in (q, k, v, *mask, y))
        return Work(flops, moved + 6 * scores * y.dtype.itemsize)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        # Five products instead of two.
        return Work(5 * work.flops // 2, 2 * work.size_bytes)

    def eager_work(self, plan: Plan) -> Work:
        # FlashAttention (Dao 2023, arXiv 2307.08691): two products, blocks of hidden scores left out, no scores stored;
        # a number of float32 for each row of them is kept.
        q, k, v, *_ = plan.inputs
        rows, num_keys = prod(plan.output.shape[:-1]), k.shape[-2]
        # Query i sees i + 1 keys; a slice of the queries counts as many as the average slice.
        seen = (num_keys + 1) / 2 if self.causal else num_keys
        moved = sum(spec.size_bytes for spec in (*plan.inputs, plan.output)) + 4 * rows
        return Work(round(2 * rows * seen * (q.shape[-1] + v.shape[-1])), moved)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        # Of each row a number in place of its scores. The result is kept, too, as the input of the next product.
        return (0, 1, 2), 4 * prod(plan.output.shape[:-1])

    def products(self, plan: Plan, needs: tuple[bool, ...] | None = None) -> tuple[MatrixProduct, ...]:
        *_, num_queries, width = plan.output.shape
        num_keys = plan.inputs[1].shape[-2]
        return (MatrixProduct(prod(plan.output.shape[:-2]), num_queries, width, num_keys, "attention"),)

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # Five products; reads the inputs, y and dy, writes the gradients of the inputs.
        work, inputs = self.eager_work(plan), plan.inputs
        written = sum(spec.size_bytes for spec, need in zip(inputs, needs, strict=True) if need)
        return Work(5 * work.flops // 2, work.size_bytes + plan.output.size_bytes + written)


class RotaryEmbedding(Op):
    """y = x with its features turned in pairs, by angles that grow with the position (Su et al. 2021, arXiv 2104.09864)

    x: (..., t, d)   y: (..., t, d). Pair i has the features i and i + d / 2, and turns by position * base ** (-2i / d).

    Args:
        base: determines the angles.
    """

    rule = "... t {d} -> ... t d"
    linear = True
    # A product with the cosine, one with the sine, and a sum.
    flops_per_element = 3

    def __init__(self, base: float = 10_000.0) -> None:
        self.base = base

    def infer(self, x: Spec) -> Spec:
        check_float(x=x)
        if x.shape[-1] % 2:
            raise ShapeError(f"x has shape {x.shape}; its last dim must be even, as features turn in pairs.")
        return super().infer(x)

    def forward(self, ctx: Context, x: Array) -> Array:
        return self._turned(ctx, x, 1)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self._turned(ctx, dy, -1),)

    def _turned(self, ctx: Context, x: Array, sign: int) -> Array:
        xp, (num_rows, size) = ctx.xp, x.shape[-2:]
        half = size // 2
        angles = xp.arange(ctx.offset("t"), ctx.offset("t") + num_rows)[:, None] * self.base ** (
            -xp.arange(half) / half
        )
        cos, sin = (each.astype(wider(x.dtype)) for each in (xp.cos(angles), sign * xp.sin(angles)))
        y = xp.empty_like(x)
        y[..., :half] = x[..., :half] * cos - x[..., half:] * sin
        y[..., half:] = x[..., half:] * cos + x[..., :half] * sin
        return y


def _add(a: Array, b: Array) -> Array:
    """Return a + b, in place unless b has batch dims that a lacks."""
    if broadcast(a.shape, b.shape) == a.shape:
        a += b
        return a
    return a + b.astype(a.dtype, copy=False)


def _matmul(arrays: HostArrays, a: Array, b: Array, like: Array) -> Array:
    """Return a @ b with the memory order of `like`.

    Heads are usually a transposed view. With the result in the same order, the caller transposes it back and merges
    the heads without a copy.
    """
    if a.shape[:-2] != b.shape[:-2] or a.shape[:-2] != like.shape[:-2]:
        return arrays.matmul(a, b)
    out = arrays.xp.empty_like(like, shape=(*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    return arrays.matmul(a, b, out=out)


def _attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, p: float
) -> Tensor:
    """Compute attention op by op, with dropout on the softmax."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = q * scale @ k.transpose(-1, -2)
    unseen = None if mask is None or mask.dtype.kind != "b" else ~mask
    if mask is not None and unseen is None:
        scores = scores + mask
    if is_causal:
        xp = get_namespace(q._data)
        later = as_tensor(xp.triu(xp.ones(scores.shape[-2:], bool), 1))
        unseen = later if unseen is None else unseen | later
    if unseen is not None:
        scores = scores.masked_fill(unseen, -math.inf)
    weights = (scores - scores.logsumexp(-1, keepdim=True)).exp()
    # A row of -inf, of a query that sees no key, is NaN here; its result is 0.
    if unseen is not None:
        weights = weights.masked_fill(unseen, 0.0)
    return dropout(weights, p) @ v


@function()
def scaled_dot_product_attention(
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return softmax(q k.T * scale + attn_mask) v.   q: (..., t, d)   k: (..., s, d)   v: (..., s, e)

    Args:
        q: queries.
        k: keys.
        v: values.
        attn_mask: (..., t, s), added to the scores; or bool, True where a query sees a key. It broadcasts: a mask
            of padded keys may be (batch, 1, 1, s).
        dropout_p: probability with which elements of the softmax are dropped. It always applies: pass 0 in evaluation.
        is_causal: query i sees the keys 0 … i only.
        scale: None for 1 / sqrt(d).
    """
    q, k, v = as_tensor(q), as_tensor(k), as_tensor(v)
    if dropout_p:
        mask = None if attn_mask is None else as_tensor(attn_mask)
        return _attention_with_dropout(q, k, v, mask, is_causal, scale, dropout_p)
    op = instance(ScaledDotProductAttention, is_causal, scale)
    if attn_mask is None:
        return op(q, k, v)
    mask, scores = as_tensor(attn_mask), (*q.shape[-2:-1], *k.shape[-2:-1])
    if mask.shape[-2:] != scores:
        mask = mask.expand(*mask.shape[:-2], *scores)
    return op(q, k, v, mask)


@function()
def rotary_embedding(x: Any, base: float = 10_000.0) -> Tensor:
    """Turn the features of x in pairs, by angles that grow with the position, see `RotaryEmbedding`.

    Args:
        x: (..., t, d), with an even d.
        base: determines the angles.
    """
    return instance(RotaryEmbedding, base)(as_tensor(x))
