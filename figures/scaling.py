"""Speed of data-parallel training over the number of ranks: measured on this machine, and simulated for clusters."""

import os
import time
from typing import Any

import numpy as np

import simparallel as sp

MEASURED = "a minute"
RANKS = 1, 2, 4, 8
BATCH_SIZE = 256  # of each rank
LINK = sp.cluster.LinkSpec(5e-6, 12.5e9, notes="100 Gb/s; latency assumed")
STEPS, ROUNDS = 12, 7  # the first two steps do not count


def train(steps: int = STEPS) -> float:
    """Train; return the median time [s] of a step."""
    model = sp.parallel.DistributedDataParallel(sp.models.mlp())
    optimizer = sp.optim.SGD(model.parameters(), lr=1e-3)
    images, labels = np.ones((BATCH_SIZE, 784), np.float32), np.zeros(BATCH_SIZE, int)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = sp.functions.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def measured() -> list[tuple[int, float]]:
    """Return (ranks, images a second): by turns, of the quietest round."""
    times: dict[int, list[float]] = {count: [] for count in RANKS}
    for _ in range(ROUNDS):
        for count in RANKS:
            with sp.Cluster(count, blas_threads=1, echo=False) as cluster:
                # The slowest rank ends a step.
                times[count].append(max(cluster.run(train)))
    return [(count, count * BATCH_SIZE / min(found)) for count, found in times.items()]


def simulated(link: Any = None) -> list[tuple[int, float]]:
    """Return (ranks, images a second) on a100 of one server, or each in a server of its own behind this link."""
    steps = []
    for count in RANKS:
        apart = {"nodes": count, "node_link": link} if link and count > 1 else {}
        steps.append(sp.dry_run(train, (4,), world_size=count, cluster="a100", **apart).step_time_s)
    return [(count, count * BATCH_SIZE / step_s) for count, step_s in zip(RANKS, steps, strict=True)]


def draw() -> Any:
    cores = len(os.sched_getaffinity(0))
    curves = {
        f"measured: wall time, {cores} cores": measured(),
        "simulated: a100 of one server": simulated(),
        "simulated: a100 behind 100 Gb/s": simulated(LINK),
    }
    title = f"Data parallelism, MLP, {BATCH_SIZE} images for each rank"
    return sp.view.plot_scaling(curves, cores=cores, title=title)
