"""Arguments of plans: shapes and dtypes of inputs, numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Spec
from simparallel.base.checks import check_integer, is_integer
from simparallel.errors import InputError


def input_specs(who: str, shapes: Sequence[Any], dtype: Any) -> list[Spec]:
    """Return a Spec for each input.

    Args:
        who: name of the caller, for messages.
        shapes: shapes of the inputs.
        dtype: dtype of all inputs, or a list or tuple with one dtype for each.

    Raises:
        InputError: a shape is not a sequence of sizes, a dtype is invalid, or the numbers of dtypes and shapes differ.
    """
    dtypes = list(dtype) if isinstance(dtype, (list, tuple)) else [dtype] * len(shapes)
    if len(dtypes) != len(shapes):
        raise InputError(f"{who}: dtype={dtype!r} has {len(dtypes)} entries for {len(shapes)} inputs.")
    return [
        Spec(_shape(who, i, shape), _dtype(who, i, d)) for i, (shape, d) in enumerate(zip(shapes, dtypes, strict=True))
    ]


def num_devices(who: str, device_num: Any, default: int) -> int:
    """Return `device_num` as an int; `default` for None. Raises InputError unless it is an integer of 1 or more."""
    return default if device_num is None else check_integer(who, "device_num", device_num, 1)


def _shape(who: str, i: int, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, (tuple, list)) or not all(is_integer(size) and size >= 0 for size in shape):
        raise InputError(f"{who}: the shape of input {i} is {shape!r}, expected a tuple of sizes such as (32, 64).")
    return tuple(map(int, shape))


def _dtype(who: str, i: int, dtype: Any) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError:
        raise InputError(f"{who}: dtype of input {i} is {dtype!r}, expected a dtype such as 'float32'.") from None
