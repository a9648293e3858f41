"""Metrics: one NumPy line each, over any batches and any ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError, LabelError, ShapeError
from simparallel.train import metrics as M

CLASSES = 4


@st.composite
def judged(draw: Any) -> tuple[np.ndarray, np.ndarray, list[slice]]:
    """Draw scores of small integers, so that there are ties; labels; and their cuts into batches."""
    count = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    scores = rng.integers(0, 4, (count, CLASSES)).astype(np.float32)
    cuts = sorted(draw(st.sets(st.integers(1, count - 1)))) if count > 1 else []
    edges = [0, *cuts, count]
    return (scores, rng.integers(0, CLASSES, count), [slice(a, b) for a, b in zip(edges, edges[1:], strict=False)])


def evaluate(metric: Any, scores: np.ndarray, labels: np.ndarray, batches: list[slice]) -> Any:
    metric.clear()
    for rows in batches:
        metric.update(sp.Tensor(scores[rows]), labels[rows])
    return metric.eval()


def top_k(scores: np.ndarray, labels: np.ndarray, k: int) -> float:
    order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return float(np.mean([label in row for label, row in zip(labels, order, strict=True)]))


@given(judged())
def test_classification(case):
    scores, labels, batches = case
    said = scores.argmax(axis=1)
    true_of = [labels == c for c in range(CLASSES)]
    said_of = [said == c for c in range(CLASSES)]
    precision = [np.mean(labels[s] == c) if s.any() else 0 for c, s in enumerate(said_of)]
    recall = [np.mean(said[t] == c) if t.any() else 0 for c, t in enumerate(true_of)]
    f1 = [2 * p * r / (p + r) if p + r else 0 for p, r in zip(precision, recall, strict=True)]
    f2 = [5 * p * r / (4 * p + r) if p + r else 0 for p, r in zip(precision, recall, strict=True)]

    assert evaluate(M.Accuracy(), *case) == np.mean(said == labels)
    for metric, expected in ((M.Precision(), precision), (M.Recall(), recall), (M.F1(), f1), (M.Fbeta(2.0), f2)):
        np.testing.assert_allclose(evaluate(metric, *case), expected, rtol=1e-12)
        assert metric.eval(average=True) == pytest.approx(np.mean(expected), rel=1e-12)
    for k in range(1, CLASSES + 2):
        assert evaluate(M.TopKCategoricalAccuracy(k), *case) == pytest.approx(top_k(scores, labels, k))
    assert evaluate(M.Top1CategoricalAccuracy(), *case) == evaluate(M.Accuracy(), *case)
    one_hot = np.eye(CLASSES, dtype=int)[labels]
    assert evaluate(M.Accuracy(), scores, one_hot, batches) == np.mean(said == labels)


@given(judged())
def test_regression(case):
    scores, _, batches = case
    target = scores[::-1]
    assert evaluate(M.MAE(), scores, target, batches) == pytest.approx(abs(scores - target).sum() / len(scores))
    assert evaluate(M.MSE(), scores, target, batches) == pytest.approx(((scores - target) ** 2).sum() / len(scores))


@given(st.lists(st.tuples(st.floats(-9, 9), st.integers(1, 5)), min_size=1, max_size=5))
def test_loss_is_a_mean_over_samples(losses):
    metric = M.Loss()
    for loss, count in losses:
        metric.update(sp.Tensor([loss]), count)
    values, counts = (np.array(column, np.float32) for column in zip(*losses, strict=True))
    assert metric.eval() == pytest.approx(float((values * counts).sum() / counts.sum()), rel=1e-5, abs=1e-6)
    metric.clear()
    for loss, _ in losses:
        metric.update(loss)
    assert metric.eval() == pytest.approx(np.mean(values), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", ["accuracy", "precision", "F1", "top_1_accuracy", "mse", "loss"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_count_together(name, size):
    """Ranks with different numbers of samples, one of them with none."""
    rng = np.random.default_rng(1)
    scores, labels = rng.normal(size=(9, 3)), rng.integers(0, 3, 9)

    def update(metric, rows):
        if name == "loss":
            metric.update(scores[rows].mean(), rows.stop - rows.start)
        else:
            metric.update(scores[rows], scores[rows] * 2 if name == "mse" else labels[rows])

    def program():
        metric = M.get_metric_fn(name)
        edges = {1: [0, 9], 2: [0, 9, 9], 4: [0, 1, 1, 6, 9]}[size]
        start, stop = edges[sp.get_rank()], edges[sp.get_rank() + 1]
        if stop > start:
            update(metric, slice(start, stop))
        return metric.eval(), metric.eval()

    whole = M.get_metric_fn(name)
    update(whole, slice(0, 9))
    for first, second in sp.launch(program, world_size=size, transport="inline"):
        np.testing.assert_allclose(first, whole.eval(), rtol=1e-12)
        assert np.array_equal(first, second)  # reading changes nothing


def test_group_counts_by_itself():
    def program():
        groups = [sp.new_group([0, 2]), sp.new_group([1])]
        metric = M.MAE(groups[sp.get_rank() % 2])
        metric.update(np.full(1, float(sp.get_rank())), np.zeros(1))
        return metric.eval()

    assert list(sp.launch(program, world_size=3, transport="inline")) == [1.0, 1.0, 1.0]
    assert sp.launch(program, world_size=3, transport="inline")[1] == 1.0


def test_ranks_with_different_numbers_of_classes():
    """One rank has seen rows of 2 scores only, the other of 3."""

    def program():
        metric = M.Recall()
        classes = 2 + sp.get_rank()
        metric.update(np.eye(classes), np.arange(classes))
        return metric.eval().tolist()

    assert list(sp.launch(program, world_size=2, transport="inline")) == [[1, 1, 1]] * 2


def test_multilabel_and_images():
    metric = M.Accuracy("multilabel")
    metric.update([[0, 1], [1, 1], [0, 0]], [[0, 1], [1, 0], [0, 0]])
    assert metric.eval() == 2 / 3
    pixels = M.Accuracy()
    scores = np.zeros((2, 3, 4, 5))
    scores[:, 1] = 1
    pixels.update(scores, np.ones((2, 4, 5), int))
    assert pixels.eval() == 1.0
    top = M.TopKCategoricalAccuracy(1)
    top.update([[np.nan, 1.0]], [0])
    assert top.eval() == 0.0  # not a number is not a hit


def test_names_in_one_order_and_objects():
    assert list(M.get_metrics({"loss", "acc", "F1"})) == ["F1", "acc", "loss"]
    assert list(M.get_metrics(["loss", "acc"])) == ["loss", "acc"]
    own = M.MAE()
    found = M.get_metrics({"own": own, "named": "mse"})
    assert found["own"] is own
    assert isinstance(found["named"], M.MSE)
    assert M.get_metrics(None) == {}
    assert list(M.get_metrics("accuracy")) == ["accuracy"]
    assert all(isinstance(M.get_metric_fn(name), M.Metric) for name in M.METRICS)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: M.Accuracy().eval(), InputError),
        (lambda: M.Accuracy("regression"), InputError),
        (lambda: M.Accuracy().update([[1.0]]), InputError),
        (lambda: M.Accuracy().update([1.0, 2.0], [0, 1]), ShapeError),
        (lambda: M.Accuracy().update([[1.0, 2.0]], [0, 1]), ShapeError),
        (lambda: M.Accuracy().update([[1.0, 2.0]], [0.5]), LabelError),
        (lambda: M.Accuracy().update([[1.0, 2.0]], [2]), LabelError),
        (lambda: M.Precision().update([[1.0, 2.0]], [-1]), LabelError),
        (lambda: M.Accuracy("multilabel").update([[1, 0]], [1]), ShapeError),
        (lambda: M.TopKCategoricalAccuracy(0), InputError),
        (lambda: M.TopKCategoricalAccuracy(1).update(np.ones((1, 2, 3)), np.ones((1, 3), int)), ShapeError),
        (lambda: M.Fbeta(0), InputError),
        (lambda: M.MAE().update([1.0], [1.0, 2.0]), ShapeError),
        (lambda: M.Loss().update([1.0, 2.0]), ShapeError),
        (lambda: M.Loss().update(), InputError),
        (lambda: M.get_metric_fn("acuracy"), InputError),
    ],
)
def test_bad_arguments_are_refused(call, error):
    with refused(error):
        call()
