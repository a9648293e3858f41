"""Convert the integers and dims that ops and functions accept."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any

import numpy as np

from simparallel.errors import DTypeError, ShapeError

Dims = int | tuple[int, ...] | None  # the dims of a reduction; None for all


def as_int(what: str, value: Any) -> int:
    """Return `value` as an int. NumPy's integers are accepted; 2.0 and True are not.

    Raises:
        DTypeError: `value` is not an integer.
    """
    if type(value) is int:
        return value
    try:
        # A bool is an integer to Python, but as a size or a dim it is a mistake.
        if not isinstance(value, (bool, np.bool_)):
            return index(value)
    except TypeError:
        pass
    raise DTypeError(f"{what}: {value!r} is not an integer.")


def as_dims(what: str, dim: Any) -> Any:
    """Return a dim or a list of dims as an int or a tuple, None as None. Raise DTypeError for anything else."""
    if dim is None or type(dim) is int:
        return dim
    if isinstance(dim, (tuple, list, np.ndarray)) and np.ndim(dim):
        return tuple([as_int(what, d) for d in dim])
    return as_int(what, dim)


def normalize_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return dims as sorted non-negative numbers; None means all.

    Raises:
        ShapeError: a dim is out of range or named twice.
    """
    if dim is None:
        return tuple(range(ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    positive = tuple(sorted(d + ndim if d < 0 else d for d in dims))
    if any(not 0 <= d < ndim for d in positive) or len(set(positive)) != len(positive):
        why = "names a dim twice" if len(set(positive)) < len(positive) else "is out of range"
        raise ShapeError(f"dim={dim!r} {why}; the tensor has {ndim} dims")
    return positive


def reduced_dims(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """Return `normalize_dims(dim, ndim)`; a tensor without dims also takes 0 and -1, as in PyTorch."""
    is_none = not ndim and dim in (0, -1, (0,), (-1,))
    return () if is_none else normalize_dims(dim, ndim)
