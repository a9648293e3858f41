"""The stand-in's rules for indices: CuPy wraps them into range, and does not define which of equal ones wins."""

from __future__ import annotations

from typing import Any

import numpy as np


def parts(key: Any) -> tuple[Any, ...]:
    return key if isinstance(key, tuple) else (key,)


def refuse_repeats(data: np.ndarray, key: Any) -> None:
    """Refuse indices with duplicates: CuPy does not define the value that wins; xp.add.at adds all."""
    # Slices, integers and masks write each element once.
    if not any(isinstance(item, np.ndarray) and item.dtype.kind in "iu" for item in parts(key)):
        return
    # Count the writes to each element; np.add.at counts repeated indices, too.
    touched = np.zeros(data.shape, np.int64)
    np.add.at(touched, key, 1)
    if touched.size and touched.max() > 1:
        raise IndexError("x[indices] = … writes an element more than once; use xp.add.at.")


def wrapped(data: np.ndarray, key: Any) -> Any:
    """Return a key with its index arrays wrapped into range, as CuPy does."""
    found = parts(key)
    if any(part is None or part is ... for part in found):
        return key
    inside = [
        part.astype("int64") % data.shape[i]
        if isinstance(part, np.ndarray) and part.dtype.kind in "iu" and data.shape[i]
        else part
        for i, part in enumerate(found)
    ]
    return tuple(inside) if isinstance(key, tuple) else inside[0]


def in_range(name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Return the arguments of a function with its indices wrapped into range."""
    if name == "take":
        kwargs = {**kwargs, "mode": "wrap"}
    elif name == "take_along_axis":
        data, indices, axis = args
        args = data, indices.astype("int64") % data.shape[axis], axis
    elif name.endswith(".at"):
        args = args[0], wrapped(args[0], args[1]), *args[2:]
    return args, kwargs
