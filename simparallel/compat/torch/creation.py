"""New Tensors, and devices, with PyTorch's arguments."""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from operator import index
from typing import Any

import numpy as np

import simparallel as sp
from simparallel import Tensor
from simparallel.clock.cuda import cuda_device
from simparallel.compat.front import public_names
from simparallel.errors import InputError
from simparallel.machine.devices import Device


def device(type: Any = "cpu", index: int | None = None) -> Device:
    """Return a device: `device("cuda", k)` is the k-th of this node, see `simparallel.clock.cuda.cuda_device`."""
    name = str(type) if index is None else f"{type}:{index}"
    return cuda_device(int(name) if name.isdigit() else name)


def tensor(data: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor with a copy of the data."""
    if isinstance(data, Tensor):
        data = data.numpy()
    # torch.tensor always copies, unlike our Tensor.
    return _placed(Tensor(np.copy(data) if isinstance(data, np.ndarray) else data), dtype, device, requires_grad)


def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
    """Return a Tensor that shares the data if possible."""
    return _placed(data if isinstance(data, Tensor) else Tensor(data), dtype, device, False)


def from_numpy(array: np.ndarray) -> Tensor:
    """Return a Tensor that shares the array's memory."""
    return Tensor(array)


def full(size: Any, fill_value: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
    """Return a Tensor filled with one value."""
    kind = Tensor(fill_value).dtype if dtype is None else dtype
    return _placed(Tensor(np.full(size, fill_value, kind)), None, device, requires_grad)


def arange(
    start: Any = 0,
    end: Any = None,
    step: Any = 1,
    *,
    dtype: Any = None,
    device: Any = None,
    requires_grad: bool = False,
) -> Tensor:
    """Return the numbers from start to end, without end; `arange(end)` begins at 0.

    As in PyTorch, integer dtypes drop the fractions of start and step, and int64 that of end, too.

    Raises:
        InputError: the step is 0, or leads away from end.
    """
    given = (0, start, step) if end is None else (start, end, step)
    first, last, by = (number.item() if isinstance(number, (Tensor, np.generic)) else number for number in given)
    # PyTorch's default dtypes; NumPy would give float64.
    kind = np.dtype(dtype or (np.float32 if any(isinstance(n, float) for n in (first, last, by)) else np.int64))
    if (by if kind.kind == "f" else int(by)) == 0 or (last - first) * by < 0:
        raise InputError(f"arange: steps of {by} in {kind} do not lead from {first} to {last}.")
    if kind == np.int64:
        first, last, by = int(first), int(last), int(by)
    count = ceil((last - first) / by)
    if kind.kind in "iu":
        first, by = int(first), int(by)
    return _placed(Tensor((first + by * np.arange(count)).astype(kind)), None, device, requires_grad)


def linspace(start: float, end: float, steps: int, dtype: Any = np.float32, device: Any = None) -> Tensor:
    """Return equally spaced numbers, both ends included; integer dtypes drop all fractions, as in PyTorch.

    Raises:
        InputError: a negative number of steps, or an end that the dtype cannot hold.
    """
    kind = np.dtype(dtype)
    first, last = (int(start), int(end)) if kind.kind in "iu" else (float(start), float(end))
    if steps < 0 or (
        kind.kind in "iu" and not all(np.iinfo(kind).min <= n <= np.iinfo(kind).max for n in (first, last))
    ):
        raise InputError(f"linspace: cannot make {steps} numbers from {first} to {last} in {kind}.")
    at, gap = np.arange(steps), (last - first) / max(steps - 1, 1)
    # PyTorch counts the second half from the end.
    numbers = np.where(at < max(steps // 2, 1), first + gap * at, last - gap * (steps - 1 - at))
    return _placed(Tensor(numbers.astype(kind)), None, device, False)


def eye(n: int, m: int | None = None, dtype: Any = np.float32, device: Any = None) -> Tensor:
    """Return a matrix with ones on the diagonal."""
    return _placed(Tensor(np.eye(n, m, dtype=dtype)), None, device, False)


def randint(low: Any = 0, high: Any = None, size: Any = None, *, dtype: Any = np.int64, device: Any = None) -> Tensor:
    """Return random integers from low to high, without high; `randint(high, size)` begins at 0."""
    if size is None:
        high, size = None, high
    if high is None:
        low, high = 0, low
    # Draw in float64 and round down, so that large ranges stay uniform.
    drawn = sp.nn.init.uniform_(Tensor(np.empty(size, np.float64)), low, high)
    return _placed(Tensor(np.floor(drawn.data).astype(dtype)), None, device, False)


def randperm(n: int) -> Tensor:
    """Return the integers below n in random order."""
    # Sorting random keys gives a random order.
    return Tensor(np.argsort(rand(n, dtype=np.float64).data, kind="stable"))


def _sized(what: str, fill: Callable[[tuple[int, ...], Any], np.ndarray | Tensor]) -> Callable[..., Tensor]:
    """Make a function of a size, which takes one sequence or several numbers."""

    def create(
        *sizes: Any, size: Any = None, dtype: Any = None, device: Any = None, requires_grad: bool = False
    ) -> Tensor:
        shape = sizes if size is None else size
        # Accept zeros((2, 3)) as well as zeros(2, 3).
        shape = shape[0] if len(shape) == 1 and np.ndim(shape[0]) else shape
        made = fill(tuple(map(index, shape)), np.dtype(dtype or np.float32))
        return _placed(made if isinstance(made, Tensor) else Tensor(made), None, device, requires_grad)

    create.__doc__ = f"Make a Tensor {what}; its size is one sequence or several numbers."
    return create


def _like(what: str, fill: Callable[[tuple[int, ...], Any], np.ndarray]) -> Callable[..., Tensor]:
    """Make a function of a Tensor that returns another one of its shape, dtype and device."""

    def create(x: Tensor, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Tensor:
        return _placed(Tensor(fill(x.shape, dtype or x.dtype)), None, device or x.device, requires_grad)

    create.__doc__ = f"Make a Tensor {what}, by default of the shape, dtype and device of x."
    return create


zeros, ones, empty = (_sized("of zeros", np.zeros), _sized("of ones", np.ones), _sized("of any values", np.empty))
zeros_like, ones_like = _like("of zeros", np.zeros), _like("of ones", np.ones)
rand = _sized(
    "of numbers from 0 to 1, evenly distributed",
    lambda shape, dtype: sp.nn.init.uniform_(Tensor(np.empty(shape, dtype))),
)
randn = _sized(
    "of numbers of the standard normal distribution",
    lambda shape, dtype: sp.nn.init.normal_(Tensor(np.empty(shape, dtype))),
)


def _placed(made: Tensor, dtype: Any, device: Any, requires_grad: bool) -> Tensor:
    # The argument hides the function `device` of this module.
    where = {"dtype": dtype, "device": None if device is None else globals()["device"](device)}
    if any(value is not None for value in where.values()):
        made = made.to(**where)
    return made.requires_grad_() if requires_grad else made


__all__ = public_names(globals(), "Device", "InputError", "Tensor", "ceil", "cuda_device", "index")
