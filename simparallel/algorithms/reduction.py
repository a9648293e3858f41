"""Reductions of the ranks' arrays, always in the order of the group: the same bits on every rank and every run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from simparallel.errors import DTypeError, InputError

_UFUNCS = {
    "sum": np.add,
    "mean": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}
# Logical reductions are the bitwise ones of `truth`'s result. PyTorch and MPI call the bitwise ones band, bor, bxor.
LOGICAL = {"land": "and", "lor": "or", "lxor": "xor"}
ALIASES = {"band": "and", "bor": "or", "bxor": "xor"}
_NAMES = frozenset((*_UFUNCS, *LOGICAL, *ALIASES))
# The partial result stays in the cache while the peers' pages stream through it.
BLOCK_BYTES = 128 * 1024


class Reduction(NamedTuple):
    """The reduction of one dtype: `ufunc` in dtype `accumulate`, then divided by the number of ranks if `is_mean`.

    `loop` is the `dtype` argument of ufuncs: `accumulate`, but None for times, where they refuse a unit.
    `is_plain`: partial results fit in arrays of the dtype itself.
    """

    ufunc: np.ufunc
    accumulate: np.dtype
    loop: np.dtype | None
    is_mean: bool
    is_plain: bool


def reduction(op: str, dtype: np.dtype, who: str = "") -> Reduction:
    """Return the reduction `op` for `dtype`.

    float16 is accumulated in float32 and rounded once. bool: sum and max are "or", prod and min are "and".
    `who`: the caller's name, for errors.

    Raises:
        InputError: unknown op.
        DTypeError: the op is not defined for the dtype.
    """
    who = f"{who}: " if who else ""
    if not isinstance(op, str) or op not in _NAMES:
        known = ", ".join(map(repr, (*_UFUNCS, *LOGICAL)))
        hint = "; for 'avg' use 'mean'" if op in ("avg", "average") else ""
        raise InputError(
            f"{who}op={op!r} is not a reduction; choose from {known} (and 'adasum', which only all_reduce has){hint}."
        )
    return _reduction(op, dtype, who)


@lru_cache(maxsize=256)
def _reduction(asked: str, dtype: np.dtype, who: str) -> Reduction:
    op = LOGICAL.get(asked) or ALIASES.get(asked) or asked
    ufunc = _UFUNCS[op]
    if op == "mean" and dtype.kind not in "fc":
        raise DTypeError(f"{who}op='mean' needs a floating-point dtype, got {dtype}; use 'sum' and divide, or cast.")
    # A ufunc computes in this machine's byte order; data in the other order is converted on the way in and out.
    native = dtype.newbyteorder("=")
    wide = native == np.float16 and op in ("sum", "mean", "prod")
    accumulate = np.dtype(np.float32) if wide else native
    # NumPy itself decides which ops a dtype has.
    try:
        result = ufunc(np.zeros(1, accumulate), np.zeros(1, accumulate))
    except TypeError:
        raise DTypeError(f"{who}op={asked!r} is not defined for dtype {dtype}.") from None
    if result.dtype != accumulate:
        raise DTypeError(f"{who}op={asked!r} is not defined for dtype {dtype}: the result would be {result.dtype}.")
    loop = None if dtype.kind in "mM" else accumulate
    return Reduction(ufunc, accumulate, loop, op == "mean", accumulate == dtype)


def truth(op: str, x: np.ndarray, who: str) -> np.ndarray:
    """Return 1 where x is not 0 and 0 elsewhere, with the dtype of x: the operand of logical reductions.

    Raises:
        DTypeError: x is neither of integers nor of bool.
    """
    reduction(op, x.dtype, who)
    found = (x != 0).astype(x.dtype)
    # NumPy gives a scalar where x has no dims.
    return np.asarray(found) if isinstance(found, np.generic) else found


def identity(rule: Reduction) -> Any:
    """Return the identity of a reduction: 0 of a sum, 1 of a product, the smallest value of a maximum, …

    Raises:
        DTypeError: it has none.
    """
    dtype, ufunc = rule.accumulate, rule.ufunc
    # NumPy has no identity of maximum and minimum, because it depends on the dtype; and that of "and" is -1, all bits.
    if ufunc is np.bitwise_and:
        return np.array(ufunc.identity).astype(dtype)[()]
    if ufunc not in (np.maximum, np.minimum):
        return ufunc.identity
    is_max = ufunc is np.maximum
    if dtype.kind in "fc":
        return -np.inf if is_max else np.inf
    if dtype.kind == "b":
        return not is_max
    if dtype.kind not in "iu":
        raise DTypeError(f"exscan: dtype {dtype} has no smallest or largest value for the first rank; use scan.")
    return np.iinfo(dtype).min if is_max else np.iinfo(dtype).max


def reduce_into(rule: Reduction, parts: Sequence[np.ndarray], out: np.ndarray, *, is_disjoint: bool = False) -> None:
    """Reduce `parts` (1-D, equal sizes) into `out`, which may be one of them unless `is_disjoint`.

    It proceeds in blocks, so that each partial result stays in the cache.
    """
    if len(parts) == 1:
        if out is not parts[0]:
            out[...] = parts[0]
        return
    # A ufunc reads both elements before it writes: two parts need no scratch array, even if `out` is one of them.
    direct = rule.is_plain and (is_disjoint or len(parts) == 2)
    if direct and len(parts) == 2 and not rule.is_mean:
        rule.ufunc(parts[0], parts[1], out=out)
        return
    # Partial results go straight to `out` only if `direct`: otherwise it may be a part that is still to be read.
    block = max(1, BLOCK_BYTES // rule.accumulate.itemsize)
    # Like the parts: of arrays without data, the scratch has none, too, and nothing computes with what it held before.
    scratch = out if direct else np.empty_like(parts[0], rule.accumulate, shape=min(block, out.size))
    for start in range(0, out.size, block):
        stop = min(start + block, out.size)
        total = out[start:stop] if direct else scratch[: stop - start]
        rule.ufunc(parts[0][start:stop], parts[1][start:stop], out=total, dtype=rule.loop)
        for part in parts[2:]:
            rule.ufunc(total, part[start:stop], out=total, dtype=rule.loop)
        if rule.is_mean:
            total /= len(parts)
        if not direct:
            out[start:stop] = total


def reduce_arrays(
    rule: Reduction, parts: Sequence[np.ndarray], dtype: np.dtype, out: np.ndarray | None = None
) -> np.ndarray:
    """Reduce arrays of any equal shape, into a new array of `dtype` or into `out`, which may be one of them."""
    # A copy in the dtype of accumulation, so that `out` may be one of the parts.
    total = np.array(parts[0], dtype=rule.accumulate, copy=True, order="C", ndmin=0)
    for part in parts[1:]:
        rule.ufunc(total, part, out=total, dtype=rule.loop)
    if rule.is_mean:
        total /= len(parts)
    if out is None:
        return total.astype(dtype, copy=False)
    out[...] = total
    return out


class Combine:
    """A pairwise reduction, for algorithms that pass partial results on.

    Partial results have the dtype of the data: float16 is rounded at every step, as on the wire of real hardware,
    and not once at the end.

    Args:
        op, dtype: as in `reduction`.
        count: number of ranks, the divisor of "mean".
    """

    def __init__(self, op: str, dtype: np.dtype, count: int) -> None:
        self._rule = reduction(op, dtype)
        self._count = count

    def __call__(self, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
        """Compute out = first op second, in this order. `out` may be one of them."""
        self._rule.ufunc(first, second, out=out)

    def finish(self, total: np.ndarray) -> None:
        """Finish the result of the last step in place: divide for "mean"."""
        if self._rule.is_mean:
            np.divide(total, self._count, out=total)

    def all_of(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Reduce all ranks' parts at once, and finish. `out` may be one of them."""
        reduce_into(self._rule, parts, out)
