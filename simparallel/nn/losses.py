"""Losses as modules."""

from __future__ import annotations

from typing import Any

from simparallel.autograd import CrossEntropy, Tensor, functions
from simparallel.nn.module import Module


class CrossEntropyLoss(Module):
    """-log softmax(logits)[label].   logits: (n, v)   labels: (n,) integers in 0 … v-1

    Args:
        reduction: "mean" over the rows, "sum", or "none" for a loss of shape (n,).

    Raises:
        InputError: unknown `reduction`; when called, ShapeError, DTypeError or LabelError.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = CrossEntropy(reduction).reduction  # refuses an unknown one now, not when called

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.cross_entropy(logits, labels, self.reduction)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"
