"""Losses as modules."""

from __future__ import annotations

from typing import Any

from simparallel.autograd import NLL, CrossEntropy, Tensor, functions
from simparallel.autograd.loss import check_reduction
from simparallel.nn.module import Module


class _Loss(Module):
    """Args:
        reduction: "mean", "sum", or "none" for the losses one by one.

    Raises:
        InputError: unknown `reduction`; when called, ShapeError, DTypeError or LabelError.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = check_reduction(type(self).__name__, reduction)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"


class CrossEntropyLoss(_Loss):
    """-log softmax(logits)[label].   logits: (n, v) or (n, v, ...)   labels: (n,) or (n, ...) integers in 0 … v-1

    Args:
        reduction: "mean" over the rows, "sum", or "none" for a loss of the shape of the labels.
        weight: (v,), what a label of each class counts for; array or Tensor, a buffer of the module.
        ignore_index: rows with this label count for nothing (None ignores none; PyTorch's default is -100).
        label_smoothing: this much of the target is spread evenly over all classes.

    Raises:
        InputError: a bad setting; when called, ShapeError, DTypeError or LabelError.
    """

    def __init__(
        self, reduction: str = "mean", *, weight: Any = None, ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(reduction)
        CrossEntropy(reduction, ignore_index, label_smoothing)  # refuses bad settings now, not when called
        self.register_buffer("weight", None if weight is None else Tensor(weight))
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.cross_entropy(
            logits, labels, self.reduction, weight=self.weight, ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
        )  # fmt: skip

    def extra_repr(self) -> str:
        ignored = "" if self.ignore_index is None else f", ignore_index={self.ignore_index}"
        smoothing = f", label_smoothing={self.label_smoothing}" if self.label_smoothing else ""
        return super().extra_repr() + ignored + smoothing


class NLLLoss(_Loss):
    """-logp[label], for log-probabilities such as those of LogSoftmax. Arguments as for CrossEntropyLoss."""

    def __init__(
        self, reduction: str = "mean", *, weight: Any = None, ignore_index: int | None = None
    ) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", None if weight is None else Tensor(weight))
        self.ignore_index = NLL(reduction, ignore_index).ignore_index

    def forward(self, logp: Any, labels: Any) -> Tensor:
        return functions.nll_loss(
            logp, labels, self.reduction, weight=self.weight, ignore_index=self.ignore_index
        )


class SoftmaxCrossEntropyWithLogits(_Loss):
    """-sum of labels * log softmax(logits), the labels being probabilities.   logits, labels: (n, v)"""

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.softmax_cross_entropy_with_logits(logits, labels, self.reduction)


class SoftmaxCrossEntropyExpand(Module):
    """The mean cross-entropy as a chain of small ops, of which each may be cut as it likes.

    Args:
        sparse: labels are integers (n,); else probabilities (n, v), as MindSpore's class of this name.
    """

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.cross_entropy_expand(logits, labels, self.sparse)

    def extra_repr(self) -> str:
        return f"sparse={self.sparse}"


class MSELoss(_Loss):
    """(x - target) ** 2, two tensors of one shape."""

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.mse_loss(x, target, self.reduction)


class L1Loss(_Loss):
    """|x - target|, two tensors of one shape."""

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.l1_loss(x, target, self.reduction)


class BCELoss(_Loss):
    """-target ln x - (1 - target) ln(1 - x), for probabilities x; logarithms are at least -100."""

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.binary_cross_entropy(x, target, self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy of sigmoid(x), safe for every finite x."""

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.binary_cross_entropy_with_logits(x, target, self.reduction)
