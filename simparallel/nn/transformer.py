"""Multi-head attention, Transformer layers and stacks of them: Vaswani et al. 2017, with PyTorch's names."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import reduce
from operator import add, or_
from typing import Any

import numpy as np

import simparallel.nn.init as init
from simparallel.autograd import Tensor, functions, functions as F
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import get_namespace
from simparallel.base.checks import check_choice, check_integer
from simparallel.errors import InputError, ShapeError
from simparallel.nn.containers import ModuleList
from simparallel.nn.layers import Dropout, Linear
from simparallel.nn.module import Module
from simparallel.nn.normalization import LayerNorm


class MultiheadAttention(Module):
    """Attention with `num_heads` heads.   x: (..., t, embed_dim)   y: (..., t, embed_dim)

    Batch first. Queries, keys and values have separate projections, so cutting the heads over devices means cutting the
    output dim of three Linear layers and the input dim of the fourth.

    Args:
        embed_dim: features, divisible by `num_heads`.
        num_heads: number of heads.
        bias: whether the projections have a bias.
        dropout: probability of dropping an element of the result, in training.
        causal: position i sees only positions 0 … i.
        dtype: floating-point dtype of the parameters.

    Raises:
        InputError: a bad setting.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.embed_dim = check_integer(type(self).__name__, "embed_dim", embed_dim, 1)
        self.num_heads = check_integer(type(self).__name__, "num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise InputError(f"MultiheadAttention: embed_dim={embed_dim} must be divisible by num_heads={num_heads}.")
        self.causal = causal
        self.q_proj = Linear(embed_dim, embed_dim, bias, dtype)
        self.k_proj = Linear(embed_dim, embed_dim, bias, dtype)
        self.v_proj = Linear(embed_dim, embed_dim, bias, dtype)
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype)
        self.dropout = Dropout(dropout)

    def forward(self, x: Any, context: Any = None, mask: Any = None) -> Tensor:
        """Attend from x to `context` (by default to x itself).

        Args:
            x: (..., t, embed_dim), the queries.
            context: (..., s, embed_dim), the keys and values.
            mask: (t, s) for all samples, (..., t, s) for each sample with all its heads, or (..., num_heads, t, s);
                sizes may be 1. Added to the scores; or bool, True at visible positions.

        Raises:
            ShapeError: a mask of another shape.
        """
        x = as_tensor(x)
        context = x if context is None else as_tensor(context)
        q = self._heads(self.q_proj(x))
        k, v = self._heads(self.k_proj(context)), self._heads(self.v_proj(context))
        # The operand with more batch dims determines the shape of the scores.
        if mask is not None:
            mask = self._mask(as_tensor(mask), q if q.ndim >= k.ndim else k, (q.shape[-2], k.shape[-2]))
        y = functions.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        # (..., t, heads, d) is already the order in memory, so the reshape below copies nothing.
        y = y.transpose(-2, -3)
        return self.dropout(self.out_proj(y.reshape(*y.shape[:-2], self.embed_dim)))

    def _heads(self, x: Tensor) -> Tensor:
        """Split the features into heads: (..., t, heads * d) -> (..., heads, t, d)."""
        return x.reshape(*x.shape[:-1], self.num_heads, self.embed_dim // self.num_heads).transpose(-2, -3)

    def _mask(self, mask: Tensor, heads: Tensor, pairs: tuple[int, int]) -> Tensor:
        """Return the mask with dims that broadcast to the scores (..., heads, t, s). Raises ShapeError."""
        given, scores = mask.shape, (*heads.shape[:-2], *pairs)
        if 2 < mask.ndim < heads.ndim:
            mask = mask.unsqueeze(-3)
        matches = zip(mask.shape[::-1], scores[::-1], strict=False)
        if mask.ndim < 2 or any(size != whole and 1 not in (size, whole) for size, whole in matches):
            raise ShapeError(
                f"MultiheadAttention: mask has shape {given}, the scores (..., heads, t, s) have {scores}; expected "
                "(t, s), (..., t, s) or (..., heads, t, s)."
            )
        return mask

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, causal={self.causal}"


_ACTIVATIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu}


class AbstractTransformerLayer(Module):
    """Attention and a two-layer network per position, each with a residual connection and a layer norm.

    Args:
        d_model: features, divisible by `nhead`.
        nhead: heads of attention.
        dim_feedforward: features between the two layers.
        dropout: probability of dropping an element, in training, of each part's result and between the two layers.
            (Attention weights themselves are not dropped.)
        activation: "relu", "gelu", "silu", or a function of a Tensor.
        layer_norm_eps: see `LayerNorm`.
        batch_first: inputs are (n, t, d_model) instead of (t, n, d_model). Without a batch they are (t, d_model).
        norm_first: normalise the input of each part instead of the sum after it.
        bias: whether layers and norms have a bias.
        dtype: floating-point dtype of the parameters.

    Masks follow PyTorch: a bool mask is True at hidden positions, numbers are added to the scores. An attention mask
    has the shape (t, s), (n, t, s) or (n nhead, t, s), a padding mask (n, s), or (s,) without a batch.

    The weights have PyTorch's names, except in attention: PyTorch's `in_proj_weight` is q_proj.weight, k_proj.weight
    and v_proj.weight here, stacked along dim 0; likewise `in_proj_bias`.

    Raises:
        InputError: a bad setting. When called, ShapeError for inputs or masks of other shapes.
    """

    _shown = {"batch_first": ..., "norm_first": ...}
    _attends_to_memory = False

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        if not callable(activation):
            check_choice(type(self).__name__, "activation", activation, _ACTIVATIONS)
        self.activation = activation if callable(activation) else _ACTIVATIONS[activation]
        self.batch_first, self.norm_first = bool(batch_first), bool(norm_first)
        self.self_attn = MultiheadAttention(d_model, nhead, bias, dropout, dtype=dtype)
        if self._attends_to_memory:
            self.multihead_attn = MultiheadAttention(d_model, nhead, bias, dropout, dtype=dtype)
        self.linear1 = Linear(d_model, dim_feedforward, bias, dtype)
        self.dropout = Dropout(dropout)
        self.linear2 = Linear(dim_feedforward, d_model, bias, dtype)
        # A norm for each part: norm1, norm2 and, with attention to a memory, norm3.
        for i in range(1, 3 + self._attends_to_memory):
            setattr(self, f"norm{i}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype))
        self.last_dropout = Dropout(dropout)

    def _add(self, x: Tensor, norm: LayerNorm, part: Callable[[Tensor], Tensor]) -> Tensor:
        return x + part(norm(x)) if self.norm_first else norm(x + part(x))

    def _feed_forward(self, x: Tensor) -> Tensor:
        return self.last_dropout(self.linear2(self.dropout(self.activation(self.linear1(x)))))

    def _batched(self, x: Any) -> Tensor:
        """Swap time and batch unless the batch comes first; the same swap restores the order of the inputs."""
        x = as_tensor(x)
        if x.ndim not in (2, 3) or x.shape[-1] != self.self_attn.embed_dim:
            raise ShapeError(
                f"{type(self).__name__}: an input has shape {x.shape}, expected 2 or 3 dims, the last one of "
                f"{self.self_attn.embed_dim} features."
            )
        return x if self.batch_first or x.ndim == 2 else x.transpose(0, 1)

    def _attend(
        self, attention: MultiheadAttention, x: Tensor, context: Tensor, mask: Any, padding: Any, is_causal: bool
    ) -> Tensor:
        masks = [as_tensor(mask)] if mask is not None else []
        # PyTorch's (n nhead, t, s): split the first dim.
        if masks and x.ndim == masks[0].ndim == 3 and masks[0].shape[0] == x.shape[0] * attention.num_heads:
            masks = [masks[0].reshape(x.shape[0], attention.num_heads, *masks[0].shape[1:])]
        if is_causal:
            xp = get_namespace(x.data)
            masks.append(as_tensor(xp.triu(xp.ones((x.shape[-2], context.shape[-2]), bool), 1)))
        if padding is not None:
            padding = as_tensor(padding)
            if padding.shape != (*context.shape[:-2], context.shape[-2]):
                raise ShapeError(
                    f"{type(self).__name__}: a padding mask has shape {padding.shape}, expected "
                    f"{(*context.shape[:-2], context.shape[-2])}."
                )
            # (n, 1, 1, s): one mask for each sample, with all its heads and positions.
            masks.append(padding.reshape(*padding.shape[:-1], *(1,) * (x.ndim - 1), padding.shape[-1]))
        return attention(x, context, _combined(masks, x.dtype))


class TransformerEncoderLayer(AbstractTransformerLayer):
    __doc__ = "Self-attention, then a two-layer network per position.\n\n    " + (
        AbstractTransformerLayer.__doc__ or ""
    )

    def forward(
        self, src: Any, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False
    ) -> Tensor:
        """Return the sequence after this layer, of the shape of `src`.

        Args:
            src: (t, n, d_model), or (n, t, d_model) with `batch_first`.
            src_mask: attention mask, see the class.
            src_key_padding_mask: padding mask, see the class.
            is_causal: position i sees only positions 0 … i, in addition to the masks.
        """
        masks = src_mask, src_key_padding_mask, is_causal
        y = self._add(self._batched(src), self.norm1, lambda x: self._attend(self.self_attn, x, x, *masks))
        return self._batched(self._add(y, self.norm2, self._feed_forward))


class TransformerDecoderLayer(AbstractTransformerLayer):
    __doc__ = "Self-attention, attention to a memory, then a two-layer network per position.\n\n    " + (
        AbstractTransformerLayer.__doc__ or ""
    )
    _attends_to_memory = True

    def forward(
        self,
        tgt: Any,
        memory: Any,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return the sequence after this layer, of the shape of `tgt`.

        Args:
            tgt: (t, n, d_model), or (n, t, d_model) with `batch_first`.
            memory: (s, n, d_model), likewise: the output of an encoder.
            tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask: see the class.
            tgt_is_causal, memory_is_causal: position i sees only positions 0 … i.
        """
        y, memory = self._batched(tgt), self._batched(memory)
        masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
        y = self._add(y, self.norm1, lambda x: self._attend(self.self_attn, x, x, *masks))
        y = self._add(y, self.norm2, lambda x: self._attend(self.multihead_attn, x, memory, *memory_masks))
        return self._batched(self._add(y, self.norm3, self._feed_forward))


class AbstractTransformerStack(Module):
    """Base of the stacks: copies of a layer, and a norm."""

    def _stack(self, layer: Module, num_layers: int, norm: Module | None) -> None:
        self.num_layers = check_integer(type(self).__name__, "num_layers", num_layers, 1)
        self.layers = ModuleList([deepcopy(layer) for _ in range(num_layers)])
        self.norm = norm

    def _applied(self, x: Any, *inputs: Any, **named: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *inputs, **named)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(AbstractTransformerStack):
    """A stack of encoder layers.

    Args:
        encoder_layer: is copied; the copies start with its weights.
        num_layers: number of layers.
        norm: module applied to the result, such as a `LayerNorm`; or None.
    """

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self._stack(encoder_layer, num_layers, norm)

    def forward(self, src: Any, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        """Apply the layers in order, all with the same masks."""
        return self._applied(src, mask, src_key_padding_mask, is_causal)


class TransformerDecoder(AbstractTransformerStack):
    """A stack of decoder layers, which all attend to the same memory. Arguments as for `TransformerEncoder`.

    `decoder_layer` takes the place of `encoder_layer`.
    """

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__()
        self._stack(decoder_layer, num_layers, norm)

    def forward(self, tgt: Any, memory: Any, *masks: Any, **named: Any) -> Tensor:
        """Apply the layers in order, all with the same memory and masks."""
        return self._applied(tgt, memory, *masks, **named)


class Transformer(Module):
    """An encoder, and a decoder that attends to its output.

    Args:
        num_encoder_layers, num_decoder_layers: numbers of layers.
        d_model, nhead, …: as for `TransformerEncoderLayer`; each stack ends with a layer norm.
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        settings = (dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, dtype)
        norms = [LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype) for _ in range(2)]
        self.encoder = TransformerEncoder(
            TransformerEncoderLayer(d_model, nhead, *settings), num_encoder_layers, norms[0]
        )
        self.decoder = TransformerDecoder(
            TransformerDecoderLayer(d_model, nhead, *settings), num_decoder_layers, norms[1]
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new initial values for all matrices from Xavier's uniform distribution."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                init.xavier_uniform_(parameter)

    def forward(
        self,
        src: Any,
        tgt: Any,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        src_is_causal: bool = False,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Return the decoder's output for `tgt`, attending to the encoder's output for `src`; masks as for layers."""
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask
        return self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal)

    @staticmethod
    def generate_square_subsequent_mask(sz: int, dtype: Any = np.float32) -> Tensor:
        """Return a causal mask (sz, sz): 0 at and below the diagonal, -inf above."""
        return Tensor(np.triu(np.full((sz, sz), -np.inf, dtype), 1))


def _combined(masks: list[Tensor], dtype: np.dtype) -> Tensor | None:
    """Combine PyTorch's masks into one for `MultiheadAttention`, where bool is True at visible positions."""
    if not masks:
        return None
    masks = [mask.unsqueeze(1) if mask.ndim == 3 and any(m.ndim == 4 for m in masks) else mask for mask in masks]
    if all(mask.dtype == bool for mask in masks):
        return ~reduce(or_, masks)
    xp = get_namespace(masks[0].data)
    zero, never = xp.zeros((), dtype), xp.full((), -np.inf, dtype)
    return reduce(add, [F.where(mask, never, zero) if mask.dtype == bool else mask for mask in masks])
