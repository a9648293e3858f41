"""The ops as functions of Tensors, arrays and numbers: `add(x, 1.0)`, `linear(x, w, b)`, …"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from simparallel.autograd import elementwise, loss, matmul as products, op, reduce, shape, tensor
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import get_namespace, is_array
from simparallel.errors import ShapeError

_ADD, _SUB, _MUL, _DIV = elementwise.Add(), elementwise.Sub(), elementwise.Mul(), elementwise.Div()
_NEG, _EXP, _LOG = elementwise.Neg(), elementwise.Exp(), elementwise.Log()
_TANH, _SIGMOID, _RELU = elementwise.Tanh(), elementwise.Sigmoid(), elementwise.ReLU()
_MATMUL, _LINEAR = products.MatMul(), products.Linear()


def _operands(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Both as Tensors; a plain number takes the other's dtype where that can hold its kind."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a, b
    if not isinstance(a, Tensor):
        b_tensor = as_tensor(b)
        return _like(a, b_tensor), b_tensor
    return a, _like(b, a)


def _like(value: Any, like: Tensor) -> Tensor:
    if isinstance(value, (bool, int, float, complex)):
        xp = get_namespace(like.data)
        return Tensor._result(xp.asarray(value, dtype=np.result_type(like.dtype, value)), None)
    if not is_array(value) and not isinstance(value, np.generic):
        value = get_namespace(like.data).asarray(value)
        if value.dtype.kind == "f":  # Python floats take the tensor's precision
            value = value.astype(np.result_type(like.dtype, 1.0))
    return Tensor(value)


def add(a: Any, b: Any) -> Tensor:
    """a + b, broadcast."""
    return _ADD(*_operands(a, b))


def sub(a: Any, b: Any) -> Tensor:
    """a - b, broadcast."""
    return _SUB(*_operands(a, b))


def mul(a: Any, b: Any) -> Tensor:
    """a * b, broadcast."""
    return _MUL(*_operands(a, b))


def div(a: Any, b: Any) -> Tensor:
    """a / b, broadcast."""
    return _DIV(*_operands(a, b))


def neg(x: Any) -> Tensor:
    """-x."""
    return _NEG(as_tensor(x))


def exp(x: Any) -> Tensor:
    """e ** x."""
    return _EXP(as_tensor(x))


def log(x: Any) -> Tensor:
    """Natural logarithm."""
    return _LOG(as_tensor(x))


def tanh(x: Any) -> Tensor:
    """Hyperbolic tangent."""
    return _TANH(as_tensor(x))


def sigmoid(x: Any) -> Tensor:
    """1 / (1 + e ** -x)."""
    return _SIGMOID(as_tensor(x))


def relu(x: Any) -> Tensor:
    """max(x, 0)."""
    return _RELU(as_tensor(x))


def matmul(x: Any, w: Any) -> Tensor:
    """x @ w.   x: (..., m, k)   w: (..., k, n)   result: (..., m, n)"""
    return _MATMUL(*_operands(x, w))


def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """x @ weight.T + bias.   x: (..., k)   weight: (n, k)   bias: (n,) or None"""
    if bias is None:
        return _LINEAR(as_tensor(x), as_tensor(weight))
    return _LINEAR(as_tensor(x), as_tensor(weight), as_tensor(bias))


def _as_dims(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list) else dim


def _spread(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """`f(2, 3)` and `f((2, 3))` mean the same."""
    return tuple(numbers[0]) if len(numbers) == 1 and isinstance(numbers[0], (tuple, list)) else numbers


def sum(x: Any, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Sum over `dim` (all dims by default)."""
    return op.instance(reduce.Sum, _as_dims(dim), keepdim)(as_tensor(x))


def mean(x: Any, dim: int | tuple[int, ...] | None = None, keepdim: bool = False) -> Tensor:
    """Mean over `dim` (all dims by default)."""
    return op.instance(reduce.Mean, _as_dims(dim), keepdim)(as_tensor(x))


def reshape(x: Any, *sizes: int) -> Tensor:
    """`x` in another shape, row-major; one size may be -1."""
    return op.instance(shape.Reshape, _spread(sizes))(as_tensor(x))


def flatten(x: Any, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    """Merge the dims `start_dim … end_dim` into one."""
    x = as_tensor(x)
    first, last = (d + x.ndim if d < 0 else d for d in (start_dim, end_dim))
    if x.ndim and not 0 <= first <= last < x.ndim:
        raise ShapeError(f"flatten: dims {start_dim} … {end_dim} do not fit a tensor of shape {x.shape}.")
    merged = 1
    for size in x.shape[first : last + 1]:
        merged *= size
    return reshape(x, *x.shape[:first], merged, *x.shape[last + 1 :])


def permute(x: Any, *dims: int) -> Tensor:
    """`x` with its dims in the order `dims`."""
    return op.instance(shape.Permute, _spread(dims))(as_tensor(x))


def transpose(x: Any, dim0: int, dim1: int) -> Tensor:
    """`x` with two dims exchanged."""
    x = as_tensor(x)
    order = list(range(x.ndim))
    try:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    except IndexError:
        raise ShapeError(
            f"transpose: dims {dim0} and {dim1} do not fit a tensor of shape {x.shape}."
        ) from None
    return permute(x, *order)


def cross_entropy(logits: Any, labels: Any, reduction: str = "mean") -> Tensor:
    """-log softmax(logits)[label].   logits: (n, v)   labels: (n,) integers in 0 … v-1"""
    return op.instance(loss.CrossEntropy, reduction)(as_tensor(logits), as_tensor(labels))


tensor._functions = sys.modules[__name__]
