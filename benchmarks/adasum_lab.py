"""The Adasum laboratory: the effect of Adasum on training, measured on the bundled digits.

    python -m benchmarks.adasum_lab  # tables, and figures in runs/adasum/

One process simulates all workers. They have the same weights, so one backward of a model with stacked
weights, a copy for each worker, yields all workers' gradients at once; these are then combined by `sp.adasum`,
mean or sum. Ranks get the same from `all_reduce(op="adasum")`. The lab compares ways to combine
gradients: learning rate, schedule and epochs suit a single worker, and are not tuned again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.adasum_pictures import plot_accuracies, plot_costs
from benchmarks.collectives import TURN_S, Ours, checked
from benchmarks.contest import measure
from benchmarks.writable import check_writable
from simparallel.algorithms.rehearsal import rehearse
from simparallel.backend import random_permutation
from simparallel.base.argparse_checks import Parser, at_least_one, exit_code, numbers, positive
from simparallel.errors import InputError
from simparallel.optim.schedules import Linear

HOWS = ("mean", "sum", "adasum", "adasum flat")
WORKERS = (1, 4, 16)
Grads = list[list[np.ndarray]]  # worker -> layer -> gradient


@dataclass(frozen=True)
class Setup:
    """A training setup: the MLP 64-hidden-hidden-10 with SGD; the rate warms up, then falls linearly to 0.

    Attributes:
        lr: the highest rate; chosen for a single worker.
        batch_size: samples per worker and step.
        epochs: passes over the data set, all workers together.
        hidden: width of the two hidden layers.
        warm_up: share of the steps with a rising rate.
    """

    lr: float = 0.1
    batch_size: int = 5
    epochs: int = 24
    hidden: int = 128
    warm_up: float = 0.17


@dataclass
class Run:
    """The result of a training.

    Attributes:
        accuracy: on the test images; at or below chance after divergence.
        losses: mean over the workers, one per step.
        ratios: layer -> its orthogonality in each step, see `orthogonality`; only if requested.
        diverged: True if the loss became NaN or infinite.
    """

    accuracy: float = 0.0
    losses: list[float] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)
    diverged: bool = False


def combine(grads: Grads, how: str) -> list[np.ndarray]:
    """Combine all workers' gradients into one gradient per layer.

    Args:
        grads: for each worker the gradients of its layers.
        how: "mean", "sum", "adasum" (each layer by itself) or "adasum flat" (the model as one vector).

    Raises:
        InputError: `how` is unknown.
    """
    if how == "adasum":
        return list(sp.adasum(grads))
    if how == "adasum flat":
        # One vector for the whole model, for comparison: large layers then dominate its dot products.
        flat = sp.adasum([np.concatenate([layer.ravel() for layer in layers]) for layers in grads])
        borders = np.cumsum([layer.size for layer in grads[0]])[:-1]
        return [part.reshape(layer.shape) for part, layer in zip(np.split(flat, borders), grads[0], strict=True)]
    if how not in HOWS:
        raise InputError(f"how={how!r}: choose from {', '.join(HOWS)}.")
    count = len(grads) if how == "mean" else 1
    return [sum(layers[1:], layers[0]) / count for layers in zip(*grads, strict=True)]


def orthogonality(grads: Grads) -> list[float]:
    """Return ||T(g_1 … g_n)||^2 / sum ||g_i||^2 per layer: 1 if all are orthogonal, 1/n if all are equal."""
    ratios = []
    for total, *parts in zip(sp.adasum(grads), *grads, strict=True):
        squares = sum(float((part.astype(float) ** 2).sum()) for part in parts)
        ratios.append(float((total.astype(float) ** 2).sum()) / squares if squares else math.nan)
    return ratios


class Workers:
    """A model, and its gradients for each of `count` workers.

    Attributes:
        model: the shared weights.
        names: names of the parameters.
    """

    def __init__(self, count: int, hidden: int, seed: int) -> None:
        sp.manual_seed(seed)
        sizes = (64, hidden, hidden, 10)
        self.linears = [sp.nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False)]
        activations = [sp.nn.ReLU() for _ in self.linears]
        layers = [layer for pair in zip(self.linears, activations, strict=True) for layer in pair]
        self.model = sp.nn.Sequential(*layers[:-1])
        self.names = [name for name, _ in self.model.named_parameters()]
        self.count = count

    def gradients(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, Grads]:
        """Return the mean loss, and all workers' gradients.

        Args:
            images: (workers, batch, 64); labels: (workers, batch).
        """
        stacked = []
        x = sp.Tensor(images)
        for i, linear in enumerate(self.linears):
            assert linear.bias is not None
            # One copy of the weights per worker, so that each copy gets that worker's gradient.
            weight = sp.Tensor(np.repeat(linear.weight.data.T[None], self.count, 0), requires_grad=True)
            bias = sp.Tensor(np.repeat(linear.bias.data[None, None], self.count, 0), requires_grad=True)
            x = x @ weight + bias
            stacked += [weight, bias]
            if i < len(self.linears) - 1:
                x = sp.functions.relu(x)
        loss = sp.functions.cross_entropy(x.reshape(labels.size, 10), labels.reshape(-1))
        if not math.isfinite(loss.item()):
            return loss.item(), []
        # The loss is a mean over all workers, so this is the sum of their own means.
        (loss * self.count).backward()
        arrays = [tensor.grad.data for tensor in stacked if tensor.grad is not None]
        # Back to the shapes of Linear: weights transposed, biases without the dim of the batch.
        own = [[a[i].T if a.shape[1] > 1 else a[i, 0] for a in arrays] for i in range(self.count)]
        return loss.item(), own


def train(how: str, workers: int = 16, seed: int = 0, setup: Setup | None = None, *, watch: bool = False) -> Run:
    """Train once.

    Args:
        how: combination of the workers' gradients, one of `HOWS`.
        workers: number of workers; each takes its part of every batch.
        seed: of weights and order of data.
        setup: None for the default one.
        watch: record the orthogonality of each layer in each step.

    Raises:
        InputError: `how` is unknown, or a step needs more images than there are.
    """
    setup, run = setup or Setup(), Run()
    images, labels = sp.data.digits("train")[:]
    # All workers together make one pass over the data per epoch.
    per_step = workers * setup.batch_size
    steps = len(images) // per_step
    if steps < 1 or how not in HOWS:
        raise InputError(
            f"train: {workers} workers x {setup.batch_size} need {per_step} of {len(images)} images per step, and "
            f"how={how!r} must be one of {', '.join(HOWS)}."
        )
    team = Workers(workers, setup.hidden, seed)
    total = setup.epochs * steps
    rate = Linear(setup.lr, total, round(setup.warm_up * total), start=setup.lr / total)
    optimizer = sp.optim.SGD(team.model.parameters(), lr=rate)
    run.ratios = {name: [] for name in team.names} if watch else {}
    with np.errstate(over="ignore", invalid="ignore"):
        # Divergence of the sum is a result, not an error.
        for epoch in range(setup.epochs):
            # The same order for every way to combine, so that runs of one seed differ in nothing else.
            order = random_permutation(seed, f"lab/{epoch}", len(images))
            for step in range(steps):
                batch = order[step * per_step : (step + 1) * per_step].reshape(workers, -1)
                loss, grads = team.gradients(images[batch], labels[batch])
                run.losses.append(loss)
                if not math.isfinite(loss):
                    run.diverged = True
                    break
                if watch:
                    for name, ratio in zip(team.names, orthogonality(grads), strict=True):
                        run.ratios[name].append(ratio)
                optimizer(combine(grads, how))
            if run.diverged:
                break
        run.accuracy = _accuracy(team.model)
    return run


def _accuracy(model: sp.nn.Module) -> float:
    images, labels = sp.data.digits("test")[:]
    with sp.no_grad():
        return float(np.mean(model(sp.Tensor(images)).numpy().argmax(axis=1) == labels))


def compare(
    workers: Sequence[int] = WORKERS,
    hows: Sequence[str] = HOWS,
    seeds: Sequence[int] = (0, 1, 2),
    setup: Setup | None = None,
) -> dict[tuple[int, str], list[Run]]:
    """Train for each number of workers and each combination; runs are in the order of the seeds."""
    return {(n, how): [train(how, n, seed, setup) for seed in seeds] for n in workers for how in hows}


def table(runs: Mapping[tuple[int, str], Sequence[Run]]) -> str:
    """Format the accuracy on the test images: mean and minimum over the seeds."""
    hows = list(dict.fromkeys(how for _, how in runs))
    lines = [f"{'workers':>8}" + "".join(f"{how:>22}" for how in hows)]
    for number in dict.fromkeys(number for number, _ in runs):
        cells = [_cell(runs[number, how]) for how in hows]
        lines.append(f"{number:>8}" + "".join(f"{cell:>22}" for cell in cells))
    return "\n".join(lines)


def _cell(runs: Sequence[Run]) -> str:
    accuracies = [run.accuracy for run in runs]
    lost = sum(run.diverged for run in runs)
    note = f", {lost} diverged" if lost else ""
    return f"{statistics.mean(accuracies):.1%} (≥ {min(accuracies):.1%}{note})"


def vectors(first: Sequence[float], second: Sequence[float]) -> dict[str, np.ndarray]:
    """Return two gradients in the plane and their combinations, by name."""
    a, b = np.array(first, float), np.array(second, float)
    return {"g1": a, "g2": b, "sum": a + b, "mean": (a + b) / 2, "Adasum": sp.adasum([a, b])}


def costs(
    sizes: Sequence[int] = (1 << 20, 1 << 22, 1 << 24), ranks: int = 4, rounds: int = 5
) -> list[dict[str, float]]:
    """Measure the cost of Adasum relative to a sum, for each size [byte] of a float32 vector.

    Returns:
        Rows with "size_bytes", "sum_s" and "adasum_s" (this machine, medians over rounds in turns),
        "ratio" (of the times, see `contest`), "sum_bytes" and "adasum_bytes" (bytes sent by a rank with
        halving_doubling, as published).
    """
    rows = []
    with sp.Cluster(ranks, echo=False) as cluster:
        ours = Ours(cluster)
        for size in sizes:
            turns = {"sum": checked(ours, "all_reduce", size // 4), "adasum": checked(ours, "adasum", size // 4)}
            result = measure("all_reduce", turns, rounds=rounds, turn_s=TURN_S)
            sent = {
                f"{name}_bytes": rehearse("halving_doubling", op, ranks, size // 4).entries[0].total.sent_bytes
                for name, op in (("sum", "all_reduce"), ("adasum", "adasum"))
            }
            times = {f"{name}_s": result.median_s(name) for name in turns}
            rows.append({"size_bytes": size, **times, "ratio": result.ratio("adasum", "sum"), **sent})
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all experiments, print the tables, draw the figures; return the exit code."""
    parser = Parser(prog="python -m benchmarks.adasum_lab", description=(__doc__ or "").split("\n")[0])
    told = ",".join(map(str, WORKERS))
    parser.add_argument(
        "--workers",
        type=numbers,
        nargs="+",
        metavar="N,…",
        default=[list(WORKERS)],
        help=f"numbers of workers (default {told})",
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many (default %(default)s)")
    parser.add_argument("--epochs", type=int, default=Setup.epochs, help="of each training (default %(default)s)")
    parser.add_argument("--lr", type=float, default=Setup.lr, help="the highest learning rate (default %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/adasum"), help="for figures (default %(default)s)")
    options = parser.parse_args(arguments)
    # Accepts "1,4" and "1 4".
    options.workers = sum(options.workers, [])
    return exit_code(partial(_run, options))


def _run(options: argparse.Namespace) -> int:
    at_least_one(workers=min(options.workers, default=0), seeds=options.seeds, epochs=options.epochs)
    positive(lr=options.lr)
    check_writable(options.out / "accuracy.png")
    setup = Setup(lr=options.lr, epochs=options.epochs)
    from simparallel import view

    runs = compare(options.workers, HOWS, range(options.seeds), setup)
    print(f"test accuracy after {setup.epochs} epochs at the learning rate of a single worker, {setup.lr:g}:")
    print(table(runs))
    watched = train("adasum", max(options.workers), 0, setup, watch=True)
    rows = costs()
    print("\nall_reduce of float32 on 4 ranks, this machine; bytes that a rank sends by halving and doubling:")
    for row in rows:
        print(
            f"{row['size_bytes'] / (1 << 20):>4.0f} MiB: sum {row['sum_s'] * 1e3:.2f} ms, Adasum "
            f"{row['adasum_s'] * 1e3:.2f} ms ({row['ratio']:.2f} x); {row['sum_bytes']:.0f} and "
            f"{row['adasum_bytes']:.0f} bytes"
        )
    # In the order of `HOWS`.
    labels = ("mean", "sum", "Adasum, layer by layer", "Adasum of the whole model")
    accuracies = {
        label: [(n, [run.accuracy for run in runs[n, how]]) for n in options.workers]
        for label, how in zip(labels, HOWS, strict=True)
    }
    figures: dict[str, Any] = {
        "accuracy": plot_accuracies(accuracies),
        "orthogonality": view.plot_orthogonality(watched.ratios, workers=max(options.workers)),
        "vectors": view.plot_vectors(
            {"nearly parallel": vectors((2, 0.4), (1.6, 1)), "orthogonal": vectors((2, 0), (0, 1.5)),
             "against each other": vectors((2, 0.3), (-1, 1))}
        ),
        "costs": plot_costs(rows),
    }  # fmt: skip
    for name, figure in figures.items():
        print(f"written: {view.save_figure(figure, options.out / f'{name}.png')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
