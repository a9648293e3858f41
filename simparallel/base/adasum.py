"""Adasum: a sum of gradients that adds orthogonal vectors, averages parallel ones, and interpolates in between.

    A(a, b) = (1 - <a,b> / 2<a,a>) a + (1 - <a,b> / 2<b,b>) b
    T(g[0, n)) = A(T(g[0, n/2)), T(g[n/2, n)))

A(a, b) is a + b minus half of each one's projection on the other. It equals the result of two
consecutive SGD steps, averaged over both orders, with the Fisher approximation of the Hessian.
Maleki et al. 2020, "Scaling distributed training with adaptive summation" (arXiv 2006.02924).

All arithmetic is float64, whatever the storage dtype, and the result is rounded once. The
coefficient of an exactly zero vector is 1, so 0 is the identity; there is no epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from simparallel.backend import Array, get_namespace, has_data, is_array, without_data
from simparallel.base.units import format_type_of
from simparallel.errors import DTypeError, InputError, ShapeError

WIDE = np.dtype(np.float64)
# Elements per dot product; the sums of blocks are then added exactly. Small enough that BLAS does not use several
# threads, whose number would change the last bits.
BLOCK = 1 << 13
# Squared norms in this range have neither underflowed nor overflowed, and neither do their quotients.
_LOW, _HIGH = 2.0**-900, 2.0**900
# The smallest positive float64; it stands for a sum of squares that underflowed.
LEAST = 2.0**-1074
# Infinities become NaN without a warning.
QUIET = np.errstate(over="ignore", invalid="ignore")


Layers = tuple[int, ...]  # sizes of the parts of a flat vector, each combined separately
Segment = tuple[int, int, int]  # the intersection of a layer with a slice: number, start and stop in the slice


class Moments(NamedTuple):
    """<a,b>, <a,a> and <b,b> of a pair of vectors, or of a part of them."""

    dot: float
    aa: float
    bb: float


def adasum(vectors: Iterable[Any], *, strict: bool = False) -> Any:
    """Return the Adasum of n vectors, which adds orthogonal vectors and averages parallel ones.

    Two vectors give A(a, b) = (1 - <a,b> / 2<a,a>) a + (1 - <a,b> / 2<b,b>) b. More are combined pair by pair:
    first neighbours (0, 1), (2, 3), …, then pairs of pairs (Maleki et al. 2020, arXiv 2006.02924). The paper
    has no rule for n that is not a power of two; here a vector without a partner waits for the next level,
    which is the same as filling the list with zeros.

    Args:
        vectors: one array for each rank, of any shape; or for each rank a list of arrays, one per
            layer: then each layer is combined separately, as in the paper. All ranks have the same
            shape and floating-point dtype in a layer.
        strict: refuse n that is not a power of two.

    Returns:
        A new array, or a list of new arrays, one per layer; shapes and dtypes as given.

    Raises:
        InputError: no vectors, elements that are not arrays, or (strict) n that is not a power of two.
        ShapeError, DTypeError: shapes or dtypes differ between ranks, or a dtype is not float16, float32 or float64.

    Cost: 9 (n - 1) flops for each element.

    Example:
        >>> sp.adasum([np.array([1.0, 0.0]), np.array([1.0, 1.0])])
        array([1.25, 0.75])
    """
    ranks = _checked(vectors)
    count = len(ranks)
    if strict and count & (count - 1):
        raise InputError(
            f"adasum: {count} vectors, but Adasum is published for powers of two only. Use "
            f"{1 << count.bit_length() - 1} or {1 << count.bit_length()}, or strict=False: then a vector without a "
            "partner moves on to the next level."
        )
    layered = isinstance(ranks[0], list)
    layers = zip(*ranks, strict=True) if layered else [ranks]
    sums = [_layer(layer) for layer in layers]
    return sums if layered else sums[0]


@QUIET
def _layer(vectors: Sequence[Array]) -> Array:
    first = vectors[0]
    total = tree([vector.reshape(-1).astype(WIDE) for vector in vectors])
    return total.astype(first.dtype).reshape(first.shape)


def tree(vectors: Sequence[Array]) -> Array:
    """Return T, the Adasum of all these flat float64 vectors: a new array, or the only vector itself."""
    level = list(vectors)
    while len(level) > 1:
        # An odd vector at the end has no partner and moves up unchanged.
        joined = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = joined + level[len(joined) * 2 :]
    return level[0]


@QUIET
def whole(vectors: Sequence[np.ndarray], layers: Layers) -> np.ndarray:
    """Return Adasum of flat vectors, computed layer by layer: a new vector of their dtype."""
    if not all(map(has_data, vectors)):
        return without_data(np.empty(vectors[0].size, vectors[0].dtype))
    out = np.empty(vectors[0].size, vectors[0].dtype)
    start = 0
    for size in layers:
        out[start : start + size] = tree([v[start : start + size].astype(WIDE) for v in vectors])
        start += size
    return out


def segments(layers: Layers, part: slice) -> Iterator[Segment]:
    """Yield the intersections of a slice with the layers."""
    start = 0
    for layer, size in enumerate(layers):
        low, high = max(start, part.start), min(start + size, part.stop)
        if low < high:
            yield layer, low - part.start, high - part.start
        start += size


def pair(a: Array, b: Array) -> Array:
    """Return A(a, b), the Adasum of two flat float64 vectors; bitwise equal to A(b, a)."""
    found = moments(a, b)
    if is_safe(found):
        first, second = coefficients(found)
        return a * first + b * second
    return _scaled_pair(a, b)


def moments(a: Array, b: Array) -> Moments:
    """Return the moments of two flat float64 vectors."""
    return Moments(product(a, b), product(a, a), product(b, b))


def coefficients(found: Moments) -> tuple[float, float]:
    """Return the factors of a and b; the factor of a zero vector is 1, since it has no projection."""
    dot, aa, bb = found
    return (1.0 - 0.5 * dot / aa if aa else 1.0), (1.0 - 0.5 * dot / bb if bb else 1.0)


def is_safe(found: Moments) -> bool:
    """Return whether the squared norms are 0, or in a range without underflow and overflow."""
    return all(value == 0.0 or _LOW <= value <= _HIGH for value in found[1:])


def product(a: Array, b: Array) -> float:
    """Return <a,b> of flat float64 vectors. <a,a> is 0 only if a is 0, even if squares underflow."""
    if a.size <= BLOCK:
        total = float(a.dot(b))
    else:
        end = a.size // BLOCK * BLOCK
        blocks = a[:end].reshape(-1, 1, BLOCK) @ b[:end].reshape(-1, BLOCK, 1)
        # `fsum` adds exactly, but raises for infinities and overflow, which `sum` passes on.
        values = [*blocks.ravel().tolist(), float(a[end:].dot(b[end:]))]
        total = math.fsum(values) if math.isfinite(sum(values)) else sum(values)
    # Squares may underflow to a sum of 0, which would make the vector pass for a zero vector.
    return total or LEAST * bool(a is b and a.any())


def _scaled_pair(a: Array, b: Array) -> Array:
    """Return A(a, b) where squares would under- or overflow: scale both vectors by powers of two first."""
    xp = get_namespace(a)
    (unit_a, exponent_a), (unit_b, exponent_b) = _scaled(a), _scaled(b)
    dot, aa, bb = moments(unit_a, unit_b)
    if aa == 0.0 or bb == 0.0:
        return a + b
    # With a = 2^m u and b = 2^n v: the projection of b on a is 2^n <u,v>/<u,u> u. Powers of two scale exactly.
    half_on_a = xp.ldexp(unit_a * (0.5 * dot / aa), exponent_b)
    half_on_b = xp.ldexp(unit_b * (0.5 * dot / bb), exponent_a)
    return (a - half_on_a) + (b - half_on_b)


def _scaled(x: Array) -> tuple[Array, int]:
    """Return x divided by a power of two, so that its largest element is about 1, and the exponent."""
    largest = float(abs(x).max())
    exponent = math.frexp(largest)[1] if math.isfinite(largest) else 0
    return get_namespace(x).ldexp(x, -exponent), exponent


def _checked(vectors: Iterable[Any]) -> list[Any]:
    """Return the vectors as a list of arrays, or of lists of arrays, checked to fit each other."""
    ranks = [
        [_array(layer) for layer in entry] if isinstance(entry, (list, tuple)) else _array(entry) for entry in vectors
    ]
    if not ranks:
        raise InputError("adasum: needs at least one vector.")
    layered = isinstance(ranks[0], list)
    if any(isinstance(entry, list) != layered for entry in ranks):
        raise InputError("adasum: give one array for each rank, or a list of layers for each rank, not both.")
    for rank, entry in enumerate(ranks):
        layers, firsts = (entry, ranks[0]) if layered else ([entry], [ranks[0]])
        if len(layers) != len(firsts):
            raise ShapeError(f"adasum: rank 0 has {len(firsts)} layers, but rank {rank} has {len(layers)}.")
        for i, (layer, first) in enumerate(zip(layers, firsts, strict=True)):
            _check_layer(layer, first, f"layer {i} of rank {rank}" if layered else f"vector {rank}")
    return ranks


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise DTypeError unless a dtype is floating point and at most as wide as the arithmetic."""
    if dtype.kind != "f" or dtype.itemsize > WIDE.itemsize:
        raise DTypeError(f"adasum: {name} has dtype {dtype}, expected float16, float32 or float64; use .astype(…).")


def _array(value: Any) -> Any:
    return np.asarray(value) if isinstance(value, np.generic) else value


def _check_layer(layer: Any, first: Any, name: str) -> None:
    if not is_array(layer):
        raise InputError(
            f"adasum: {name} is {format_type_of(layer)}, expected an array; use np.asarray(…), or the `.data` of a "
            "Tensor."
        )
    check_dtype(name, layer.dtype)
    if layer.shape != first.shape:
        raise ShapeError(f"adasum: {name} has shape {layer.shape}, but on rank 0 it has {first.shape}.")
    if layer.dtype != first.dtype:
        raise DTypeError(f"adasum: {name} has dtype {layer.dtype}, but on rank 0 it has {first.dtype}.")
