"""`Function`: a gradient of your own, in the style of `torch.autograd.Function`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.autograd.grad_mode import grad_mode, no_grad
from simparallel.autograd.tape import FlatSlice, Node, Reversible
from simparallel.autograd.tensor import Tensor, as_tensor, common_device
from simparallel.backend import Array, get_namespace, is_array
from simparallel.errors import AutogradError, InputError, LayoutError, ShapeError
from simparallel.machine.devices import Device, current_device


class FunctionContext:
    """Keeps values from `forward` for `backward`, by `save_for_backward` or as attributes of any name.

    Attributes:
        needs_input_grad: for each argument of `apply`, whether its gradient is wanted.
        saved_tensors: the saved values, detached.
    """

    accumulate_into: Array | None = None
    grad_buffers: Sequence[Array | None] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...], needs: tuple[bool, ...], device: Device) -> None:
        self.needs_input_grad = needs_input_grad
        # `needs_input_grad` of the arguments that are Tensors.
        self.needs = needs
        self._device = device
        self._saved: tuple[Array | None, ...] = ()  # arrays, so that backward detects later writes
        self._constant: tuple[int, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep inputs or outputs; backward refuses to run if they were written in place meanwhile. They may be None."""
        self._saved = tuple(None if x is None else as_tensor(x)._data for x in tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return tuple(None if x is None else Tensor._result(x, None, self._device) for x in self._saved)

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Mark these outputs as having no gradient."""
        self._constant = tuple(map(id, tensors))


class Function:
    """A function with a gradient of your own. Call it through `apply`.

        >>> class Double(sp.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...
        ...     @staticmethod
        ...     def backward(ctx, dy):
        ...         (x,) = ctx.saved_tensors
        ...         return dy * 2 * x
        >>> x = sp.Tensor([3.0], requires_grad=True)
        >>> Double.apply(x).backward()
        >>> x.grad.tolist()
        [6.0]

    Ops inside `forward` and `backward` are not recorded, so these may use NumPy on `x.numpy()`; only ops take simulated
    time. There are no second derivatives: the tape keeps arrays. Sharded tensors are refused; for them, write an Op
    (`help(simparallel.ops.Op)`), whose rule says how it is cut.
    """

    @staticmethod
    def forward(*args: Any) -> Any:
        """Return a Tensor or a tuple of them, given (ctx, *args); given args alone if there is a `setup_context`."""
        raise InputError("Function: define forward(ctx, *args), a static method.")

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of the arguments, in order, given the gradients of the outputs; None for no gradient.

        An output that the loss does not use has a gradient of zeros.
        """
        raise InputError("Function: define backward(ctx, *grads), a static method.")

    setup_context: Any = None  # setup_context(ctx, inputs, output), a static method: PyTorch's newer style

    def __call__(self, *args: Any) -> Any:
        raise InputError(
            f"{type(self).__name__}: call {type(self).__name__}.apply(...) on the class, not on an instance."
        )

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Call `forward` with `args`, Tensors or other objects, and record it for backward.

        Raises:
            LayoutError: a Tensor is sharded.
            DeviceMismatchError: the Tensors are on different devices.
            InputError: `forward` returned something other than Tensors.
        """
        inputs = tuple(x for x in args if isinstance(x, Tensor))
        if any(x.placement is not None for x in inputs):
            raise LayoutError(f"{cls.__name__}: a Tensor is sharded; use full_tensor(), or write an Op.")
        device = (common_device(cls.__name__, inputs) if inputs else None) or current_device()
        wanted = {id(x) for x in inputs if grad_mode.enabled and x._requires_grad}
        ctx = FunctionContext(tuple(id(x) in wanted for x in args), tuple(id(x) in wanted for x in inputs), device)
        with no_grad():
            if cls.setup_context is None:
                result = cls.forward(ctx, *args)
            else:
                result = cls.forward(*args)
                cls.setup_context(ctx, args, result)
        outputs = result if isinstance(result, tuple) else (result,)
        for y in outputs:
            if not isinstance(y, Tensor):
                raise InputError(f"{cls.__name__}: forward returned {y!r:.80}; return a Tensor, or a tuple of them.")
        if wanted:
            outputs = _on_tape(cls, ctx, args, inputs, outputs)
        return outputs if isinstance(result, tuple) else outputs[0]


def _on_tape(
    cls: type[Function],
    ctx: FunctionContext,
    args: tuple[Any, ...],
    inputs: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    """Return the outputs as results of one node, which gets all their gradients at once.

    A node has one result. If several outputs have a gradient, it is a flat tensor without data, and they are slices of
    it: the node then gets one vector with the gradients of all.
    """
    kept = [y for y in outputs if y._data.dtype.kind == "f" and id(y) not in ctx._constant]
    node = Node(_FunctionCall(cls, args, outputs, kept), ctx, inputs)  # type: ignore[arg-type]
    if len(kept) == 1:
        return tuple(Tensor._result(y._data, node, y._device) if y is kept[0] else y.detach() for y in outputs)
    sizes = [y._data.size for y in kept]
    dtype = np.result_type(*(y._data.dtype for y in kept)) if kept else np.dtype(np.float32)
    # A broadcast zero takes no memory: only the shape and dtype of this tensor are used.
    whole = Tensor._result(np.broadcast_to(np.zeros((), dtype), sum(sizes)), node, ctx._device)
    found = []
    for y in outputs:
        place = next((i for i, other in enumerate(kept) if other is y), None)
        if place is None:
            found.append(y.detach())
            continue
        part_ctx = FunctionContext((True,), (True,), ctx._device)
        part = FlatSlice(repr(node.op), sum(sizes[:place]), sum(sizes))
        found.append(Tensor._result(y._data, Node(part, part_ctx, (whole,)), y._device))  # type: ignore[arg-type]
    return tuple(found)


class _FunctionCall(Reversible):
    """A call of a Function as an op of the autograd graph."""

    def __init__(
        self, cls: type[Function], args: tuple[Any, ...], outputs: tuple[Tensor, ...], kept: list[Tensor]
    ) -> None:
        self.name, self._function = cls.__name__, cls
        self._is_tensor = [isinstance(x, Tensor) for x in args]
        self._specs = [(x.shape, x.dtype) for x in args if isinstance(x, Tensor)]
        # Of each output: shape, dtype, and the offset of its gradient in the vector of all; None for a constant.
        starts = np.cumsum([0, *(y._data.size for y in kept)]).tolist()
        where = {id(y): starts[i] for i, y in enumerate(kept)}
        self._outputs = [(y._data.shape, y._data.dtype, where.get(id(y))) for y in outputs]

    def __repr__(self) -> str:
        return f"{self.name}.apply"

    def run_backward(self, ctx: FunctionContext, dy: Array) -> Sequence[Array | None]:
        grads = [
            Tensor._result(self._gradient(dy, shape, dtype, start), None, ctx._device)
            for shape, dtype, start in self._outputs
        ]
        with no_grad():
            found = self._function.backward(ctx, *grads)
        found = found if isinstance(found, (tuple, list)) else (found,)
        count = len(self._is_tensor)
        if len(found) < count or any(x is not None for x in found[count:]):
            raise AutogradError(
                f"{self.name}: backward returned {len(found)} gradients, forward took {count} arguments; return one "
                "for each, and None for the others."
            )
        # Gradients are returned for all arguments, but the tape knows only the Tensors.
        of_tensors = [x for x, is_tensor in zip(found, self._is_tensor, strict=False) if is_tensor]
        return [self._checked(i, x, dy) for i, x in enumerate(of_tensors)]

    @staticmethod
    def _gradient(dy: Array, shape: tuple[int, ...], dtype: np.dtype, start: int | None) -> Array:
        if start is None:
            return get_namespace(dy).zeros(shape, dtype)
        return dy.reshape(-1)[start : start + prod(shape)].reshape(shape).astype(dtype, copy=False)

    def _checked(self, i: int, gradient: Any, dy: Array) -> Array | None:
        if gradient is None:
            return None
        array = gradient._data if isinstance(gradient, Tensor) else gradient
        shape, dtype = self._specs[i]
        if not is_array(array):
            array = get_namespace(dy).asarray(array, dtype)
        if array.shape != shape:
            raise ShapeError(
                f"{self.name}: backward returned a gradient of shape {array.shape} for a Tensor of shape {shape}; sum "
                "it over the dims that were broadcast."
            )
        # A view, which the tape never writes to: the function may keep the array.
        return array.astype(dtype, copy=False)[...]
