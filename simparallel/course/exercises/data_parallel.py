"""Exercises of lesson 3: data parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.course.exercises.exercise import (
    Case,
    Values,
    as_array,
    by_rank,
    call_case,
    difference,
    exercise,
    integers,
    on_one_rank,
    ranks_case,
    run_ranks,
)
from simparallel.course.exercises.remarks import Remark
from simparallel.nn import Linear, MSELoss


@exercise(lesson=3, samples=range(1, 7), size=range(1, 5))
def accumulate(samples: int, size: int) -> Case:
    """Leave the gradient of the mean loss in `.grad`, computed with at most `size` samples at a time."""
    x, y = integers(samples, 2), integers(samples, 1)[::-1] + 1
    residual = x.sum(axis=1, keepdims=True) - y  # all weights are 1
    batches: list[int] = []

    class BatchRecorder(Linear):
        def forward(self, x: Tensor) -> Tensor:
            batches.append(len(x))
            return super().forward(x)

    def run(answer: Callable[..., Any]) -> Values:
        batches.clear()
        model = BatchRecorder(2, 1, bias=False, dtype=np.float64, weight_init="ones")
        answer(model, MSELoss(), x.copy(), y.copy(), size)
        weight = "missing" if model.weight.grad is None else model.weight.grad.numpy()[0]
        weights = model.weight.detach().numpy()[0]
        return {"gradient": weight, "weights": weights, "micro-batches": list(batches)}

    def judge(expected: Values, found: Values) -> str | None:
        if max(found["micro-batches"], default=0) > size:
            return Remark("a micro-batch of {} samples, at most {} fit", max(found["micro-batches"]), size)
        return difference({**expected, "micro-batches": found["micro-batches"]}, found)

    expected = {
        "gradient": 2 * (residual * x).mean(axis=0),
        "weights": np.ones(2),
        "micro-batches": [min(size, samples - first) for first in range(0, samples, size)],
    }
    return Case({"x": x, "y": y[:, 0], "weights": np.ones(2), "size": size}, expected, on_one_rank(run), judge)


@exercise(lesson=3, ranks=range(1, 5), spread=range(3))
def average_gradients(ranks: int, spread: int) -> Case:
    """Return the gradients of the mean loss over the samples of all ranks."""
    samples = [1 + spread * (rank % 3) for rank in range(ranks)]
    gradients = [[integers(ranks, 3)[rank], integers(ranks, 1)[rank] + 1] for rank in range(ranks)]
    means = [sum(n * g[i] for n, g in zip(samples, gradients, strict=True)) / sum(samples) for i in range(2)]

    def run(answer: Callable[..., Any]) -> Values:
        def joined(*inputs: Any) -> np.ndarray | None:
            # On the rank: what an answer returns may have no end.
            found = answer(*inputs)
            return None if found is None else np.concatenate([as_array(x) for x in found])

        return by_rank(run_ranks(joined, list(zip(gradients, samples, strict=True))))

    given = {f"rank {rank}, {n} samples": np.concatenate(gradients[rank]) for rank, n in enumerate(samples)}
    return Case(given, by_rank([np.concatenate(means)] * ranks), run)


@exercise(lesson=3, size=range(1, 9), ranks=range(1, 5), epoch=range(2))
def sampler_indices(size: int, ranks: int, epoch: int) -> Case:
    """Return the samples of a rank: every `ranks`-th of the order of the epoch, padded with its own beginning."""
    order = np.random.default_rng(epoch).permutation(size)
    padded = np.resize(order, -(-size // ranks) * ranks)

    given = {"size": size, "ranks": ranks, "epoch": epoch, "order": order.tolist()}
    calls = [(size, ranks, rank, epoch) for rank in range(ranks)]
    expected = by_rank(padded[rank::ranks].tolist() for rank in range(ranks))
    return call_case(given, expected, calls=calls, form=lambda found: list(map(int, found)))


@exercise(lesson=3, ranks=range(1, 5), spread=range(3))
def sync_batch_norm(ranks: int, spread: int) -> Case:
    """Return x, normalised by the mean and the variance of each column over all ranks."""
    rows = [1 + spread * (rank % 3) for rank in range(ranks)]
    whole = integers(sum(rows), 2)
    parts = np.split(whole, np.cumsum(rows)[:-1])
    result = (whole - whole.mean(axis=0)) / np.sqrt(whole.var(axis=0) + 1e-5)
    return ranks_case(by_rank(parts), np.split(result, np.cumsum(rows)[:-1]), [(part,) for part in parts])
