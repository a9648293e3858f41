"""Convolution of images, and of sequences as images one pixel high."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.arrays.host import im2col, winograd
from simparallel.arrays.host.arrays import HostArrays
from simparallel.arrays.host.windows import Pair, Windows, as_pair, windows
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Plan, instance
from simparallel.autograd.ops.matmul import AbstractProduct, are_aligned
from simparallel.autograd.ops.promotion import hashable
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.base.checks import check_choice, check_integer
from simparallel.errors import InputError, ShapeError
from simparallel.machine.achieved import CONVOLUTION, CONVOLUTION_WEIGHT, POINTS_GRADIENT, REORDER, TAPS_GRADIENT
from simparallel.machine.device import DeviceWork
from simparallel.machine.products import MatrixProduct

METHODS = ("auto", "direct", "winograd")
# From this many channels on, the channels of a pixel are contiguous in memory.
MANY_CHANNELS = 16
# From this many channels on, Winograd's saved products outweigh its transforms (measured).
WINOGRAD_CHANNELS = 16

# The permutations of an image (N, C, H, W) to the memory orders (H, W, N, C) and (C, H, W, N), and back.
_PIXELS, _PLANES = (2, 3, 0, 1), (1, 2, 3, 0)
_FROM_PIXELS, _FROM_PLANES = (2, 3, 0, 1), (3, 0, 1, 2)


class Conv2d(AbstractProduct):
    """y[n, o, p, q] = b[o] + sum over c, i, j of x[n, c, p s + i d - pad, q s + j d - pad] w[o, c, i, j]

    x: (N, C, H, W)   w: (O, C / groups, kh, kw)   b: (O,), may be left out   y: (N, O, P, Q)

    In memory, the batch is the innermost dim, or the second innermost, just outside the channels (see
    `arrays/host/im2col.py`); y has the order that is fastest for the next convolution. Inputs in other
    orders are copied.

    Args:
        stride, dilation: integer or (height, width).
        padding: zeros at each side, integer or (height, width); "valid" is none, "same" gives
            P = ceil(H / stride) with the odd one at the bottom and at the right.
        groups: channels are split into this many groups, each convolved independently.
        method: "direct"; "winograd" (3 x 3, stride 1, in float32: see `winograd` for its error);
            "auto" takes the faster one, on a GPU "direct". float64 and integers are always summed directly,
            so that integer values give exact results.

    Raises:
        InputError: a setting out of range.
        ShapeError: channels do not fit the groups, or no window fits the image.
    """

    rule = "n c <h> <w>, o c {kh} {kw}, o -> n o <h> <w>"

    def __init__(
        self,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        dilation: int | Pair = 1,
        groups: int = 1,
        method: str = "auto",
    ) -> None:
        self.stride = as_pair("Conv2d", "stride", stride, 1)
        self.dilation = as_pair("Conv2d", "dilation", dilation, 1)
        if isinstance(padding, str) and padding not in ("same", "valid"):
            raise InputError(f"Conv2d: padding={padding!r} must be 'same', 'valid', an integer or a pair.")
        self.padding = padding if isinstance(padding, str) else as_pair("Conv2d", "padding", padding, 0)
        check_choice("Conv2d", "method", method, METHODS)
        self.groups, self.method = check_integer("Conv2d", "groups", groups, 1), method

    def windows(self, x: tuple[int, ...], w: tuple[int, ...], *b: tuple[int, ...]) -> Windows:
        """Return the windows for these shapes."""
        return windows((x[2], x[3]), (w[2], w[3]), self.stride, self.padding, self.dilation)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        x, w = shapes[:2]
        if len(x) != 4 or len(w) != 4:
            raise ShapeError(f"needs x (N, C, H, W) and w (O, C / groups, kh, kw), got shapes {x} and {w}")
        height, width = self.windows(x, w).out
        if self.groups == 1:
            taken, made, out = "c", "o", "o"
        else:
            if x[1] != w[1] * self.groups or w[0] % self.groups:
                raise ShapeError(
                    f"groups={self.groups} must divide the {w[0]} output channels and take {w[1]} input channels "
                    f"each, but x has {x[1]}"
                )
            taken = f"(g={self.groups} c={w[1]})"
            made = f"(g={self.groups} o={w[0] // self.groups})"
            out = "(g o)"
        bias = f", {made}" if len(shapes) == 3 else ""
        return f"n {taken} <h> <w>, {made} c {{kh}} {{kw}}{bias} -> n {out} <h>={height} <w>={width}"

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        x, w = shapes[:2]
        if len(w) != 4:
            return None
        takes = w[1] * self.groups
        if len(x) == 3 and takes in (1, x[0]):
            channels = "x[:, None]" if x[0] != takes else "x[None]"
            return f"x has shape {x}, expected images (N, C, H, W): {channels} adds the missing dim"
        if len(x) != 4 or x[1] == takes or self.groups > 1:
            return None
        order = "; its channels seem to be last: permute(0, 3, 1, 2)" if x[3] == takes else ""
        return (
            f"x {x} has C = {x[1]} channels, the layer's weight {w} takes {takes}: feed (N, {takes}, H, W), or make "
            f"the layer Conv2d({x[1]}, {w[0]}, ...){order}"
        )

    def product(self, plan: Plan) -> MatrixProduct:
        w, y, groups = plan.inputs[1].shape, plan.output.shape, max(plan.sizes.get("g", 1), 1)
        is_aligned = are_aligned(plan.output, w[1])
        return MatrixProduct(groups, y[0] * prod(y[2:]), w[0] // groups, prod(w[1:]), "convolution", is_aligned)

    def products(self, plan: Plan, needs: tuple[bool, ...] | None = None) -> tuple[MatrixProduct, ...]:
        forward = self.product(plan)._replace(speeds=CONVOLUTION)
        if needs is None:
            return (forward,)
        # Implicit products: the gradient of a pixel is a sum over the filters and the taps that meet it.
        x, w = plan.inputs[0].shape, plan.inputs[1].shape
        batch, m, n, k, *_ = forward
        pixels = x[0] * prod(x[2:])
        wide, tf32 = TAPS_GRADIENT if w[2:] != (1, 1) and self.stride == (1, 1) else POINTS_GRADIENT
        image = forward._replace(m=pixels, n=w[1], k=-(-m * n * k // max(pixels * w[1], 1)), speeds=(wide, tf32))
        weight = forward._replace(m=k, k=m, speeds=(wide, CONVOLUTION_WEIGHT))
        return tuple(each for each, need in zip((image, weight), needs, strict=False) if need)

    def eager_kernels(
        self, work: DeviceWork, plan: Plan, needs: tuple[bool, ...] | None, memory_format: str
    ) -> DeviceWork:
        # Tensor cores take pixels, but a filter of one pixel is a product of planes whose rows are aligned.
        w, y = plan.inputs[1].shape, plan.output
        is_product = w[2:] == self.stride == (1, 1) and prod(y.shape[2:]) * y.dtype.itemsize % 16 == 0
        found = super().eager_kernels(work, plan, needs, memory_format)
        if memory_format != "contiguous" or work.itemsize > 3 or is_product:
            return found
        # Each product reads its operands and writes its result in another order.
        moved = 2 * plan.work.size_bytes * (1 if needs is None else sum(needs[:2]))
        return found._replace(beside=found.beside + round(moved / REORDER[y.dtype.itemsize]))

    def _by_winograd(self, arrays: HostArrays, x: Array, w: Array, dtype: np.dtype) -> bool:
        is_possible = (
            w.shape[2:] == (3, 3)
            and self.stride == self.dilation == (1, 1)
            and self.groups == 1
            and dtype == np.float32
            and 0 not in (*x.shape, *w.shape)
        )
        # Its transforms stay in a core's cache; a GPU would start small kernels for each row of tiles.
        is_faster = arrays.has_fast_taps and min(w.shape[:2]) >= WINOGRAD_CHANNELS
        return is_possible and (self.method == "winograd" or (self.method == "auto" and is_faster))

    def _in_pixels(self, channels: int) -> bool:
        return self.groups == 1 and channels >= MANY_CHANNELS

    def forward(self, ctx: Context, x: Array, w: Array, b: Array | None = None) -> Array:
        xp, dtype = ctx.xp, ctx.plan.output.dtype
        # BLAS has no float16 product, so float16 is computed in float32.
        wide = np.result_type(dtype, np.float32) if dtype.kind == "f" else dtype
        at = ctx.windows
        ctx.by_winograd = self._by_winograd(ctx.arrays, x, w, wide)
        ctx.in_pixels = ctx.by_winograd or self._in_pixels(x.shape[1])
        to_pixels = ctx.in_pixels or self._in_pixels(w.shape[0])
        x = xp.ascontiguousarray(x.transpose(_PIXELS if ctx.in_pixels else _PLANES), dtype=wide)
        w = w.astype(wide, copy=False)
        if ctx.by_winograd:
            y = winograd.forward(ctx.arrays, x, w, at)
        elif ctx.in_pixels:
            y = im2col.pixels_forward(ctx.arrays, x, w, at)
        else:
            y = im2col.planes_forward(ctx.arrays, x, w, at, ctx.plan.sizes.get("g", 1), to_pixels)
        # Where c is cut, y is a partial sum: the rank with the first slice adds the bias.
        if b is not None and not ctx.offset("c"):
            y += (b if to_pixels else b[:, None, None, None]).astype(wide, copy=False)
        ctx.x, ctx.w = x, w
        return y.transpose(_FROM_PIXELS if to_pixels else _FROM_PLANES).astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, x, w = ctx.xp, ctx.x, ctx.w
        at = ctx.windows
        dx = None
        dw = ctx.gradient(1, w.dtype) if ctx.needs[1] else None
        is_pixels = dy.transpose(_PIXELS).flags.c_contiguous
        if ctx.in_pixels:
            dy = xp.ascontiguousarray(dy.transpose(_PIXELS), dtype=x.dtype)
            if True in ctx.needs[:2]:
                method = winograd.backward if ctx.by_winograd else im2col.pixels_backward
                dx = method(ctx.arrays, x, w, dy, at, ctx.needs[0], dw)
        else:
            dy = dy.transpose(_PLANES).astype(x.dtype, order="K", copy=False)
            if not (is_pixels and self.groups == 1):
                dy = xp.ascontiguousarray(dy)
            if True in ctx.needs[:2]:
                groups = ctx.plan.sizes.get("g", 1)
                dx = im2col.planes_backward(ctx.arrays, x, w, dy, at, groups, ctx.needs[0], dw)
        if dx is not None:
            dx = dx.transpose(_FROM_PIXELS if ctx.in_pixels else _FROM_PLANES)
        if len(ctx.needs) == 2:
            return dx, dw
        return dx, dw, self._bias_gradient(ctx, dy) if ctx.needs[2] else None

    def _bias_gradient(self, ctx: Context, dy: Array) -> Array:
        """Sum dy over all dims but the channels.   dy: (P, Q, N, O) for pixels, (O, P, Q, N) for planes"""
        db = ctx.gradient(2, dy.dtype)
        if ctx.offset("c"):
            db[...] = 0
        elif not ctx.in_pixels and dy.flags.c_contiguous:
            dy.sum(axis=(1, 2, 3), out=db)
        else:
            dy_PQNO = dy if ctx.in_pixels else dy.transpose(1, 2, 3, 0)
            ctx.arrays.sum_rows(dy_PQNO.reshape(prod(dy_PQNO.shape[:3]), len(db)), out=db)
        return db


@function()
def conv2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
    method: str = "auto",
) -> Tensor:
    """Convolve images; see `Conv2d`.   x: (N, C, H, W)   weight: (O, C / groups, kh, kw)   result: (N, O, P, Q)"""
    settings = (hashable(value) for value in (stride, padding, dilation, groups, method))
    tensors = (as_tensor(x), as_tensor(weight), *(() if bias is None else (as_tensor(bias),)))
    return instance(Conv2d, *settings)(*tensors)


def as_single(who: str, name: str, value: Any, least: int) -> int:
    """Return `value` as an int; it may be an integer or a sequence of one.

    Raises:
        InputError: `value` is anything else, or below `least`.
    """
    single = value[0] if isinstance(value, (tuple, list)) and len(value) == 1 else value
    return check_integer(who, name, single, least)


@function()
def conv1d(
    x: Any, weight: Any, bias: Any = None, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1
) -> Tensor:
    """Convolve sequences; see `Conv2d`.   x: (N, C, L)   weight: (O, C / groups, k)   result: (N, O, P)

    Raises:
        ShapeError: x or weight does not have three dims.
    """
    x, weight = as_tensor(x), as_tensor(weight)
    if x.ndim != 3 or weight.ndim != 3:
        raise ShapeError(
            f"conv1d: x has shape {x.shape}, weight {weight.shape}; expected (N, C, L) and (O, C / groups, k)."
        )
    stride, dilation = (
        (1, as_single("conv1d", name, value, 1)) for name, value in (("stride", stride), ("dilation", dilation))
    )
    padding = padding if isinstance(padding, str) else (0, as_single("conv1d", "padding", padding, 0))
    y = conv2d(x.unsqueeze(2), weight.unsqueeze(2), bias, stride, padding, dilation, groups)
    return y.squeeze(2)
