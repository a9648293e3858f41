"""Programs of `tools/gpu_check.sh`: each compares a GPU with host memory, or measures it.

    python tools/gpu_programs.py captured|ranks|steps|where

Lines that begin with "* " belong to the summary. A difference beyond the tolerance ends the program with exit code 1.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks import gpu_step
from benchmarks.step import TASKS, Task, our_step
from simparallel.backend import why_no_gpu
from simparallel.base.units import format_bytes, format_seconds

# float32 sums in another order, after a few steps of SGD.
TOLERANCE = 1e-4
STEPS = 6
GPU = {"array": "cupy", "timeout_s": 60.0}


def difference(found: Any, expected: Any) -> float:
    """Return the largest difference of two lists of arrays, relative to the largest element of each array."""
    return max(float(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30)) for x, y in zip(found, expected, strict=True))


def tell(what: str, found: Any, expected: Any, note: str) -> bool:
    """Print the difference of a program from its reference; return whether it is within the tolerance."""
    worst = difference(found, expected)
    is_right = worst <= TOLERANCE  # not for NaN
    print(f"* {what}: difference {worst:.1e}, {'right' if is_right else 'WRONG'}; {note}", flush=True)
    return is_right


def net() -> sp.nn.Sequential:
    """Return an MLP with dropout, whose weights and masks are the same in each run."""
    sp.manual_seed(0)
    layers = sp.nn.Linear(64, 128), sp.nn.ReLU(), sp.nn.Dropout(0.3), sp.nn.Linear(128, 16)
    return sp.nn.Sequential(*layers)


def batches(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return one batch of 32 samples for each step."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((32, 64), np.float32), rng.integers(0, 16, 32)) for _ in range(STEPS)]


def training(*, is_captured: bool = False, is_parallel: bool = False) -> tuple[list[np.ndarray], float]:
    """Train; return the losses and weights, and the seconds of the quickest step."""
    model: Any = net()
    optimizer = sp.optim.SGD(model.parameters(), lr=0.05)
    wrapped = sp.parallel.DistributedDataParallel(model) if is_parallel else model

    def forward_backward(x: np.ndarray, y: np.ndarray) -> sp.Tensor:
        loss = sp.functions.cross_entropy(wrapped(sp.Tensor(x)), sp.Tensor(y))
        loss.backward()
        return loss

    step = sp.captured(forward_backward) if is_captured else forward_backward
    losses, times_s = [], []
    for x, y in batches(sp.get_rank() if is_parallel else 0):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        losses.append(step(x, y).item())
        optimizer.step()
        times_s.append(time.perf_counter() - start_s)
    return [np.array(losses), *(p.numpy() for p in model.parameters())], min(times_s)


class Cut(sp.nn.Module):
    """Two products, cut over four devices: rows of x, and the dim that the second one sums over."""

    def __init__(self) -> None:
        super().__init__()
        sp.manual_seed(0)
        self.first, self.second = sp.nn.Linear(64, 128, bias=False), sp.nn.Linear(128, 16, bias=False)
        self.product = sp.ops.MatMul().shard(((2, 2), (2, 1)))

    def forward(self, x: sp.Tensor) -> sp.Tensor:
        return self.product(self.first(x).relu(), self.second.weight.T)


def cut_step(*, is_cut: bool) -> tuple[list[np.ndarray], float]:
    """Train with products that are cut; return the losses and weights, and the seconds of the quickest step."""
    model: Any = Cut()
    if not is_cut:
        model.product = sp.ops.MatMul()
    optimizer = sp.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(x: np.ndarray, y: np.ndarray) -> sp.Tensor:
        loss = sp.functions.cross_entropy(model(sp.Tensor(x)), sp.Tensor(y))
        loss.backward()
        return loss

    step = sp.AutoParallel(loss_of) if is_cut else loss_of
    losses, times_s = [], []
    for x, y in batches(0):
        start_s = time.perf_counter()
        optimizer.zero_grad()
        losses.append(step(x, y).item())
        optimizer.step()
        times_s.append(time.perf_counter() - start_s)
    return [np.array(losses), *(p.numpy() for p in model.parameters())], min(times_s)


def captured() -> bool:
    """Compare steps with dropout, captured and not, with those in host memory."""
    expected, host_s = sp.launch(training, world_size=1)[0]
    eager, eager_s = sp.launch(training, world_size=1, **GPU)[0]
    graph, graph_s = sp.launch(partial(training, is_captured=True), world_size=1, **GPU)[0]
    times = f"host {format_seconds(host_s)}, eager {format_seconds(eager_s)}, captured {format_seconds(graph_s)}"
    return tell("step", eager, expected, times) & tell("captured step with dropout", graph, expected, "as above")


def ranks() -> bool:
    """Compare four ranks that share a GPU with four in host memory: gradients averaged, and products cut."""
    is_right = True
    for what, program, reference in (
        ("DDP on 4 ranks", partial(training, is_parallel=True), None),
        ("MatMul cut on 4 ranks", partial(cut_step, is_cut=True), partial(cut_step, is_cut=False)),
    ):
        if reference is None:
            expected = sp.launch(program, world_size=4)
        else:
            expected = [sp.launch(reference, world_size=1)[0]] * 4
        found = sp.launch(program, world_size=4, **GPU)
        flat = [[array for arrays, _ in results for array in arrays] for results in (found, expected)]
        note = f"{format_seconds(max(time_s for _, time_s in found))} a step, in host memory "
        is_right &= tell(what, *flat, f"{note}{format_seconds(max(time_s for _, time_s in expected))}")
    return is_right


def trace_of(task: Task) -> sp.Trace:
    """Return the trace of three steps of a task, the first of which warms up."""

    def program() -> None:
        step = our_step(task.ours(), task.batch(task.batch_size, *task.shape))
        for _ in range(3):
            step()

    return sp.launch(program, world_size=1, record="full", **GPU).trace


def where() -> bool:
    """Print where the GPU's time goes in the last of three steps of the large models."""
    chosen = TASKS[2:3] if why_no_gpu() else gpu_step.TASKS[2:]
    for task in chosen:
        times_ns: dict[str, int] = defaultdict(int)
        for event in trace_of(task).select(steps={2}).events:
            if event.stream == "compute":
                times_ns[event.name] += event.wall_end_ns - event.wall_start_ns
        ordered = sorted(times_ns.items(), key=lambda item: -item[1])
        print(task.title, *(f"{name:32}{format_seconds(ns / 1e9)}" for name, ns in ordered), sep="\n  ")
        largest = ", ".join(f"{name} {format_seconds(ns / 1e9)}" for name, ns in ordered[:5])
        print(f"* {task.title}: {format_seconds(sum(times_ns.values()) / 1e9)}: {largest}", flush=True)
    return True


def steps() -> bool:
    """Print the table of training steps beside PyTorch's, with what the calibration predicts."""
    for task in gpu_step.TASKS:
        (result,) = gpu_step.main(rounds=3, names=[task.title.partition(",")[0]])
        medians = ", ".join(f"{name} {format_seconds(result.median_s(name))}" for name in result.times_s)
        error = float(result.extra["predicted_s"]) / result.median_s("simparallel") - 1
        memory = [format_bytes(float(str(v))) for n, v in result.extra.items() if n.startswith("peak_bytes")]
        print(f"* {task.title}: {medians}; predicted {error:+.0%}; memory {' / '.join(memory)}", flush=True)
    return True


if __name__ == "__main__":
    parts = {part.__name__: part for part in (captured, ranks, steps, where)}
    sys.exit(not parts[sys.argv[1]]())
