"""Draws the pictures of the README: `python figures/make.py`."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import simparallel as sp
from simparallel import demo

FIGURES = Path(__file__).parent
NUM_DEVICES, BATCH_SIZE = 4, 128  # of all devices together


def train(wrap: Any, batch_size: int) -> None:
    """Two steps of a small network."""
    layers = [
        sp.nn.Linear(784, 512),
        sp.nn.ReLU(),
        sp.nn.Linear(512, 512),
        sp.nn.ReLU(),
        sp.nn.Linear(512, 10),
    ]
    model = wrap(sp.nn.Sequential(*layers))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = sp.functions.cross_entropy(
            model(np.ones((batch_size, 784), np.float32)), np.zeros(batch_size, int)
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def distributed(model: sp.nn.Module) -> sp.nn.Module:
    return sp.parallel.DistributedDataParallel(model, bucket_cap_mb=1)


def data_parallel() -> None:
    """One step of DataParallel above one of DistributedDataParallel, on the same scale of time."""
    import matplotlib.pyplot as plt

    one = sp.launch(train, (sp.parallel.DataParallel, BATCH_SIZE), devices_per_rank=NUM_DEVICES).trace
    many = sp.launch(train, (distributed, BATCH_SIZE // NUM_DEVICES), world_size=NUM_DEVICES).trace
    figure, axes = plt.subplots(2, 1, figsize=(13, 10), layout="constrained", height_ratios=[12, 9])
    for ax, trace, name in zip(axes, (one, many), ("DataParallel", "DistributedDataParallel"), strict=True):
        step = trace.select(steps=1)
        print(f"{name}: {step.makespan_s * 1e6:.0f} µs a step (simulated, {trace.title})")
        step.timeline(ax=ax)
        for text in tuple(ax.texts):  # names fit the axes before they are stretched
            text.remove()
        ax.set_title(f"{name}, {trace.title}", loc="left", fontweight="bold")
        start = min(event.sim_start_ps for event in step.events) / 1e6
        ax.set_xlim(start - 3, start + one.select(steps=1).makespan_s * 1e6 + 3)
    figure.savefig(FIGURES / "data_parallel.png", dpi=100)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        demo.main(out=folder)
        shutil.copy(Path(folder, "timeline.png"), FIGURES / "timeline.png")
    data_parallel()
