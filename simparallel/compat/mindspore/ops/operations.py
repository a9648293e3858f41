"""`mindspore.ops.operations`: ops as objects. Ops without settings are `sp.ops`' own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from simparallel import Tensor, functions, ops
from simparallel.compat.front import public_names, refuse, take, unused
from simparallel.compat.groups import group_of
from simparallel.compat.mindspore.ops import functional as _functional
from simparallel.compat.mindspore.ops.primitive import Primitive, Resolved, axes, number, primitive

# Ops without settings, some of them under several of MindSpore's names.
_SAME = """
Abs Add Asin Atan BitwiseAnd BitwiseOr BitwiseXor Ceil Cos Cosh Div Equal Exp Expm1 Flatten Floor Greater
GreaterEqual Less LessEqual Log Log1p LogSoftmax MatMul Maximum Minimum Mul Neg NotEqual Pow ReLU Rsqrt
Sigmoid Sign SiLU Sin Sinh Softmax Sqrt Sub Tan Tanh Trunc
"""
_RENAMED = {
    "ACos": "Acos", "BatchMatMul": "MatMul", "FloorDiv": "FloorDivide", "FloorMod": "Remainder", "RealDiv": "Div",
    "Select": "Where", "TensorAdd": "Add",
}  # fmt: skip
take(globals(), ops, _SAME, **_RENAMED)
Call = Callable[..., Resolved]


def _reduction(op: type[ops.Op], what: str) -> type[Primitive]:
    def reduce(keep_dims: bool = False) -> Call:
        return lambda x, axis=(): (op, (axes(axis), keep_dims), (x,))

    reduce.__name__, reduce.__doc__ = (
        f"Reduce{op.__name__}",
        f"The {what} along the call's `axis`; () takes all elements.",
    )
    return primitive(reduce)


ReduceSum, ReduceMean = _reduction(ops.Sum, "sum"), _reduction(ops.Mean, "mean")
ReduceMax, ReduceMin = _reduction(ops.Max, "maximum"), _reduction(ops.Min, "minimum")


@primitive
def OneHot(axis: int = -1) -> Call:
    """`on_value` at the class of each index, `off_value` elsewhere."""
    refuse("OneHot", "classes are the last dim", axis=axis if axis != -1 else None)

    def resolve(indices: Any, depth: int, on_value: Any = 1.0, off_value: Any = 0.0) -> Resolved:
        dtype = getattr(on_value, "dtype", "float32")
        # The dtype follows `on_value`, which MindSpore programs give as a Tensor.
        return ops.OneHot, (int(number(depth)), number(on_value), number(off_value), str(dtype)), (indices,)

    return resolve


@primitive
def Argmax(axis: int = -1, output_type: Any = None) -> Call:
    """The index of the first maximum along `axis`, int64."""
    unused("Argmax", output_type=output_type)
    return lambda x: (ops.ArgMax, (axis,), (x,))


@primitive
def Cast() -> Call:
    """x converted to another dtype."""
    return lambda x, dtype: (ops.Cast, (str(dtype),), (x,))


@primitive
def Reshape() -> Call:
    """x in another shape."""
    return lambda x, shape: (ops.Reshape, (tuple(shape),), (x,))


@primitive
def Transpose() -> Call:
    """x with its dims in another order."""
    return lambda x, perm: (ops.Permute, (tuple(perm),), (x,))


@primitive
def ExpandDims() -> Call:
    """x with a new dim of size 1 at `axis`."""
    return lambda x, axis: (ops.Unsqueeze, (axis,), (x,))


@primitive
def Squeeze(axis: Any = ()) -> Call:
    """x without dims of size 1; () drops all of them."""

    def resolve(x: Any) -> Resolved:
        dims = axes(axis)
        # `ops.Squeeze` takes the dims, so find those of size 1.
        if dims is None:
            dims = tuple(dim for dim, size in enumerate(x.shape) if size == 1)
        return ops.Squeeze, (dims,), (x,)

    return resolve


@primitive
def Tile() -> Call:
    """x repeated along each dim."""
    return lambda x, multiples: (ops.Tile, (tuple(multiples),), (x,))


@primitive
def BroadcastTo(shape: Any) -> Call:
    """x broadcast to this shape."""
    return lambda x: (ops.BroadcastTo, (tuple(shape),), (x,))


@primitive
def Concat(axis: int = 0) -> Call:
    """The Tensors of a tuple, concatenated along `axis`."""
    return lambda tensors: (ops.Concat, (axis,), tuple(tensors))


@primitive
def Stack(axis: int = 0) -> Call:
    """The Tensors of a tuple, stacked along a new dim at `axis`."""
    return lambda tensors: (ops.Stack, (axis,), tuple(tensors))


@primitive
def Gather() -> Call:
    """Rows of a table by index."""

    def resolve(x: Any, indices: Any, axis: int = 0) -> Resolved:
        refuse("Gather", "rows are looked up along axis 0", axis=axis or None)
        return ops.Embedding, (), (indices, x)

    return resolve


@primitive
def MaxPool(
    kernel_size: Any = 1,
    strides: Any = 1,
    pad_mode: str = "valid",
    data_format: str = "NCHW",
    *,
    ksize: Any = None,
    padding: str | None = None,
) -> Call:
    """The maximum of windows; MindSpore 0.2 calls the settings ksize and padding."""
    refuse("MaxPool", "give NCHW", data_format=data_format != "NCHW")
    settings = kernel_size if ksize is None else ksize, strides, (padding or pad_mode).lower()
    return lambda x: (ops.MaxPool2d, settings, (x,))


def BiasAdd(data_format: str = "NCHW") -> Callable[..., Tensor]:
    """x (n, c, ...) plus the bias (c,) of each channel."""
    refuse("BiasAdd", "give NCHW", data_format=data_format != "NCHW")
    return _functional.bias_add


def Shape() -> Callable[..., tuple[int, ...]]:
    """The shape of a Tensor."""
    return _functional.shape


# --- collectives and gradients ---------------------------------------------------------------------


class ReduceOp:
    """Names of reductions over the ranks."""

    SUM, MAX, MIN, PROD = "sum", "max", "min", "prod"


def AllReduce(op: str = ReduceOp.SUM, group: Any = None) -> Callable[..., Tensor]:
    """The reduction over the ranks, see `sp.functions.all_reduce`."""
    return partial(functions.all_reduce, op=op, group=group_of(group))


def AllGather(group: Any = None) -> Callable[..., Tensor]:
    """The ranks' tensors joined along dim 0, see `sp.functions.all_gather`."""
    return partial(functions.all_gather, group=group_of(group))


def ReduceScatter(op: str = ReduceOp.SUM, group: Any = None) -> Callable[..., Tensor]:
    """This rank's part along dim 0 of the reduction over the ranks, see `sp.functions.reduce_scatter`."""
    return partial(functions.reduce_scatter, op=op, group=group_of(group))


def Broadcast(root_rank: int, group: Any = None) -> Callable[..., tuple[Tensor, ...]]:
    """The tensors of a tuple from rank `root_rank`, see `sp.functions.broadcast`."""
    own = group_of(group)
    return lambda xs: tuple(functions.broadcast(x, root_rank, own) for x in xs)


def GradOperation(get_all: bool = False, get_by_list: bool = False, sens_param: bool = False) -> Callable[..., Any]:
    """A function's gradients: of its first argument, of all (`get_all`), of weights (`get_by_list`), or of both.

    With `sens_param` the last argument of the call is the gradient of the result; otherwise each element counts 1.
    """

    def gradients(fn: Any, weights: Any = None) -> Any:
        if get_by_list and weights is None:
            weights = fn.trainable_params()

        def total(*args: Any) -> Tensor:
            return (fn(*args[:-1]) * args[-1]).sum() if sens_param else fn(*args).sum()

        def run(*args: Any) -> Any:
            every = tuple(range(len(args) - sens_param))
            return _functional.grad(total, every if get_all else None if get_by_list else 0, weights)(*args)

        return run

    return gradients


__all__ = public_names(globals(), "Call", "Resolved", "Tensor", "axes", "functions", "number", "primitive")
