"""Transposed two-dimensional convolution: its forward is the gradient of `Conv2d` with respect to the image."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from simparallel.arrays.host import im2col
from simparallel.arrays.host.windows import Pair, Windows, as_pair, windows
from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Spec, Work, instance
from simparallel.autograd.ops.promotion import hashable
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.base.checks import check_count
from simparallel.errors import InputError, ShapeError

_PLANES, _FROM_PLANES = (1, 2, 3, 0), (3, 0, 1, 2)  # (N, C, H, W) as (C, H, W, N), and back


class ConvTranspose2d(Op):
    """y[n, o, p s + i d - pad, q s + j d - pad] gets the sum over c of x[n, c, p, q] w[c, o, i, j], plus b[o]

    x: (N, C, H, W)   w: (C, O / groups, kh, kw)   b: (O,), may be left out   y: (N, O, P, Q), where
    P = (H - 1) stride - 2 padding + dilation (kh - 1) + output_padding + 1, Q likewise

    Batch and channels may be cut; with the input channels cut, y is a partial sum.

    Args:
        stride, padding, output_padding, dilation: integer or (height, width); `output_padding`, less than
            `stride`, adds rows at the bottom and columns at the right. padding="same" gives P = H stride, without
            `output_padding`.
        groups: channels are split into this many groups, each convolved independently.

    Raises:
        InputError: a setting out of range, or an `output_padding` that is not less than the stride.
    """

    rule = "n c {h} {w}, c o {kh} {kw}, o -> n o 1 1"
    is_matrix_product = True

    def __init__(
        self,
        stride: int | Pair = 1,
        padding: int | Pair | str = 0,
        output_padding: int | Pair = 0,
        groups: int = 1,
        dilation: int | Pair = 1,
    ) -> None:
        self.stride = as_pair(self.name, "stride", stride, 1)
        if isinstance(padding, str) and padding != "same":
            raise InputError(f"{self.name}: padding={padding!r} must be 'same', an integer or a pair.")
        self.padding = padding if isinstance(padding, str) else as_pair(self.name, "padding", padding, 0)
        self.output_padding = as_pair(self.name, "output_padding", output_padding, 0)
        self.dilation = as_pair(self.name, "dilation", dilation, 1)
        self.groups = check_count(self.name, "groups", groups)
        if any(extra >= step for extra, step in zip(self.output_padding, self.stride, strict=True)):
            raise InputError(f"{self.name}: output_padding={output_padding!r} must be less than stride={stride!r}.")
        if padding == "same" and any(self.output_padding):
            raise InputError(
                f"{self.name}: padding='same' determines the size of y; leave out output_padding={output_padding!r}."
            )

    def image(self, x: Sequence[int], w: Sequence[int]) -> Pair:
        """Return height and width of y, given height and width of x and of the kernel."""
        if isinstance(self.padding, str):
            return x[0] * self.stride[0], x[1] * self.stride[1]
        height, width = (
            (size - 1) * s - 2 * p + d * (k - 1) + extra + 1
            for size, s, p, d, k, extra in zip(
                x, self.stride, self.padding, self.dilation, w, self.output_padding, strict=True
            )
        )
        return height, width

    def _windows(self, x: tuple[int, ...], w: tuple[int, ...]) -> Windows:
        """Return the windows over y, one for each pixel of x."""
        height, width = self.image(x[2:], w[2:])
        if min(*x[2:], height, width) < 1:
            raise ShapeError(f"x {x} and w {w} with padding {self.padding} leave y without pixels")
        return windows((height, width), (w[2], w[3]), self.stride, self.padding, self.dilation)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        x, w = shapes[:2]
        if len(x) != 4 or len(w) != 4:
            raise ShapeError(f"needs x (N, C, H, W) and w (C, O / groups, kh, kw), got shapes {x} and {w}")
        if x[1] != w[0] or w[0] % self.groups:
            raise ShapeError(f"x {x} has {x[1]} channels, w {w} takes {w[0]}; groups={self.groups} must divide them")
        taken, made, out = "c", "o", "o"
        if self.groups > 1:
            taken = f"(g={self.groups} c={w[0] // self.groups})"
            made, out = f"(g={self.groups} o={w[1]})", "(g o)"
        bias = f", {made}" if len(shapes) == 3 else ""
        height, width = self._windows(x, w).image
        return f"n {taken} {{h}} {{w}}, {taken} o {{kh}} {{kw}}{bias} -> n {out} {height} {width}"

    def forward(self, ctx: Context, x: Array, w: Array, b: Array | None = None) -> Array:
        xp, dtype = ctx.xp, ctx.plan.output.dtype
        wide = np.result_type(dtype, np.float32) if dtype.kind == "f" else dtype
        ctx.at, ctx.groups = self._windows(x.shape, w.shape), ctx.plan.sizes.get("g", 1)
        ctx.x = xp.ascontiguousarray(x.transpose(_PLANES), dtype=wide)
        ctx.w = w.astype(wide, copy=False)
        # Without dw to compute, the kernel reads shape and dtype of the image, but no elements.
        image = xp.broadcast_to(xp.zeros((), wide), (ctx.groups * w.shape[1], *ctx.at.image, x.shape[0]))
        y = im2col.planes_backward(ctx.arrays, image, ctx.w, ctx.x, ctx.at, ctx.groups, True, None)
        assert y is not None
        # Where c is cut, y is a partial sum: the rank with the first slice adds the bias.
        if b is not None and not ctx.offset("c"):
            y = y + b[:, None, None, None]
        return y.transpose(_FROM_PLANES).astype(dtype, copy=False)

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, needs, dx, dw, db = ctx.xp, ctx.needs, None, None, None
        dy = xp.ascontiguousarray(dy.transpose(_PLANES), dtype=ctx.x.dtype)
        if needs[0]:
            dx_planes = im2col.planes_forward(ctx.arrays, dy, ctx.w, ctx.at, ctx.groups, False)
            dx = dx_planes.transpose(_FROM_PLANES)
        if needs[1]:
            dw = xp.empty(ctx.w.shape, ctx.w.dtype)
            im2col.planes_backward(ctx.arrays, dy, ctx.w, ctx.x, ctx.at, ctx.groups, False, dw)
        if needs[2:] == (True,):
            db = dy.sum(axis=(1, 2, 3)) * (not ctx.offset("c"))
        return (dx, dw, db)[: len(needs)]

    def work(self, x: Spec, w: Spec, *b: Spec) -> Work:
        y = self.infer(x, w, *b)
        flops = 2 * prod(x.shape) * prod(w.shape[1:]) + prod(y.shape)
        return Work(flops, sum(spec.size_bytes for spec in (x, w, *b, y)))


@function()
def conv_transpose2d(
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: int | Pair = 1,
    padding: int | Pair | str = 0,
    output_padding: int | Pair = 0,
    groups: int = 1,
    dilation: int | Pair = 1,
) -> Tensor:
    """Convolve images, transposed; see `ConvTranspose2d`.   x: (N, C, H, W)   weight: (C, O / groups, kh, kw)"""
    settings = (hashable(value) for value in (stride, padding, output_padding, groups, dilation))
    tensors = (as_tensor(x), as_tensor(weight), *(() if bias is None else (as_tensor(bias),)))
    return instance(ConvTranspose2d, *settings)(*tensors)
