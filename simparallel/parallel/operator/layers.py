"""Layers whose weights are cut over a mesh axis: Megatron's tensor parallelism, derived from the ops' rules.

Sources: Shoeybi et al. 2019, "Megatron-LM"; for the sequence-parallel part Korthikanti et al. 2022, "Reducing
activation recomputation in large transformer models". This file contains no communication: the layouts place the
weights, and the exchanges follow from them. A column-parallel layer leaves its output cut, a row-parallel layer
leaves an unfinished sum, so each transformer block has one sum in its attention and one in its feed-forward part.

Initial weights equal the weights of the layer on one device, bit for bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.autograd import Tensor, functions as F
from simparallel.errors import LayoutError
from simparallel.layout.layout import Layout
from simparallel.nn import GELU, Embedding, LayerNorm, Linear, Module, MultiheadAttention
from simparallel.nn.deferred import no_init_parameters
from simparallel.parallel.operator.distribute import distribute_module


class ColumnParallelLinear(Linear):
    """y = x @ weight.T + bias; each rank along `axis` computes its part of the output features.

    Args:
        in_features, out_features, bias, dtype: as for `nn.Linear`.
        layout: the axes of the devices, not yet called.
        axis: the axis that cuts the output features.
        gather_output: return y gathered along `axis`; by default it stays cut.

    Collective: no, unless `gather_output`; in backward the gradient of x is all-reduced along `axis`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        axis: str = "tp",
        bias: bool = True,
        gather_output: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        # Without data, so that each rank draws its slice only.
        with no_init_parameters():
            super().__init__(in_features, out_features, bias, dtype)
        self.axis, self.gather_output = axis, gather_output
        distribute_module(self, layout, {"weight": (axis, "None"), **({"bias": (axis,)} if bias else {})})

    def forward(self, x: Any) -> Tensor:
        y = super().forward(x)
        return whole_along(y, self.axis) if self.gather_output else y


class RowParallelLinear(Linear):
    """y = x @ weight.T + bias; each rank along `axis` adds the contribution of its part of the input features.

    Args:
        in_features, out_features, bias, dtype: as for `nn.Linear`.
        layout: the axes of the devices, not yet called.
        axis: the axis that cuts the input features.
        scatter_dim: dim of y that `axis` cuts once the sum is finished (sequence parallelism), with a reduce-scatter
            instead of an all-reduce. None leaves the sum unfinished until an op needs y.

    Collective: along `axis`, when the sum is finished.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        layout: Layout,
        axis: str = "tp",
        bias: bool = True,
        scatter_dim: int | None = None,
        dtype: Any = np.float32,
    ) -> None:
        with no_init_parameters():
            super().__init__(in_features, out_features, bias, dtype)
        self.axis, self.scatter_dim = axis, scatter_dim
        # The bias is replicated; `Linear` adds it on the first slice only, so the sum has it once.
        distribute_module(self, layout, {"weight": ("None", axis)})

    def forward(self, x: Any) -> Tensor:
        y = super().forward(x)
        # The same axis leaves the sum and cuts a dim: the plan of this redistribution is a reduce-scatter.
        return y if self.scatter_dim is None else cut_along(y, self.axis, self.scatter_dim)


class VocabParallelEmbedding(Embedding):
    """y = weight[ids]; each rank along `axis` holds its part of the rows.

    Ids of other ranks' rows contribute 0, so y is an unfinished sum until an op needs it.

    Args:
        num_embeddings: number of rows.
        embedding_dim: size of a row.
        layout: the axes of the devices, not yet called.
        axis: the axis that cuts the rows.
        padding_idx: a row with a gradient of 0; None for none.
        dtype: floating-point dtype of the weight.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        layout: Layout,
        axis: str = "tp",
        padding_idx: int | None = None,
        dtype: Any = np.float32,
    ) -> None:
        with no_init_parameters():
            super().__init__(num_embeddings, embedding_dim, padding_idx, dtype)
        distribute_module(self, layout, {"weight": (axis, "None")})


class VocabParallelCrossEntropy(Module):
    """Cross-entropy of logits (n, v) or (n, v, ...) with the class dim v cut along `axis`; nothing is gathered.

    Forward makes two all-reduces: of each row's maximum, then of its sum and its label's logit; backward makes none.

    Args:
        axis: the axis that cuts the classes.
        reduction: "mean", "sum", or "none" for the loss of each row.
        label_smoothing: share of the target that is spread over all classes, in 0 … 1.

    Raises:
        LayoutError: (when called) the logits are not cut along `axis`.
    """

    def __init__(self, axis: str = "tp", reduction: str = "mean", label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.axis, self.reduction, self.label_smoothing = axis, reduction, label_smoothing

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        # The op would accept whole logits, too, but then all ranks would compute the same.
        layout = logits.layout
        axis = self.axis
        # An axis of one device cuts nothing, and layouts leave it out.
        is_cut = layout is not None and (
            any(axis in axes for axes in layout.axes_by_dim[1:2]) or layout.mesh.axis_size(axis) == 1
        )
        if not is_cut:
            raise LayoutError(
                f"VocabParallelCrossEntropy: the class dim of the logits is not cut along {self.axis!r}; they are laid "
                f"out as {layout!r}. Use nn.CrossEntropyLoss for whole logits."
            )
        return F.cross_entropy(logits, labels, reduction=self.reduction, label_smoothing=self.label_smoothing)


class SequenceParallelLayerNorm(LayerNorm):
    """LayerNorm on activations that are cut along the sequence, a dim over which it does not normalise.

    Args:
        normalized_shape, eps: as for `nn.LayerNorm`.
        layout: the axes of the devices, not yet called.
        axis: the axis that cuts the sequence.
        dim: the sequence dim of x.

    Collective: no in forward, if x is already cut this way; the gradients of weight and bias are summed along `axis`.
    """

    def __init__(
        self,
        normalized_shape: Any,
        layout: Layout,
        axis: str = "tp",
        dim: int = 1,
        eps: float = 1e-5,
        dtype: Any = np.float32,
    ) -> None:
        # Weight and bias are small, and replicated.
        super().__init__(normalized_shape, eps, dtype=dtype)
        self.axis, self.dim = axis, dim
        distribute_module(self, layout)

    def forward(self, x: Any) -> Tensor:
        return super().forward(cut_along(x, self.axis, self.dim))


class ParallelTransformerBlock(Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).   x: (B, T, D)

    `axis` cuts heads and hidden features: queries, keys, values and the first feed-forward layer by columns, the output
    projection and the second feed-forward layer by rows. Another axis may cut x along the batch at the same time: data
    parallelism is the same mechanism.

    Args:
        width: D.
        num_heads: number of heads; a multiple of the size of `axis`.
        layout: the axes of the devices, not yet called.
        axis: the axis that cuts heads and features.
        sequence_parallel: cut activations along T by `axis` outside attention and feed-forward, as in norms.
        causal: position i sees only positions 0 … i.
        dtype: floating-point dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        layout: Layout,
        axis: str = "tp",
        sequence_parallel: bool = False,
        causal: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self.norm1, self.norm2 = LayerNorm(width, dtype=dtype), LayerNorm(width, dtype=dtype)
        with no_init_parameters():
            self.attention = MultiheadAttention(width, num_heads, causal=causal, dtype=dtype)
            self.up, self.down = Linear(width, 4 * width, dtype=dtype), Linear(4 * width, width, dtype=dtype)
        self.gelu = GELU(approximate="tanh")
        # The head dim is part of the output features, so cutting these by `axis` cuts the heads.
        columns = {f"attention.{name}_proj.{part}": cut for name in "qkv" for part, cut in _columns(axis)}
        columns |= {f"up.{part}": cut for part, cut in _columns(axis)}
        # Columns, then rows: in between each rank works on its own features, without communication.
        rows = {"attention.out_proj.weight": ("None", axis), "down.weight": ("None", axis)}
        distribute_module(self, layout, columns | rows)

    def forward(self, x: Tensor) -> Tensor:
        if self.sequence_parallel:
            x = cut_along(x, self.axis, 1)
        x = x + self._joined(self.attention(self._whole(self.norm1(x))))
        return x + self._joined(self.down(self.gelu(self.up(self._whole(self.norm2(x))))))

    def _whole(self, x: Tensor) -> Tensor:
        # An all-gather along T before the columns, and in `_joined` a reduce-scatter after the rows: together they move
        # as many bytes as the all-reduce that they replace.
        return whole_along(x, self.axis) if self.sequence_parallel else x

    def _joined(self, x: Tensor) -> Tensor:
        return cut_along(x, self.axis, 1) if self.sequence_parallel else x


def _columns(axis: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return ("weight", (axis, "None")), ("bias", (axis,))


def whole_along(x: Tensor, axis: str) -> Tensor:
    """Return x with no dim cut by `axis` and no unfinished sum along it. Raises LayoutError for a plain tensor."""
    return cut_along(x, axis, None)


def cut_along(x: Tensor, axis: str, dim: int | None) -> Tensor:
    """Return x with `dim` also cut by `axis`, innermost; None for no dim. Raises LayoutError for a plain tensor."""
    if not isinstance(x, Tensor) or x.layout is None:
        raise LayoutError("a parallel layer takes sharded tensors; shard x with distribute_tensor(x, layout).")
    layout = x.layout
    dims = [tuple(a for a in axes if a != axis) for axes in layout.axes_by_dim]
    if dim is not None:
        dims[dim] = (*dims[dim], axis)
    # Sums along other axes stay unfinished.
    left = tuple(a for a in layout.partial if a != axis)
    return x.redistribute(layout.with_partial(())(*dims).with_partial(left))
