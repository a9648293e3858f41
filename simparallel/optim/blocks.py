"""Helpers for updates of parameters, in at least float32: in pieces that stay in the cache, or in a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from simparallel.arrays.host.sums import wider
from simparallel.backend import Array, get_namespace

# A core's cache holds several pieces, and slicing costs little in comparison.
PIECE_BYTES = 512 * 1024


def widened(x: Array) -> Array:
    """Convert float16 to float32; return any other array unchanged."""
    return x.astype(wider(x.dtype)) if x.dtype.itemsize < 4 else x


def decayed(xp: Any, p: Array, grad: Array, weight_decay: float, out: Array | None) -> Array:
    """Return the gradient with an L2 penalty, grad + weight_decay p, in `out`."""
    return xp.add(xp.multiply(p, weight_decay, out=out), grad, out=out)


def converted(pieces: list[Array], factor: float) -> Iterator[list[Array]]:
    """Yield the arrays of one piece for an update, with the gradient times `factor`.

    A float16 parameter is yielded as a float32 copy, which is copied back after the update.

    Args:
        pieces: of the parameter, its gradient, the arrays of the update, and two work arrays.
        factor: of the gradient.
    """
    p, grad, *others, own, gradient = pieces
    if factor == 1:
        gradient[...] = grad
    else:
        # In the dtype of `gradient`: a small float16 times 1 / loss_scale would become 0.
        get_namespace(p).multiply(grad, factor, out=gradient, dtype=gradient.dtype)
    if p.dtype == own.dtype:
        yield [p, gradient, *others]
        return
    own[...] = p
    yield [own, gradient, *others]
    p[...] = own


def in_one_kernel(
    xp: Any, p: Array, grad: Array, *others: Any, update: Callable[..., None], dtype: Any, scaled: bool, **settings: Any
) -> None:
    """Call `update` in `dtype`, like `converted` for whole arrays; the last of `others` scales the gradient."""
    *rest, factor = others
    grad = grad.astype(dtype, copy=False)
    if scaled:
        grad = grad * factor
    own = p.astype(dtype, copy=False)
    update(xp, own, grad, *rest, **settings)
    if p.dtype != dtype:
        p[...] = own
