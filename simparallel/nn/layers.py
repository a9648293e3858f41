"""Layers: `Affine`, the base of layers with a weight; Linear and Embedding; Dropout, and layers without parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

import simparallel.nn.init as init
from simparallel.autograd import GELU as GELUOp, Dropout as DropoutOp, LeakyReLU as LeakyReLUOp, Tensor, functions
from simparallel.autograd.op import instance
from simparallel.autograd.ops.interpolate import check_settings
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import random_state
from simparallel.base.checks import check_integer, is_integer
from simparallel.base.dry_new import uninitialized
from simparallel.errors import DTypeError, InputError, ShapeError
from simparallel.nn.deferred import zero_row
from simparallel.nn.module import Module, Parameter, TensorModule


class Affine(TensorModule):
    """A layer with a weight and a bias, filled by `weight_init` and `bias_init` or by the subclass's defaults.

    Each initializer may be a name, an `Initializer`, a function that fills a tensor, a number, an array or a Tensor,
    see `nn.initializer`. An initializer for an absent parameter has no effect.
    """

    weight: Parameter | None
    bias: Parameter | None
    _weight_init: Callable[[Any], Any] | None = None
    _bias_init: Callable[[Any], Any] | None = None

    def _make(self, dtype: Any, weight_init: Any, bias_init: Any, **shapes: tuple[int, ...] | None) -> None:
        """Register the parameters of these shapes (None for an absent one), and fill them by the initializers.

        Raises:
            DTypeError: `dtype` is not floating point.
            InputError, ShapeError: an unknown initializer, or one of another shape.
        """
        who, dtype = type(self).__name__, check_floating(self, dtype)
        for name, shape in shapes.items():
            setattr(self, name, None if shape is None else Parameter(uninitialized(shape, dtype)))
        if weight_init is not None:
            self._weight_init = init.as_initializer(weight_init, f"{who}: weight_init")
        if bias_init is not None:
            self._bias_init = init.as_initializer(bias_init, f"{who}: bias_init")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values."""
        begin = {
            "weight": self._weight_init or self._default_weight, "bias": self._bias_init or self._default_bias,
        }  # fmt: skip
        for name, fill in begin.items():
            # An RMSNorm has no bias at all.
            parameter = getattr(self, name, None)
            if parameter is not None:
                fill(parameter)

    def _default_weight(self, weight: Parameter) -> None:
        init.ones_(weight)

    def _default_bias(self, bias: Parameter) -> None:
        init.zeros_(bias)


class FanIn(Affine):
    """Base of layers that begin with PyTorch's default: weight and bias uniform in ±1 / sqrt(fan_in)."""

    weight: Parameter

    def _default_weight(self, weight: Parameter) -> None:
        init.kaiming_uniform_(weight, a=math.sqrt(5.0))

    def _default_bias(self, bias: Parameter) -> None:
        bound = 1.0 / math.sqrt(init.fans(self.weight)[0])
        init.uniform_(bias, -bound, bound)


def check_floating(module: Module, dtype: Any) -> np.dtype:
    """Return the dtype of a module's parameters. Raises DTypeError if it is not floating point."""
    dtype = np.dtype(dtype)
    if dtype.kind != "f":
        raise DTypeError(f"{type(module).__name__}: dtype={dtype} must be floating point, for example float32.")
    return dtype


class Linear(FanIn):
    """y = x @ weight.T + bias.   x: (..., in_features)   y: (..., out_features)

    Args:
        in_features: size of the last dim of x.
        out_features: size of the last dim of y.
        bias: whether the layer has a bias.
        dtype: floating-point dtype of the parameters.
        weight_init, bias_init: initial values, see `nn.initializer`; None for the values below.

    Attributes:
        weight: Parameter (out_features, in_features), uniform in ±1 / sqrt(in_features) at first.
        bias: Parameter (out_features,), uniform likewise; or None.

    Raises:
        InputError: a size that is not a positive integer, or an unknown initializer.
        DTypeError: `dtype` is not floating point.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
        bias_init: Any = None,
    ) -> None:
        super().__init__()
        self.in_features = check_integer("Linear", "in_features", in_features, 1)
        self.out_features = check_integer("Linear", "out_features", out_features, 1)
        weight, bias_shape = (self.out_features, self.in_features), (self.out_features,) if bias else None
        self._make(dtype, weight_init, bias_init, weight=weight, bias=bias_shape)

    def forward(self, x: Any) -> Tensor:
        return functions.linear(x, self.weight, self.bias)

    def extra_repr(self) -> str:
        has_bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={has_bias}"


class _Inplace(TensorModule):
    """
    Args:
        inplace: accepted for PyTorch's signature, without effect: the values are the same, and x is not changed.
    """

    _shown = {"inplace": False}

    def __init__(self, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = bool(inplace)


class ReLU(_Inplace):
    __doc__ = "y = max(x, 0), any shape.\n" + (_Inplace.__doc__ or "")

    def forward(self, x: Any) -> Tensor:
        return functions.relu(x)


class LeakyReLU(_Inplace):
    """y = x for x > 0, else negative_slope * x, any shape.

    Args:
        negative_slope: a finite number.
        inplace: accepted for PyTorch's signature, without effect: the values are the same, and x is not changed.

    Raises:
        InputError: `negative_slope` is not a finite number.
    """

    _shown = {"negative_slope": ..., "inplace": False}

    def __init__(self, negative_slope: float = 0.01, inplace: bool = False) -> None:
        super().__init__(inplace)
        # The op refuses a bad value now, not in forward.
        self.negative_slope = LeakyReLUOp(negative_slope).negative_slope

    def forward(self, x: Any) -> Tensor:
        return functions.leaky_relu(x, self.negative_slope)


class Tanh(TensorModule):
    """y = tanh x, any shape."""

    def forward(self, x: Any) -> Tensor:
        return functions.tanh(x)


class Sigmoid(TensorModule):
    """y = 1 / (1 + e ** -x), any shape."""

    def forward(self, x: Any) -> Tensor:
        return functions.sigmoid(x)


class GELU(TensorModule):
    """x * P(standard normal < x), any shape.

    Args:
        approximate: "none", or "tanh" for the formula with tanh.
    """

    _shown = {"approximate": ...}

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        # The op refuses an unknown value now, not in forward.
        self.approximate = GELUOp(approximate).approximate

    def forward(self, x: Any) -> Tensor:
        return functions.gelu(x, self.approximate)


class SiLU(_Inplace):
    __doc__ = "x * sigmoid(x), any shape.\n" + (_Inplace.__doc__ or "")

    def forward(self, x: Any) -> Tensor:
        return functions.silu(x)


class Softmax(TensorModule):
    """e ** x over its sum along `dim`, any shape."""

    _shown = {"dim": ...}

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Any) -> Tensor:
        return functions.softmax(x, self.dim)


class LogSoftmax(Softmax):
    """Logarithm of softmax along `dim`; accurate for values that are far apart."""

    def forward(self, x: Any) -> Tensor:
        return functions.log_softmax(x, self.dim)


class Identity(Module):
    """y = x; a placeholder for a layer that is left out."""

    def forward(self, x: Any) -> Any:
        return x


class Flatten(TensorModule):
    """Merge the dims `start_dim … end_dim` into one; by default all but the first, the batch.

    Raises:
        InputError: a dim that is not an integer.
    """

    _shown = {"start_dim": ..., "end_dim": ...}

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        for name, dim in (("start_dim", start_dim), ("end_dim", end_dim)):
            if not is_integer(dim):
                raise InputError(f"Flatten: {name}={dim!r} must be an integer.")
        self.start_dim, self.end_dim = int(start_dim), int(end_dim)

    def forward(self, x: Any) -> Tensor:
        return functions.flatten(x, self.start_dim, self.end_dim)


class Upsample(TensorModule):
    """Resize the dims of x (N, C, ...) after the channels; see `sp.functions.interpolate`.

    Args:
        size: of y, an integer or one for each resized dim.
        scale_factor: y's size is x's size times this factor, rounded down; a number or one for each dim. Give either
            `size` or `scale_factor`.
        mode: "nearest", "linear" (x of 3 dims) or "bilinear" (x of 4 dims).
        align_corners: whether the centres of the corner pixels keep their positions; for "linear" and "bilinear".
        recompute_scale_factor: derive the sampling distance from the sizes of x and y, instead of `scale_factor`.

    Raises:
        InputError: an unknown mode, not exactly one of size and scale_factor, or a setting of another mode. When
            called, also for a size below 1, and ShapeError for x of another number of dims.
    """

    def __init__(
        self,
        size: Any = None,
        scale_factor: Any = None,
        mode: str = "nearest",
        align_corners: bool | None = None,
        recompute_scale_factor: bool | None = None,
    ) -> None:
        super().__init__()
        check_settings("Upsample", size, scale_factor, mode, align_corners, recompute_scale_factor)
        self.size, self.scale_factor, self.mode = size, scale_factor, mode
        self.align_corners, self.recompute_scale_factor = align_corners, recompute_scale_factor

    def forward(self, x: Any) -> Tensor:
        return functions.interpolate(
            x, self.size, self.scale_factor, self.mode, self.align_corners, self.recompute_scale_factor
        )

    def extra_repr(self) -> str:
        given = f"scale_factor={self.scale_factor!r}" if self.size is None else f"size={self.size!r}"
        return f"{given}, mode={self.mode!r}" + (", align_corners=True" if self.align_corners else "")


class Embedding(Affine):
    """y = weight[ids].   ids: (...) integers in 0 … num_embeddings-1   y: (..., embedding_dim)

    Args:
        num_embeddings: number of rows.
        embedding_dim: size of a row.
        padding_idx: a row that is 0 at first and gets no gradient; may count from the end.
        dtype: floating-point dtype of the weight.
        weight_init: initial values, see `nn.initializer`; None for standard normal. The row `padding_idx` is 0 in any
            case.

    Attributes:
        weight: Parameter (num_embeddings, embedding_dim).

    Raises:
        InputError: a bad setting; DTypeError: `dtype` is not floating point. When called, LabelError for an id out of
            range, DTypeError for ids that are not integers.
    """

    weight: Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        dtype: Any = np.float32,
        *,
        weight_init: Any = None,
    ) -> None:
        super().__init__()
        self.num_embeddings = check_integer(type(self).__name__, "num_embeddings", num_embeddings, 1)
        self.embedding_dim = check_integer(type(self).__name__, "embedding_dim", embedding_dim, 1)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise InputError(f"Embedding: padding_idx={padding_idx} does not name one of {num_embeddings} rows.")
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self._make(dtype, weight_init, None, weight=(self.num_embeddings, self.embedding_dim))

    def reset_parameters(self) -> None:
        """Draw new initial values; the row `padding_idx` becomes 0."""
        super().reset_parameters()
        if self.padding_idx is not None:
            zero_row(self.weight, self.padding_idx)

    def _default_weight(self, weight: Parameter) -> None:
        init.normal_(weight)

    def forward(self, ids: Any) -> Tensor:
        return functions.embedding(ids, self.weight, self.padding_idx)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class Dropout(TensorModule):
    """In training, 0 with probability p and x / (1 - p) otherwise; after `eval()`, x itself.

    The dropped elements depend on the seed of `manual_seed`, on the position of this layer among the Dropouts created
    since then, on how often this layer was called before, and on the index of the element in the whole tensor: never
    on how the work is cut. Under DistributedDataParallel, and in data-parallel mode (`set_auto_parallel_context`), the
    ranks' batches count as one batch, in the order of the ranks, and must be equal parts of it. In stand-alone mode,
    without a wrapper, each rank's batch counts as a whole one, so all ranks draw the same mask. A sharded tensor counts
    as the whole batch in every mode, but in a `Pipeline` as one of its micro-batches.

    Args:
        p: probability of 0.
        inplace: accepted for PyTorch's signature, without effect: the values are the same, and x is not changed.

    Raises:
        InputError: p is not a probability.
    """

    _shown = {"p": ..., "inplace": False}

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__()
        # The op checks that p is a probability.
        self.p = DropoutOp(p).p
        self.inplace = bool(inplace)
        self.stream = random_state.next_mask()

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if not self.training or self.p == 0:
            return x
        # An input, not a setting: one op serves every step, and so does its cached plan. It stays on the host, where
        # masks are drawn.
        call = Tensor._result(np.array(random_state.next_call(self.stream), np.int64))
        part = random_state.part if x.placement is None else random_state.sharded_part
        return instance(DropoutOp, self.p, random_state.seed, self.stream, part)(x, call)


class Dropout2d(Dropout):
    """A `Dropout` of whole channels: the images (n, c, h, w) of a channel become 0 together.

    Args:
        p: probability of 0.
        inplace: as in `Dropout`.

    Raises:
        InputError: p is not a probability.
        ShapeError: x has no four dims.
    """

    def forward(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.ndim != 4:
            raise ShapeError(f"Dropout2d: x has shape {x.shape}; expected (n, c, h, w).")
        if not self.training or self.p == 0:
            return x
        # Ones of shape (n, c, 1, 1), cut as x is.
        ones = ((x.detach()[:, :, :1, :1] == 0) | True).to(x.dtype)
        return x * super().forward(ones)
