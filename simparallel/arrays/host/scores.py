"""The softmax of attention's scores (..., s, t) over the keys s, and its gradient, in host memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from simparallel.arrays.host.windows import scratch
from simparallel.backend import Array, number_on


def softmax(arrays: Any, scores: Array, first: int | None, may_see_none: bool) -> Array:
    """Return the softmax of each column, see `HostArrays.column_softmax`."""
    xp = arrays.xp
    if first is not None:
        scores += _causal_mask(arrays, scores, first)
    largest = _maxima(arrays, scores)
    if may_see_none:
        # A query that sees no key has scores of -inf; without the bound, -inf - -inf would give NaN.
        largest = xp.maximum(largest, float(np.finfo(scores.dtype).min))
    scores -= largest
    xp.exp(scores, out=scores)
    # A product with ones is the fastest sum.
    total = arrays.matmul(arrays.ones(scores.shape[-2], scores), scores)[..., None, :]
    if may_see_none:
        total = total + (total == 0)
    scores *= 1 / total
    return scores


def gradient(arrays: Any, dp: Array, p: Array) -> Array:
    """Return p (dp - d), where d is the sum of dp p over the keys."""
    dp -= arrays.einsum("...st,...st->...t", dp, p)[..., None, :]
    dp *= p
    return dp


def _causal_mask(arrays: Any, scores: Array, first: int) -> Array:
    """Return (s, t), cached for all layers: at [j, i] 0 where query first + i sees key j <= first + i, else -inf."""
    xp, (num_keys, num_queries), dtype = arrays.xp, scores.shape[-2:], scores.dtype

    def make() -> Array:
        seen = xp.arange(num_keys)[:, None] <= xp.arange(first, first + num_queries)
        return xp.where(seen, number_on(xp, 0, dtype), -math.inf)

    what = (num_keys, num_queries, first)
    return scratch.made("attention.causal", what, num_keys * num_queries, scores, make)


def _maxima(arrays: Any, x: Array) -> Array:
    """Return the maxima over s, kept with size 1: by halves, three times as fast as `max` (NumPy 2.4)."""
    while (num_rows := x.shape[-2]) > 1:
        # An odd number of rows: the halves share the middle row.
        half = -(-num_rows // 2)
        x = arrays.xp.maximum(x[..., :half, :], x[..., num_rows - half :, :])
    return x
