"""`torch.nn.functional`: `sp.functions`, with PyTorch's arguments where they differ."""

# mypy: disable-error-code="no-redef"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from simparallel import Tensor, functions
from simparallel.autograd.functions import *
from simparallel.compat.front import refuse
from simparallel.errors import ShapeError


def softmax(input: Any, dim: int | None = None) -> Tensor:
    """See `sp.functions.softmax`; without `dim`, PyTorch's implicit choice."""
    return functions.softmax(input, _usual_dim(input) if dim is None else dim)


def log_softmax(input: Any, dim: int | None = None) -> Tensor:
    """See `sp.functions.log_softmax`; without `dim`, PyTorch's implicit choice."""
    return functions.log_softmax(input, _usual_dim(input) if dim is None else dim)


def cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    *,
    ignore_index: int | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """See `sp.functions.cross_entropy`; a label of -100 is an error unless `ignore_index` asks for it."""
    return functions.cross_entropy(
        input, target, reduction, weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing
    )


def nll_loss(
    input: Any, target: Any, weight: Any = None, *, ignore_index: int | None = None, reduction: str = "mean"
) -> Tensor:
    """See `sp.functions.nll_loss`; a label of -100 is an error unless `ignore_index` asks for it."""
    return functions.nll_loss(input, target, reduction, weight=weight, ignore_index=ignore_index)


def one_hot(tensor: Any, num_classes: int = -1) -> Tensor:
    """Return 1 at the class of each number, 0 elsewhere, int64; -1 takes the smallest sufficient number of classes."""
    count = int(functions.max(tensor)) + 1 if num_classes == -1 else num_classes
    return functions.one_hot(tensor, count, dtype="int64")


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Normalise by the given statistics, or in training by the input's.

    Raises:
        InputError: there are statistics to update, or none to normalise by; `nn.BatchNorm2d` keeps its own.
    """
    way_out = "use nn.BatchNorm2d, which keeps its statistics"
    # In training PyTorch updates the given statistics in place, which a function does not do here.
    refuse("batch_norm", way_out, training=training == (running_mean is not None) and training)
    refuse("batch_norm", "give training=True", running_mean="None" if not training and running_mean is None else None)
    return functions.batch_norm(input, weight, bias, mean=running_mean, var=running_var, eps=eps)


def layer_norm(
    input: Any, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> Tensor:
    """See `sp.functions.layer_norm`."""
    return functions.layer_norm(input, weight, bias, _num_dims("layer_norm", input, normalized_shape), eps)


def rms_norm(input: Any, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None) -> Tensor:
    """See `sp.functions.rms_norm`."""
    return functions.rms_norm(input, weight, _num_dims("rms_norm", input, normalized_shape), eps)


def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """See `sp.functions.max_pool2d`."""
    refuse("max_pool2d", "leave it out", return_indices=return_indices)
    return functions.max_pool2d(input, kernel_size, stride, padding, dilation=dilation, ceil_mode=ceil_mode)


def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """See `sp.functions.avg_pool2d`."""
    refuse("avg_pool2d", "divide the result", divisor_override=divisor_override)
    return functions.avg_pool2d(
        input, kernel_size, stride, padding, count_include_pad=count_include_pad, ceil_mode=ceil_mode
    )


def _usual_dim(x: Any) -> int:
    # PyTorch's legacy rule for an implicit dim.
    return 0 if x.ndim in (0, 1, 3) else 1


def _num_dims(who: str, x: Any, normalized_shape: Sequence[int]) -> int:
    # Ours take the number of dims to normalise, PyTorch's their sizes.
    shape = tuple(normalized_shape)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ShapeError(f"{who}: normalized_shape={shape} is not the end of the input's shape {tuple(x.shape)}.")
    return len(shape)
