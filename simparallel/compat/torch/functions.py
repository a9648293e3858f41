"""Functions of `torch`: those of `sp.functions`, and some with other arguments or results."""

# mypy: disable-error-code="no-redef"
# ruff: noqa: F821

from __future__ import annotations

from typing import Any

import simparallel as sp
from simparallel import Tensor, functions
from simparallel.autograd.functions import *
from simparallel.autograd.ops.along import Largest
from simparallel.clock.notes import note_once
from simparallel.compat.front import public_names
from simparallel.errors import InputError

# In PyTorch these are in torch.nn.functional, methods, or take other arguments.
del (
    adaptive_avg_pool2d, all, any, avg_pool2d, batch_norm, binary_cross_entropy, binary_cross_entropy_with_logits,
    bitwise_not, broadcast_to, cast, clone, conv1d, conv2d, conv_transpose2d, cross_entropy, cross_entropy_expand,
    dropout, embedding, expand, floor_divide, gelu, getitem, group_norm, huber_loss, interpolate, l1_loss, layer_norm,
    leaky_relu, linear, max_pool2d, mse_loss, nll_loss, one_hot, pad, redistribute, remainder, rms_norm,
    scaled_dot_product_attention, silu, smooth_l1_loss, softmax_cross_entropy_with_logits, take, to,
)  # fmt: skip


def max(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor | Largest:
    """Return the maximum; with `dim`, (values, indices) along it; with a Tensor, the elementwise maximum."""
    if isinstance(dim, Tensor):
        return functions.maximum(input, dim)
    return functions.max(input) if dim is None else _chosen(functions.argmax, input, dim, keepdim)


def min(input: Any, dim: Any = None, keepdim: bool = False) -> Tensor | Largest:
    """Return the minimum; with `dim`, (values, indices) along it; with a Tensor, the elementwise minimum."""
    if isinstance(dim, Tensor):
        return functions.minimum(input, dim)
    return functions.min(input) if dim is None else _chosen(functions.argmin, input, dim, keepdim)


def clamp(input: Any, min: Any = None, max: Any = None) -> Tensor:
    """See `sp.functions.clip`."""
    return functions.clip(input, min, max)


clip = clamp

# Methods of Tensor that are functions of torch, too.
amax = Tensor.amax
amin = Tensor.amin
bmm = Tensor.bmm
diag = Tensor.diag
index_select = Tensor.index_select
mm = Tensor.mm
multinomial = Tensor.multinomial
norm = Tensor.norm
roll = Tensor.roll
scatter_reduce = Tensor.scatter_reduce
t = Tensor.t
tril = Tensor.tril
triu = Tensor.triu


def meshgrid(*tensors: Any, indexing: str = "ij") -> tuple[Tensor, ...]:
    """Return the tensors, vectors or numbers, broadcast to a grid; with "xy", the first two dims are swapped.

    Raises:
        InputError: another `indexing`.
    """
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    if indexing not in ("ij", "xy"):
        raise InputError(f"meshgrid: indexing={indexing!r}, choose 'ij' or 'xy'.")
    shape = tuple(int(x.size) for x in given)
    grid = [
        functions.expand(functions.reshape(x, *(1,) * i, -1, *(1,) * (len(given) - 1 - i)), *shape)
        for i, x in enumerate(given)
    ]
    return tuple(functions.transpose(x, 0, 1) if indexing == "xy" and len(shape) > 1 else x for x in grid)


def set_float32_matmul_precision(precision: str) -> None:
    """See `sp.set_float32_matmul_precision`; "medium" means "high"."""
    sp.set_float32_matmul_precision("high" if precision == "medium" else precision)


def compile(model: Any = None, **settings: Any) -> Any:
    """Return the function or module itself; without one, a decorator. Noted: operations run one by one."""
    note_once("torch.compile changes nothing here: operations run one by one.")
    return (lambda decorated: decorated) if model is None else model


def _chosen(choose: Any, input: Any, dim: int, keepdim: bool) -> Largest:
    """Return the chosen elements along `dim` and their indices; only these elements get gradients."""
    # Kept dims, so that gather can use the indices; they are dropped at the end.
    indices = choose(input, dim, True)
    found = Largest(functions.gather(input, dim, indices), indices)
    return found if keepdim else Largest(*(functions.squeeze(y, dim) for y in found))


__all__ = public_names(globals(), "InputError", "Largest", "Tensor", "sp")
