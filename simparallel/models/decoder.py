"""A decoder-only transformer by its sizes: as GPT-2, Llama, Qwen and Mistral have it.

Sources: Radford et al. 2019 (GPT-2); Touvron et al. 2023, "Llama 2" (arXiv 2307.09288); Qwen3 (arXiv 2505.09388).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from simparallel.autograd import Tensor, functions as F
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import get_namespace
from simparallel.errors import InputError
from simparallel.models.gpt import initialise
from simparallel.nn import Embedding, LayerNorm, Linear, Module, ModuleList, RMSNorm, checkpoint


class DecoderBlock(Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).   x: (B, T, D)

    The rows of `qkv` are in groups: for each head of keys its queries, the key and the value, so that a slice of the
    rows is a slice of the heads. Those of a gated `up` are pairs of a gate and a value.

    Args:
        decoder: has the settings.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.num_groups, self.num_queries, self.head_size = decoder.num_kv_heads, decoder.num_queries, decoder.head_size
        self.is_gated, self.has_rotary = decoder.is_gated, not decoder.num_positions
        dtype, width = decoder.dtype, decoder.width
        heads = self.num_groups * self.num_queries
        self.norm1, self.norm2 = decoder.norm_of(width), decoder.norm_of(width)
        self.qkv = Linear(width, (heads + 2 * self.num_groups) * self.head_size, decoder.has_qkv_bias, dtype)
        self.out = Linear(heads * self.head_size, width, decoder.has_bias, dtype)
        self.up = Linear(width, (1 + self.is_gated) * decoder.mlp_width, decoder.has_bias, dtype)
        self.down = Linear(decoder.mlp_width, width, decoder.has_bias, dtype)
        if decoder.has_query_norm:
            self.query_norm, self.key_norm = decoder.norm_of(self.head_size), decoder.norm_of(self.head_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.norm1(x)))
        h = self.up(self.norm2(x))
        if self.is_gated:
            h = h.reshape(*h.shape[:-1], -1, 2)
            h = F.silu(h[..., 0]) * h[..., 1]
        else:
            h = F.gelu(h, approximate="tanh")
        return x + self.down(h)

    def attend(self, x: Tensor) -> Tensor:
        batch_size, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch_size, length, self.num_groups, self.num_queries + 2, self.head_size)
        # (B, G, Q or 1, T, D/H) each: the queries of a group share its key and value.
        q, k, v = qkv.permute(0, 2, 3, 1, 4).split([self.num_queries, 1, 1], 2)
        if "query_norm" in self._modules:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.has_rotary:
            q, k = F.rotary_embedding(q), F.rotary_embedding(k)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(0, 3, 1, 2, 4).reshape(batch_size, length, -1)


class Decoder(Module):
    """Logits of the next token for every position.   tokens: (B, T) integers   result: (B, T, V)

    Args:
        vocabulary: number of tokens V.
        num_layers, num_heads, width: of the blocks.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`; 0 for as many.
        head_size: features of a head; 0 for `width` / `num_heads`.
        mlp_width: features inside of the feed-forward part; 0 for 4 `width`.
        is_gated: whether that part is SwiGLU, not GELU.
        has_layer_norm: LayerNorm, not RMSNorm.
        has_query_norm: whether queries and keys are normalised head by head.
        has_qkv_bias, has_bias: whether the products of queries, keys and values, and the other ones, add a bias.
        num_positions: rows of the learned table of positions; 0 for rotary positions.
        is_tied: whether the table of tokens is the output layer, too.
        recompute: whether backward computes each block again from its input.
        dtype: floating-point dtype of the parameters.

    Raises:
        InputError: heads that cannot be divided.
    """

    def __init__(
        self,
        vocabulary: int,
        num_layers: int,
        num_heads: int,
        width: int,
        *,
        num_kv_heads: int = 0,
        head_size: int = 0,
        mlp_width: int = 0,
        is_gated: bool = True,
        has_layer_norm: bool = False,
        has_query_norm: bool = False,
        has_qkv_bias: bool = False,
        has_bias: bool = False,
        num_positions: int = 0,
        is_tied: bool = False,
        recompute: bool = False,
        dtype: Any = np.float32,
    ) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads or num_heads
        self.num_queries = num_heads // self.num_kv_heads
        if num_heads % self.num_kv_heads or (not head_size and width % num_heads):
            raise InputError(
                f"Decoder: num_heads={num_heads} must be divisible by num_kv_heads={self.num_kv_heads}, and "
                f"width={width} by num_heads where head_size is not given."
            )
        self.head_size, self.width, self.mlp_width = head_size or width // num_heads, width, mlp_width or 4 * width
        self.is_gated, self.has_layer_norm, self.has_query_norm = is_gated, has_layer_norm, has_query_norm
        self.has_qkv_bias, self.has_bias, self.num_positions = has_qkv_bias, has_bias, num_positions
        self.recompute, self.dtype = recompute, dtype
        self.tokens = Embedding(vocabulary, width, dtype=dtype)
        if num_positions:
            self.positions = Embedding(num_positions, width, dtype=dtype)
        self.blocks = ModuleList([DecoderBlock(self) for _ in range(num_layers)])
        self.norm = self.norm_of(width)
        self.head = None if is_tied else Linear(width, vocabulary, False, dtype)
        initialise(self, num_layers)

    def norm_of(self, size: int) -> Module:
        """Return a new norm over the last dim, of this size."""
        return LayerNorm(size, dtype=self.dtype) if self.has_layer_norm else RMSNorm(size, 1e-5, dtype=self.dtype)

    def cuts(self, axis: str) -> Mapping[str, tuple[str, ...]]:
        """Return the cuts of Megatron's tensor parallelism along `axis`, for `distribute_module`."""
        return dict(self._cuts(axis))

    def _cuts(self, axis: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        for name, _ in self.named_parameters():
            layer = name.split(".")[-2]
            if layer in ("qkv", "up", "tokens", "head"):
                yield name, (axis, "None") if name.endswith("weight") else (axis,)
            elif layer in ("out", "down") and name.endswith("weight"):
                yield name, ("None", axis)

    def forward(self, tokens: Any) -> Tensor:
        tokens = as_tensor(tokens)
        x = self.tokens(tokens)
        if self.num_positions:
            # By the tokens: in a dry run x has no values.
            x = x + self.positions(get_namespace(tokens.data).arange(x.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x) if self.recompute else block(x)
        x = self.norm(x)
        return F.linear(x, self.tokens.weight) if self.head is None else self.head(x)
