"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import simparallel.nn.init as init
from simparallel.arrays.host.normalize import move_running
from simparallel.autograd import BatchNorm, Tensor, functions
from simparallel.autograd.tape import grad_mode
from simparallel.autograd.tensor import as_tensor, common_device
from simparallel.backend import fused, get_namespace
from simparallel.base.checks import check_integer, check_number
from simparallel.errors import InputError, ShapeError
from simparallel.nn.layers import Affine
from simparallel.nn.module import Module


class AbstractBatchNorm(Affine):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, with one mean and var for each channel.

    Training uses the statistics of the batch, and updates the running statistics with them: running = (1 - momentum) *
    running + momentum * batch, with the unbiased variance. After `eval()` the running statistics are used. If a
    strategy cuts the batch over devices, its statistics still cover the whole batch.

    Args:
        num_features: number of channels.
        eps: added to the variance.
        momentum: weight of the newest batch; None averages all batches equally.
        affine: whether the layer has weight and bias.
        track_running_stats: False always uses the statistics of the batch, and leaves the running ones unchanged.
        dtype: floating-point dtype of parameters and buffers.
        weight_init, bias_init: initial values, see `nn.initializer`; None for 1 and 0.
        running_mean_init, running_var_init: initial values of the running statistics, likewise.
        group_size: number of neighbouring slices that share statistics if a strategy cuts the batch; it must divide the
            number of slices. None for all, 1 for separate statistics on each device. The running statistics are the
            mean over all groups, the same on every rank.

    The settings are attributes as well; `eps`, `momentum` and `track_running_stats` may be set later.

    Attributes:
        weight: Parameter (num_features,); or None.
        bias: Parameter (num_features,); or None.
        running_mean: buffer (num_features,); or None.
        running_var: buffer (num_features,); or None.
        num_batches_tracked: buffer, int64 of shape (); or None.

    Raises:
        InputError, DTypeError: a bad setting. When called, ShapeError for other dims or channels, DeviceMismatchError
            if x is on another device than the running statistics.
    """

    _shown = {"eps": ..., "momentum": ..., "affine": ..., "track_running_stats": ..., "group_size": None}
    _dims: tuple[int, ...] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
        running_mean_init: Any = 0.0,
        running_var_init: Any = 1.0,
        group_size: int | None = None,
    ) -> None:
        super().__init__()
        who = type(self).__name__
        self._mean_init = init.as_initializer(running_mean_init, f"{who}: running_mean_init")
        self._var_init = init.as_initializer(running_var_init, f"{who}: running_var_init")
        self.num_features = check_integer(type(self).__name__, "num_features", num_features, 1)
        self.eps, self.momentum = check_number(type(self).__name__, "eps", eps), momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        tracked = track_running_stats
        self.register_buffer("running_mean", np.zeros(num_features, dtype) if tracked else None)
        self.register_buffer("running_var", np.ones(num_features, dtype) if tracked else None)
        self.register_buffer("num_batches_tracked", np.zeros((), np.int64) if tracked else None)
        # Not a shared instance, because it reports the statistics to this module. No strategy may cut its channels,
        # because every rank has the running statistics of all channels.
        self._op = BatchNorm(self.eps, self._move_running if tracked else None, group_size, keeps_channels=tracked)
        shape = (self.num_features,) if affine else None
        self._make(dtype, weight_init, bias_init, weight=shape, bias=shape)

    @property
    def group_size(self) -> int | None:
        return self._op.group_size

    def reset_running_stats(self) -> None:
        """Reset the running statistics to their initial values, and the number of batches to 0."""
        if self.running_mean is not None:
            self._mean_init(self.running_mean)
            self._var_init(self.running_var)
            init.zeros_(self.num_batches_tracked)

    def reset_parameters(self) -> None:
        """Reset weight and bias to their initial values, and the running statistics."""
        self.reset_running_stats()
        super().reset_parameters()

    def _move_running(self, mean: Any, var: Any, count: int) -> None:
        # A recomputation in backward (`nn.checkpoint`) sees a batch that has been counted.
        if grad_mode.recomputing:
            return
        self.num_batches_tracked.data[...] += 1
        # Without momentum, the new batch has weight 1 / n in the mean of n batches.
        share = self.momentum
        if share is None:
            share = 1.0 / float(self.num_batches_tracked.data)
        # The op reports the biased variance; count / (count - 1) is Bessel's correction.
        statistics = self.running_mean.data, self.running_var.data, mean, var
        fused(get_namespace(mean), move_running)(*statistics, count / (count - 1), float(1 - share), float(share))

    def _batch_op(self) -> BatchNorm:
        """Return the op that normalises with batch statistics and reports them to this module."""
        return self._as_set(self._op)

    def _as_set(self, op: BatchNorm) -> BatchNorm:
        """Return the op, or a copy of it if the settings have changed since it was made."""
        observer = getattr(op._observe, "__self__", None)
        tracking = self if self.track_running_stats and self.running_mean is not None else None
        if observer is tracking and op.eps == self.eps:
            return op
        # A replica shares its original's op. Storing the copy on the replica would make a reference cycle per step.
        op = op.twin()
        op.eps, op._observe = self.eps, None if tracking is None else self._move_running
        return op

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.ndim not in self._dims or x.shape[1] != self.num_features:
            dims = " or ".join(map(str, self._dims))
            raise ShapeError(
                f"{type(self).__name__}: x has shape {x.shape}, expected {dims} dims, and {self.num_features} "
                "channels in dim 1."
            )
        affine = (self.weight, self.bias) if self.weight is not None and self.bias is not None else ()
        if self.training or not self.track_running_stats:
            # The op checks its inputs, but the running statistics are not among them.
            if self.running_mean is not None:
                common_device(type(self).__name__, (x, self.running_mean))
            return self._batch_op()(x, *affine)
        return functions.batch_norm(x, *affine, mean=self.running_mean, var=self.running_var, eps=self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_features}, {super().extra_repr()}"


class BatchNorm1d(AbstractBatchNorm):
    __doc__ = "x: (n, c) or (n, c, l).   " + (AbstractBatchNorm.__doc__ or "")
    _dims = (2, 3)


class BatchNorm2d(AbstractBatchNorm):
    __doc__ = "x: (n, c, h, w).   " + (AbstractBatchNorm.__doc__ or "")
    _dims = (4,)


class AbstractTailNorm(Affine):
    """Base of norms over the last dims of x."""

    _shown = {"eps": ..., "elementwise_affine": ...}
    normalized_shape: tuple[int, ...]

    def _tail(self, x: Any) -> Tensor:
        """Return x as a Tensor. Raises ShapeError for other last dims."""
        x = as_tensor(x)
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            who = type(self).__name__
            raise ShapeError(f"{who}: x has shape {x.shape}, its last dims must be {self.normalized_shape}.")
        return x

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, {super().extra_repr()}"


class LayerNorm(AbstractTailNorm):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over the last dims of x.

    Args:
        normalized_shape: the sizes of those dims; an integer for one.
        eps: added to the variance.
        elementwise_affine: whether the layer has a weight.
        bias: whether the layer has a bias; without a weight it has none.
        dtype: floating-point dtype of the parameters.
        weight_init, bias_init: initial values, see `nn.initializer`; None for 1 and 0.

    Attributes:
        weight: Parameter `normalized_shape`; or None.
        bias: Parameter `normalized_shape`; or None.

    Raises:
        InputError, DTypeError: a bad setting. When called, ShapeError for other last dims.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _as_shape(self, normalized_shape)
        self.eps, self.elementwise_affine = check_number(type(self).__name__, "eps", eps), elementwise_affine
        shape = self.normalized_shape if elementwise_affine else None
        self._make(dtype, weight_init, bias_init, weight=shape, bias=shape if bias else None)

    def forward(self, x: Any) -> Tensor:
        return functions.layer_norm(self._tail(x), self.weight, self.bias, len(self.normalized_shape), self.eps)


class RMSNorm(AbstractTailNorm):
    """y = x / sqrt(mean(x²) + eps) * weight, over the last dims of x.

    Args:
        normalized_shape: the sizes of those dims; an integer for one.
        eps: added under the square root; None takes the machine epsilon of x's dtype.
        elementwise_affine: whether the layer has a weight.
        dtype: floating-point dtype of the weight.
        weight_init: initial values, see `nn.initializer`; None for 1.

    Attributes:
        weight: Parameter `normalized_shape`; or None.

    Raises:
        InputError, DTypeError: a bad setting. When called, ShapeError for other last dims.
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = _as_shape(self, normalized_shape)
        self.eps = None if eps is None else check_number(type(self).__name__, "eps", eps)
        self.elementwise_affine = elementwise_affine
        self._make(dtype, weight_init, None, weight=self.normalized_shape if elementwise_affine else None)

    def forward(self, x: Any) -> Tensor:
        return functions.rms_norm(self._tail(x), self.weight, len(self.normalized_shape), self.eps)


class GroupNorm(Affine):
    """y = (x - mean) / sqrt(var + eps) * weight + bias, over each group of channels.   x: (n, c, ...)

    Args:
        num_groups: number of groups; it divides `num_channels`.
        num_channels: c.
        eps: added to the variance.
        affine: whether the layer has weight and bias.
        dtype: floating-point dtype of the parameters.
        weight_init, bias_init: initial values, see `nn.initializer`; None for 1 and 0.

    Attributes:
        weight: Parameter (num_channels,); or None.
        bias: Parameter (num_channels,); or None.

    Raises:
        InputError, DTypeError: a bad setting. When called, ShapeError for other channels.
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        self.num_groups = check_integer(type(self).__name__, "num_groups", num_groups, 1)
        self.num_channels = check_integer(type(self).__name__, "num_channels", num_channels, 1)
        if num_channels % num_groups:
            raise InputError(f"GroupNorm: num_channels={num_channels} must be divisible by num_groups={num_groups}.")
        self.eps, self.affine = check_number(type(self).__name__, "eps", eps), affine
        shape = (self.num_channels,) if affine else None
        self._make(dtype, weight_init, bias_init, weight=shape, bias=shape)

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.ndim < 2 or x.shape[1] != self.num_channels:
            raise ShapeError(f"GroupNorm: x has shape {x.shape}, expected (n, {self.num_channels}, ...).")
        return functions.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {self.num_channels}, eps={self.eps}, affine={self.affine}"


def _as_shape(module: Module, shape: int | Sequence[int]) -> tuple[int, ...]:
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if not sizes:
        raise InputError(f"{type(module).__name__}: normalized_shape={shape!r} must name one dim or more.")
    return tuple(check_integer(type(module).__name__, "normalized_shape", size, 1) for size in sizes)
