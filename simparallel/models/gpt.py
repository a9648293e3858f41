"""A small GPT: a decoder-only transformer with tied embeddings.

Source: Radford et al. 2019, "Language models are unsupervised multitask learners": norms before the attention and the
feed-forward part, and one after the last block; the output layer is the token table.
"""

from __future__ import annotations

from typing import Any

from simparallel.autograd import Tensor, functions as F
from simparallel.autograd.tensor import as_tensor
from simparallel.backend import get_namespace
from simparallel.errors import InputError, ShapeError
from simparallel.nn import GELU, Embedding, LayerNorm, Linear, Module, ModuleList, checkpoint, init

# GPT-2's standard deviation.
INIT_STD = 0.02


def initialise(model: Module, num_layers: int) -> None:
    """Draw small normal weights; those that add to the residual stream are scaled down by its depth."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            # Each block adds two outputs to the stream, so its variance would grow with the depth.
            is_residual = name.endswith(("out.weight", "down.weight"))
            init.normal_(parameter, std=INIT_STD / (2 * num_layers) ** 0.5 if is_residual else INIT_STD)
        elif name.endswith("bias"):
            init.zeros_(parameter)


class Block(Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)).   x: (B, T, D)"""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        # One matrix for queries, keys and values: one large product instead of three.
        self.norm1, self.norm2 = LayerNorm(width), LayerNorm(width)
        self.qkv, self.out = Linear(width, 3 * width), Linear(width, width)
        self.up, self.down = Linear(width, 4 * width), Linear(4 * width, width)
        # GPT-2 uses the approximation.
        self.gelu = GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.norm1(x)))
        return x + self.down(self.gelu(self.up(self.norm2(x))))

    def attend(self, x: Tensor) -> Tensor:
        batch_size, length, width = x.shape
        qkv = self.qkv(x).reshape(batch_size, length, 3, self.num_heads, width // self.num_heads)
        # (B, H, T, D/H) each.
        q, k, v = (part.squeeze(0) for part in qkv.permute(2, 0, 3, 1, 4).split(1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.permute(0, 2, 1, 3).reshape(batch_size, length, width)


class GPT(Module):
    """Logits of the next token for every position.   tokens: (B, T) or (T,) integers   result: (B, T, V) or (T, V)

    Args:
        vocabulary: number of tokens V.
        length: longest sequence T.
        num_layers, num_heads, width: of the blocks; width D is a multiple of the number of heads.

    Raises:
        InputError: `width` is not divisible by `num_heads`.
        ShapeError: (when called) a sequence longer than `length`, or tokens of other dims.
    """

    def __init__(
        self, vocabulary: int = 256, length: int = 64, *, num_layers: int = 4, num_heads: int = 4, width: int = 128
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise InputError(f"GPT: width={width} is not divisible by num_heads={num_heads}.")
        self.length = length
        self.tokens, self.positions = Embedding(vocabulary, width), Embedding(length, width)
        self.blocks = ModuleList([Block(width, num_heads) for _ in range(num_layers)])
        self.norm = LayerNorm(width)
        initialise(self, num_layers)

    def forward(self, tokens: Any) -> Tensor:
        tokens = as_tensor(tokens)
        if tokens.ndim == 1:
            # One sequence without a batch dim.
            return self.forward(tokens.unsqueeze(0)).squeeze(0)
        if tokens.ndim != 2:
            raise ShapeError(f"GPT: tokens have shape {tokens.shape}, expected (B, T) or (T,).")
        if tokens.shape[-1] > self.length:
            raise ShapeError(f"GPT: a sequence of {tokens.shape[-1]} tokens is longer than length={self.length}.")
        positions = get_namespace(tokens.data).arange(tokens.shape[-1])
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = checkpoint(block, x, optional=True)
        # Tied embeddings: the output layer is the token table.
        return F.linear(self.norm(x), self.tokens.weight)


def gpt(vocabulary: int = 256, length: int = 64, *, num_layers: int = 4, num_heads: int = 4, width: int = 128) -> GPT:
    """Make a small GPT; by default 4 layers of width 128 for sequences of 64 tokens.

    Args:
        vocabulary: number of tokens.
        length: number of positions.
        num_layers: number of blocks.
        num_heads: heads of each block; a divisor of the width.
        width: features of a token.
    """
    return GPT(vocabulary, length, num_layers=num_layers, num_heads=num_heads, width=width)
