"""Convolutions and pooling as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.arrays.host.windows import Pair, as_pair
from simparallel.autograd import (
    AdaptiveAvgPool2d as AdaptiveAvgPool2dOp,
    AvgPool2d as AvgPool2dOp,
    Conv2d as Conv2dOp,
    ConvTranspose2d as ConvTranspose2dOp,
    MaxPool2d as MaxPool2dOp,
    Tensor,
    functions,
)
from simparallel.autograd.ops.conv import as_single
from simparallel.autograd.tensor import as_tensor
from simparallel.base.checks import check_integer
from simparallel.errors import InputError, ShapeError
from simparallel.nn.layers import FanIn
from simparallel.nn.module import TensorModule


class AbstractConv(FanIn):
    """Base of convolutions: the weight (out_channels, in_channels / groups, *kernel_size) and the bias.

    A subclass checks its other settings, and sets `kernel_size` and the attributes in `_shown`. The weight of a
    transposed convolution is (in_channels, out_channels / groups, *kernel_size).
    """

    _is_transposed = False

    kernel_size: tuple[int, ...]

    def _make_conv(
        self,
        in_channels: int,
        out_channels: int,
        groups: int,
        bias: bool,
        padding_mode: str,
        dtype: Any,
        weight_init: Any,
        bias_init: Any,
    ) -> None:
        who = type(self).__name__
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            check_integer(who, name, value, 1)
        if padding_mode != "zeros":
            raise InputError(f"{who}: padding_mode={padding_mode!r} is not supported, use 'zeros'.")
        if in_channels % groups or out_channels % groups:
            raise InputError(
                f"{who}: groups={groups} must divide in_channels={in_channels} and out_channels={out_channels}."
            )
        self.in_channels, self.out_channels, self.groups = int(in_channels), int(out_channels), groups
        outer, inner = self.out_channels, self.in_channels
        if self._is_transposed:
            outer, inner = inner, outer
        weight = (outer, inner // groups, *self.kernel_size)
        self._make(dtype, weight_init, bias_init, weight=weight, bias=(self.out_channels,) if bias else None)

    def extra_repr(self) -> str:
        channels = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        bias = "" if self.bias is not None else "bias=False"
        return ", ".join(filter(None, (channels, super().extra_repr(), bias)))


class Conv2d(AbstractConv):
    """y = x convolved with weight, + bias.   x: (N, in_channels, H, W)   y: (N, out_channels, P, Q)

    Args:
        in_channels: of x.
        out_channels: of y.
        kernel_size: integer or (height, width).
        stride, padding, dilation, groups: see `sp.ops.Conv2d`; padding may be "same" or "valid".
        bias: whether the layer has a bias.
        padding_mode: only "zeros" is supported.
        dtype: floating-point dtype of the parameters.
        method: see `sp.ops.Conv2d`.
        weight_init, bias_init: initial values, see `nn.initializer`; None for the values below.

    Attributes:
        weight: Parameter (out_channels, in_channels / groups, kh, kw), uniform in ±1 / sqrt(fan_in) at first, with
            fan_in = in_channels / groups * kh * kw.
        bias: Parameter (out_channels,), uniform likewise; or None.

    Raises:
        InputError: a setting out of range, or channels that are not divisible by `groups`.
        DTypeError: `dtype` is not floating point.
    """

    _shown = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "method": "auto"}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = np.float32,
        method: str = "auto",
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        # The op refuses bad settings now, not in forward.
        settings = Conv2dOp(stride, padding, dilation, groups, method)
        self.kernel_size = as_pair("Conv2d", "kernel_size", kernel_size, 1)
        self.stride, self.padding, self.dilation = settings.stride, settings.padding, settings.dilation
        self.method = settings.method
        self._make_conv(in_channels, out_channels, settings.groups, bias, padding_mode, dtype, weight_init, bias_init)

    def forward(self, x: Any) -> Tensor:
        return functions.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups, self.method
        )


class Conv1d(AbstractConv):
    """y = x convolved with weight, + bias.   x: (N, in_channels, L)   y: (N, out_channels, P)

    Args:
        in_channels: of x.
        out_channels: of y.
        kernel_size: integer.
        stride, padding, dilation, groups: see `Conv2d`, integers here; padding may be "same" or "valid".
        bias: whether the layer has a bias.
        padding_mode: only "zeros" is supported.
        dtype: floating-point dtype of the parameters.
        weight_init, bias_init: initial values, see `nn.initializer`; None for the values below.

    Attributes:
        weight: Parameter (out_channels, in_channels / groups, kernel_size), uniform in ±1 / sqrt(fan_in) at first,
            with fan_in = in_channels / groups * kernel_size.
        bias: Parameter (out_channels,), uniform likewise; or None.

    Raises:
        InputError: a setting out of range, or channels that are not divisible by `groups`.
        DTypeError: `dtype` is not floating point.
    """

    _shown = {"stride": (1,), "padding": (0,), "dilation": (1,), "groups": 1}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        given = (("kernel_size", kernel_size), ("stride", stride), ("dilation", dilation))
        self.kernel_size, self.stride, self.dilation = ((as_single("Conv1d", name, value, 1),) for name, value in given)
        self.padding = padding if isinstance(padding, str) else (as_single("Conv1d", "padding", padding, 0),)
        # The op refuses bad settings now, not in forward.
        settings = Conv2dOp(1, padding if isinstance(padding, str) else 0, groups=groups)
        self._make_conv(in_channels, out_channels, settings.groups, bias, padding_mode, dtype, weight_init, bias_init)

    def forward(self, x: Any) -> Tensor:
        return functions.conv1d(x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class ConvTranspose2d(AbstractConv):
    """y = gradient of a convolution with respect to its image, + bias.

    x: (N, in_channels, H, W)   y: (N, out_channels, P, Q)

    P = (H - 1) stride - 2 padding + dilation (kernel_size - 1) + output_padding + 1, Q likewise.

    Args:
        in_channels: of x.
        out_channels: of y.
        kernel_size: integer or (height, width).
        stride, padding, output_padding, groups, dilation: see `sp.ops.ConvTranspose2d`; padding may be "same".
        bias: whether the layer has a bias.
        padding_mode: only "zeros" is supported.
        dtype: floating-point dtype of the parameters.
        weight_init, bias_init: initial values, see `nn.initializer`; None for the values below.

    Attributes:
        weight: Parameter (in_channels, out_channels / groups, kh, kw), uniform in ±1 / sqrt(fan_in) at first, with
            fan_in = out_channels / groups * kh * kw, as in PyTorch.
        bias: Parameter (out_channels,), uniform likewise; or None.

    Raises:
        InputError: a setting out of range, or channels that are not divisible by `groups`.
        DTypeError: `dtype` is not floating point.
    """

    _is_transposed = True
    _shown = {"stride": (1, 1), "padding": (0, 0), "output_padding": (0, 0), "groups": 1, "dilation": (1, 1)}

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | Pair = 1,
        padding_mode: str = "zeros",
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        # The op refuses bad settings now, not in forward.
        settings = ConvTranspose2dOp(stride, padding, output_padding, groups, dilation)
        self.kernel_size = as_pair("ConvTranspose2d", "kernel_size", kernel_size, 1)
        self.stride, self.padding, self.dilation = settings.stride, settings.padding, settings.dilation
        self.output_padding = settings.output_padding
        self._make_conv(in_channels, out_channels, settings.groups, bias, padding_mode, dtype, weight_init, bias_init)

    def forward(self, x: Any, output_size: Sequence[int] | None = None) -> Tensor:
        """Return the transposed convolution of x.

        Args:
            x: (N, in_channels, H, W).
            output_size: (P, Q), or the whole shape of y; replaces `output_padding`, which follows from it.

        Raises:
            ShapeError: no `output_padding` gives this size.
        """
        x = as_tensor(x)
        extra = self.output_padding
        if output_size is not None and x.ndim == 4:
            extra = self._extra_for(x, tuple(output_size))
        return functions.conv_transpose2d(
            x, self.weight, self.bias, self.stride, self.padding, extra, self.groups, self.dilation
        )

    def _extra_for(self, x: Tensor, output_size: tuple[int, ...]) -> Pair:
        """Return the `output_padding` that gives this size. Raises ShapeError."""
        least = ConvTranspose2dOp(self.stride, self.padding, dilation=self.dilation).image(
            x.shape[2:], self.kernel_size
        )
        steps = (1, 1) if isinstance(self.padding, str) else self.stride
        most = least[0] + steps[0] - 1, least[1] + steps[1] - 1
        sizes = output_size[-2:]
        if len(output_size) not in (2, 4) or not all(
            low <= size <= high for low, size, high in zip(least, sizes, most, strict=True)
        ):
            raise ShapeError(
                f"ConvTranspose2d: output_size={output_size} does not fit x {x.shape}: (height, width) may be "
                f"{least} to {most}."
            )
        return sizes[0] - least[0], sizes[1] - least[1]


class MaxPool2d(TensorModule):
    """Maximum over windows.   x: (N, C, H, W)   y: (N, C, P, Q)

    Args:
        kernel_size: of the windows, integer or (height, width).
        stride: between windows, likewise; None means `kernel_size`.
        padding: at each side, likewise; at most half of `kernel_size`.
        dilation: between the pixels of a window, likewise.
        ceil_mode: whether a last window may extend beyond the image.

    Raises:
        InputError: a setting out of range.
    """

    _shown = {"kernel_size": ..., "stride": ..., "padding": ..., "dilation": (1, 1), "ceil_mode": False}

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair | str = 0,
        *,
        dilation: int | Pair = 1,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        op = MaxPool2dOp(kernel_size, stride, padding, ceil_mode, dilation)
        self.kernel_size, self.stride, self.padding = op.kernel_size, op.stride, op.padding
        self.dilation, self.ceil_mode = op.dilation, op.ceil_mode

    def forward(self, x: Any) -> Tensor:
        return functions.max_pool2d(
            x, self.kernel_size, self.stride, self.padding, dilation=self.dilation, ceil_mode=self.ceil_mode
        )


class AvgPool2d(TensorModule):
    """Mean over windows.   x: (N, C, H, W)   y: (N, C, P, Q)

    Args:
        kernel_size, stride, padding: as for `MaxPool2d`.
        count_include_pad: whether padding pixels count; keyword-only, because PyTorch has `ceil_mode` in this position.
        ceil_mode: as for `MaxPool2d`.

    Raises:
        InputError: a setting out of range.
    """

    _shown = {"kernel_size": ..., "stride": ..., "padding": ..., "count_include_pad": True, "ceil_mode": False}

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair | str = 0,
        *,
        count_include_pad: bool = True,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__()
        op = AvgPool2dOp(kernel_size, stride, padding, count_include_pad, ceil_mode)
        self.kernel_size, self.stride, self.padding = op.kernel_size, op.stride, op.padding
        self.count_include_pad, self.ceil_mode = op.count_include_pad, op.ceil_mode

    def forward(self, x: Any) -> Tensor:
        return functions.avg_pool2d(
            x,
            self.kernel_size,
            self.stride,
            self.padding,
            count_include_pad=self.count_include_pad,
            ceil_mode=self.ceil_mode,
        )


class AdaptiveAvgPool2d(TensorModule):
    """Mean over `output_size` windows.   x: (N, C, H, W)   y: (N, C, *output_size)

    Raises:
        InputError: a size that is not a positive integer.
    """

    _shown = {"output_size": ...}

    def __init__(self, output_size: int | Pair) -> None:
        super().__init__()
        self.output_size = AdaptiveAvgPool2dOp(output_size).output_size

    def forward(self, x: Any) -> Tensor:
        return functions.adaptive_avg_pool2d(x, self.output_size)
