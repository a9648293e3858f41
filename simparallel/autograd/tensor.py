"""`Tensor`: an array with automatic differentiation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from simparallel.arrays.captures import HOOKS, READ, refuse, running
from simparallel.arrays.host.sums import wider
from simparallel.arrays.seam import device_of
from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.hooks import Hook, RemovableHandle, changed_by, hooks_of
from simparallel.autograd.methods import FUNCTIONS, Size, TensorMethods
from simparallel.autograd.numpy_functions import TensorNumpy, without_gradient
from simparallel.autograd.tape import Node, mark_changed, run_backward
from simparallel.autograd.tensor_html import tensor_html
from simparallel.backend import DRY_TYPES, Array, get_namespace, has_data, is_array, to_host
from simparallel.clock.memory import GRADIENTS, TENSORS
from simparallel.clock.recorder import current_recorder, observer_of
from simparallel.errors import (
    AutogradError,
    DeviceMismatchError,
    DTypeError,
    InputError,
    LayoutError,
    NonFiniteLossError,
    ShapeError,
)
from simparallel.machine.devices import FIRST, SIM, Device, current_device

if TYPE_CHECKING:
    from simparallel.autograd.interpreter import AbstractInterpreter
    from simparallel.layout.layout import Layout
    from simparallel.layout.sharding import Placement


_NOT_SCALED = (1.0, None)


class Tensor(TensorMethods, TensorNumpy):
    """An array on a device; ops on it are recorded for `backward`.

    Args:
        data: array (kept, not copied: `x += 1` writes into it), number or nested sequence. Python floats become
            float32.
        requires_grad: collect a gradient. Floating-point tensors only. A dtype in this position, as in MindSpore, is
            taken as `dtype`.
        name: shown in messages.
        dtype: convert the data; None keeps it as it is.
        device: the device, such as "sim:1"; by default the device of the Tensor given as `data`, else the device of
            the surrounding `with device(...)`, else sim:0. To move a Tensor, use `to`.

    Attributes:
        data: the NumPy or CuPy array, shape `shape`, dtype `dtype`. Another array, or a Tensor, may be assigned.
        grad: Tensor of the same shape, or None before the first backward.
        requires_grad: may be assigned for a leaf.
        placement: layout and shape of a sharded tensor: `data` is then this rank's slice, and `shape` the shape of the
            whole tensor. None for a plain one.
        interpreter: runs the ops on this tensor, if it is more than an array, such as a sharded one; else None.

    Raises:
        InputError: data that is not an array, such as lists of different lengths, or a Tensor on another device than
            `device`.
        AutogradError: a list of Tensors that need gradients, or `requires_grad` for integers.
    """

    # _device is None for a plain array given to an op: it is taken to be on the device of the other operands.
    __slots__ = (
        "__weakref__", "_data", "_device", "_grad", "_hooks", "_node", "_requires_grad", "_room", "_scaled",
        "interpreter", "name", "placement",
    )  # fmt: skip
    _counts_itself: ClassVar[bool] = False  # a subclass puts its memory on the account
    __array_priority__ = 1000  # cupy_array * tensor asks the tensor first; NumPy does so anyway

    def __init__(
        self, data: Any, requires_grad: Any = False, name: str = "", device: Any = None, *, dtype: Any = None
    ) -> None:
        if not isinstance(requires_grad, bool):  # MindSpore's Tensor(data, dtype)
            dtype, requires_grad = requires_grad, False
        self._device: Device | None = current_device() if device is None else find_device(device)
        self.placement: Placement | None = None
        self.interpreter: AbstractInterpreter | None = None
        if isinstance(data, Tensor):
            if device is None:
                self._device = data._device or self._device
            elif self._device is not data._device:
                raise InputError(f"Tensor: the data is a Tensor on {data.device}; move it with to({device!r}).")
            data, self.placement, self.interpreter = data.data, data.placement, data.interpreter
        data = as_array(data, dtype)
        if requires_grad:
            check_differentiable(data)
        recorder = current_recorder()
        if recorder is not None:
            if recorder.home is not None:
                data = recorder.home(data, requires_grad)
            # Tensors are counted only against a limit, so that a program without one pays nothing.
            if recorder.memory.limit_bytes is not None and not self._counts_itself:
                what = f"a tensor of shape {data.shape}"
                recorder.of(self._device).memory.hold(data, TENSORS, what=what, is_copied=True)
        self._data: Array = data
        self._grad: Tensor | None = None
        self._requires_grad = requires_grad
        self.name = name
        self._node: Node | None = None
        self._hooks: list[Hook] | None = None  # of a leaf; else the node has them
        self._room: Array | None = None  # contiguous; backward may write the gradient there while `.grad` is None
        self._scaled: tuple[float, Tensor | None] = _NOT_SCALED  # another one by `scale_loss` only

    @classmethod
    def _result(
        cls,
        data: Array,
        node: Node | None = None,
        device: Device | None = None,
        placement: Placement | None = None,
        interpreter: AbstractInterpreter | None = None,
    ) -> Tensor:
        """Wrap the result of an op; with a placement and its interpreter, this rank's part of a sharded tensor."""
        self = Tensor.__new__(Tensor)
        # NumPy reduces to scalars, and a user's op may return a number or a list.
        if not (type(data) is np.ndarray or is_array(data)):
            data = (get_namespace(data) if type(data) in DRY_TYPES else np).asarray(data)
        self._data = data
        self._grad = None
        self._requires_grad = node is not None
        self.name = ""
        self.placement = placement
        self.interpreter = interpreter
        self._node = node
        if node is not None:
            node.shape = data.shape if placement is None else placement.shape
            node.dtype, node.device = data.dtype, device
        self._hooks = self._room = None
        self._scaled = _NOT_SCALED
        self._device = device
        return self

    def _like(self, data: Array, node: Node | None = None) -> Tensor:
        """Wrap an array of this tensor's shape in a Tensor with the same device and layout."""
        if self.placement is None:
            return Tensor._result(data, node, self._device)
        return Tensor._result(data, node, self._device, self.placement, self.interpreter)

    def _gradient(self, gradient: Array) -> Tensor:
        """Wrap the gradient of this leaf in a Tensor with the same device and layout."""
        if self.placement is None:
            return Tensor._result(gradient, None, self._device)
        return Tensor._result(gradient, None, self._device, self.placement.gradient, self.interpreter)

    def __getstate__(self) -> Any:
        """Return the state for copies and pickles, without hooks and without the gradient buffer."""
        if self._node is not None:
            raise AutogradError(
                f"{self.name or 'a tensor'} of shape {self.shape} came from {self._node.op!r}: it is part of the "
                "autograd graph, and such tensors cannot be copied or pickled; use detach(), or item() for a loss."
            )
        slots: dict[str, Any] = object.__getstate__(self)[1]  # type: ignore[index]
        return None, {**slots, "_hooks": None, "_room": None}

    # --- attributes ----------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, ...]:
        return self._data.shape if self.placement is None else self.placement.shape

    @property
    def layout(self) -> Layout | None:
        """How a sharded tensor is cut over the devices; None for a plain one."""
        return None if self.placement is None else self.placement.layout

    @property
    def dtype(self) -> np.dtype:
        return self._data.dtype

    @property
    def ndim(self) -> int:
        return self._data.ndim

    @property
    def size(self) -> Size:
        """The number of elements; `size()` and `size(dim)` are PyTorch's."""
        size = Size(self._data.size if self.placement is None else math.prod(self.placement.shape))
        size.shape = self.shape
        return size

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; for a sharded tensor, of the whole tensor."""
        return int(self.size) * self._data.dtype.itemsize

    @property
    def device(self) -> Device:
        """The device: "sim:k" for NumPy arrays, "cuda:k" for those of a GPU."""
        return device_of(self._data) or self._device or current_device()

    @property
    def is_leaf(self) -> bool:
        """Whether it is not the result of a recorded op: `backward` sets `.grad` of leaves only."""
        return self._node is None

    def detach(self) -> Tensor:
        """Return a leaf with the same data, detached from the autograd graph."""
        detached = self._like(self._data)
        if grad_mode.interpreter is not None:
            grad_mode.interpreter.note_detached(self, detached)
        return detached

    # --- assignment: ops and the tape read the slots, because a property costs ten times as much ----

    @property
    def data(self) -> Array:
        return self._data

    @data.setter
    def data(self, value: Any) -> None:
        """Replace the array.

        A sharded tensor takes its slice of an array of its (global) shape, or an array of the slice's shape. Results
        computed from the old array keep it: backward goes through the old values.

        Raises:
            InputError: not an array.
            LayoutError, DeviceMismatchError: a Tensor with another layout or device.
            ShapeError: an array of another shape, for a sharded tensor.
        """
        if value is self._data:  # x.data -= step: NumPy has written into it
            mark_changed((self,))
            return
        array = self._array_of("data", value)
        if self._requires_grad:
            check_differentiable(array)
        recorder = current_recorder()
        if recorder is not None:
            if recorder.home is not None:
                array = recorder.home(array, self._requires_grad)
            recorder.of(self._device or recorder.device).memory.follow(self._data, array)
        self._data = array

    @property
    def grad(self) -> Tensor | None:
        return self._grad

    @grad.setter
    def grad(self, value: Any) -> None:
        """Replace the gradient. Raise ShapeError or DTypeError if it does not fit, and the errors of `data`."""
        if value is None or value is self._grad:  # x.grad *= 0.5
            self._grad = value
            return
        grad = self._as_gradient(value)
        recorder = current_recorder()
        if recorder is not None:
            memory = recorder.of(self._device or recorder.device).memory
            memory.hold(grad._data, GRADIENTS, move=grad._data.base is None)  # a bucket keeps its category
        self._grad = grad

    @property
    def requires_grad(self) -> bool:
        return self._requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Raise AutogradError for the result of a recorded op, and for integers."""
        if self._node is not None:
            raise AutogradError("requires_grad can change only for a leaf, not for the result of an op; use detach().")
        if value:
            check_differentiable(self._data)
            recorder = current_recorder()
            if recorder is not None and recorder.home is not None:
                self._data = recorder.home(self._data, True)
        self._requires_grad = bool(value)

    def _as_gradient(self, value: Any) -> Tensor:
        """Return a Tensor for a gradient given as a Tensor or array; an array is converted to this tensor's dtype.

        The gradient of a float16 tensor may be float32, for example after it was divided by the loss scale.

        Raises:
            ShapeError, DTypeError: it does not fit this tensor.
        """
        array = self._array_of("grad", value)
        if array.shape != self._data.shape:
            raise ShapeError(f"grad has shape {array.shape}, but the tensor has {self._data.shape}.")
        if not isinstance(value, Tensor):
            return self._gradient(array.astype(self.dtype, copy=False))
        if array.dtype != self.dtype and array.dtype != wider(self.dtype):
            raise DTypeError(
                f"grad has dtype {array.dtype}, but the tensor has {self.dtype}; use grad.astype('{self.dtype}')."
            )
        if self.placement is not None and value.placement is None:
            return self._gradient(array)
        return value

    def _array_of(self, what: str, value: Any) -> Array:
        """Return the array of a value assigned to `what`; for a sharded tensor, this rank's slice of it."""
        if isinstance(value, Tensor):
            place = self.placement
            if value.placement is not None and (place is None or value.placement not in (place, place.gradient)):
                raise LayoutError(
                    f"{what}: the Tensor given is laid out as {value.layout!r}, this one as {self.layout!r}; use "
                    "redistribute or full_tensor()."
                )
            if value._device not in (None, self._device) and value.device != self.device:
                raise DeviceMismatchError(
                    f"{what}: the Tensor given is on {value.device}, this one on {self.device}; use "
                    f".to('{self.device}').",
                    op=what,
                    devices=[str(self.device), str(value.device)],
                )
            return value._data if value.placement is not None else self._slice(what, value._data)
        if not (is_array(value) or isinstance(value, np.generic) or not has_data(value)):
            raise InputError(f"{what}: {value!r:.200} is neither a Tensor nor an array.")
        array = value if is_array(value) else get_namespace(value).asarray(value)
        check_numbers(what, array)
        return self._slice(what, array)

    def _slice(self, what: str, array: Array) -> Array:
        """Return this rank's slice of a whole array, or the slice itself; for a plain tensor, the array."""
        place = self.placement
        if place is None or array.shape == self._data.shape:
            return array
        if array.shape != place.shape or self.interpreter is None:
            raise ShapeError(
                f"{what}: got shape {array.shape}, the sharded tensor has shape {place.shape} and its slice on this "
                f"rank {self._data.shape}; give either."
            )
        return self.interpreter.slice_of(array, place.gradient)

    # --- values: reading them waits for the device that computes them ------------------------------

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a tensor without dims")
        return self.shape[0]

    def item(self) -> float | int | bool:
        """Return the only element as a Python number. Raise ShapeError for any other size."""
        if math.prod(self.shape) != 1:
            raise ShapeError(f"item() needs exactly one element, but this tensor has shape {self.shape}.")
        return to_host(self._seen("item()")).item()

    @property
    def _is_whole(self) -> bool:
        """Whether this rank holds the whole tensor; a rank outside the layout's mesh holds nothing."""
        return self.placement is None or (self.placement.is_whole and self.data.shape == self.placement.shape)

    def _check_whole(self, what: str) -> None:
        """Raise LayoutError if this rank holds only a part of the tensor."""
        if not self._is_whole:
            assert self.placement is not None
            held = "an addend" if self.placement.layout.partial else "a slice" if self.data.size else "nothing"
            raise LayoutError(
                f"{what}: this rank holds {held} of this tensor of shape {self.shape}, laid out as {self.layout!r}. "
                "Use full_tensor() (every rank calls it) for the whole, .data for what is here."
            )

    def _seen(self, what: str) -> Array:
        """Return the data for a read on the host, which waits in simulated time. Raise LayoutError for a shard."""
        if running.step and what != "backward":
            refuse(f"reads a value on the host ({what})", READ)
        if self.placement is not None:
            self._check_whole(what)
        observer_of(None).read(self._device, is_check=what == "backward")
        return self._data

    def __float__(self) -> float:
        return float(without_gradient(self).item())

    def __int__(self) -> int:
        return int(without_gradient(self).item())

    def __index__(self) -> int:
        # Unlike PyTorch, refuse dims of size 1: an array indexed by such a tensor would lose that dim.
        if self.shape or self.dtype.kind not in "iu":
            raise TypeError(
                f"a tensor of shape {self.shape} and dtype {self.dtype} is not an index; pass an integer, such as "
                "x.item(), or an integer tensor without dims."
            )
        return int(self.item())

    def __round__(self, ndigits: int | None = None) -> float:
        return round(without_gradient(self).item(), ndigits)

    def __bool__(self) -> bool:
        return bool(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if spec else str(self)

    def numpy(self) -> np.ndarray:
        """Return the data in host memory; for a NumPy tensor the array itself, not a copy.

        Raises:
            LayoutError: a sharded tensor, if this rank holds only a part of it.
        """
        return to_host(self._seen("numpy()"))

    def tolist(self) -> Any:
        """Return the numbers in nested lists; without dims the number itself. Raise LayoutError for a slice."""
        return self.numpy().tolist()

    def asnumpy(self) -> np.ndarray:
        """Return `numpy()`. MindSpore's name."""
        return self.numpy()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(without_gradient(self).numpy().__array__(), dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return str(to_host(self.data)) if self._is_whole else repr(self)

    def __repr__(self) -> str:
        before = "Tensor(" if self.placement is None else "Tensor(slice "
        text = np.array2string(to_host(self.data), separator=", ", threshold=20, edgeitems=2, prefix=before)
        if self.placement is not None:
            text = f"{text}, shape={self.shape}, layout={self.layout!r}"
        elif not self.data.size or not has_data(self.data):
            text = f"{text}, shape={self.shape}"
        grad = ", requires_grad=True" if self.requires_grad else ""
        name = f", name={self.name!r}" if self.name else ""
        device = "" if self._device in (None, FIRST) else f", device={str(self._device)!r}"
        return f"{before}{text}, dtype={self.dtype}{grad}{name}{device})"

    def _repr_html_(self) -> str:
        """Return shape, dtype and small values as HTML, for notebooks; of a cut tensor also the slices of all ranks."""
        return tensor_html(self)

    # --- gradients -------------------------------------------------------------------------------

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Call `hook(self)` whenever backward has finished this leaf's gradient.

        Returns:
            A handle: `handle.remove()`, or `handle()`, removes the hook.

        Raises:
            AutogradError: the tensor is not a leaf that requires a gradient.
        """
        if not (self.is_leaf and self.requires_grad):
            raise AutogradError("only a leaf that requires a gradient can have a gradient hook.")
        return RemovableHandle(hooks_of(self), Hook(hook, may_change=False))

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Call `hook(gradient)` whenever backward has computed the gradient of this tensor, summed over all its uses.

        If the hook returns a Tensor or an array of the same shape, that replaces the gradient. The hook of a leaf
        is called before the gradient is added to `.grad`.

        Returns:
            A handle: `handle.remove()`, or `handle()`, removes the hook.

        Raises:
            AutogradError: the tensor requires no gradient. In backward: the errors of assigning to `.grad`.
        """
        if not self.requires_grad:
            raise AutogradError("only a tensor that requires a gradient can have a gradient hook.")
        return RemovableHandle(hooks_of(self), Hook(hook, may_change=True))

    def backward(
        self, grad: Any = None, *, retain_graph: bool = False, check_finite: bool = True, gradient: Any = None
    ) -> None:
        """Add the gradients of this tensor to `.grad` of every leaf that it was computed from.

        Args:
            grad: cotangent of the same shape, or for a sharded tensor of the shape of this rank's slice; None means 1,
                for a scalar.
            retain_graph: keep the values that forward saved, for another backward.
            check_finite: refuse a scalar loss that is NaN or infinite before anything changes.
            gradient: PyTorch's name for `grad`.

        Raises:
            AutogradError: nothing to differentiate, or the graph was consumed before.
            InputError: `grad` was given under both names.
            NonFiniteLossError: the loss is NaN or infinite; names rank and step, and the loss scale if it has one.
        """
        if grad is not None and gradient is not None:
            raise InputError("backward: grad and gradient are two names of one argument; give it once.")
        seed = seed_of(self, gradient if grad is None else grad, check_finite)
        # The caller looks for infinities itself, so NumPy's warnings about them would be noise.
        may_overflow = self._scaled[1] is not None
        with np.errstate(over="ignore", invalid="ignore") if may_overflow else nullcontext():
            run_backward(self, seed, _accumulate, retain_graph=retain_graph, calls_hooks=True)

    def requires_grad_(self, requires_grad: bool = True) -> Tensor:
        """Start or stop collecting gradients for this leaf, like `requires_grad = …`; return the tensor."""
        self.requires_grad = requires_grad
        return self


def as_tensor(value: Any) -> Tensor:
    """Return `value` itself if it is a Tensor, else a new leaf (arrays are not copied).

    A plain array is on no device: an op computes with it on the device of its other operands. A list of Tensors that
    require a gradient is stacked by a recorded op, so their gradients are kept.
    """
    if isinstance(value, Tensor):
        return value
    if is_on_tape(value):
        return FUNCTIONS["stack"]([as_tensor(item) for item in value])
    tensor = Tensor(value)
    tensor._device = None
    return tensor


def find_dtype(who: str, dtype: Any) -> np.dtype:
    """Return `dtype`, such as a name, as a NumPy dtype.

    Raises:
        DTypeError: there is no such dtype.
    """
    try:
        return np.dtype(dtype)
    except TypeError:
        raise DTypeError(f"{who}: {dtype!r} is not a dtype, use for example 'float32'.") from None


def is_on_tape(value: Any) -> bool:
    """Return whether this is a list, possibly nested, with a Tensor that requires a gradient."""
    if not isinstance(value, (list, tuple)) or not grad_mode.enabled:
        return False
    # Costs as little as NumPy's own pass over the list.
    kinds = set(map(type, value))
    if any(issubclass(kind, Tensor) for kind in kinds) and any(
        item._requires_grad for item in value if isinstance(item, Tensor)
    ):
        return True
    return bool(kinds & {list, tuple}) and any(map(is_on_tape, value))


def find_device(name: Any) -> Device:
    """Return the simulated device of this rank with this name.

    Raises:
        InputError: there is no such device, or it is a GPU.
    """
    device = Device(name)
    if device.type != SIM:
        raise InputError(f"device={name!r}: make the tensor of a CuPy array, or use to({name!r}).")
    recorder = current_recorder()
    if recorder is not None:
        device = recorder.own(device)
        recorder.of(device)
    return device


def common_device(who: str, inputs: Sequence[Tensor]) -> Device | None:
    """Return the device of the inputs; None if all are plain arrays. Raises DeviceMismatchError for several devices."""
    devices = list(dict.fromkeys(tensor._device for tensor in inputs if tensor._device is not None))
    if len(devices) > 1:
        raise device_mismatch(who, inputs, [tensor._device for tensor in inputs], devices[0])
    return devices[0] if devices else None


def device_mismatch(who: str, inputs: Sequence[Tensor], devices: Sequence[Any], target: str) -> DeviceMismatchError:
    """Build the error for inputs on these devices; None is the device of a plain array, which is not listed."""
    found = {i: f"input {i} {inputs[i].shape} on {device}" for i, device in enumerate(devices) if device is not None}
    return DeviceMismatchError(
        f"{who}: the tensors are on different devices: {', '.join(found.values())}. Nothing was computed. Move them "
        f"to one device first, for example with .to('{target}').",
        op=who,
        devices=list(dict.fromkeys(str(devices[i]) for i in found)),
    )


def scale_loss(loss: Tensor, scale: float, may_overflow: bool = False) -> Tensor:
    """Return loss * scale, recorded for backward; if that is NaN or infinite, backward raises and names the scale.

    Args:
        loss: any shape.
        scale: above 0.
        may_overflow: the caller checks the gradients for infinities, so the scaled loss may be infinite.
    """
    if running.step:
        refuse("scales its loss by a number on the host", "Leave the step uncaptured.")
    # The product may overflow on purpose: the loss scale is then lowered.
    with np.errstate(over="ignore"):
        scaled = loss * scale
    scaled._scaled = scale, loss if may_overflow else None
    return scaled


def seed_of(root: Tensor, grad: Any, check_finite: bool) -> Array:
    """Return the cotangent that backward starts with. Raise AutogradError, ShapeError or NonFiniteLossError."""
    if not root._requires_grad:
        why = "this tensor does not depend on any tensor with requires_grad=True (or it was computed under no_grad)"
        raise AutogradError(f"backward: {why}.")
    data = root._data
    xp = get_namespace(data)
    if grad is not None:
        value = grad if isinstance(grad, Tensor) or is_array(grad) else xp.asarray(grad)
        seed = xp.asarray(root._array_of("backward: grad", value), dtype=data.dtype)
        if seed.shape != data.shape:
            raise ShapeError(f"backward: grad has shape {seed.shape}, the tensor {data.shape}.")
        return seed
    if math.prod(root.shape) != 1:
        raise ShapeError(f"backward: a tensor of shape {root.shape} needs grad=; only a scalar may leave it out.")
    scale, unscaled = root._scaled
    # Only the loss itself has to be finite.
    if unscaled is not None:
        root, scale = unscaled, 1.0
    if running.capture is not None:
        if check_finite:
            running.capture.checks.append(lambda: _check_finite(root, to_host(root._data).item(), scale))
        return xp.ones(data.shape, dtype=data.dtype)
    # Reading the value waits for the device, and refuses a slice.
    if check_finite or root.placement is not None:
        seen = root._seen("backward")
        value = seen.item() if isinstance(seen, np.ndarray) else to_host(seen).item()
        if check_finite and type(data) not in DRY_TYPES and not math.isfinite(abs(value)):
            _check_finite(root, value, scale)
    return xp.ones(data.shape, dtype=data.dtype)


def _check_finite(root: Tensor, value: float, scale: float) -> None:
    """Raise NonFiniteLossError if the value of a loss is NaN or infinite."""
    if not math.isfinite(abs(value)):
        recorder = current_recorder()
        rank, step = (recorder.rank, recorder.step) if recorder else (0, -1)
        where = f"rank {rank}, step {step}" if recorder else "outside of a run"
        times, lower = (f" times its loss scale, {scale:g},", "loss scale or the ") if scale != 1 else ("", "")
        raise NonFiniteLossError(
            f"{where}: the loss{times} is {value}. Nothing was updated. Lower the {lower}learning rate, clip the "
            "gradients, or look for a division by 0 or a log of 0 in the inputs "
            "(backward(check_finite=False) lets it pass).",
            rank=rank,
            step=step,
            value=str(value),
        )


_MAY_CHANGE = attrgetter("may_change")


def _accumulate(leaf: Tensor, gradient: Array) -> None:
    hooks = leaf._hooks
    if hooks and running.step:
        refuse(f"calls a hook of {leaf.name or 'a leaf'}", HOOKS)
    if hooks and any(map(_MAY_CHANGE, hooks)):
        gradient = changed_by(hooks, leaf, gradient)
    if leaf._grad is None:
        leaf._grad = leaf._gradient(gradient)
    else:
        # In place: the Tensor in `.grad`, and a bucket that it is a view of, stay the same.
        leaf._grad._data += gradient
    if hooks:
        for hook in tuple(hooks):
            if not hook.may_change:
                hook.function(leaf)


def as_array(data: Any, dtype: Any = None) -> Array:
    """Return an array itself; a number or nested lists as a NumPy array, with floats as float32.

    Raises:
        InputError: complex numbers, text, objects, or lists of different lengths.
        AutogradError: the lists hold Tensors that require a gradient.
    """
    if not is_array(data):
        if is_on_tape(data):
            raise AutogradError(
                "Tensor: the list holds Tensors that require a gradient, which would be lost; use "
                "functions.stack(...), or x.detach() for each of them."
            )
        is_numpy = isinstance(data, np.generic) or not has_data(data)
        try:
            data = get_namespace(data).asarray(data)
        except ValueError as error:  # NumPy's error for lists of different lengths
            raise InputError(f"Tensor: {data!r:.200} cannot be converted to an array: {error}") from None
        # Python floats become float32, as in PyTorch; NumPy's own scalars keep their dtype.
        if data.dtype == np.float64 and not is_numpy:
            data = data.astype(np.float32)
    if dtype is not None:
        data = data.astype(find_dtype("Tensor", dtype), copy=False)
    check_numbers("Tensor", data)
    return data


def check_numbers(who: str, array: Array) -> None:
    """Raise InputError for an array of complex numbers, text, times or objects."""
    if array.dtype.kind == "c":
        raise InputError(
            f"{who}: {array!r:.200} holds complex numbers, which no op computes with; keep the real and the imaginary "
            "part, x.real and x.imag, in two Tensors."
        )
    if array.dtype.kind in "OUSmMV":
        held = {"O": "Python objects", "U": "text", "S": "text", "V": "records"}.get(array.dtype.kind, "times")
        raise InputError(f"{who}: {array!r:.200} holds {held}; need numbers, in an array or nested lists.")


def check_differentiable(array: Array) -> None:
    """Raise AutogradError unless the array is floating point."""
    if array.dtype.kind != "f":
        raise AutogradError(f"requires_grad=True needs a floating-point tensor, got dtype {array.dtype}.")
