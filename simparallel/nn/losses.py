"""Losses as modules."""

from __future__ import annotations

from typing import Any

from simparallel.autograd import NLL, CrossEntropy, Huber, SmoothL1, Tensor, functions
from simparallel.autograd.ops.loss import check_reduction
from simparallel.autograd.tensor import as_tensor
from simparallel.base.checks import check_integer, check_number
from simparallel.errors import ShapeError
from simparallel.nn.module import TensorModule


class _Loss(TensorModule):
    """Base of losses with a `reduction`.

    Args:
        reduction: "mean", "sum", or "none" for the losses one by one.

    Raises:
        InputError: unknown `reduction`; when called, ShapeError, DTypeError or LabelError.
    """

    _shown = {"reduction": ...}

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = check_reduction(type(self).__name__, reduction)


class CrossEntropyLoss(_Loss):
    """-log softmax(logits)[label].   logits: (n, v) or (n, v, ...)   labels: (n,) or (n, ...) integers in 0 … v-1

    Args:
        reduction: "mean" over the rows, "sum", or "none" for a loss of the shape of the labels.
        weight: (v,), weight of each class; array or Tensor, stored as a buffer of the module.
        ignore_index: rows with this label do not count (None ignores none; PyTorch's default is -100).
        label_smoothing: share of the target that is spread evenly over all classes.

    Raises:
        InputError: a bad setting; when called, ShapeError, DTypeError or LabelError.
    """

    _shown = {"reduction": ..., "ignore_index": None, "label_smoothing": 0.0}

    def __init__(
        self,
        reduction: str = "mean",
        *,
        weight: Any = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(reduction)
        # The op refuses bad settings now, not in forward.
        CrossEntropy(reduction, ignore_index, label_smoothing)
        self.register_buffer("weight", None if weight is None else Tensor(weight))
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.cross_entropy(logits, labels, weight=self.weight, **self._settings())


class CrossEntropySmooth(_Loss):
    """Cross-entropy with smoothed labels, MindSpore's.   logits: (n, v)   labels: (n,), or (n, v) if not sparse

    The target of the correct class is 1 - smooth_factor, the target of every other class smooth_factor / (v - 1).
    (PyTorch spreads its `label_smoothing` over all v classes.)

    Args:
        sparse: labels are class indices; otherwise they are the targets themselves, used without smoothing.
        reduction: "mean" over the rows, "sum", or "none".
        smooth_factor: 0 … 1 - 1 / num_classes; at the maximum all classes have the same target.
        num_classes: v, 2 or more.

    Raises:
        InputError: a bad setting; when called, ShapeError, DTypeError or LabelError.
    """

    _shown = {"reduction": ..., "smooth_factor": ..., "num_classes": ...}

    def __init__(
        self, sparse: bool = True, reduction: str = "mean", smooth_factor: float = 0.0, num_classes: int = 1000
    ) -> None:
        super().__init__(reduction)
        self.sparse = bool(sparse)
        self.num_classes = check_integer("CrossEntropySmooth", "num_classes", num_classes, 2)
        most = 1 - 1 / self.num_classes
        self.smooth_factor = check_number("CrossEntropySmooth", "smooth_factor", smooth_factor, high=most)

    def forward(self, logits: Any, labels: Any) -> Tensor:
        logits = as_tensor(logits)
        if logits.ndim != 2 or logits.shape[1] != self.num_classes:
            raise ShapeError(f"CrossEntropySmooth: logits have shape {logits.shape}, expected (n, {self.num_classes}).")
        if not self.sparse:
            return functions.softmax_cross_entropy_with_logits(logits, labels, self.reduction)
        spread = self.smooth_factor * self.num_classes / (self.num_classes - 1)
        return functions.cross_entropy(logits, labels, self.reduction, label_smoothing=min(spread, 1.0))


class NLLLoss(_Loss):
    """-logp[label], for log-probabilities, such as the output of LogSoftmax. Arguments as for CrossEntropyLoss.

    Args:
        reduction: "mean", "sum", or "none" for the loss of each row.
        weight: factor of each class, (v,).
        ignore_index: a label whose rows count neither in the loss nor in the mean.
    """

    def __init__(self, reduction: str = "mean", *, weight: Any = None, ignore_index: int | None = None) -> None:
        super().__init__(reduction)
        self.register_buffer("weight", None if weight is None else Tensor(weight))
        self.ignore_index = NLL(reduction, ignore_index).ignore_index

    def forward(self, logp: Any, labels: Any) -> Tensor:
        return functions.nll_loss(logp, labels, self.reduction, weight=self.weight, ignore_index=self.ignore_index)


class SoftmaxCrossEntropyWithLogits(_Loss):
    """-sum of labels * log softmax(logits), for labels that are probabilities.   logits, labels: (n, v)

    Args:
        reduction: "mean" over the rows, "sum", or "none" for the loss of each row.
    """

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.softmax_cross_entropy_with_logits(logits, labels, self.reduction)


class SoftmaxCrossEntropyExpand(TensorModule):
    """The mean cross-entropy as a chain of small ops, each of which may have its own strategy.

    Args:
        sparse: labels are integers (n,); else probabilities (n, v), as in MindSpore's class of this name.
    """

    _shown = {"sparse": ...}

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.sparse = sparse

    def forward(self, logits: Any, labels: Any) -> Tensor:
        return functions.cross_entropy_expand(logits, labels, self.sparse)


class MSELoss(_Loss):
    """(x - target) ** 2.   x, target: one shape, any; floating point

    Args:
        reduction: "mean" over all elements, "sum", or "none" for the losses one by one.

    Raises:
        InputError: unknown `reduction`; when called, ShapeError or DTypeError.
    """

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.mse_loss(x, target, self.reduction)


class L1Loss(_Loss):
    """|x - target|.   x, target: one shape, any; floating point

    Args:
        reduction: "mean" over all elements, "sum", or "none" for the losses one by one.

    Raises:
        InputError: unknown `reduction`; when called, ShapeError or DTypeError.
    """

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.l1_loss(x, target, self.reduction)


class HuberLoss(_Loss):
    """d² / 2 if |d| <= delta, else delta (|d| - delta / 2), with d = x - target; two tensors of one shape.

    Args:
        reduction: "mean", "sum", or "none" for the losses one by one.
        delta: above 0.

    Raises:
        InputError: a bad setting; when called, ShapeError or DTypeError.
    """

    _shown = {"reduction": ..., "delta": ...}

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        super().__init__(reduction)
        self.delta = Huber(reduction, delta).delta

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.huber_loss(x, target, self.reduction, self.delta)


class SmoothL1Loss(_Loss):
    """d² / (2 beta) if |d| < beta, else |d| - beta / 2, with d = x - target; two tensors of one shape.

    Args:
        reduction: "mean", "sum", or "none" for the losses one by one.
        beta: 0 or more; with 0 it equals `L1Loss`.

    Raises:
        InputError: a bad setting; when called, ShapeError or DTypeError.
    """

    _shown = {"reduction": ..., "beta": ...}

    def __init__(self, reduction: str = "mean", beta: float = 1.0) -> None:
        super().__init__(reduction)
        self.beta = SmoothL1(reduction, beta).beta

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.smooth_l1_loss(x, target, self.reduction, self.beta)


class BCELoss(_Loss):
    """-target ln x - (1 - target) ln(1 - x); logarithms are at least -100.   x: probabilities   target: x's shape

    Args:
        reduction: "mean" over all elements, "sum", or "none" for the losses one by one.

    Raises:
        InputError: unknown `reduction`; when called, ShapeError, DTypeError, or x beyond 0 … 1.
    """

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.binary_cross_entropy(x, target, self.reduction)


class BCEWithLogitsLoss(_Loss):
    """Binary cross-entropy of sigmoid(x), accurate for every finite x.

    Args:
        reduction: "mean", "sum", or "none" for the losses one by one.
        pos_weight: factor of -target ln sigmoid(x); array or Tensor whose shape broadcasts to that of x, such as one
            factor per class; stored as a buffer of the module.

    Raises:
        InputError: a bad setting; when called, ShapeError or DTypeError.
    """

    def __init__(self, reduction: str = "mean", *, pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self.register_buffer("pos_weight", None if pos_weight is None else Tensor(pos_weight))

    def forward(self, x: Any, target: Any) -> Tensor:
        return functions.binary_cross_entropy_with_logits(x, target, self.reduction, pos_weight=self.pos_weight)
