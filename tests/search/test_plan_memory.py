"""A plan's memory is the peak of its run: they are counted by one account."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from training_programs import PROGRAMS, graph_of, slow_cluster, train

import simparallel as sp
from simparallel import functions as F
from simparallel.errors import DeviceOutOfMemoryError, RunFailedError
from simparallel.search.planner import pareto_plans

VOCABULARY = 50304
# Size -> layers, width, length of a sequence, sequences of each device.
SIZES = {"0.1 B": (12, 768, 1024, 4), "1.3 B": (24, 2048, 1024, 2), "7 B": (32, 4096, 2048, 1)}
MEMORY_BYTES = 80 * 10**9


def step_of(num_layers, width, length, dtype, optimizer, zero_late=False, vocabulary=VOCABULARY):
    """Return a training step of a GPT."""
    with sp.no_init_parameters():
        net = sp.models.gpt(vocabulary, length, num_layers=num_layers, num_heads=width // 64, width=width)
    if dtype == "float16":
        net.half()
    kind = sp.optim.AdamW if optimizer == "AdamW" else sp.optim.SGD
    trained = kind(net.parameters(), lr=1e-4)

    def step(tokens, labels):
        if not zero_late:
            trained.zero_grad()
        loss = F.cross_entropy(net(tokens).reshape(-1, vocabulary), labels)
        if zero_late:
            trained.zero_grad()
        loss.backward()
        trained.step()
        return loss

    return step


def run(size, dtype, optimizer, device_num, device_memory=None, **settings):
    """Return the plan of a GPT and the peak of its dry run [bytes]."""
    num_layers, width, length, sequences = SIZES[size] if isinstance(size, str) else size
    zero_late, vocabulary = settings.pop("zero_late", False), settings.pop("vocabulary", VOCABULARY)
    settings.setdefault("memory_limit", 10**15)

    def program():
        step = step_of(num_layers, width, length, dtype, optimizer, zero_late, vocabulary)
        parallel = sp.AutoParallel(step, "auto", **settings)
        tokens = np.zeros((sequences * device_num, length), np.int64)
        for _ in range(2):
            parallel(tokens, tokens.reshape(-1).copy())
        return parallel.plan

    prediction = sp.dry_run(
        program, world_size=device_num, cluster="dgx-h100", device_memory=device_memory, timeout_s=3600
    )
    return prediction.values[0], prediction.peak_bytes


@pytest.mark.parametrize(
    ("dtype", "optimizer", "device_num"),
    [*product(("float32", "float16"), ("SGD", "AdamW"), (1,)), ("float32", "SGD", 8), ("float16", "AdamW", 8)],
)
def test_plan_of_a_small_gpt_has_its_peak(dtype, optimizer, device_num):
    plan, peak_bytes = run((2, 128, 64, 4), dtype, optimizer, device_num, "1GB", vocabulary=256)
    assert plan.memory_bytes == pytest.approx(peak_bytes, rel=0.001)


def test_ops_that_a_capture_does_not_run_count(monkeypatch):
    """Attention keeps its scores, also where those of all devices together are too large for a capture."""
    monkeypatch.setattr("simparallel.search.graph.LARGE_BYTES", 1 << 12)
    plan, peak_bytes = run((2, 128, 64, 4), "float16", "SGD", 2, "1GB", vocabulary=256)
    assert plan.memory_bytes == pytest.approx(peak_bytes, rel=0.001)


def test_gradients_that_are_freed_late_count():
    early, _ = run((2, 256, 16, 1), "float32", "SGD", 1, "1GB", vocabulary=256)
    late, peak_bytes = run((2, 256, 16, 1), "float32", "SGD", 1, "1GB", vocabulary=256, zero_late=True)
    assert late.memory_bytes > early.memory_bytes
    assert late.memory_bytes == pytest.approx(peak_bytes, rel=0.001)


def test_memory_that_fits_exactly():
    plan, peak_bytes = run((2, 128, 64, 4), "float32", "AdamW", 2, "1GB", vocabulary=256, memory_limit=10**7)
    assert plan.recomputed
    again = {"plan": plan, "vocabulary": 256}
    assert run((2, 128, 64, 4), "float32", "AdamW", 2, device_memory=peak_bytes, **again)[1] == peak_bytes
    with pytest.raises(RunFailedError) as failure:
        run((2, 128, 64, 4), "float32", "AdamW", 2, device_memory=plan.memory_bytes - 1000, **again)
    assert isinstance(failure.value.__cause__, DeviceOutOfMemoryError)


def _check_front(name, device_num):
    cluster = slow_cluster(device_num)
    each = [graph_of(name, device_num, count) for count in ((1, 2, 4) if PROGRAMS[name].splits else (1,))]
    graph, *split = [graph for graph, _ in each]
    for plan in pareto_plans(graph, cluster, split=split, points=4):
        prediction = sp.dry_run(
            train, (name, "auto", 3), {"plan": plan}, world_size=device_num, cluster=cluster, device_memory="1GB"
        )
        assert plan.memory_bytes == pytest.approx(prediction.peak_bytes, rel=0.02)


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_have_their_peaks(name):
    _check_front(name, 2)


@pytest.mark.matrices
@pytest.mark.parametrize("device_num", [1, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_have_their_peaks_on_more(name, device_num):
    _check_front(name, device_num)


CASES = [
    (size, dtype, optimizer, device_num)
    for size in SIZES
    for device_num in (1, 8, 64)
    for dtype in ("float32", "float16")
    for optimizer in ("SGD", "AdamW")
]


def row(size, dtype, optimizer, device_num):
    """Return a row of the table in docs/auto_parallel.md: the case, the plan's memory, its run's peak, their ratio."""
    plan, peak_bytes = run(size, dtype, optimizer, device_num)
    fits = plan.memory_bytes <= MEMORY_BYTES
    if not fits:
        with pytest.raises(RunFailedError) as failure:
            run(size, dtype, optimizer, device_num, device_memory=MEMORY_BYTES, plan=plan)
        assert isinstance(failure.value.__cause__, DeviceOutOfMemoryError)
    assert plan.memory_bytes == pytest.approx(peak_bytes, rel=0.05)
    assert fits == (peak_bytes <= MEMORY_BYTES)
    numbers = f"{plan.memory_bytes / 1e9:.2f} | {peak_bytes / 1e9:.2f} | {plan.memory_bytes / peak_bytes:.3f}"
    return f"| {size} | {device_num} | {dtype} | {optimizer} | {numbers} | {'fits' if fits else 'refused by both'} |"


@pytest.mark.matrices
@pytest.mark.parametrize("case", [("0.1 B", "float32", "SGD", 1), ("0.1 B", "float16", "AdamW", 8)], ids=str)
def test_plan_of_a_gpt_has_its_peak(case):
    assert row(*case)


if __name__ == "__main__":
    print("| parameters | devices | dtype | optimizer | plan [GB] | dry run [GB] | ratio | 80 GB |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        print(row(*case), flush=True)
