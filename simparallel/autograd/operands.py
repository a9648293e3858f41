"""What the functions accept as operands and dims."""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import get_namespace, is_array


def operands(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors; a plain number takes the other's dtype where that can hold its kind."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a, b
    if not isinstance(a, Tensor):
        b_tensor = as_tensor(b)
        return _like(a, b_tensor), b_tensor
    return a, _like(b, a)


def _like(value: Any, like: Tensor) -> Tensor:
    """`value` as a Tensor beside `like`, and where `like` is."""
    if isinstance(value, (bool, int, float, complex)):
        xp = get_namespace(like.data)
        return Tensor._result(xp.asarray(value, dtype=np.result_type(like.dtype, value)), None, like._device)
    if not is_array(value) and not isinstance(value, np.generic):
        value = get_namespace(like.data).asarray(value)
        if value.dtype.kind == "f":  # Python floats take the tensor's precision
            value = value.astype(np.result_type(like.dtype, 1.0))
    return as_tensor(value)


def as_dims(dim: Any) -> Any:
    """A list of dims as a tuple, which can be a key."""
    return tuple(dim) if isinstance(dim, list) else dim


def spread(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """`f(2, 3)` and `f((2, 3))` mean the same."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], (tuple, list)) else numbers
