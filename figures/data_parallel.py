"""A step of DataParallel above one of DistributedDataParallel, on the same scale of simulated time."""

from typing import Any

import numpy as np

import simparallel as sp

NUM_DEVICES, BATCH_SIZE = 4, 128  # of all devices together


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


def distributed(model: sp.nn.Module) -> sp.nn.Module:
    return sp.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


def draw() -> Any:
    import matplotlib.pyplot as plt

    one = sp.launch(train, (sp.parallel.DataParallel, BATCH_SIZE), devices_per_rank=NUM_DEVICES).trace
    many = sp.dry_run(train, (distributed, BATCH_SIZE // NUM_DEVICES), world_size=NUM_DEVICES, fold=False).trace
    steps = [trace.select(steps=1).from_zero() for trace in (one, many)]
    longest = max(step.makespan_s for step in steps) * 1e6
    # Fixed places: names are fitted to bars, which nothing that is added later may make smaller.
    places = {"left": 0.15, "right": 0.99, "top": 0.97, "bottom": 0.05, "hspace": 0.25}
    figure, axes = plt.subplots(2, 1, figsize=(13, 14), height_ratios=[12, 9.5], gridspec_kw=places)
    notes = (
        "sim:0 sends each device its samples and the parameters (copy out), and collects the gradients (copy in)",
        "each rank has its samples and its parameters; gradients are summed while backward goes on",
    )
    for ax, step, name, note in zip(axes, steps, ("DataParallel", "DistributedDataParallel"), notes, strict=True):
        ax.set_xlim(-0.01 * longest, 1.01 * longest)
        step.timeline(ax=ax)
        ax.set_title(f"{name}: {step.makespan_s * 1e6:.0f} µs a step", loc="left", fontweight="bold", fontsize=14)
        ax.set_xlabel(f"simulated time [µs], {step.title.removeprefix('prediction · ')}\n{note}", fontsize=12)
    return figure
