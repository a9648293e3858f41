"""How the elements of an array lie in memory."""

from __future__ import annotations

from itertools import accumulate
from math import prod
from operator import mul
from typing import Any

import numpy as np


def reshapes_in_place(x: np.ndarray, shape: tuple[Any, ...], order: str) -> bool:
    """Tell whether NumPy reshapes an array without a copy: new dims begin wherever the steps of the old ones break.

    Since 2.1 NumPy itself can be asked, by `copy=False`.
    """
    is_fortran = order == "F" or (order == "A" and x.flags.fnc)
    if not x.size or (x.flags.f_contiguous if is_fortran else x.flags.c_contiguous):
        return True
    sizes = tuple(shape[0]) if np.iterable(shape[0]) else shape
    sizes = tuple(x.size // (abs(prod(sizes)) or 1) if size == -1 else size for size in sizes)
    towards_front = slice(None) if is_fortran else slice(None, None, -1)
    begins = set(accumulate(sizes[towards_front], mul))
    inner, step = 1, None
    for size, stride in zip(x.shape[towards_front], x.strides[towards_front], strict=True):
        if size > 1:
            if step not in (None, stride) and inner not in begins:
                return False
            inner, step = inner * size, stride * size
    return True
