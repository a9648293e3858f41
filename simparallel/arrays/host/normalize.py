"""The steps of normalisations, for `backend.fused`: each is one kernel on a GPU.

Arrays of sums broadcast to x, so NumPy computes with them at their own size.
"""

from __future__ import annotations

from types import ModuleType

from simparallel.backend import Array


def centered(xp: ModuleType, x: Array, sums: Array, count: int) -> tuple[Array, Array]:
    """Return x - sums / count, and its square."""
    # Two passes: the variance of centred values keeps its digits where the mean is far from 0.
    difference = x - sums / count
    return difference, difference * difference


def squared_distances(xp: ModuleType, x: Array, mean: Array) -> tuple[Array]:
    """Return the squares of x - mean."""
    difference = x - mean
    return (difference * difference,)


def products(xp: ModuleType, dy: Array, x: Array, mean: Array | None = None) -> tuple[Array, Array]:
    """Return dy and dy (x - mean)."""
    return dy, dy * (x if mean is None else x - mean)


def spread(xp: ModuleType, squares: Array, count: int, eps: float) -> tuple[Array, Array]:
    """Return the variance, squares / count, and 1 / sqrt(variance + eps)."""
    var = squares / count
    return var, 1 / xp.sqrt(var + eps)


def channel_statistics(
    xp: ModuleType, sums: Array, squares: Array, w: Array | None, count: int, eps: float
) -> tuple[Array, ...]:
    """Return mean, variance, r = 1 / sqrt(variance + eps), and with weights r w."""
    var, r = spread(xp, squares, count, eps)
    statistics = sums / count, var, r
    return statistics if w is None else (*statistics, (r * w).astype(r.dtype, copy=False))


def affine_gradients(xp: ModuleType, sums: Array, sums_x: Array, r: Array, dw: Array | None, db: Array | None) -> None:
    """Multiply `sums_x`, of the centred x, by r, and write the sums to dw and db."""
    sums_x *= r
    if dw is not None:
        dw[...] = sums_x
    if db is not None:
        db[...] = sums


def normalize(xp: ModuleType, y: Array, x_hat: Array, r: Array, w: Array | None, b: Array | None) -> None:
    """Multiply the centred `x_hat` by r in place, then write x_hat * w + b to y."""
    x_hat *= r
    if w is None:
        y[...] = x_hat
    else:
        xp.multiply(x_hat, w, out=y)
    if b is not None:
        y += b


def scale(
    xp: ModuleType, y: Array, x: Array, factor: Array, w: Array | None, b: Array | None, mean: Array | None = None
) -> None:
    """Write (x - mean) * factor * w + b to y."""
    xp.multiply(x if mean is None else x - mean, factor, out=y)
    if w is not None:
        y *= w
    if b is not None:
        y += b


def row_gradient(
    xp: ModuleType, dy: Array, x_hat: Array, r: Array, w: Array | None, sums: Array, sums_x: Array, count: int,
    work: Array | None,
) -> Array:  # fmt: skip
    """Return r (dy w - sums / count - x_hat sums_x / count)."""
    dx = dy.copy() if w is None else dy * w
    dx -= xp.multiply(x_hat, sums_x / count, out=work)
    dx -= sums / count
    dx *= r
    return dx


def root_gradient(
    xp: ModuleType, dy: Array, x: Array, r: Array, w: Array | None, sums_x: Array, count: int, work: Array | None
) -> Array:
    """Return r (dy w - x r² sums_x / count)."""
    dx = dy.copy() if w is None else dy * w
    dx -= xp.multiply(x, sums_x / count * (r * r), out=work)
    dx *= r
    return dx


def channel_gradient(
    xp: ModuleType, dx: Array, dy: Array, x: Array, work: Array | None, factor: Array, r: Array, sums: Array,
    sums_x: Array, mean: Array | None, count: int,
) -> None:  # fmt: skip
    """Write factor (dy - sums / count - (x - mean) r sums_x / count) to dx."""
    if mean is not None:
        x = x - mean
    xp.multiply(dy, factor, out=dx)
    work = xp.multiply(x, factor * r * (sums_x / count), out=work)
    work += factor * (sums / count)
    dx -= work


def move_running(
    xp: ModuleType, mean: Array, var: Array, new_mean: Array, new_var: Array, correction: float, kept: float, new: float
) -> None:
    """Move running statistics towards the statistics of a batch; `correction` is Bessel's."""
    for running, batch in ((mean, new_mean), (var, new_var * correction)):
        running *= kept
        running += (new * batch).astype(running.dtype, copy=False)


def along_channels(values: Array, ndim: int) -> Array:
    """View values (c,) as (1, c, 1, ...) with `ndim` dims."""
    return values.reshape(1, -1, *(1,) * (ndim - 2))
