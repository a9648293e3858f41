"""New arrays of a dry run: of parameters, and of numbers that are unknown, as in `np.array([loss.item()])`.

NumPy would convert an unknown number to a float, and any float, NaN included, would hide that it is unknown. NumPy's
dispatch protocols do not cover `np.array` and `np.asarray` of a list, so both are patched while there are dry runs; on
all other threads they are unchanged.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import numpy as np

from simparallel.backend import has_data
from simparallel.base.dry_arrays import UnknownNumber, given, xp

_FUNCTIONS: dict[str, Any] = {"array": np.array, "asarray": np.asarray}
_runs = [0]
_runs_lock = threading.Lock()


def uninitialized(shape: Any, dtype: Any) -> np.ndarray:
    """Return an array for a parameter, which an initializer fills next; one without data in a dry run."""
    return np.empty(shape, dtype) if given.new is None else given.new(shape, dtype)


@contextmanager
def unknown_numbers() -> Iterator[None]:
    """Inside the block, make `np.array` of unknown numbers an array without data, on threads of ranks of a dry run."""

    def count(change: int) -> None:
        with _runs_lock:
            _runs[0] += change
            for name, function in _FUNCTIONS.items():
                setattr(np, name, _aware(name, function) if _runs[0] else function)

    count(1)
    try:
        yield
    finally:
        count(-1)


def _aware(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        x = args[0] if args and given.new is not None else None
        if isinstance(x, (list, tuple, UnknownNumber)) and _is_unknown(x):
            return _without_data(name, *args, **kwargs)
        return function(*args, **kwargs)

    return make


def _is_unknown(x: Any) -> bool:
    return any(map(_is_unknown, x)) if isinstance(x, (list, tuple)) else not has_data(x)


def _without_data(name: str, x: Any, dtype: Any = None, order: Any = None, *, ndmin: int = 0, **_: Any) -> Any:
    if isinstance(x, (list, tuple)):
        x = np.stack([_without_data(name, one) for one in x])
    x = getattr(xp, name)(x, dtype)
    return x.reshape((1,) * (ndmin - x.ndim) + x.shape)
