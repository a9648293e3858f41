"""Embedding, a look-up of rows by integer ids, and one-hot vectors of ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.arrays.host.sums import wider
from simparallel.autograd.methods import function
from simparallel.autograd.op import AbstractConstant, Context, Op, Plan, Spec, Work, as_int, instance
from simparallel.autograd.ops.labels import Words, check_labels
from simparallel.autograd.tensor import Tensor, as_tensor
from simparallel.backend import Array
from simparallel.errors import DTypeError, InputError, OutOfRangeError
from simparallel.layout.rule import dim_names

ROWS = Words("id", "ids", "rows", "make the table {} rows long", "")
COLUMNS = Words("id", "ids", "classes", "set num_classes={}", "")


class Embedding(Op):
    """y = table[ids].   ids: (...) integers   table: (v, e)   y: (..., e)

    The rows v may be cut: an id outside of this rank's rows gives 0, so y is Partial, and each rank
    computes the gradient of its own rows (the vocabulary-parallel embedding of Shoeybi et al. 2019,
    "Megatron-LM"). The gradients of equal ids add up.

    Args:
        padding_idx: a row with a gradient of 0; None for none.
    """

    rule = "..., v e -> ... e"
    fills_grad_buffers = True

    def __init__(self, padding_idx: int | None = None) -> None:
        self.padding_idx = None if padding_idx is None else as_int("Embedding: padding_idx", padding_idx)

    @property
    def repeat(self) -> str:
        """Position of the repeat axis in the device matrix, as for MindSpore's Gather: "left" if rows are cut."""
        table = self.in_strategy[1] if self.in_strategy is not None and len(self.in_strategy) > 1 else None
        return "left" if isinstance(table, tuple) and table[:1] > (1,) else "right"

    def infer(self, ids: Spec, table: Spec) -> Spec:
        _check_integers("ids", ids)
        shape, num_rows = super().infer(ids, table).shape, table.shape[0]
        if self.padding_idx is not None and not -num_rows <= self.padding_idx < num_rows:
            raise OutOfRangeError(
                f"padding_idx={self.padding_idx} is not one of the {num_rows} rows of the table of shape {table.shape}."
            )
        return Spec(shape, table.dtype)

    def forward(self, ctx: Context, ids: Array, table: Array) -> Array:
        check_labels(ctx.arrays, ids.reshape(-1), ctx.size("v"), None, self.name, ROWS)
        ctx.inside = None
        if table.shape[0] != ctx.size("v"):
            ids = ids.astype("int64", copy=False) - ctx.offset("v")
            ctx.inside = (ids >= 0) & (ids < table.shape[0])
            # Look up row 0 for ids outside of this slice; the result is set to 0 below.
            ids = ids * ctx.inside
        ctx.ids = ids
        # An empty slice has no row to look up.
        if not table.shape[0]:
            return ctx.xp.zeros(ctx.plan.output.shape, table.dtype)
        y = ctx.xp.take(table, ids, axis=0)
        if ctx.inside is not None:
            y *= ctx.inside[..., None]
        return y

    def backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        xp, shape = ctx.xp, ctx.plan.inputs[1].shape
        if ctx.inside is not None:
            dy = dy * ctx.inside[..., None]
        dtable = ctx.gradient(1, dy.dtype)
        # The gradients of many equal ids add up in float32: float16 would lose digits.
        total = dtable if dy.dtype == wider(dy.dtype) else xp.empty(shape, wider(dy.dtype))
        total[...] = 0
        ids = ctx.ids.reshape(-1).astype("int64", copy=False)
        inside = None if ctx.inside is None else ctx.inside.reshape(-1)
        rows = xp.ascontiguousarray(dy.reshape(ids.size, shape[1]), dtype=total.dtype)
        ctx.arrays.add_rows(total, ids, rows, inside)
        if total is not dtable:
            dtable[...] = total
        if self.padding_idx is not None:
            padding = self.padding_idx % ctx.size("v") - ctx.offset("v")
            if 0 <= padding < shape[0]:
                dtable[padding] = 0
        return None, dtable

    def work(self, ids: Spec, table: Spec) -> Work:
        return Work(0, ids.size_bytes + 2 * self.infer(ids, table).size_bytes)

    def work_backward(self, needs: tuple[bool, ...], work: Work) -> Work:
        # One addition per element.
        return Work(work.size_bytes // 8, work.size_bytes)

    def eager_work_backward(self, needs: tuple[bool, ...], plan: Plan) -> Work:
        # Zeros for the whole table, to which the rows are added.
        work = self.work_backward(needs, plan.work)
        return Work(work.flops, work.size_bytes + plan.inputs[1].size_bytes + plan.output.size_bytes)


class OneHot(AbstractConstant):
    """y[..., j] = on where j == ids[...], else off.   ids: (...) integers   y: (..., v)

    The new dim may be cut: each rank makes its slice. No gradient.

    Args:
        num_classes: size of the new last dim.
        on: value at the id.
        off: value elsewhere.
        dtype: dtype of y.

    Raises:
        InputError: `num_classes` is below 1.
    """

    flops_per_element = 0

    def __init__(self, num_classes: int, on: float = 1.0, off: float = 0.0, dtype: Any = "float32") -> None:
        num_classes = as_int("OneHot: num_classes", num_classes)
        if num_classes < 1:
            raise InputError(f"OneHot: num_classes={num_classes!r} must be 1 or more.")
        self.num_classes, self.on, self.off, self.dtype = num_classes, on, off, np.dtype(dtype)

    def rule_for(self, shape: tuple[int, ...]) -> str:
        names = " ".join(dim_names(len(shape)))
        return f"{names} -> {names} v={self.num_classes}"

    def infer(self, ids: Spec) -> Spec:
        _check_integers("ids", ids)
        return Spec((*ids.shape, self.num_classes), self.dtype)

    def forward(self, ctx: Context, ids: Array) -> Array:
        xp, shape = ctx.xp, ctx.plan.output.shape
        flat = ids.reshape(-1)
        check_labels(ctx.arrays, flat, self.num_classes, None, self.name, COLUMNS)
        y = xp.full((flat.shape[0], shape[-1]), self.off, dtype=self.dtype)
        rows = xp.arange(flat.shape[0])
        if shape[-1] != self.num_classes:
            flat = flat.astype("int64", copy=False) - ctx.offset("v")
            inside = (flat >= 0) & (flat < shape[-1])
            rows, flat = rows[inside], flat[inside]
        y[rows, flat] = self.on
        return y.reshape(shape)


def _check_integers(name: str, spec: Spec) -> None:
    if spec.dtype.kind not in "iu":
        raise DTypeError(f"{name} have dtype {spec.dtype}, expected integers; use .astype('int64').")


@function()
def embedding(ids: Any, table: Any, padding_idx: int | None = None) -> Tensor:
    """Return table[ids].   ids: (...) integers   table: (v, e)   result: (..., e)

    Args:
        ids: integers, any shape.
        table: one row for each id.
        padding_idx: a row with a gradient of 0; None for none.
    """
    return instance(Embedding, padding_idx)(as_tensor(ids), as_tensor(table))


@function()
def one_hot(ids: Any, num_classes: int, on: float = 1.0, off: float = 0.0, dtype: Any = "float32") -> Tensor:
    """Add a last dim of size `num_classes`, with `on` at the id and `off` elsewhere.

    Args:
        ids: integers, any shape.
        num_classes: number of classes; ids are below it.
        on, off: the elements of the result.
        dtype: dtype of the result.
    """
    return instance(OneHot, num_classes, on, off, str(dtype))(as_tensor(ids))
