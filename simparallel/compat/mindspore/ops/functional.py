"""`mindspore.ops.functional`: ops as functions, with MindSpore's argument names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel import Tensor, functions
from simparallel.compat.front import public_names, refuse, take
from simparallel.compat.groups import group_of
from simparallel.compat.mindspore.common import grad, jit, value_and_grad
from simparallel.compat.mindspore.ops.primitive import axes, number

# Functions whose arguments are MindSpore's.
_SAME = """
abs acos add asin atan bitwise_and bitwise_or bitwise_xor ceil cos cosh div exp expm1 floor ge gelu gt le
log log1p masked_fill matmul maximum minimum mse_loss mul ne neg pow relu sigmoid silu sin sinh sqrt square
sub tan tanh trunc where
"""
take(globals(), functions, _SAME, tensor_add="add", real_div="div")


def _reduction(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduce(x: Any, axis: Any = None, keep_dims: bool = False) -> Tensor:
        return fn(x, axes(axis), keep_dims)

    reduce.__name__ = reduce.__qualname__ = fn.__name__
    reduce.__doc__ = f"`sp.functions.{fn.__name__}` along `axis`; None or () takes all."
    return reduce


reduce_sum = _reduction(functions.sum)
mean = reduce_mean = _reduction(functions.mean)
reduce_max = _reduction(functions.max)
reduce_min = _reduction(functions.min)


def sum(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor:
    """Return the sum along `dim`; None or () sums all elements."""
    return functions.sum(input, axes(dim), keepdim)


def max(input: Any, axis: int | None = None, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Return (maxima along `axis`, their int32 indices); without an axis the index is 0, as in MindSpore."""
    return functions.max(input, axis, keepdims), _where(functions.argmax, input, axis, keepdims)


def min(input: Any, axis: int | None = None, keepdims: bool = False) -> tuple[Tensor, Tensor]:
    """Return (minima along `axis`, their int32 indices); without an axis the index is 0, as in MindSpore."""
    return functions.min(input, axis, keepdims), _where(functions.argmin, input, axis, keepdims)


def _where(choose: Callable[..., Tensor], x: Any, axis: int | None, keepdims: bool) -> Tensor:
    # MindSpore returns the index 0, not the position in the flat tensor.
    found = Tensor(0) if axis is None else choose(x, axis, keepdims)
    return functions.cast(found, "int32")


def flatten(input: Any, order: str = "C", *, start_dim: int = 1, end_dim: int = -1) -> Tensor:
    """Merge several dims into one; by default all but the first."""
    refuse("flatten", "transpose before", order=order != "C")
    return functions.flatten(input, start_dim, end_dim)


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """See `sp.functions.cross_entropy`; a label of -100 is an error unless `ignore_index` asks for it."""
    return functions.cross_entropy(
        input, target, reduction, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def softmax(input: Any, axis: int = -1) -> Tensor:
    """See `sp.functions.softmax`."""
    return functions.softmax(input, axis)


def log_softmax(logits: Any, axis: int = -1) -> Tensor:
    """See `sp.functions.log_softmax`."""
    return functions.log_softmax(logits, axis)


def argmax(input: Any, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """See `sp.functions.argmax`; returns int64."""
    return functions.argmax(input, dim, keepdim)


def cast(input: Any, dtype: Any) -> Tensor:
    """Return the input in another dtype."""
    return functions.cast(input, dtype)


def reshape(input: Any, shape: Sequence[int]) -> Tensor:
    """Return the input in another shape."""
    return functions.reshape(input, *shape)


def transpose(input: Any, input_perm: Sequence[int]) -> Tensor:
    """Return the input with its dims in another order."""
    return functions.permute(input, *input_perm)


def expand_dims(input_x: Any, axis: int) -> Tensor:
    """Return the input with a new dim of size 1 at `axis`."""
    return functions.unsqueeze(input_x, axis)


def squeeze(input: Any, axis: Any = None) -> Tensor:
    """Return the input without dims of size 1; None or () drops all of them."""
    return functions.squeeze(input, axes(axis))


def tile(input: Any, dims: Sequence[int]) -> Tensor:
    """Repeat the input along each dim."""
    return functions.tile(input, *dims)


def concat(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Concatenate the Tensors along `axis`."""
    return functions.cat(tensors, axis)


cat = concat


def stack(tensors: Sequence[Any], axis: int = 0) -> Tensor:
    """Stack the Tensors along a new dim at `axis`."""
    return functions.stack(tensors, axis)


def one_hot(indices: Any, depth: int, on_value: Any = 1, off_value: Any = 0, axis: int = -1) -> Tensor:
    """Return `on_value` at the class of each index, `off_value` elsewhere."""
    refuse("one_hot", "classes are the last dim", axis=axis if axis != -1 else None)
    return functions.one_hot(indices, int(number(depth)), number(on_value), number(off_value))


def shape(input_x: Any) -> tuple[int, ...]:
    """Return the shape of a Tensor."""
    return tuple(input_x.shape)


def scalar_to_array(input_x: float) -> Tensor:
    """Return a 0-d Tensor: float32 for a float, int64 for an int."""
    return Tensor(input_x)


scalar_to_tensor = scalar_to_array


def zeros(size: Any, dtype: Any = "float32") -> Tensor:
    """Return a Tensor of zeros."""
    return Tensor(np.zeros(size, dtype))


def ones(size: Any, dtype: Any = "float32") -> Tensor:
    """Return a Tensor of ones."""
    return Tensor(np.ones(size, dtype))


def zeros_like(input: Any, dtype: Any = None) -> Tensor:
    """Return zeros of the input's shape and, by default, its dtype."""
    return zeros(input.shape, dtype or input.dtype)


def ones_like(input: Any, dtype: Any = None) -> Tensor:
    """Return ones of the input's shape and, by default, its dtype."""
    return ones(input.shape, dtype or input.dtype)


def stop_gradient(value: Tensor) -> Tensor:
    """Return the same data, detached from the autograd graph."""
    return value.detach()


def depend(value: Any, expr: Any) -> Any:
    """Return `value`: operations run in program order anyway."""
    return value


def all_reduce(x: Tensor, op: str = "sum", group: Any = None) -> Tensor:
    """Return a new Tensor with the reduction over the ranks, see `sp.functions.all_reduce`."""
    return functions.all_reduce(x, op, group_of(group))


def bias_add(input_x: Any, bias: Any) -> Tensor:
    """Return x (n, c, ...) plus the bias (c,) of each channel."""
    return functions.add(input_x, functions.reshape(bias, -1, *(1,) * (len(input_x.shape) - 2)))


__all__ = public_names(globals(), "Tensor", "axes", "number")
