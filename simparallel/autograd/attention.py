"""Scaled dot-product attention as one op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from simparallel.autograd.op import Context, Op, Spec, Work, unbroadcast, wider
from simparallel.backend import Array
from simparallel.errors import DTypeError, ShapeError
from simparallel.rule import broadcast


class ScaledDotProductAttention(Op):
    """y = softmax(q k.T * scale + mask) v, row by row (Vaswani et al. 2017, "Attention is all you need")

    q: (..., t, d)   k: (..., s, d)   v: (..., s, e)   mask: (..., t, s), may be left out   y: (..., t, e)

    The leading dims (batch, heads) broadcast and may be cut, as may the queries t and the features
    e; the keys s and the features d of the scores have to be whole on each rank.

    Kept for backward are the inputs, y, and of the scores only e ** (score - row maximum) with
    its row sums. With p the softmax and D = rowsum(dy * y), which equals rowsum(dp * p) (Dao et al. 2022,
    "FlashAttention", appendix B.2):
    dv = p.T dy,  ds = p * (dy v.T - D),  dq = ds k * scale,  dk = ds.T q * scale,  dmask = ds.
    A query that sees no key at all gives 0.

    Args:
        causal: query i sees the keys 0 … i only (counted over the whole tensor).
        scale: None for 1 / sqrt(d).
    """

    def __init__(self, causal: bool = False, scale: float | None = None) -> None:
        self.causal = causal
        self.scale = scale

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        mask = ", ... t {s}" if len(shapes) == 4 else ""
        return f"... t {{d}}, ... {{s}} {{d}}, ... {{s}} e{mask} -> ... t e"

    def infer(self, q: Spec, k: Spec, v: Spec, *mask: Spec) -> Spec:
        for name, spec in zip("qkv", (q, k, v), strict=True):
            if spec.dtype.kind != "f":
                raise DTypeError(f"{name} has dtype {spec.dtype}, need floating point.")
        if mask and mask[0].dtype.kind not in "fb":
            raise DTypeError(f"mask has dtype {mask[0].dtype}, need floating point or bool.")
        spec = super().infer(q, k, v, *mask)
        if 0 in (q.shape[-1], k.shape[-2]):
            raise ShapeError(f"k has shape {k.shape}; there must be keys, with at least one feature.")
        return Spec(spec.shape, np.result_type(q.dtype, k.dtype, v.dtype))

    def _scale(self, ctx: Context) -> float:
        return 1 / math.sqrt(ctx.size("d")) if self.scale is None else self.scale

    def forward(self, ctx: Context, q: Array, k: Array, v: Array, mask: Array | None = None) -> Array:
        xp = ctx.xp
        dtype = ctx.dtype = wider(ctx.plan.output.dtype)
        ctx.q, ctx.k, ctx.v = q, k, v = [array.astype(dtype, copy=False) for array in (q, k, v)]
        scores = (q * self._scale(ctx)) @ k.swapaxes(-1, -2)  # (..., t, s)
        if self.causal:
            scores += _causal_mask(xp, *scores.shape[-2:], ctx.offset("t"), dtype.name, _device(scores))
        if mask is not None:
            if mask.dtype == "bool":
                mask = xp.where(mask, xp.asarray(0, dtype), xp.asarray(-math.inf, dtype))
            scores = _add(scores, mask)
        largest = scores.max(axis=-1, keepdims=True)
        if mask is not None:  # a row of -inf would give -inf - -inf
            largest = xp.maximum(largest, float(np.finfo(dtype).min))
        scores -= largest
        ctx.exps = xp.exp(scores, out=scores)
        total = ctx.exps.sum(axis=-1, keepdims=True)
        if mask is not None:
            total += total == 0
        ctx.total = total
        y = _matmul(xp, ctx.exps, v, q)
        y /= total
        ctx.y = y
        return y.astype(ctx.plan.output.dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, needs, scale = ctx.xp, ctx.needs, self._scale(ctx)
        q, k, v, exps = ctx.q, ctx.k, ctx.v, ctx.exps
        dy = dy / ctx.total  # so that the exponentials stand for the softmax below
        dq = dk = dv = dmask = None
        if needs[2]:
            dv = unbroadcast(xp, _matmul(xp, exps.swapaxes(-1, -2), dy, v), v.shape)
        if needs[0] or needs[1] or needs[3:] == (True,):
            ds = dy @ v.swapaxes(-1, -2)
            ds = _subtract(ds, (dy * ctx.y).sum(axis=-1, keepdims=True))
            ds *= exps
            if needs[0]:
                dq = _matmul(xp, ds, k, q)
                dq *= scale
                dq = unbroadcast(xp, dq, q.shape)
            if needs[1]:
                dk = _matmul(xp, ds.swapaxes(-1, -2), q, k)
                dk *= scale
                dk = unbroadcast(xp, dk, k.shape)
            if needs[3:] == (True,):
                dmask = unbroadcast(xp, ds, ctx.plan.inputs[3].shape)
        return (dq, dk, dv, dmask)[: len(needs)]

    def work(self, q: Spec, k: Spec, v: Spec, *mask: Spec) -> Work:
        y = self.infer(q, k, v, *mask)
        scores = prod(y.shape[:-1]) * k.shape[-2]
        # two products; per score: mask, maximum, subtraction, exponential (10 by convention), sum
        flops = scores * (2 * q.shape[-1] + 2 * v.shape[-1] + 13 + bool(mask) + self.causal)
        moved = sum(spec.size_bytes for spec in (q, k, v, *mask, y))
        return Work(flops, moved + 6 * scores * y.dtype.itemsize)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        return Work(5 * work.flops // 2, 2 * work.size_bytes)  # five products instead of two


def _add(a: Array, b: Array) -> Array:
    """a + b, in place unless b is larger (a batch that only the mask has)."""
    if broadcast(a.shape, b.shape) == a.shape:
        a += b
        return a
    return a + b.astype(a.dtype, copy=False)


def _subtract(a: Array, b: Array) -> Array:
    """a - b, in place where the shapes allow."""
    if b.shape[:-1] == a.shape[:-1]:
        a -= b
        return a
    return a - b


def _matmul(xp: ModuleType, a: Array, b: Array, like: Array) -> Array:
    """a @ b, with the dims in the same order in memory as those of `like`.

    Heads are usually a transposed view; so is then the result, and transposing it back and merging
    the heads copies nothing.
    """
    if a.shape[:-2] != b.shape[:-2] or a.shape[:-2] != like.shape[:-2]:
        return a @ b
    out = xp.empty_like(like, shape=(*a.shape[:-1], b.shape[-1]), dtype=a.dtype)
    return xp.matmul(a, b, out=out)


def _device(array: Array) -> str:
    return str(getattr(array, "device", "cpu"))


@lru_cache(maxsize=64)
def _causal_mask(xp: ModuleType, num_queries: int, num_keys: int, first: int, dtype: str, device: str) -> Any:
    """(t, s): 0 where query first + i may see key j, j <= first + i; else -inf. One for all layers."""
    seen = xp.arange(num_keys) <= xp.arange(first, first + num_queries)[:, None]
    return xp.where(seen, xp.asarray(0, dtype), xp.asarray(-math.inf, dtype))
