"""The steps of normalisations, for `backend.fused`: each is one kernel on a GPU."""

from __future__ import annotations

from types import ModuleType

from simparallel.backend import Array


def centered(xp: ModuleType, x: Array, mean: Array) -> tuple[Array, Array]:
    """Return x - mean and its square: the variance of centred values keeps its digits where the mean is far from 0."""
    difference = x - mean
    return difference, difference * difference


def spread(xp: ModuleType, squares: Array, count: int, eps: float) -> tuple[Array, Array]:
    """Return the variance, squares / count, and 1 / sqrt(variance + eps)."""
    var = squares / count
    return var, 1 / xp.sqrt(var + eps)


def normalize(xp: ModuleType, y: Array, x_hat: Array, r: Array, w: Array | None, b: Array | None) -> None:
    """Multiply the centred `x_hat` by r in place, then write x_hat * w + b to y."""
    x_hat *= r
    if w is None:
        y[...] = x_hat
    else:
        xp.multiply(x_hat, w, out=y)
    if b is not None:
        y += b


def scale(xp: ModuleType, y: Array, x: Array, factor: Array, w: Array | None, b: Array | None) -> None:
    """Write x * factor * w + b to y."""
    xp.multiply(x, factor, out=y)
    if w is not None:
        y *= w
    if b is not None:
        y += b


def input_gradient(
    xp: ModuleType, dy: Array, x: Array, r: Array, w: Array | None, mean: Array | None, of_x: Array, work: Array | None
) -> Array:
    """Return r (dy w - mean - x of_x)."""
    dx = dy.copy() if w is None else dy * w
    dx -= xp.multiply(x, of_x, out=work)
    if mean is not None:
        dx -= mean
    dx *= r
    return dx
