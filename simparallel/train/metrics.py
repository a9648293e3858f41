"""Metrics: sums collected batch by batch and reduced over the ranks in `eval()`.

Names and meaning are MindSpore's. Each rank updates with its own samples; `eval()` adds the sums of
all ranks, so the result covers all samples, however they were divided.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Tensor
from simparallel.autograd.ops.labels import Words, check_labels
from simparallel.backend import to_host
from simparallel.base.checks import check_choice, check_integer, check_number
from simparallel.comm import Group
from simparallel.errors import InputError, LabelError, ShapeError
from simparallel.world.rank import get_world_size


class Metric:
    """Base of the metrics: a subclass defines `sums` and `result`, or overrides `clear`, `update` and `eval`.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def __init__(self, group: Group | None = None) -> None:
        self.group = group
        self.clear()

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        """Return the sums of a batch, float64, shape (k,) or (k, classes); the number of classes may vary by batch."""
        raise TypeError(f"{self._name} does not define sums")

    def result(self, sums: np.ndarray) -> Any:
        """Return the metric, given the sums over all batches and ranks; by convention the first sum is a count."""
        raise TypeError(f"{self._name} does not define result")

    def clear(self) -> None:
        """Discard all samples."""
        self._sums: np.ndarray | None = None

    def update(self, *inputs: Any) -> None:
        """Add the samples of a batch: predictions and labels.

        Raises:
            ShapeError, LabelError, InputError: inputs do not fit; nothing is added.
        """
        # Computed before anything is added: a batch that does not fit leaves the sums as they were.
        added = self.sums(*map(self._convert_data, inputs))
        self._sums = added if self._sums is None else _total(self._sums, added)

    def _convert_data(self, data: Any) -> np.ndarray:
        """Return the values of a Tensor or array in host memory. MindSpore's name, for subclasses."""
        return to_host(data.data if isinstance(data, Tensor) else data)

    def eval(self) -> Any:
        """Return the metric of all samples of all ranks; the collected sums stay.

        Raises:
            InputError: no rank has seen a sample.

        Collective: yes, if there are several ranks.
        """
        sums = self._sums
        if get_world_size(self.group) > 1:
            # Shapes are unknown to a rank without samples, so gather objects instead of reducing arrays.
            parts = [part for part in collectives.all_gather_object(sums, self.group) if part is not None]
            sums = reduce(_total, parts) if parts else None
        if sums is None:
            raise InputError(f"{self._name}: eval() before any update(); there are no samples.")
        return self.result(sums)

    @property
    def _name(self) -> str:
        return type(self).__name__


class AbstractMean(Metric):
    """Base of means: the second sum divided by the first."""

    def result(self, sums: np.ndarray) -> float:
        return (sums[1] / sums[0]).item()


class Loss(AbstractMean):
    """Mean of losses.   update(loss), or update(loss, number of samples that it averages)

    Args:
        group: ranks that combine their samples; by default all.
    """

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        if not 1 <= len(inputs) <= 2:
            raise InputError(f"Loss: update takes a loss and optionally a count, got {len(inputs)} values.")
        loss = inputs[0]
        if loss.size != 1:
            raise ShapeError(f"Loss: expected a loss of one element, got shape {loss.shape}.")
        count = float(inputs[1]) if len(inputs) == 2 else 1.0
        # Weighted by the samples it averages, so that a smaller last batch counts less.
        return np.array([count, loss.reshape(()).astype(np.float64) * count])


class Accuracy(AbstractMean):
    """Share of correctly classified samples.

    Args:
        eval_type: "classification": update((n, v, ...) scores, (n, ...) labels, or one-hot as the scores).
            "multilabel": update of two arrays (n, v, ...) of 0 and 1; a sample is correct if all v agree.
        group: ranks that combine their samples; by default all.

    Raises:
        InputError: an unknown `eval_type`.
    """

    def __init__(self, eval_type: str = "classification", group: Group | None = None) -> None:
        check_choice("Accuracy", "eval_type", eval_type, ("classification", "multilabel"))
        self.eval_type = eval_type
        super().__init__(group)

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        scores, labels = _pair(self._name, inputs)
        if self.eval_type == "multilabel":
            if scores.shape != labels.shape or scores.ndim < 2:
                raise ShapeError(f"Accuracy: shapes {scores.shape} and {labels.shape} must both be (n, v, …).")
            # One wrong class of a sample makes the sample wrong.
            right = (scores == labels).all(axis=1)
        else:
            labels = _labels(self._name, scores, labels)
            right = scores.argmax(axis=1) == labels
        return np.array([right.size, right.sum()], np.float64)


class TopKCategoricalAccuracy(AbstractMean):
    """Share of the samples with the label among the k highest scores.   update((n, v) scores, labels)

    Among equal scores, a lower class index ranks higher.

    Args:
        k: 1 or more.
        group: ranks that combine their samples; by default all.
    """

    def __init__(self, k: int, group: Group | None = None) -> None:
        self.k = check_integer("TopKCategoricalAccuracy", "k", k, 1)
        super().__init__(group)

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        scores, labels = _pair(self._name, inputs)
        labels = _labels(self._name, scores, labels)
        if scores.ndim != 2:
            raise ShapeError(f"{self._name}: expected scores (n, v), got shape {scores.shape}.")
        # Count the classes ahead of the label instead of sorting all scores.
        own = scores[np.arange(len(labels)), labels][:, None]
        # Classes ranked ahead of the label: higher scores, and equal ones with a lower index. NaN is never a hit.
        ahead = scores > own
        ahead |= (scores == own) & (np.arange(scores.shape[1]) < labels[:, None])
        hit = (ahead.sum(axis=1) < self.k) & ~np.isnan(own[:, 0])
        return np.array([len(labels), hit.sum()], np.float64)


class Top1CategoricalAccuracy(TopKCategoricalAccuracy):
    """`TopKCategoricalAccuracy(1)`.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__(1, group)


class Top5CategoricalAccuracy(TopKCategoricalAccuracy):
    """`TopKCategoricalAccuracy(5)`.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__(5, group)


class _ClassCounts(Metric):
    """Per class: samples, correct predictions, predictions, labels.   update((n, v) scores, labels)

    A quotient 0 / 0 counts as 0.
    """

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        scores, labels = _pair(self._name, inputs)
        labels, predicted = _labels(self._name, scores, labels).ravel(), scores.argmax(axis=1).ravel()
        num_classes = scores.shape[1]
        counts = [labels[labels == predicted], predicted, labels]
        counted = np.stack([np.bincount(c, minlength=num_classes) for c in counts]).astype(np.float64)
        # Row 0 is the number of samples, the same for each class: all sums need one shape.
        return np.concatenate([np.full((1, num_classes), float(labels.size)), counted])

    def eval(self, average: bool = False) -> Any:
        """Return one number for each class, shape (classes,); with `average` their mean. Collective: yes."""
        values = super().eval()
        return float(values.mean()) if average else values


class Precision(_ClassCounts):
    """Share of the predictions of a class that are correct, for each class.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def result(self, sums: np.ndarray) -> np.ndarray:
        return _quotient(sums[1], sums[2])


class Recall(_ClassCounts):
    """Share of the samples of a class that were predicted as such, for each class.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def result(self, sums: np.ndarray) -> np.ndarray:
        return _quotient(sums[1], sums[3])


class Fbeta(_ClassCounts):
    """(1 + beta^2) precision recall / (beta^2 precision + recall), for each class.

    Args:
        beta: weight of recall relative to precision, above 0; with 0 it would be `Precision`.
        group: ranks that combine their samples; by default all.

    Raises:
        InputError: `beta` is not a number, or is 0.
    """

    def __init__(self, beta: float, group: Group | None = None) -> None:
        self.beta = check_number(type(self).__name__, "beta", beta, above=0.0)
        super().__init__(group)

    def result(self, sums: np.ndarray) -> np.ndarray:
        square = self.beta**2
        return _quotient((1 + square) * sums[1], square * sums[3] + sums[2])


class F1(Fbeta):
    """`Fbeta(1)`: the harmonic mean of precision and recall.

    Args:
        group: ranks that combine their samples; by default all.
    """

    def __init__(self, group: Group | None = None) -> None:
        super().__init__(1.0, group)


class MAE(AbstractMean):
    """Sum of |x - y| divided by the number of samples.   update(x, y), both of shape (n, ...)

    Args:
        group: ranks that combine their samples; by default all.
    """

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        return np.array([len(inputs[0]), np.abs(_difference(self._name, inputs)).sum()])


class MSE(AbstractMean):
    """Sum of (x - y)^2 divided by the number of samples.   update(x, y), both of shape (n, ...)

    Args:
        group: ranks that combine their samples; by default all.
    """

    def sums(self, *inputs: np.ndarray) -> np.ndarray:
        return np.array([len(inputs[0]), np.square(_difference(self._name, inputs)).sum()])


METRICS: dict[str, type[Any]] = {
    "accuracy": Accuracy, "acc": Accuracy, "loss": Loss, "precision": Precision, "recall": Recall, "F1": F1,
    "top_1_accuracy": Top1CategoricalAccuracy, "top_5_accuracy": Top5CategoricalAccuracy, "mae": MAE, "mse": MSE,
}  # fmt: skip


def get_metric_fn(name: str, *args: Any, **kwargs: Any) -> Metric:
    """Create a metric by name, with its arguments.

    Raises:
        InputError: unknown name.
    """
    if name not in METRICS:
        raise InputError(f"metric {name!r} is unknown; choose from {', '.join(METRICS)}.")
    return METRICS[name](*args, **kwargs)


def get_metrics(metrics: Any, group: Group | None = None) -> dict[str, Metric]:
    """Resolve metrics to name -> metric, in the same order on all ranks.

    Args:
        metrics: None; one name; names in a list or a set; or a dict of name -> `Metric` or metric name.
        group: ranks that combine their samples; by default all.

    Raises:
        InputError: an unknown name, an object without clear, update and eval, or a `Metric` over all ranks where only
            a group trains.
    """
    if metrics is None:
        return {}
    if isinstance(metrics, str):
        metrics = [metrics]
    if not isinstance(metrics, Mapping):
        listed = list(metrics) if isinstance(metrics, Iterable) else [metrics]
        if not all(isinstance(name, str) for name in listed):
            raise InputError(f"metrics={metrics!r}: expected names in a set, or a dict of name and metric.")
        # The order of a set differs between processes; metrics are collective, so sort.
        listed = sorted(listed) if isinstance(metrics, (set, frozenset)) else listed
        metrics = {name: name for name in listed}
    # Metrics given by name cover the ranks that train together; `Metric` objects have their own group.
    setting = {} if group is None else {"group": group}
    found = {name: get_metric_fn(m, **setting) if isinstance(m, str) else m for name, m in metrics.items()}
    for name, metric in found.items():
        if not all(callable(getattr(metric, method, None)) for method in ("clear", "update", "eval")):
            raise InputError(f"metric {name!r}: {metric!r} must have the methods clear, update and eval.")
        if group is not None and isinstance(metric, Metric) and getattr(metric, "group", None) is None:
            raise InputError(
                f"metric {name!r}: {type(metric).__name__} adds the samples of all ranks, but ranks "
                f"{list(group.ranks)} train separately; choose the ranks with {type(metric).__name__}(group=…)."
            )
    return found


def _total(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a + b; the array with fewer classes is padded with zeros."""
    if a.shape[-1] < b.shape[-1]:
        a, b = b, a
    total = a.copy()
    total[..., : b.shape[-1]] += b
    return total


def _pair(who: str, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, np.ndarray]:
    if len(inputs) != 2:
        raise InputError(f"{who}: update takes predictions and labels, got {len(inputs)} values.")
    return inputs[0], inputs[1]


def _labels(who: str, scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the class indices, (n, ...), that match scores (n, v, ...); labels may be one-hot."""
    if scores.ndim >= 2 and labels.shape == scores.shape:
        return labels.argmax(axis=1)
    if scores.ndim < 2 or labels.shape != (scores.shape[0], *scores.shape[2:]) or scores.shape[1] == 0:
        raise ShapeError(
            f"{who}: scores have shape {scores.shape}, labels {labels.shape}; expected (n, v, …) and (n, …)."
        )
    if labels.dtype.kind not in "iu":
        raise LabelError(f"{who}: labels have dtype {labels.dtype}, expected integers.")
    check_labels(arrays_of(labels), labels, scores.shape[1], None, who, Words(ignore=""))
    return labels


def _difference(who: str, inputs: tuple[np.ndarray, ...]) -> np.ndarray:
    x, y = _pair(who, inputs)
    if x.shape != y.shape or x.ndim == 0:
        raise ShapeError(f"{who}: shapes {x.shape} and {y.shape} must both be (n, …).")
    # Unsigned integers would wrap around below 0.
    return x.astype(np.float64) - y.astype(np.float64)


def _quotient(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    # No warning for 0 / 0: a class without samples or predictions counts as 0.
    return np.divide(a, b, out=np.zeros_like(a), where=b > 0)
