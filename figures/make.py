"""Draws the pictures of the README and of `docs/`: `python figures/make.py`."""

from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

import simparallel as sp

FIGURES = Path(__file__).parent
NUM_DEVICES, BATCH_SIZE = 4, 128  # of all devices together
# The README's picture: rank 3 has more images, and a machine of its own behind a slower link.
IMAGES = 32, 32, 32, 36
NODES = [[0, 1, 2], [3]]
SLOW_LINK = sp.cluster.LinkSpec(5e-6, 12.5e9, notes="100 Gb/s; latency assumed")


def train_resnet() -> None:
    """Two steps of ResNet-18; the first one also compares the ranks' models."""
    model = distributed(sp.models.resnet18(10, "cifar"), bucket_cap_mb=8)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    count = IMAGES[sp.get_rank()]
    images, labels = np.random.default_rng(0).standard_normal((count, 3, 32, 32), np.float32), np.arange(count) % 10
    for _ in range(2):
        loss = sp.functions.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def resnet() -> None:
    """One step of ResNet-18 on four devices, with a note in each gap where a device waits."""
    trace = sp.launch(train_resnet, world_size=NUM_DEVICES, nodes=NODES, node_link=SLOW_LINK).trace
    step = from_zero(trace.select(steps=1))
    print(step.table())
    ax = step.timeline()
    ax.set_title("ResNet-18: one training step on four devices", loc="left", fontweight="bold", fontsize=14)
    ax.set_xlabel(
        "simulated time [ms] on described hardware: three a100 on one machine, one on another, 100 Gb/s between them;\n"
        f"ranks 0 to 2 have {IMAGES[0]} images each, rank 3 has {IMAGES[3]}",
        fontsize=11,
    )
    for bars in ax.collections:
        bars.set_linewidth(0.3)  # parts the bars, and leaves the thinnest visible
    rows = sorted(ax.get_yticks())
    note = {"fontsize": 10, "color": "0.25", "ha": "center", "va": "center"}
    for row, (_, events) in zip(rows[::2], groupby(step.events, key=lambda event: event.rank), strict=True):
        ends = {event.kind: (event.sim_start_ps / 1e9, event.sim_end_ps / 1e9) for event in events}
        done, update = ends["backward"][1], ends["optimizer"][0]
        ax.annotate("", (update, row + 0.15), (done, row + 0.15), arrowprops={"arrowstyle": "<->", "color": "0.25"})
        ax.text((done + update) / 2, row - 0.12, f"waits {update - done:.1f} ms", **note)
    ax.text(1.6, rows[1], "gradients are summed while backward runs", **note)
    ax.text(1.6, rows[-1], "sums start when the last rank is ready", **note)
    ax.figure.savefig(FIGURES / "resnet18.png", dpi=110)


def train(wrap: Any, batch_size: int) -> None:
    """Two steps of a small network."""
    layers = [sp.nn.Linear(784, 512), sp.nn.ReLU(), sp.nn.Linear(512, 512), sp.nn.ReLU(), sp.nn.Linear(512, 10)]
    model = wrap(sp.nn.Sequential(*layers))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = sp.functions.cross_entropy(model(np.ones((batch_size, 784), np.float32)), np.zeros(batch_size, int))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def distributed(model: sp.nn.Module, bucket_cap_mb: float = 1) -> sp.nn.Module:
    return sp.parallel.DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)


def data_parallel() -> None:
    """One step of DataParallel above one of DistributedDataParallel, both from 0 and on the same scale of time."""
    import matplotlib.pyplot as plt

    one = sp.launch(train, (sp.parallel.DataParallel, BATCH_SIZE), devices_per_rank=NUM_DEVICES).trace
    many = sp.launch(train, (distributed, BATCH_SIZE // NUM_DEVICES), world_size=NUM_DEVICES).trace
    steps = [from_zero(trace.select(steps=1)) for trace in (one, many)]
    longest = max(step.makespan_s for step in steps) * 1e6
    # Fixed places: names are fitted to bars, which nothing that is added later may make smaller.
    places = {"left": 0.15, "right": 0.99, "top": 0.97, "bottom": 0.05, "hspace": 0.25}
    figure, axes = plt.subplots(2, 1, figsize=(13, 14), height_ratios=[12, 9.5], gridspec_kw=places)
    notes = (
        "sim:0 sends each device its samples and the parameters (copy out), and collects the gradients (copy in)",
        "each rank has its samples and its parameters; gradients are summed while backward goes on",
    )
    for ax, step, name, note in zip(axes, steps, ("DataParallel", "DistributedDataParallel"), notes, strict=True):
        duration = f"{step.makespan_s * 1e6:.0f} µs"
        print(f"{name}: {duration} a step (simulated, {step.title})")
        ax.set_xlim(-0.01 * longest, 1.01 * longest)
        step.timeline(ax=ax)
        ax.set_title(f"{name}: {duration} a step", loc="left", fontweight="bold", fontsize=14)
        ax.set_xlabel(f"simulated time [µs], {step.title}\n{note}", fontsize=12)
    figure.savefig(FIGURES / "data_parallel.png", dpi=100)


def from_zero(trace: sp.Trace) -> sp.Trace:
    """The same events, the first of them at 0."""
    first = min(event.sim_start_ps for event in trace.events)
    moved = (
        event._replace(sim_start_ps=event.sim_start_ps - first, sim_end_ps=event.sim_end_ps - first)
        for event in trace.events
    )
    return sp.Trace(moved, trace.cluster, name=trace.name)


def schedules() -> None:
    """Pipeline schedules with their bubbles and critical paths, on four ranks and eight micro-batches."""
    from matplotlib import pyplot as plt

    names = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "dualpipe_v")
    figure, axes = plt.subplots(len(names), 1, figsize=(13, 2.1 * len(names)), layout="constrained")
    for name, ax in zip(names, axes, strict=True):
        sp.view.plot_schedule(sp.pipeline_schedule(name), ax, critical_path=True)
    figure.savefig(FIGURES / "schedules.png", dpi=90)


def schedule_search() -> None:
    """Bubble over memory of all named schedules, and of the best ones that a search finds for each memory."""
    from simparallel.parallel.pipeline.schedule import RULES

    # PipeDream has no flush, and reversed backwards change neither bubble nor memory.
    names = [name for name in RULES if not name.startswith("pipedream") and name != "gpipe_reversed"]
    found = [sp.search_schedule(memory=memory) for memory in range(1, 5)]
    print(*found, sep="\n")
    ax = sp.view.plot_schedule_tradeoff(
        [sp.pipeline_schedule(name) for name in names],
        [each.schedule for each in found],
        title="Pipeline schedules: 4 ranks, 8 micro-batches, F = I = W",
    )
    ax.figure.savefig(FIGURES / "schedule_search.png", dpi=110)


if __name__ == "__main__":
    resnet()
    data_parallel()
    schedules()
    schedule_search()
