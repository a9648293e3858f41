"""BERT (Devlin et al. 2019, arXiv 1810.04805) of simparallel's modules, with a head for masked words or for SQuAD."""

from __future__ import annotations

import numpy as np

import simparallel as sp
from simparallel.autograd import Tensor, functions as F

WORDS, POSITIONS, KINDS, DROPOUT = 30_522, 512, 2, 0.1


class BertAttention(sp.nn.MultiheadAttention):
    """Attention that stores its scores, and drops some of them, as BERT's first programs had it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads, dropout=DROPOUT)
        self.drop_scores = sp.nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend from x to x.   x, result: (n, t, width)"""
        q, k, v = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores + mask
        y = self.drop_scores(F.softmax(scores, -1)) @ v
        return self.dropout(self.out_proj(y.transpose(-2, -3).reshape(x.shape)))


class Bert(sp.nn.Module):
    """BERT with a head: logits of all words (n, t, words), or with `answers` of the ends of an answer (n, t, 2).

    Args:
        layers, width, heads: sizes; the defaults are BERT-large.
        stores_scores: whether attention stores its scores, or is one kernel without dropout of scores.
        answers: whether the head is that for SQuAD.
    """

    def __init__(
        self, layers: int = 24, width: int = 1024, heads: int = 16, stores_scores: bool = False, answers: bool = False
    ) -> None:
        super().__init__()
        nn = sp.nn
        self.words, self.kinds = nn.Embedding(WORDS, width), nn.Embedding(KINDS, width)
        self.positions, self.norm, self.dropout = (
            nn.Embedding(POSITIONS, width),
            nn.LayerNorm(width),
            nn.Dropout(DROPOUT),
        )
        blocks = []
        for _ in range(layers):
            block = nn.TransformerEncoderLayer(width, heads, 4 * width, DROPOUT, "gelu", batch_first=True)
            # BERT drops nothing between the two layers of its network.
            block.dropout = nn.Dropout(0.0)
            if stores_scores:
                block.self_attn = BertAttention(width, heads)
            blocks.append(block)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 2) if answers else None
        if self.head is None:
            self.transform, self.head_norm = nn.Linear(width, width), nn.LayerNorm(width)
            self.bias = nn.Parameter(np.zeros(WORDS, np.float32))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits.   tokens: (n, t) integers"""
        length = tokens.shape[1]
        x = self.words(tokens) + self.kinds(sp.Tensor(np.zeros(tokens.shape, np.int64)))
        x = self.dropout(self.norm(x + self.positions(sp.Tensor(np.arange(length)))))
        for block in self.blocks:
            x = block(x)
        if self.head is not None:
            return self.head(x)
        x = self.head_norm(F.gelu(self.transform(x)))
        return F.linear(x, self.words.weight, self.bias)
