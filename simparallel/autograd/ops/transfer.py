"""Copies between devices: `ToDevice`, the op of `to`, and `Replicate`."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from simparallel.arrays.seam import arrays_of
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, Work, instance
from simparallel.autograd.ops.cast import Cast
from simparallel.autograd.tape import Node, grad_mode
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array, gpu_namespace, place
from simparallel.clock.cuda import cuda_device
from simparallel.clock.memory import ACTIVATIONS
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError, LayoutError
from simparallel.machine.device import DeviceWork
from simparallel.machine.devices import CUDA, FIRST, SIM, Device, is_device


class ToDevice(Op):
    """y = x on another device; the gradient is copied back

    A copy between simulated devices is an event on both, priced by the link. A copy to or from a GPU is
    real and not simulated.

    Args:
        device: the device of y.
        purpose: name of the copy in the trace.

    Raises:
        LayoutError: the op is called with a sharded x.
    """

    rule = "... -> ..."

    def __init__(self, device: Any, purpose: str = "ToDevice") -> None:
        self.device = Device(device)
        self.purpose = purpose

    def __call__(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        if x.placement is not None:
            raise LayoutError(
                f"{self.name}: this tensor is sharded over ranks as {x.layout!r}, whose slices stay on the first "
                "device of each rank. Use full_tensor() for a plain tensor, or redistribute(layout) to move slices "
                "between ranks."
            )
        needs = (grad_mode.enabled and x.requires_grad,)
        ctx = self.context_type(arrays_of(x.data), needs, self._plan([x.data]))
        ctx.device = x.device
        y = self._copy(self.purpose, x.data, x.device, self.device, ACTIVATIONS)
        node = Node(self, ctx, inputs) if needs[0] else None
        return Tensor._result(y, node, self.device if self.device.type == SIM else FIRST)

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (self._copy(f"{self.purpose}.backward", dy, self.device, ctx.device),)

    def forward(self, ctx: Context, x: Array) -> Array:
        return x.copy()

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy.copy(),)

    def work(self, x: Spec) -> Work:
        return Work(0, x.size_bytes)

    def _copy(self, name: str, x: Array, source: Device, target: Device, category: str = "") -> Array:
        """Copy `x` to new memory on `target`, counted there under `category` if given."""
        if CUDA in (source.type, target.type):
            y = place(x, target.index if target.type == CUDA else None)
            return x.copy() if y is x else y
        recorder = current_recorder()
        if recorder is None:
            return x.copy()
        there = recorder.of(target)
        there.memory.make_room(x.nbytes, name)
        start_ns = perf_counter_ns()
        y = x.copy()
        if category:
            there.memory.hold(y, category)
        if source is not target:
            recorder.of(source).copy_to(
                there, name, start_ns, perf_counter_ns(), y.size * recorder.cluster.itemsize(y.dtype)
            )
        return y


class Replicate(ToDevice):
    """y = x on another device, one of several replicas; their gradients are summed on the device of x

    For a flat x with parts that receive their gradients one by one (see `parallel.replicate`). The
    clock also counts the concatenation of these gradients on the replica's device, and their addition
    to the sum on the device of x.

    Args:
        device: the device of y, such as "sim:1".
        purpose: name of the op in traces.
    """

    def __init__(self, device: Any, purpose: str = "Replicate") -> None:
        super().__init__(device, purpose)

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        self._note(self.device, 0, 2, dy)
        grads = super().run_backward(ctx, dy)
        self._note(ctx.device, dy.size, 3, dy)
        return grads

    def _note(self, device: Device, flops: int, passes: int, dy: Array) -> None:
        recorder = current_recorder()
        if recorder is not None and device.type == SIM:
            # Simulated time only: the backward pass does the work, and measures its wall time.
            now_ns = perf_counter_ns()
            name = f"{self.purpose}.backward"
            itemsize = recorder.cluster.itemsize(dy.dtype)
            price = recorder.price(DeviceWork(name, flops, passes * dy.size * itemsize, itemsize))
            recorder.of(device).compute(name, "backward", now_ns, now_ns, price)


def move(x: Tensor, device: Device, purpose: str = "ToDevice") -> Tensor:
    """Move `x` to `device`; return `x` itself if it is there already."""
    is_plain_array = x._device is None and x.interpreter is None and x.device.type == SIM
    if is_plain_array and device.type == SIM:
        return Tensor(x.data, device=device)
    return x if x.device is device else instance(ToDevice, device, purpose)(x)


@function("to")
def to(x: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Convert `x` to another device, another dtype, or both; return `x` itself if nothing changes.

    `x.to("sim:1")`, `x.to("float16")`, `x.to("sim:1", np.float16)`, `x.to(other)` (device and dtype of a Tensor), or
    by name: `device=`, `dtype=`. The cast runs first, on the device of `x`. The gradient is converted back.

    Without a GPU, `x.to("cuda")` means a simulated device, see `simparallel.clock.cuda.cuda_device`.

    Raises:
        InputError: there is no such device or dtype.
    """
    x = as_tensor(x)
    device, dtype = where_to(*args, **kwargs)
    if dtype is not None and dtype != x.dtype:
        x = instance(Cast, dtype)(x)
    return x if device is None else move(x, device)


def where_to(
    *args: Any, device: Any = None, dtype: Any = None, non_blocking: bool = False
) -> tuple[Device | None, np.dtype | None]:
    """Return the device and the dtype given by the arguments of `to`; None if not given.

    `non_blocking` has no effect: copies to simulated devices are synchronous.

    Raises:
        InputError: an unknown name, a device or dtype given twice, or neither given.
    """
    wanted = {"device": device, "dtype": dtype}
    for value in args:
        if isinstance(value, Tensor):
            found = {"device": value.device, "dtype": value.dtype}
        else:
            found = {"device" if is_device(value) else "dtype": value}
        for name, meant in found.items():
            if wanted[name] is not None:
                raise InputError(f"to: {name} is given twice, {wanted[name]!r} and {meant!r}.")
            wanted[name] = meant
    # `is` and not `==`: in NumPy, dtype("float64") == None is True.
    if all(value is None for value in wanted.values()):
        raise InputError('to: give a device, for example to("sim:1"), or a dtype, to("float16").')
    try:
        wanted_dtype = None if wanted["dtype"] is None else np.dtype(wanted["dtype"])
    except TypeError:
        raise InputError(
            f"to: {wanted['dtype']!r} is neither a dtype nor a device, such as 'sim:1' or 'cpu'."
        ) from None
    given = wanted["device"]
    target = None if given is None else Device(given)
    if target is not None and target.type == CUDA and gpu_namespace() is None:
        target = cuda_device(given)
    recorder = current_recorder()
    if target is not None and target.type == SIM and recorder is not None:
        target = recorder.own(target)
        recorder.of(target)
    return target, wanted_dtype
