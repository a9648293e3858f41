"""Functions of `torch`: those of `sp.functions`, and some with other arguments or results."""

# mypy: disable-error-code="no-redef"
# ruff: noqa: F821

from __future__ import annotations

from typing import Any

import numpy as np

import simparallel as sp
from simparallel import Tensor, functions
from simparallel.autograd.functions import *
from simparallel.autograd.ops.along import Largest
from simparallel.clock.notes import note_once
from simparallel.compat.front import public_names

# In PyTorch these are in torch.nn.functional, methods, or take other arguments.
del (
    adaptive_avg_pool2d, all, any, avg_pool2d, batch_norm, binary_cross_entropy, binary_cross_entropy_with_logits,
    bitwise_not, broadcast_to, cast, clone, conv1d, conv2d, conv_transpose2d, cross_entropy, cross_entropy_expand,
    dropout, embedding, expand, floor_divide, gelu, getitem, group_norm, huber_loss, interpolate, l1_loss, layer_norm,
    leaky_relu, linear, max_pool2d, mse_loss, nll_loss, one_hot, pad, redistribute, remainder, rms_norm,
    rotary_embedding, scaled_dot_product_attention, silu, smooth_l1_loss, softmax_cross_entropy_with_logits, take, to,
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


# Methods of Tensor that are functions of torch, too.
_METHODS = ("amax", "amin", "bmm", "clamp", "diag", "mm", "multinomial", "norm", "roll", "scatter_reduce", "t",
            "tril", "triu")  # fmt: skip
globals().update(((name, getattr(Tensor, name)) for name in _METHODS), clip=Tensor.clamp)


def meshgrid(*tensors: Any, indexing: Any = "ij") -> tuple[Tensor, ...]:
    """Return the vectors, repeated along the dims of the others; with "xy", the first two dims are swapped."""
    given = tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors
    positions = np.meshgrid(*(np.arange(int(x.size)) for x in given), indexing=indexing)
    return tuple(x.flatten().take(Tensor(at).to(x.device), 0) for x, at in zip(given, positions, strict=True))


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


__all__ = public_names(globals(), "Largest", "Tensor", "np", "sp")
