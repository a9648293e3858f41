"""Move the tensors of a module between devices, and account for their memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.autograd import Tensor, no_grad
from simparallel.autograd.ops.transfer import to, where_to
from simparallel.clock.memory import BUFFERS, GRADIENTS, PARAMETERS
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError
from simparallel.machine.devices import Device
from simparallel.nn.deferred import is_deferred, placeholder

if TYPE_CHECKING:
    from simparallel.nn.module import Module


def hold(tensor: Tensor, category: str, what: str) -> None:
    """Charge a tensor of a module to its device's memory account.

    Raises:
        DeviceOutOfMemoryError: `what` does not fit on the device.
    """
    recorder = current_recorder()
    if recorder is not None:
        memory = recorder.of(tensor._device or recorder.device).memory
        memory.hold(tensor.data, category, move=True, what=what)


def move_to(module: Module, *args: Any, **kwargs: Any) -> None:
    """Move parameters, their gradients and buffers, each once, in place. Raises InputError."""
    device, dtype = where_to(*args, **kwargs)
    if dtype is not None and dtype.kind != "f":
        raise InputError(f"{type(module).__name__}.to: dtype={dtype} is not floating point.")
    with no_grad():
        _move(module.parameters(), PARAMETERS, device, dtype)
        _move(module.buffers(), BUFFERS, device, dtype)


def _move(tensors: Iterable[Tensor], category: str, device: Device | None, dtype: np.dtype | None) -> None:
    for tensor in tensors:
        # A deferred parameter has nothing to copy: it will be drawn on the new device.
        if is_deferred(tensor):
            tensor.data = placeholder(tensor.shape, dtype or tensor.dtype)
            tensor._device = device or tensor._device
            continue
        grad = tensor.grad
        if grad is not None:
            grad = _moved(grad, device, dtype)
            hold(grad, GRADIENTS, "a gradient")
        moved = _moved(tensor, device, dtype)
        if moved is not tensor:
            tensor._device = moved._device
            tensor.data = moved.data
            tensor.grad = grad
            hold(tensor, category, f"a tensor of shape {tensor.shape}")


def _moved(x: Tensor, device: Device | None, dtype: np.dtype | None) -> Tensor:
    wanted = {"device": device, "dtype": dtype if x.dtype.kind == "f" else None}
    return to(x, **wanted) if any(value is not None for value in wanted.values()) else x
