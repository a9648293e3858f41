"""Helpers for updates of parameters in pieces that stay in the cache, in at least float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from simparallel.autograd.kernels.sums import wider
from simparallel.backend import Array, get_namespace

# A core's cache holds several pieces, and slicing costs little in comparison.
PIECE_BYTES = 512 * 1024


def widened(x: Array) -> Array:
    """Convert float16 to float32; return any other array unchanged."""
    return x.astype(wider(x.dtype)) if x.dtype.itemsize < 4 else x


def decayed(xp: Any, p: Array, grad: Array, weight_decay: float, out: Array | None) -> Array:
    """Return the gradient with an L2 penalty, grad + weight_decay p, in `out`."""
    return xp.add(xp.multiply(p, weight_decay, out=out), grad, out=out)


def converted(pieces: list[Array], negated: bool) -> Iterator[list[Array]]:
    """Yield one piece with copies of the gradient and, if float16, of the parameter, which is then copied back."""
    p, grad, *others, own, gradient = pieces
    if negated:
        get_namespace(p).negative(grad, out=gradient)
    else:
        gradient[...] = grad
    if p.dtype == own.dtype:
        yield [p, gradient, *others]
        return
    own[...] = p
    yield [own, gradient, *others]
    p[...] = own
