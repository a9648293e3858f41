"""NumPy's functions on Tensors: `np.exp(x)` calls the op, which is recorded; no call silently loses a gradient.

NumPy asks a Tensor through `__array_ufunc__` and `__array_function__`. The two tables below map NumPy's functions to
`simparallel.functions`. Any other NumPy function computes with the arrays, and nothing is recorded. If a gradient is
wanted, such a call is an error, unless it only reads. A conversion such as `np.asarray(x)` or `math.exp(x)` returns
the values, with a warning.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.autograd.grad_mode import grad_mode
from simparallel.autograd.methods import FUNCTIONS
from simparallel.autograd.tape import may_run_backward
from simparallel.base.callsite import calling_frame, is_inside, place
from simparallel.errors import AutogradError, InputError

if TYPE_CHECKING:
    from simparallel.autograd.tensor import Tensor

# NumPy's name = the function's, where they differ.
_UFUNCS = """
    absolute=abs add arccos=acos arcsin=asin arctan=atan bitwise_and bitwise_or bitwise_xor ceil cos cosh divide=div
    equal=eq exp expm1 fabs=abs floor floor_divide greater=gt greater_equal=ge invert=bitwise_not less=lt less_equal=le
    log log10 log1p log2 matmul maximum minimum multiply=mul negative=neg not_equal=ne positive=clone power=pow
    remainder rint=round sign sin sinh sqrt square subtract=sub tan tanh trunc
"""

_REDUCTIONS = "sum prod mean any all argmax argmin max min"

# Functions that only read or compare a Tensor, or copy its shape: their results have no gradient.
_READERS = """
    allclose argsort argwhere array2string array_equal array_equiv array_repr array_str bincount can_cast common_type
    count_nonzero digitize empty_like flatnonzero full_like histogram iscomplexobj isclose isrealobj lexsort
    may_share_memory min_scalar_type nonzero ones_like result_type save savetxt savez savez_compressed searchsorted
    shares_memory zeros_like
"""


def _functions(f: Any) -> dict[str, Callable[..., Any]]:
    """Return functions under NumPy's names, with NumPy's arguments; `f` is `simparallel.functions`."""

    def repeated(reduce: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, axis=None, keepdims=False: reduce(a, axis, keepdims)

    def flat(a: Any, axis: int | None) -> Any:
        return f.reshape(a, -1) if axis is None else a

    def deviation(reduce: Callable[..., Any]) -> Callable[..., Any]:
        return lambda a, axis=None, ddof=0, keepdims=False: reduce(a, axis, ddof, keepdims)

    def parts(ary: Any, indices_or_sections: Any, axis: int = 0) -> Any:
        if np.ndim(indices_or_sections) == 0:
            return f.chunk(ary, indices_or_sections, axis)
        ends = [0, *indices_or_sections, ary.shape[axis]]
        return f.split(ary, np.diff(ends).tolist(), axis)

    def chosen(condition: Any, x: Any = None, y: Any = None) -> Any:
        return np.nonzero(_arrays(condition)) if x is None and y is None else f.where(condition, x, y)

    def clipped(a: Any, a_min: Any = None, a_max: Any = None, *, min: Any = None, max: Any = None) -> Any:
        return f.clip(a, min if a_min is None else a_min, max if a_max is None else a_max)

    def order(a: Any, axes: Any) -> tuple[int, ...]:
        return tuple(reversed(range(a.ndim))) if axes is None else tuple(axes)

    return {
        **{name: repeated(getattr(f, name)) for name in _REDUCTIONS.split()},
        **{"amax": repeated(f.max), "amin": repeated(f.min), "var": deviation(f.var), "std": deviation(f.std)},
        **{"around": f.round, "round": f.round, "clip": clipped, "where": chosen, "copy": lambda a: f.clone(a)},
        "shape": lambda a: a.shape,
        "ndim": lambda a: a.ndim,
        "size": lambda a, axis=None: int(a.size) if axis is None else a.shape[axis],
        "concatenate": lambda arrays, axis=0: f.concat(arrays, axis),
        "stack": lambda arrays, axis=0: f.stack(arrays, axis),
        "split": parts,
        "take": lambda a, indices, axis=None: f.take(flat(a, axis), indices, axis or 0),
        "cumsum": lambda a, axis=None: f.cumsum(flat(a, axis), axis or 0),
        "reshape": lambda a, shape: f.reshape(a, shape),
        "ravel": lambda a: f.reshape(a, -1),
        "transpose": lambda a, axes=None: f.permute(a, order(a, axes)),
        "swapaxes": lambda a, axis1, axis2: f.transpose(a, axis1, axis2),
        "squeeze": lambda a, axis=None: f.squeeze(a, axis),
        "expand_dims": lambda a, axis: f.unsqueeze(a, axis),
        "broadcast_to": lambda array, shape: f.expand(array, shape),
        "tile": lambda A, reps: f.tile(A, reps),
        "flip": lambda m, axis=None: f.flip(m, axis),
        "einsum": lambda subscripts, *operands: f.einsum(subscripts, *operands),
        "dot": lambda a, b: f.matmul(a, b) if np.ndim(a) > 0 and 0 < np.ndim(b) < 3 else f.mul(a, b),
    }


class TensorNumpy:
    """Mixin of Tensor with NumPy's protocols for functions."""

    __slots__ = ()

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method == "__call__" and not kwargs:
            function = _taped_ufuncs().get(ufunc)
            if function is not None:
                return function(*inputs)
        who = f"np.{ufunc.__name__}" + ("" if method == "__call__" else f".{method}")
        # A ufunc such as isnan has no gradient to lose.
        if not _is_constant(ufunc):
            _check_nothing_lost(who, (inputs, kwargs))
        if any(isinstance(out, TensorNumpy) for out in kwargs.get("out", ())):
            raise InputError(f"{who}: out= is a Tensor; give an array, or write x[...] = y.")
        return getattr(ufunc, method)(*_arrays(inputs), **_arrays(kwargs))

    def __array_function__(
        self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        who = f"{function.__module__}.{function.__name__}".replace("numpy.", "np.", 1)
        taped = _taped_functions().get(function)
        if taped is not None:
            # NumPy also passes defaults that the caller has not given.
            given = {name: value for name, value in kwargs.items() if value is not None and value is not np._NoValue}
            # Bind first: an argument that the function lacks is an error about the call, not one from inside of it.
            try:
                inspect.signature(taped).bind(*args, **given)
            except TypeError as error:
                raise InputError(
                    f"{who} of a Tensor: {error}; it takes {inspect.signature(taped)}. To call NumPy itself, pass "
                    "x.detach().numpy()."
                ) from None
            return taped(*args, **given)
        if function.__name__ not in _READERS.split():
            _check_nothing_lost(who, (args, kwargs))
        return function(*_arrays(args), **_arrays(kwargs))


@cache
def _taped_ufuncs() -> dict[np.ufunc, Callable[..., Tensor]]:
    pairs = [entry.split("=") for entry in _UFUNCS.split()]
    return {getattr(np, pair[0]): FUNCTIONS[pair[-1]] for pair in pairs}


@cache
def _taped_functions() -> dict[Callable[..., Any], Callable[..., Any]]:
    table = _functions(SimpleNamespace(**FUNCTIONS))
    return {getattr(np, name): function for name, function in table.items()}


@cache
def _is_constant(ufunc: np.ufunc) -> bool:
    """Return whether a ufunc returns bools for floating-point inputs, as `np.isnan` does."""
    return all(kind.split("->")[1] == "?" for kind in ufunc.types if "d" in kind.split("->")[0])


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, TensorNumpy):
        yield value  # type: ignore[misc]
    elif isinstance(value, (tuple, list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


def _arrays(value: Any) -> Any:
    """Return the same value with NumPy arrays in place of Tensors."""
    if isinstance(value, TensorNumpy):
        return value.numpy()  # type: ignore[attr-defined]
    if isinstance(value, dict):
        return {name: _arrays(item) for name, item in value.items()}
    return type(value)(map(_arrays, value)) if type(value) in (tuple, list) else value


def _check_nothing_lost(who: str, call: Any) -> None:
    lost = next((x for x in _tensors(call) if x._requires_grad), None) if grad_mode.enabled else None
    if lost is not None:
        raise AutogradError(
            f"{who}: the gradient of {lost.name or 'a tensor'} of shape {lost.shape} would be lost: autograd does "
            "not record this function. Use the functions of simparallel.functions, make one with "
            "simparallel.Function, or pass x.detach().numpy() for the numbers alone."
        )


def without_gradient(tensor: Tensor) -> Tensor:
    """Return the tensor, to be read as plain numbers, and warn if they lose a gradient; Python shows this once a line.

    Warns:
        UserWarning: the tensor requires a gradient, and no backward pass has consumed its graph. Reads of this package
            itself, such as of losses and metrics, do not warn.
    """
    if tensor._requires_grad and grad_mode.enabled:
        frame, level = calling_frame()
        if not is_inside(file := frame.f_code.co_filename) and may_run_backward(tensor):
            warnings.warn(
                f"{place(file, frame.f_lineno)}: a tensor that requires a gradient becomes plain numbers, which lose "
                "it. Use x.item(), x.tolist() or x.detach() if they are all that is wanted, else "
                "simparallel.functions, such as stack, concat and exp.",
                stacklevel=level,
            )
    return tensor
