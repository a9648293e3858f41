"""Pooling over images. y keeps the memory order of x, which spares copies between convolutions."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.sums import divided, in_order_of, lowest
from simparallel.arrays.host.windows import Pair, Windows, as_pair, windows
from simparallel.autograd.exchanges import Asked, Exchanges
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work, instance
from simparallel.autograd.ops.promotion import hashable
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import InputError, ShapeError

# The batch and the channels, taken whole.
_ALL = (slice(None), slice(None))
_copy = operator.methodcaller("copy", "K")


class AbstractPool(Op):
    """A reduction of each window of each channel.   x: (N, C, H, W)   y: (N, C, P, Q)

    Args:
        kernel_size: size of the windows, integer or (height, width).
        stride: step between windows, likewise; None means `kernel_size`.
        padding: pixels at each side, likewise; at most half of the kernel, as in PyTorch. "same" gives
            ceil(size / stride) windows, with the odd pixel at the end; "valid" pads nothing.
        ceil_mode: whether a last window may reach beyond the image.

    Raises:
        InputError: a setting out of range.
    """

    rule = "n c <h> <w> -> n c <h> <w>"
    dilation: Pair = (1, 1)

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair | str = 0,
        ceil_mode: bool = False,
    ) -> None:
        self.kernel_size = as_pair(self.name, "kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else as_pair(self.name, "stride", stride, 1)
        self.padding: Pair | str
        self.ceil_mode = bool(ceil_mode)
        if isinstance(padding, str) and padding in ("same", "valid"):
            self.padding = padding
            return
        self.padding = pads = as_pair(self.name, "padding", padding, 0)
        if any(2 * pad > size for pad, size in zip(pads, self.kernel_size, strict=True)):
            raise InputError(f"{self.name}: padding={padding!r} must be at most half of kernel_size={kernel_size!r}.")

    def windows(self, shape: tuple[int, ...]) -> Windows:
        """Return the windows for this shape of x."""
        image = shape[2], shape[3]
        return windows(image, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        _check_image(shape)
        height, width = self.windows(shape).out
        return f"n c <h> <w> -> n c <h>={height} <w>={width}"

    def work(self, x: Spec) -> Work:
        y = self.infer(x)
        return Work(prod(y.shape) * prod(self.kernel_size), x.size_bytes + y.size_bytes)


class MaxPool2d(AbstractPool):
    """y = maximum over each window; the gradient goes to the first maximum of a window, row by row

    Args:
        kernel_size, stride, padding, ceil_mode: as for `AvgPool2d`.
        dilation: step between the pixels of a window, integer or (height, width).
    """

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair | str = 0,
        ceil_mode: bool = False,
        dilation: int | Pair = 1,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.dilation = as_pair(self.name, "dilation", dilation, 1)

    def forward(self, ctx: Context, x: Array) -> Array:
        at = ctx.windows
        padded = _pad(ctx.arrays, x, at, lowest(x.dtype))
        y = ctx.arrays.window_maxima([padded[(*_ALL, *at.slices(i, j))] for i, j in at.taps()])
        ctx.x, ctx.y = x, y
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x, y, at = ctx.xp, ctx.x, ctx.y, ctx.windows
        padded = _pad(ctx.arrays, x, at, lowest(x.dtype))
        dy = in_order_of(xp, dy, y)
        # No pixel is in two windows, so each gradient is written once.
        is_apart = at.stride == at.kernel and at.dilation == (1, 1)
        # The windows tile the padded image exactly, so dx need not be zeroed.
        is_tiled = is_apart and padded.shape[2:] == (at.out[0] * at.kernel[0], at.out[1] * at.kernel[1])
        dx = (xp.empty_like if is_tiled else xp.zeros_like)(padded)
        places = [(*_ALL, *at.slices(i, j)) for i, j in at.taps()]
        taps, grads = ([array[place] for place in places] for array in (padded, dx))
        ctx.arrays.give_to_first(dy, y, taps, grads, is_apart)
        return (_crop(ctx.arrays, dx, at),)


class AvgPool2d(AbstractPool):
    """y = sum over each window / number of its pixels

    Args:
        kernel_size: size of the windows, integer or (height, width).
        stride: step between windows, likewise; None means `kernel_size`.
        padding: pixels at each side, likewise; at most half of the kernel. "same" gives ceil(size / stride) windows,
            with the odd pixel at the end; "valid" pads nothing.
        ceil_mode: whether a last window may reach beyond the image.
        count_include_pad: whether pixels of the padding count; pixels beyond the padding never count.
    """

    def __init__(
        self,
        kernel_size: int | Pair,
        stride: int | Pair | None = None,
        padding: int | Pair | str = 0,
        count_include_pad: bool = True,
        ceil_mode: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, padding, ceil_mode)
        self.count_include_pad = bool(count_include_pad)

    def infer(self, x: Spec) -> Spec:
        return Spec(super().infer(x).shape, _mean_dtype(x.dtype))

    def _scale(self, ctx: Context, at: Windows, like: Array, dtype: np.dtype) -> Any:
        """Return 1 / number of pixels: one number for all windows, or an array (P, Q)."""
        if at.padded == at.image or (self.count_include_pad and (not self.ceil_mode or self.padding == "same")):
            return 1.0 / prod(at.kernel)
        pads: Pair = (0, 0)
        if self.count_include_pad and isinstance(self.padding, tuple):
            pads = self.padding
        # Pixels of each window along each dim, within the image, or within the padded image if padding counts.
        sizes = [
            [min(p * s - b + k, size + pad) - max(p * s - b, -pad) for p in range(out)]
            for size, k, s, b, out, pad in zip(at.image, at.kernel, at.stride, at.before, at.out, pads, strict=True)
        ]
        counts = ctx.arrays.from_host(lambda: np.multiply.outer(*sizes), like)
        return (1.0 / counts).astype(dtype)

    def forward(self, ctx: Context, x: Array) -> Array:
        at, dtype = ctx.windows, ctx.plan.output.dtype
        padded = _pad(ctx.arrays, x.astype(_wide(dtype), order="K", copy=False), at, 0)
        first, *others = (padded[(*_ALL, *at.slices(i, j))] for i, j in at.taps())
        y = ctx.arrays.elementwise(_copy, first)
        for other in others:
            ctx.arrays.elementwise(operator.iadd, y, other)
        ctx.arrays.elementwise(operator.imul, y, self._scale(ctx, at, x, y.dtype))
        return y.astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, at = ctx.xp, ctx.windows
        dy = dy.astype(_wide(dy.dtype), order="K", copy=False)
        dy = ctx.arrays.elementwise(operator.mul, dy, self._scale(ctx, at, dy, dy.dtype))
        dx = _zeros_padded(xp, dy, at)
        for i, j in at.taps():
            ctx.arrays.elementwise(operator.iadd, dx[(*_ALL, *at.slices(i, j))], dy)
        return (_crop(ctx.arrays, dx, at),)


class AdaptiveAvgPool2d(Op):
    """y[..., p, q] = mean of x over rows floor(p H / P) … ceil((p + 1) H / P) - 1, columns likewise

    x: (N, C, H, W)   y: (N, C, P, Q). The means are two small matrix products, with matrices that
    have one row for each window.

    Rows may be cut into a number of slices that divides both H and P: window i P / cut then begins at row
    i H / cut, like slice i. So no window reaches beyond its slice, and the formula holds on each slice. For a mean
    over all rows (P = 1) the number of slices need only divide H, and the ranks add their sums. Columns likewise.

    Args:
        output_size: (P, Q), or one integer for both; 1 is the global average.
    """

    rule = "n c [h] [w] -> n c 1 1"

    def __init__(self, output_size: int | Pair = 1) -> None:
        self.output_size = as_pair("AdaptiveAvgPool2d", "output_size", output_size, 1)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        _check_image(shape)
        if 0 in shape[2:]:
            raise ShapeError(f"the mean over no pixels is undefined; x has shape {shape}")
        if self.output_size == (1, 1):
            return self.rule
        (p, q), dims = self.output_size, (("[h]", "<h>"), ("[w]", "<w>"))
        (h, w) = (whole if out == 1 else window for out, (whole, window) in zip((p, q), dims, strict=True))
        return f"n c {h} {w} -> n c {1 if p == 1 else f'{h}={p}'} {1 if q == 1 else f'{w}={q}'}"

    @property
    def _means(self) -> str:
        """Names of the dims that are averaged over all pixels, in one string."""
        return " ".join(dim for dim, out in zip("hw", self.output_size, strict=True) if out == 1)

    def infer(self, x: Spec) -> Spec:
        return Spec(super().infer(x).shape, _mean_dtype(x.dtype))

    def _weights(self, ctx: Context, dtype: np.dtype) -> list[Array]:
        """Return matrices (P, H) and (Q, W) of the slice: row p is 1 / size in window p, 0 elsewhere."""
        matrices = []
        outs, sizes = ctx.plan.output.shape[2:], ctx.plan.inputs[0].shape[2:]
        for dim, out, size in zip("hw", outs, sizes, strict=True):
            if dim in self._means:
                matrices.append(ctx.xp.full((1, size), 1 / ctx.size(dim), dtype))
                continue
            window, pixel = ctx.xp.arange(out)[:, None], ctx.xp.arange(size)
            is_in = (pixel >= window * size // out) & (pixel < -(-(window + 1) * size // out))
            matrices.append((is_in / is_in.sum(axis=1, keepdims=True)).astype(dtype))
        return matrices

    def forward(self, ctx: Context, x: Array) -> Array:
        dtype = ctx.plan.output.dtype
        x = x.astype(_wide(dtype), order="K", copy=False)
        if self.output_size == (1, 1):
            y = ctx.sum_over("h w", x.sum(axis=(2, 3), keepdims=True)) / ctx.sizes("h w")
        else:
            rows, columns = self._weights(ctx, x.dtype)
            y = ctx.arrays.matmul(ctx.arrays.matmul(rows, x), columns.T)
            if self._means:
                y = ctx.sum_over(self._means, y)
        return y.astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        shape = ctx.plan.inputs[0].shape
        if self.output_size == (1, 1):
            return (ctx.xp.broadcast_to(divided(dy, ctx.sizes("h w")), shape),)
        dy = dy.astype(_wide(dy.dtype), copy=False)
        rows, columns = self._weights(ctx, dy.dtype)
        return (ctx.arrays.matmul(ctx.arrays.matmul(rows.T, dy), columns),)

    def exchanges(self, plan: Plan) -> Exchanges:
        y = plan.output
        return Exchanges((Asked(self._means, "sum", y.shape, _wide(y.dtype)),) if self._means else ())

    def work(self, x: Spec) -> Work:
        y = self.infer(x)
        return Work(max(prod(x.shape), prod(y.shape)), x.size_bytes + y.size_bytes)


def _check_image(shape: tuple[int, ...]) -> None:
    if len(shape) != 4:
        raise ShapeError(f"needs x (N, C, H, W), got shape {shape}")


def _mean_dtype(dtype: np.dtype) -> np.dtype:
    return np.mean(np.zeros(1, dtype)).dtype


def _wide(dtype: np.dtype) -> np.dtype:
    """Return the dtype to sum in: float32 for float16."""
    return np.result_type(dtype, np.float32)


def _zeros_padded(xp: Any, like: Array, at: Windows, value: Any = 0) -> Array:
    """Return an array (N, C, padded H, padded W) filled with `value`, in the memory order of `like`."""
    order = sorted(range(4), key=lambda dim: -like.strides[dim])
    shape = (*like.shape[:2], *at.padded)
    flat = xp.full(tuple(shape[dim] for dim in order), value, like.dtype)
    return flat.transpose(tuple(order.index(dim) for dim in range(4)))


def _pad(arrays: HostArrays, x: Array, at: Windows, value: Any) -> Array:
    if at.padded == at.image:
        return x
    padded = _zeros_padded(arrays.xp, x, at, value)
    arrays.elementwise(arrays.xp.copyto, _crop_view(padded, at), x)
    return padded


def _crop_view(padded: Array, at: Windows) -> Array:
    (top, left), (height, width) = at.before, at.image
    return padded[:, :, top : top + height, left : left + width]


def _crop(arrays: HostArrays, padded: Array, at: Windows) -> Array:
    """Return the image without its padding, in the same memory order and without gaps."""
    return padded if at.padded == at.image else arrays.elementwise(_copy, _crop_view(padded, at))


def _pooled(op: Op, x: Any) -> Tensor:
    """Apply `op` to images (N, C, H, W), or to a single image (C, H, W)."""
    x = as_tensor(x)
    return op(x.unsqueeze(0)).squeeze(0) if x.ndim == 3 else op(x)


@function()
def max_pool2d(
    x: Any,
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair | str = 0,
    *,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return the maximum over windows of x (N, C, H, W) or (C, H, W); see `MaxPool2d`."""
    settings = (hashable(value) for value in (kernel_size, stride, padding, ceil_mode, dilation))
    return _pooled(instance(MaxPool2d, *settings), x)


@function()
def avg_pool2d(
    x: Any,
    kernel_size: int | Pair,
    stride: int | Pair | None = None,
    padding: int | Pair | str = 0,
    *,
    count_include_pad: bool = True,
    ceil_mode: bool = False,
) -> Tensor:
    """Return the mean over windows of x (N, C, H, W) or (C, H, W); see `AvgPool2d`."""
    settings = (hashable(value) for value in (kernel_size, stride, padding, count_include_pad, ceil_mode))
    return _pooled(instance(AvgPool2d, *settings), x)


@function()
def adaptive_avg_pool2d(x: Any, output_size: int | Pair) -> Tensor:
    """Return the means over `output_size` windows of x (N, C, H, W) or (C, H, W); see `AdaptiveAvgPool2d`."""
    return _pooled(instance(AdaptiveAvgPool2d, hashable(output_size)), x)
