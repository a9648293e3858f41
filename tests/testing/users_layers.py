"""Tensor-parallel layers as users write them by hand, after Megatron's, and the mistakes that one can make in them."""

from __future__ import annotations

import numpy as np

import simparallel as sp
from simparallel import nn


class CopyToRanks(sp.Function):
    """Identity; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, dy):
        return sp.all_reduce(dy, "sum")


class SumOverRanks(sp.Function):
    """Sum over the ranks; the gradient is passed on."""

    @staticmethod
    def forward(ctx, x):
        return sp.all_reduce(x, "sum")

    @staticmethod
    def backward(ctx, dy):
        return dy


class GatherFromRanks(sp.Function):
    """Concatenate the last dim over the ranks; the gradient is cut again."""

    @staticmethod
    def forward(ctx, x):
        ctx.ends = np.cumsum([0, *sp.all_gather_object(x.shape[-1])])
        return sp.Tensor(sp.all_gather(x.data, dim=-1, uneven=True))

    @staticmethod
    def backward(ctx, dy):
        return dy[..., ctx.ends[sp.get_rank()] : ctx.ends[sp.get_rank() + 1]]


def ends_of(size: int) -> np.ndarray:
    """Return where the slices of a dim end: sizes differ by at most one."""
    ranks = sp.get_world_size()
    return np.cumsum([0, *(len(part) for part in np.array_split(np.arange(size), ranks))])


class ColumnParallel(nn.Module):
    """A Linear with slices of its outputs.

    Args:
        mistake: "" or "no sum of the input's gradient" or "size rounded down".
    """

    def __init__(self, in_features: int, out_features: int, mistake: str = "") -> None:
        super().__init__()
        rank = sp.get_rank()
        own = int(np.diff(ends_of(out_features))[rank])
        if mistake == "size rounded down":
            own = out_features // sp.get_world_size()
        self.mistake = mistake
        self.weight = nn.Parameter(np.zeros((own, in_features), np.float32))
        self.bias = nn.Parameter(np.zeros(own, np.float32))

    def forward(self, x):
        if self.mistake != "no sum of the input's gradient":
            x = CopyToRanks.apply(x)
        return GatherFromRanks.apply(x @ self.weight.T + self.bias)


class RowParallel(nn.Module):
    """A Linear with slices of its inputs.

    Args:
        mistake: "" or "bias on every rank" or "no sum".
    """

    def __init__(self, in_features: int, out_features: int, mistake: str = "") -> None:
        super().__init__()
        self.first, self.last = ends_of(in_features)[sp.get_rank() : sp.get_rank() + 2]
        self.mistake = mistake
        self.weight = nn.Parameter(np.zeros((out_features, self.last - self.first), np.float32))
        self.bias = nn.Parameter(np.zeros(out_features, np.float32))

    def forward(self, x):
        y = CopyToRanks.apply(x)[..., self.first : self.last] @ self.weight.T
        if self.mistake == "bias on every rank":
            return SumOverRanks.apply(y + self.bias)
        return (y if self.mistake == "no sum" else SumOverRanks.apply(y)) + self.bias
