"""Matrix products: MatMul, and Linear with a transposed weight and a bias."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import MappingProxyType
from typing import Any

import numpy as np

from simparallel.autograd.methods import function
from simparallel.autograd.op import Context, Op, Plan, Spec, Work
from simparallel.autograd.ops.promotion import operands
from simparallel.autograd.tensor import Tensor
from simparallel.backend import Array
from simparallel.errors import InputError
from simparallel.machine.achieved import COLUMN_SUM, LINEAR_WEIGHT
from simparallel.machine.device import DeviceWork
from simparallel.machine.products import MatrixProduct

# With at most this many rows and more than this many outputs, `Linear` computes w @ x.T instead of x @ w.T.
FEW_ROWS = 128


def as_rows(x: Array) -> Array:
    """Reshape (..., k) to rows (M, k)."""
    # Not reshape(-1, ...), which cannot infer a size for an empty array.
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def are_aligned(spec: Spec, *sizes: int) -> bool:
    """Return whether rows of these sizes, in the dtype of `spec`, begin at multiples of 16 bytes, as tensor cores need.

    Always True for float32 and float64, which are multiplied without tensor cores.
    """
    return spec.dtype.itemsize > 2 or all(size * spec.dtype.itemsize % 16 == 0 for size in sizes)


class AbstractProduct(Op):
    """Products of x and w, summed over all dims of w but the first, with an optional bias b."""

    kept_for = MappingProxyType({"x": 1, "w": 0})
    is_matrix_product = True
    fills_grad_buffers = True

    def work(self, x: Spec, w: Spec, *b: Spec) -> Work:
        y = self.infer(x, w, *b)
        moved = sum(spec.size_bytes for spec in (x, w, *b, y))
        return Work(2 * prod(y.shape) * prod(w.shape[1:]) + len(b) * prod(y.shape), moved)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        # dx and dw cost as much as forward each; db is summed from data that dw reads anyway.
        products = needs[0] + needs[1]
        return Work(work.flops * products, work.size_bytes * max(products, 1))

    def product(self, plan: Plan) -> MatrixProduct:
        """Return the product of forward: (m, k) of x by (k, n) of w."""
        raise TypeError(f"{self.name} does not define product")

    def products(self, plan: Plan, needs: tuple[bool, ...] | None = None) -> tuple[MatrixProduct, ...]:
        forward = self.product(plan)
        if needs is None:
            return (forward,)
        _, m, n, k, *_ = forward
        gradients = forward._replace(n=k, k=n), forward._replace(m=k, k=m, speeds=(1.0, LINEAR_WEIGHT))
        return tuple(each for each, need in zip(gradients, needs, strict=False) if need)

    def eager_keeps(self, plan: Plan) -> tuple[tuple[int, ...], int]:
        # Also of float16, which convolutions here convert.
        return (0, 1), 0

    def eager_kernels(
        self, work: DeviceWork, plan: Plan, needs: tuple[bool, ...] | None, memory_format: str
    ) -> DeviceWork:
        # A kernel of its own sums dy for the bias.
        has_sum = needs is not None and any(needs[2:])
        return work._replace(beside=round(plan.output.size_bytes / COLUMN_SUM)) if has_sum else work


class MatMul(AbstractProduct):
    """y = x @ w.   x: (..., m, k)   w: (..., k, n)   y: (..., m, n), leading dims broadcast

    Args:
        transpose_a: x is (..., k, m), and y = x.T @ w of the last two dims.
        transpose_b: w is (..., n, k), and y = x @ w.T of the last two dims.

    Raises:
        InputError: a setting that is not a bool.
    """

    rule = "... m k, ... k n -> ... m n"
    # Order of the axes of the device matrix, also for transposed inputs.
    axis_order = ("m", "k", "n")
    transpose_a = transpose_b = False

    def __init__(self, transpose_a: bool = False, transpose_b: bool = False) -> None:
        for name, value in (("transpose_a", transpose_a), ("transpose_b", transpose_b)):
            if not isinstance(value, (bool, np.bool_)):
                raise InputError(f"MatMul: {name}={value!r} must be True or False.")
            if value:
                # Set only if True: attributes of the instance are printed as its settings.
                setattr(self, name, True)

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        x, w = "k m" if self.transpose_a else "m k", "n k" if self.transpose_b else "k n"
        return f"... {x}, ... {w} -> ... m n"

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        if len(shapes) != 2 or min(map(len, shapes)) < 2:
            return None
        x, w = shapes
        if self.transpose_a or self.transpose_b:
            k, other = x[-2 if self.transpose_a else -1], w[-1 if self.transpose_b else -2]
            return None if k == other else f"x {x} and w {w} are summed over dims of sizes {k} and {other}"
        if x[-1] == w[-2]:
            return None
        return f"x {x} has {x[-1]} columns, w {w} has {w[-2]} rows: make them equal" + (
            ", with w.T for example" if len(w) == 2 and x[-1] == w[-1] else ""
        )

    def forward(self, ctx: Context, x: Array, w: Array) -> Array:
        ctx.x, ctx.w = x, w
        w_kn = w.swapaxes(-1, -2) if self.transpose_b else w
        if self._shares_w(x, w):
            return ctx.arrays.product(as_rows(x), w_kn).reshape(*x.shape[:-1], w_kn.shape[-1])
        return ctx.arrays.product(x.swapaxes(-1, -2) if self.transpose_a else x, w_kn)

    def _shares_w(self, x: Array, w: Array) -> bool:
        """Return whether one w multiplies all matrices of x: then a single product of all rows suffices."""
        return w.ndim == 2 < x.ndim and not self.transpose_a

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        x, w, product = ctx.x, ctx.w, ctx.arrays.product
        dx = dw = None
        if self._shares_w(x, w):
            x, dy = as_rows(x), as_rows(dy)
        if ctx.needs[0]:
            w_kn = w.swapaxes(-1, -2) if self.transpose_b else w
            dx = product(w_kn, dy.swapaxes(-1, -2)) if self.transpose_a else product(dy, w_kn.swapaxes(-1, -2))
            dx = ctx.arrays.unbroadcast(dx, x.shape).reshape(ctx.x.shape)
        if ctx.needs[1]:
            is_plain = x.ndim == w.ndim == 2 and x.dtype == dy.dtype
            out = ctx.gradient(1, dy.dtype) if is_plain else None
            x_km = x if self.transpose_a else x.swapaxes(-1, -2)
            if self.transpose_b:
                dw = product(dy.swapaxes(-1, -2), x_km.swapaxes(-1, -2), out)
            else:
                dw = product(x_km, dy, out)
            dw = ctx.arrays.unbroadcast(dw, w.shape)
        return dx, dw

    def product(self, plan: Plan) -> MatrixProduct:
        x, w = (spec.shape for spec in plan.inputs)
        *batch, m, n = plan.output.shape
        k = x[-2 if self.transpose_a else -1]
        if len(w) == 2 and not self.transpose_a:
            batch, m = [], m * prod(batch)
        return MatrixProduct(prod(batch), m, n, k, is_aligned=are_aligned(plan.output, n, k))

    def work(self, x: Spec, w: Spec) -> Work:
        y = self.infer(x, w)
        k = x.shape[-2 if self.transpose_a else -1]
        return Work(2 * prod(y.shape) * k, x.size_bytes + w.size_bytes + y.size_bytes)


class Linear(AbstractProduct):
    """y = x @ w.T + b.   x: (..., k)   w: (n, k)   b: (n,), may be left out   y: (..., n)

    One op instead of three: the bias is added in place, and backward works on 2-D arrays, so that
    each gradient is one matrix product for any number of leading dims.
    """

    rule = "... k, n k, n -> ... n"

    def rule_for(self, *shapes: tuple[int, ...]) -> str:
        return self.rule if len(shapes) == 3 else "... k, n k -> ... n"

    def misfit(self, *shapes: tuple[int, ...]) -> str | None:
        if len(shapes) < 2 or len(shapes[1]) != 2:
            return None
        x, w = shapes[:2]
        if x and x[-1] == w[1]:
            return None
        if not x:
            return f"x is a single number; feed a tensor (..., {w[1]})"
        flat = prod(x[1:])
        way_out = f"flatten it to ({x[0]}, {flat})" if flat == w[1] else f"feed (..., {w[1]})"
        return (
            f"x {x} has {x[-1]} features, the layer's weight {w} takes {w[1]}: {way_out}, or make the layer "
            f"Linear({x[-1]}, {w[0]})"
        )

    def product(self, plan: Plan) -> MatrixProduct:
        n, k = plan.inputs[1].shape
        rows = prod(plan.output.shape[:-1])
        return MatrixProduct(1, rows, n, k, is_aligned=are_aligned(plan.output, n, k))

    def forward(self, ctx: Context, x: Array, w: Array, b: Array | None = None) -> Array:
        ctx.x, ctx.w = x, w
        # BLAS copies w to multiply by its transpose, but not to multiply w itself. With few rows, w @ x.T is faster:
        # a third for 32 rows (measured). The result is then column-major.
        rows = x if x.ndim == 2 else as_rows(x)
        y = ctx.arrays.product(w, rows.T).T if len(rows) <= FEW_ROWS < len(w) else ctx.arrays.product(rows, w.T)
        if x.ndim != 2:
            y = y.reshape(*x.shape[:-1], len(w))
        # Where k is cut, y is a partial sum: the rank with the first slice adds the bias.
        if b is None or ctx.offset("k"):
            return y
        if y.dtype != ctx.plan.output.dtype:
            return y + b
        y += b
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        x, w = ctx.x, ctx.w
        dy_MN, rows = (dy, x) if x.ndim == 2 else (as_rows(dy), as_rows(x))
        dx = ctx.arrays.product(dy_MN, w).reshape(x.shape) if ctx.needs[0] else None
        dw = None
        # dw is a product (n, M) @ (M, k).
        if ctx.needs[1]:
            out = ctx.gradient(1, dy.dtype) if x.dtype == dy.dtype else None
            dw = ctx.arrays.product(dy_MN.T, rows, out)
        if len(ctx.needs) == 2:
            return dx, dw
        db = None
        if ctx.needs[2]:
            db = ctx.gradient(2, dy.dtype)
            if ctx.offset("k"):
                db[...] = 0
            else:
                ctx.arrays.sum_rows(dy_MN, out=db)
        return dx, dw, db


_MATMUL, _LINEAR = MatMul(), Linear()


@function("matmul mm bmm __matmul__ __rmatmul__")
def matmul(x: Any, w: Any) -> Tensor:
    """Return x @ w.   x: (..., m, k) or (k,)   w: (..., k, n) or (k,)   result: (..., m, n)

    A 1-D x or w counts as a matrix of one row or one column; the result lacks that dim.
    """
    x, w = operands(x, w)
    # The op refuses tensors without dims, with a message of its own.
    if x.ndim > 1 and w.ndim > 1 or not x.ndim or not w.ndim:
        return _MATMUL(x, w)
    y = _MATMUL(x.unsqueeze(0) if x.ndim == 1 else x, w.unsqueeze(1) if w.ndim == 1 else w)
    return y.squeeze((-2,) * (x.ndim == 1) + (-1,) * (w.ndim == 1))


@function()
def linear(x: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return x @ weight.T + bias.   x: (..., k)   weight: (n, k)   bias: (n,) or None   result: (..., n)"""
    return _LINEAR(x, weight) if bias is None else _LINEAR(x, weight, bias)
