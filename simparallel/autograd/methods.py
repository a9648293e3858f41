"""The functions of ops by name, and the methods and operators of Tensor.

With `@function("relu")`, the function `relu` of an op becomes `simparallel.functions.relu` and `Tensor.relu`.
`method_types.pyi` declares the methods for type checkers.

`x += y` and `x[items] = y` write into the memory of x, which its views and the tensors that it is a view of share, as
in NumPy. Backward through a graph that kept the old values raises an error. The result of a recorded op is never
written, because backward needs its value. For such an x, and where y requires a gradient but x does not, `x += y` is
`x = x + y`, as for Python's numbers: losses add up, and other names of the old x do not see the change.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from simparallel.autograd.dims import Dims
from simparallel.autograd.grad_mode import grad_mode, no_grad
from simparallel.autograd.tape import mark_changed
from simparallel.backend import assign, has_data, is_array
from simparallel.base.hints import attribute
from simparallel.clock.cuda import cuda_device
from simparallel.errors import AutogradError, DTypeError, InputError, LayoutError, ShapeError
from simparallel.machine.devices import FIRST

if TYPE_CHECKING:
    from simparallel.autograd.method_types import MethodTypes
    from simparallel.autograd.tensor import Tensor
else:
    MethodTypes = object

Called = Callable[..., Any]
C = TypeVar("C", bound=Called)

# All functions by name, including users' own ops.
FUNCTIONS: dict[str, Called] = {}
_SIGNS = {"__iadd__": "+", "__isub__": "-", "__imul__": "*", "__itruediv__": "/", "__ipow__": "**"}


def function(methods: str = "", form: Callable[[Called], Called] | None = None) -> Callable[[C], C]:
    """Register the function of an op under its name, and as methods of Tensor. A decorator.

    Args:
        methods: names of the methods, such as "pow __pow__ __rpow__ __ipow__"; see `method`.
        form: makes the method of the function: `reduction` or `deviation`. None: the method is the function.
    """

    def register(function: C) -> C:
        FUNCTIONS[function.__name__] = function
        method(methods)(form(function) if form else function)
        return function

    return register


def method(names: str) -> Callable[[C], C]:
    """Register a function of a Tensor as its methods of these names. A decorator.

    `__radd__` beside `__add__` passes the operands in reverse order; `__iadd__` writes the result into x.
    """

    def register(function: C) -> C:
        listed = names.split()
        reflected = [f"__r{name[2:]}" for name in listed]
        for name in listed:
            form = _in_place if name in _SIGNS else _reflected if name in reflected else None
            setattr(TensorMethods, name, form(name, function) if form else function)
        return function

    return register


def _in_place(name: str, function: Called) -> Called:
    def operator(self: Any, other: Any) -> Any:
        return _augment(self, _SIGNS[name], function, other)

    operator.__name__, operator.__doc__ = name, function.__doc__
    return operator


def _reflected(name: str, function: Called) -> Called:
    def operator(self: Any, other: Any) -> Tensor:
        return function(other, self)

    operator.__name__, operator.__doc__ = name, function.__doc__
    return operator


def reduction(function: Called) -> Called:
    """Make a method that also takes NumPy's `axis` and `keepdims`, so that np.sum(x, axis=0) and its kin work."""

    def method(self: Any, dim: Dims = None, keepdim: bool = False, **numpys: Any) -> Tensor:
        if numpys:
            dim, keepdim = _dims(function.__name__, dim, keepdim, numpys)
        return function(self, dim, keepdim)

    return _named_like(function, method)


def deviation(function: Called) -> Called:
    """Make a method that also takes NumPy's `axis`, `ddof` and `keepdims`."""

    def method(self: Any, dim: Dims = None, correction: int = 1, keepdim: bool = False, **numpys: Any) -> Tensor:
        if numpys:
            correction = int(numpys.pop("unbiased", numpys.pop("ddof", correction)))
            dim, keepdim = _dims(function.__name__, dim, keepdim, numpys)
        return function(self, dim, correction, keepdim)

    return _named_like(function, method)


def _named_like(function: Called, method: Called) -> Called:
    update_wrapper(method, function, ("__module__", "__name__", "__qualname__", "__doc__"))
    del method.__dict__["__wrapped__"]  # `help` shows the arguments of the method
    method.__annotations__["dim"] = function.__annotations__["dim"]
    return method


class Size(int):
    """The number of elements. A call returns the shape, or with a dim the size of that dim, as PyTorch's `size()`."""

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        """Return the shape, or the size of `dim`. Raise ShapeError if there is no such dim."""
        if dim is None:
            return self.shape
        try:
            return self.shape[dim]
        except IndexError:
            raise ShapeError(f"size({dim}): a tensor of shape {self.shape} has no such dim.") from None


class TensorMethods(MethodTypes):
    """Mixin with the methods and operators of Tensor; an operand that is a list or an array becomes a Tensor.

    In place, x keeps its shape, dtype, layout and memory, unless it has a place in the autograd graph,
    or y requires a gradient: then x becomes the result of an op.

    Raises:
        AutogradError: in place, x is a leaf that requires a gradient, outside of `no_grad`; in `x[items] = y`, x was
            made by a recorded op, or y requires a gradient, which would be lost.
        ShapeError, DTypeError, LayoutError: in place, the result does not fit x. InputError: x's memory is read-only.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def ndim(self) -> builtins.int: ...

        @property
        def size(self) -> Size: ...

        def __len__(self) -> builtins.int: ...

    else:

        def __getattr__(self, name: str) -> Any:
            return attribute(self, name)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    # By identity: a Tensor can be a key although == compares elements.
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Tensor:
        return FUNCTIONS["eq"](self, other) if _is_operand(other) else NotImplemented

    def __ne__(self, other: object) -> Tensor:
        return FUNCTIONS["ne"](self, other) if _is_operand(other) else NotImplemented

    def full_tensor(self) -> Tensor:
        """Gather a sharded tensor into a plain one on every rank, differentiably; return a plain tensor itself.

        Collective: yes, if it is cut or an unfinished sum.
        """
        return self.redistribute(None)

    @property
    def T(self) -> Tensor:
        """All dims in reverse order."""
        return self.permute(*reversed(range(self.ndim)))

    # --- PyTorch's names ----------------------------------------------------------------------------

    def numel(self) -> builtins.int:
        """Return the number of elements."""
        return int(self.size)

    def clamp(self, min: Any = None, max: Any = None) -> Tensor:
        """Return `clip(min, max)`."""
        return self.clip(min, max)

    def cuda(self, device: Any = None, non_blocking: builtins.bool = False) -> Tensor:
        """Move to the device that PyTorch calls cuda, or cuda:`device`; see `simparallel.clock.cuda.cuda_device`."""
        return self.to(cuda_device(device))

    def cpu(self) -> Tensor:
        """Move to sim:0, the device that this rank begins with."""
        return self.to(FIRST)

    def half(self) -> Tensor:
        """Return the tensor in float16; itself if it has that dtype."""
        return self.astype(np.float16)

    def float(self) -> Tensor:
        """Return the tensor in float32; itself if it has that dtype."""
        return self.astype(np.float32)

    def double(self) -> Tensor:
        """Return the tensor in float64; itself if it has that dtype."""
        return self.astype(np.float64)

    def long(self) -> Tensor:
        """Return the tensor in int64; itself if it has that dtype."""
        return self.astype(np.int64)

    def int(self) -> Tensor:
        """Return the tensor in int32; itself if it has that dtype."""
        return self.astype(np.int32)

    def bool(self) -> Tensor:
        """Return the tensor in bool; itself if it has that dtype."""
        return self.astype(np.bool_)


def _dims(who: str, dim: Any, keepdim: bool, numpys: dict[str, Any]) -> tuple[Any, bool]:
    """Return (dim, keepdim), also given as NumPy's axis and keepdims; NumPy also passes dtype=None and out=None.

    Raises:
        InputError: an unknown name, both names of `dim`, or a value for `dtype` or `out`.
    """
    axis = numpys.get("axis")
    unused = [name for name in ("dtype", "out") if numpys.get(name) is None]
    unknown = [name for name in numpys if name not in ("axis", "keepdims", *unused)]
    if unknown or (dim is not None and axis is not None):
        got = ", ".join(f"{name}={value!r:.80}" for name, value in numpys.items())
        raise InputError(
            f"{who}: cannot take {got} beside dim={dim!r}; give dim and keepdim, or NumPy's axis and keepdims."
        )
    return (dim if axis is None else axis), bool(numpys.get("keepdims", keepdim))


def _is_operand(value: object) -> bool:
    """Return whether elements can be compared with this value; None or a string is simply not equal."""
    number = isinstance(value, (TensorMethods, int, float, complex, np.generic, list, tuple))
    return number or is_array(value) or not has_data(value)


def _augment(x: Any, sign: str, function: Any, other: Any) -> Any:
    """Compute x = function(x, other); write into the memory of x unless the op has to be recorded for backward."""
    what = f"x {sign}= y"
    brings = grad_mode.enabled and not x._requires_grad and getattr(other, "_requires_grad", False)
    interpreter = grad_mode.interpreter
    if x._node is not None or brings or not (interpreter is None or interpreter.writes_in_place):
        return function(x, other)
    check_writable(what, x, other, f"write x = x {sign} y, a new Tensor")
    # Computed first and written only if the result fits, so a refused call changes nothing.
    with no_grad():
        y = function(x, other)
    if y.placement is not x.placement:
        raise LayoutError(
            f"{what}: x is laid out as {x.layout!r}, x {sign} y as {y.layout!r}; use redistribute or full_tensor()."
        )
    if y.shape != x.shape:
        raise ShapeError(
            f"{what}: x has shape {x.shape}, x {sign} y has {y.shape}; write x = x {sign} y, a new Tensor."
        )
    check_held(what, y, x)
    x._data = assign(x._data, ..., y._data)
    # Backward through a graph that kept the old values of x raises.
    mark_changed((x,))
    return x


def check_writable(what: str, x: Any, other: Any, way_out: str) -> None:
    if x._node is not None:
        raise AutogradError(
            f"{what}: x, of shape {x.shape}, is the result of an op in the autograd graph, and must keep its value; "
            f"{way_out}. Or change a detach().clone()."
        )
    number = other.item() if isinstance(other, np.generic) else other
    if isinstance(number, int) and x.dtype.kind in "iu":
        limits = np.iinfo(x.dtype)
        # The assignment would wrap a number outside the limits.
        if not limits.min <= number <= limits.max:
            raise DTypeError(f"{what}: x of dtype {x.dtype} cannot hold {number}; use astype('int64') on x.")
    if grad_mode.enabled and x._requires_grad:
        raise AutogradError(
            f"{what}: {x.name or 'x'}, of shape {x.shape}, is a leaf that requires a gradient: change it inside of "
            f"`with no_grad():`. If that is not what you mean, {way_out}."
        )
    if grad_mode.enabled and getattr(other, "_requires_grad", False):
        raise AutogradError(
            f"{what}: y requires a gradient, which would be lost, because x, of shape {x.shape}, requires none; "
            f"{way_out}. Or take y.detach()."
        )
    if not getattr(x._data.flags, "writeable", True):
        raise InputError(
            f"{what}: the memory of x, of shape {x.shape}, is read-only, like that of expand() or of a parameter "
            "without data yet; use a clone()."
        )


def check_held(what: str, y: Tensor, x: Tensor) -> None:
    if not np.can_cast(y.dtype, x.dtype, "same_kind"):
        raise DTypeError(
            f"{what}: the result has dtype {y.dtype}, which x of dtype {x.dtype} cannot hold; use "
            f"astype('{y.dtype}') on x, or astype('{x.dtype}') on y."
        )
