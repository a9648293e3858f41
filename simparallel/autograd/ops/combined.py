"""Methods of Tensor, under PyTorch's names, that combine ops or write into the tensor."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np

from simparallel.autograd.dims import Dims
from simparallel.autograd.methods import TensorMethods, method
from simparallel.autograd.ops.along import scatter
from simparallel.autograd.ops.elementwise import clone
from simparallel.autograd.ops.expand import expand, pad
from simparallel.autograd.ops.indexing import setitem, take
from simparallel.autograd.ops.selection import where
from simparallel.autograd.ops.shape import reshape, transpose
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import filled, get_namespace, random_normal, random_state, random_uniform, to_device_like
from simparallel.errors import InputError, ShapeError


@method("dim")
def dim(x: Tensor) -> int:
    """Return the number of dims."""
    return x.ndim


@method("contiguous")
def contiguous(x: Tensor) -> Tensor:
    """Return the tensor itself if its memory is in row-major order, else a copy."""
    return x if x._data.flags.c_contiguous else clone(x)


@method("pin_memory")
def pin_memory(x: Tensor) -> Tensor:
    """Return the tensor itself: copies to a device need no other host memory."""
    return x


@method("view_as")
def view_as(x: Tensor, other: Tensor) -> Tensor:
    """Return the tensor in the shape of `other`."""
    return reshape(x, *other.shape)


@method("expand_as")
def expand_as(x: Tensor, other: Tensor) -> Tensor:
    """Return the tensor, broadcast to the shape of `other`."""
    return expand(x, *other.shape)


@method("t")
def t(x: Tensor) -> Tensor:
    """Return the matrix transposed; vectors and numbers as they are. Raise ShapeError for more dims."""
    if x.ndim > 2:
        raise ShapeError(f"t: the tensor has shape {x.shape}, not that of a matrix; use transpose or permute.")
    return transpose(x, 0, 1) if x.ndim == 2 else x


@method("norm")
def norm(x: Tensor, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Tensor:
    """Return the p-norm over `dim` (all dims by default); `p` is a number above 0, infinity or "fro"."""
    p = 2 if p == "fro" else p
    if not (isinstance(p, (int, float)) and p > 0):
        raise InputError(f"norm: p={p!r}, need a number above 0, infinity or 'fro'.")
    if p == float("inf"):
        return abs(x).max(dim, keepdim)
    total = (x * x if p == 2 else abs(x) ** p).sum(dim, keepdim)
    # The gradient at 0 is 0, as in PyTorch; that of the root would be infinite.
    return where(total == 0, total, where(total == 0, 1, total) ** (1 / p))


@method("roll")
def roll(x: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Shift the elements along `dims`, round the end; without `dims`, in row-major order."""
    if dims is None:
        return reshape(roll(reshape(x, -1), shifts, 0), *x.shape)
    for shift, at in np.broadcast(shifts, dims):
        x = take(x, _beside(x, np.roll(np.arange(x.shape[at]), shift)), int(at))
    return x


@method("tril")
def tril(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the matrices with zeros above a diagonal; 0 is the main one, 1 the next above."""
    return where(_beside(x, np.tri(x.shape[-2], x.shape[-1], diagonal, bool)), x, x.dtype.type(0))


@method("triu")
def triu(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return the matrices with zeros below a diagonal; 0 is the main one, 1 the next above."""
    return where(_beside(x, np.tri(x.shape[-2], x.shape[-1], diagonal - 1, bool)), x.dtype.type(0), x)


@method("diag")
def diag(x: Tensor, diagonal: int = 0) -> Tensor:
    """Return a diagonal of a matrix; of a vector, the matrix with this diagonal and zeros elsewhere."""
    if x.ndim == 2:
        return take(reshape(x, -1), _beside(x, np.diagonal(np.arange(x.size).reshape(x.shape), diagonal)), 0)
    if x.ndim != 1:
        raise ShapeError(f"diag: the tensor has shape {x.shape}, not that of a vector or a matrix.")
    # Position 0 holds the zero.
    return take(pad(x, (1, 0)), _beside(x, np.diag(np.arange(1, len(x) + 1), diagonal)), 0)


@method("scatter_reduce")
def scatter_reduce(x: Tensor, dim: int, index: Any, src: Any, reduce: str) -> Tensor:
    """Add `src` to the elements at `index` along `dim`. See `functions.scatter`.

    Raises:
        InputError: `reduce` is not "sum".
    """
    if reduce != "sum":
        raise InputError(
            f"scatter_reduce: reduce={reduce!r} must be 'sum'. docs/not_here.md says what to do for others."
        )
    return scatter(x, dim, index, src, "add")


@method("multinomial")
def multinomial(x: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Draw positions along the last dim, int64, with probabilities in proportion to the elements.

    Raises:
        InputError: negative or infinite elements, or fewer above 0 than samples.
    """
    weights = x.detach().numpy().astype(np.float64)
    least = 1 if replacement else num_samples
    if not (np.isfinite(weights) & (weights >= 0)).all() or ((weights > 0).sum(-1) < least).any():
        raise InputError(
            f"multinomial: the weights of shape {x.shape} have to be finite, 0 or more, and {least} or more of each "
            "row above 0."
        )
    # The first of several waiting times, each exponential with its weight as the rate.
    weights = np.expand_dims(weights, -2).repeat(num_samples if replacement else 1, -2)
    with np.errstate(divide="ignore", invalid="ignore"):
        waits = -np.log1p(-_drawn(random_uniform, weights.shape)) / weights
    order = np.argsort(waits, -1)
    drawn = order[..., 0] if replacement else order[..., 0, :num_samples]
    return Tensor._result(to_device_like(drawn, x._data), None, x._device)


@method("copy_ fill_")
def write(x: Tensor, value: Any, non_blocking: bool = False) -> Tensor:
    """Write a value, such as another tensor, into all elements; it is broadcast."""
    setitem(x, ..., value)
    return x


@method("zero_")
def zero_(x: Tensor) -> Tensor:
    """Write 0 into all elements."""
    return write(x, 0)


@method("normal_")
def normal_(x: Tensor, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Write numbers of this normal distribution into all elements."""
    values = filled(x.shape, x.dtype, x.data, lambda: mean + std * _drawn(random_normal, x.shape))
    return write(x, to_device_like(values, x._data))


def _beside(x: Tensor, array: np.ndarray) -> Tensor:
    """Return an array where the tensor's data is."""
    return as_tensor(get_namespace(x._data).asarray(array))


def _drawn(draw: Callable[[int, str, int, int], np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """Draw from a new stream of random numbers."""
    return draw(random_state.seed, random_state.next_stream(draw.__name__), 0, math.prod(shape)).reshape(shape)


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(function)
    def written(x: Tensor, *args: Any, **settings: Any) -> Tensor:
        return write(x, function(x, *args, **settings))

    return written


for _name in ("add", "clamp", "div", "masked_fill", "mul", "sub"):
    method(f"{_name}_")(_in_place(getattr(TensorMethods, _name)))
