"""`python -m benchmarks step`: one training step of each model, compared with PyTorch on one BLAS thread."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.contest import Result, measure, printed_apart, table, tell_bound
from benchmarks.peers.exchange import images
from simparallel import models
from simparallel.base.blas import THREAD_VARIABLES
from simparallel.base.units import format_bytes
from simparallel.errors import InputError

# Small, so that thousands of steps on one batch do not end in denormal numbers, which are slow.
LEARNING_RATE = 1e-4
TURN_S = 0.3
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[], object]


def tokens(batch_size: int, length: int, vocabulary: int) -> Batch:
    """Return random tokens and their successors: int64 (batch_size, length) each."""
    generator = np.random.Generator(np.random.Philox(0))
    text = generator.integers(0, vocabulary, (batch_size, length + 1))
    return text[:, :-1], text[:, 1:]


@dataclass(frozen=True)
class Task:
    """A model to train, and its batches.

    Attributes:
        title: title of the rows.
        ours: makes our model.
        torch_model: the function of `peers.torch_models` that makes torch's.
        batch_size: samples, of each rank.
        shape: shape of an input; further arguments of `batch`.
        batch: makes a batch.
    """

    title: str
    ours: Callable[[], Any]
    torch_model: str
    batch_size: int
    shape: tuple[int, ...]
    batch: Callable[..., Batch] = images

    def theirs(self) -> Any:
        """Return torch's model."""
        from benchmarks.peers import torch_models

        return getattr(torch_models, self.torch_model)()


def mlp() -> sp.nn.Module:
    """Return the MLP 784-512-512-10."""
    return sp.nn.Sequential(
        sp.nn.Linear(784, 512), sp.nn.ReLU(), sp.nn.Linear(512, 512), sp.nn.ReLU(), sp.nn.Linear(512, 10)
    )


resnet = partial(models.resnet18, 10, "cifar")
TASKS = (
    Task("MLP 784-512-512-10, batch 32", mlp, "mlp", 32, (784,)),
    Task("MLP 784-512-512-10, batch 256", mlp, "mlp", 256, (784,)),
    Task("LeNet-5 28x28, batch 64", models.lenet5, "lenet", 64, (1, 28, 28)),
    Task("ResNet-18 CIFAR stem 32x32, batch 32", resnet, "resnet18_cifar", 32, (3, 32, 32)),
    Task("GPT 4 layers, d 128, T 64, batch 16", models.gpt, "gpt", 16, (64, 256), tokens),
)


def chosen_tasks(names: Sequence[str] | None, tasks: Sequence[Task] = TASKS) -> list[Task]:
    """Return the tasks with one of `names` in the title; None for all.

    Raises:
        InputError: there is none.
    """
    found = [task for task in tasks if not names or any(name.lower() in task.title.lower() for name in names)]
    if not found:
        raise InputError(
            f"--models {','.join(names or ())}: no such model; choose from {'; '.join(t.title for t in tasks)}."
        )
    return found


def our_step(net: Any, batch: Batch, optimizer_type: Callable[..., Any] = sp.optim.SGD) -> Step:
    """Return a step in simparallel: forward, backward and, by default, SGD."""
    optimizer = optimizer_type(net.parameters(), lr=LEARNING_RATE)
    # Tokens have two dims, the loss takes one label for each row.
    inputs, labels = sp.Tensor(batch[0]), sp.Tensor(batch[1].reshape(-1))

    def step() -> None:
        logits = net(inputs)
        loss = sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def torch_step(net: Any, batch: Batch, device: str = "cpu") -> Step:
    """Return the same step in PyTorch."""
    import torch

    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    inputs, labels = (torch.from_numpy(array).to(device) for array in (batch[0], batch[1].reshape(-1)))

    def step() -> None:
        logits = net(inputs)
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def repeated(step: Step, count: int) -> float:
    """Return the seconds that `count` steps take."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return time.perf_counter() - start


def by_hand_step(batch: Batch) -> Step:
    """Return the MLP's step in plain NumPy: a lower bound for any framework on NumPy."""
    x, labels = batch
    generator = np.random.Generator(np.random.Philox(1))
    sizes = (784, 512, 512, 10)
    weights = [
        generator.standard_normal((n, k), dtype=np.float32) / np.sqrt(k, dtype=np.float32)
        for k, n in zip(sizes, sizes[1:], strict=False)
    ]
    biases = [np.zeros(n, np.float32) for n in sizes[1:]]
    rows = np.arange(len(x))

    def step() -> None:
        inputs, h = [], x
        for i, (w, b) in enumerate(zip(weights, biases, strict=True)):
            inputs.append(h)
            h = h @ w.T
            h += b
            if i < 2:
                np.maximum(h, 0, out=h)
        # Softmax, cross-entropy (computed like the others' loss, then unused), and its gradient p - onehot.
        # Shifted by the maximum, so that exp does not overflow.
        h -= h.max(axis=1, keepdims=True)
        np.exp(h, out=h)
        h /= h.sum(axis=1, keepdims=True)
        -np.log(h[rows, labels]).mean()
        h[rows, labels] -= 1
        h /= len(x)
        for i in (2, 1, 0):
            dw, db = h.T @ inputs[i], h.sum(axis=0)
            # The gradient of the images is not needed.
            if i:
                h = h @ weights[i]
                h *= inputs[i] > 0
            dw *= np.float32(LEARNING_RATE)
            db *= np.float32(LEARNING_RATE)
            weights[i] -= dw
            biases[i] -= db

    return step


def main(*, rounds: int = 7, names: list[str] | None = None, as_json: bool = False) -> list[Result]:
    """Measure, print a table or JSON, return the results. `gpu_step` does so on a GPU.

    Raises:
        InputError: no model has one of `names` in its title.
    """
    from threadpoolctl import threadpool_limits

    tasks = chosen_tasks(names)
    has_torch = _has_torch()
    tell_bound(sys.stderr if as_json else sys.stdout)
    results = []
    # One BLAS thread for every contender.
    with threadpool_limits(1):
        for task in tasks:
            data = task.batch(task.batch_size, *task.shape)
            steps = {"simparallel": our_step(task.ours(), data)}
            if has_torch:
                steps["PyTorch"] = torch_step(task.theirs(), data)
            if task is TASKS[0]:
                # Only for the first task, whose network is short enough to write by hand.
                steps["NumPy by hand"] = by_hand_step(data)
            turns = {who: partial(repeated, step) for who, step in steps.items()}
            result = measure(task.title, turns, rounds=rounds, turn_s=TURN_S)
            result.extra = {f"peak_bytes {who}": peak_bytes(task.title, who) for who in steps if who[0] != "N"}
            results.append(result)
            if not as_json:
                print(table([result], "simparallel"), "  peak memory", _told_peaks(result), flush=True)
    if as_json:
        rows = [
            {
                "model": r.title,
                "median_s": {n: r.median_s(n) for n in r.times_s},
                "ratio": {n: r.ratio("simparallel", n) for n in r.times_s},
                **r.extra,
            }
            for r in results
        ]
        print(json.dumps(rows, indent=1))
    else:
        print("\n" + table(results, "simparallel"))
        if not has_torch:
            print('PyTorch is not installed, so nothing stands beside: pip install ".[bench]"')
    return results


def _told_peaks(result: Result) -> str:
    return ", ".join(f"{name.split()[1]} {format_bytes(float(str(n)))}" for name, n in result.extra.items())


def _has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    # One thread, as for NumPy's BLAS.
    torch.set_num_threads(1)
    return True


def peak_bytes(name: str, who: str) -> int:
    """Measure the peak resident memory of three steps in a separate process, without the memory of imports."""
    code = f"from benchmarks.step import print_peak; print_peak({name!r}, {who!r})"
    # The peak of a process never falls, so each measurement needs a new one.
    return int(printed_apart(code, dict.fromkeys(THREAD_VARIABLES, "1")))


def print_peak(name: str, who: str) -> None:
    """Print the peak memory, as the body of the process that `peak_bytes` starts."""
    (task,) = chosen_tasks([name])
    data = task.batch(task.batch_size, *task.shape)
    # Import it now, so that its own memory does not count.
    if who == "PyTorch":
        _has_torch()
    # After imports and data, so that only the steps count.
    before = _status_bytes("VmRSS")
    step = our_step(task.ours(), data) if who == "simparallel" else torch_step(task.theirs(), data)
    for _ in range(3):
        step()
    # Not getrusage, which counts the parent's memory before exec.
    print(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
