"""Conversion of the arguments of functions: operands, their common dtype, and sizes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from simparallel.autograd.op import Op, as_int
from simparallel.autograd.ops.cast import cast
from simparallel.autograd.tensor import Tensor, as_tensor, is_on_tape
from simparallel.backend import Array, get_namespace, is_array, number_on
from simparallel.errors import InputError

# The dtype of a Python float beside tensors that are not floating-point.
SINGLE = np.dtype(np.float32)


def operands(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Convert both operands to Tensors, with dtypes promoted as in PyTorch.

    A number (also a NumPy scalar) or a list takes the dtype of the other operand if that can hold its kind; a float
    beside integers is float32. An integer tensor takes the dtype of a floating-point one, where NumPy would promote
    int64 and float32 to float64. All other pairs, such as float16 and float32, follow NumPy's promotion.

    Raises:
        InputError: an operand is not a number, array, list of numbers or Tensor, or is an integer that no dtype holds.
    """
    if not isinstance(a, Tensor):
        b = as_tensor(b)
        a = _like(a, b)
    elif not isinstance(b, Tensor):
        b = _like(b, a)
    # Checked in every call: dtypes are usually the same object, which is cheap to test.
    if a._data.dtype is not b._data.dtype:
        return _promoted(a, b.dtype), _promoted(b, a.dtype)
    return a, b


def floating(x: Any) -> Tensor:
    """Convert `x` to a Tensor; integers and bools become float32."""
    x = as_tensor(x)
    return cast(x, SINGLE) if x.dtype.kind in "biu" else x


def plain(value: Any) -> Any:
    """Convert a NumPy scalar to a Python number, which takes the dtype of the other operand."""
    return value.item() if isinstance(value, np.generic) else value


def as_like(value: Any, like: Tensor) -> Tensor:
    """Convert `value` to a Tensor; a number or a list takes the dtype of `like` if that can hold its kind."""
    return value if isinstance(value, Tensor) else _like(value, like)


def _promoted(x: Tensor, other: np.dtype) -> Tensor:
    """Cast an integer `x` to the floating-point dtype `other` where NumPy would promote both to a wider one."""
    is_wider = x.dtype.kind in "iu" and other.kind == "f" and np.result_type(x.dtype, other) != other
    return cast(x, other) if is_wider else x


def _like(value: Any, like: Tensor) -> Tensor:
    """Convert `value` to a Tensor on the device of `like`."""
    xp, dtype = get_namespace(like._data, value), like._data.dtype
    # The most common case, handled first.
    if type(value) is float and dtype.kind == "f":
        return Tensor._result(number_on(xp, value, dtype), None, like._device)
    value = plain(value)
    if isinstance(value, (bool, int, float)):
        return Tensor._result(_number(xp, value, dtype), None, like._device)
    if is_array(value) or is_on_tape(value):
        return as_tensor(value)
    try:
        array = get_namespace(value).asarray(value)
    except ValueError:
        # Lists of unequal lengths.
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        # `as_tensor` raises the error.
        return as_tensor(value)
    if array.dtype.kind == "f" or (array.dtype.kind in "iu" and dtype.kind == "f"):
        array = array.astype(np.result_type(SINGLE if dtype.kind in "biu" else dtype, 1.0))
    return as_tensor(xp.asarray(array))


def _number(xp: ModuleType, value: Any, like: np.dtype) -> Array:
    """Convert a Python number to an array without dims, in the dtype `like` if that can hold its kind."""
    is_first_float = isinstance(value, float) and like.kind in "biu"
    try:
        return number_on(xp, value, SINGLE if is_first_float else np.result_type(like, value))
    except OverflowError:
        # 300 or -1 beside uint8: promote instead of wrapping around.
        dtype = np.asarray(value).dtype
        if dtype.kind not in "iu":
            raise InputError(f"{value!r:.100} cannot be combined with a tensor: no dtype can hold it.") from None
        return number_on(xp, value, dtype)


def at_least_1d(op: Op, x: Any, dim: Any) -> Tensor:
    """Return `op(x)` for an op along one dim; a tensor without dims counts as one element along dim 0 or -1."""
    x = as_tensor(x)
    if x.ndim or dim not in (0, -1):
        return op(x)
    return op(x.reshape(1)).reshape()


def hashable(value: Any) -> Any:
    """Convert a list or an array to a tuple, which can be a key of the cache of ops."""
    return tuple(value) if isinstance(value, list) or (is_array(value) and value.ndim) else value


def spread(what: str, numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """Unpack a single tuple, so that `f((2, 3))` means `f(2, 3)`. Raise DTypeError for anything but integers."""
    if len(numbers) == 1 and type(numbers[0]) is not int:
        inner = hashable(numbers[0])
        numbers = inner if isinstance(inner, tuple) else (inner,)
    for number in numbers:
        if type(number) is not int:
            return tuple([as_int(what, number) for number in numbers])
    return numbers
