"""A training step of ResNet-18 on four devices, a lane for each rank and stream.

Rank 3 has more images, and a machine of its own behind a slower link: gradients are summed while backward runs, the
slow link keeps all ranks waiting, and ranks 0 to 2 also wait for rank 3. In simulated time.
"""

from itertools import groupby
from typing import Any

import numpy as np

import simparallel as sp

IMAGES = 32, 32, 32, 36
NODES = [[0, 1, 2], [3]]
SLOW_LINK = sp.cluster.LinkSpec(5e-6, 12.5e9, notes="100 Gb/s; latency assumed")


def train() -> None:
    """Two steps; the first one also compares the ranks' models."""
    model = sp.parallel.DistributedDataParallel(sp.models.resnet18(10, "cifar"), bucket_cap_mb=8)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    count = IMAGES[sp.get_rank()]
    images, labels = np.random.default_rng(0).standard_normal((count, 3, 32, 32), np.float32), np.arange(count) % 10
    for _ in range(2):
        loss = sp.functions.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw() -> Any:
    trace = sp.dry_run(train, world_size=len(IMAGES), nodes=NODES, node_link=SLOW_LINK, fold=False).trace
    step = trace.select(steps=1).from_zero()
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
    ax.text(1.4, rows[1], "gradients are summed while backward runs", **note)
    ax.text(1.4, rows[-1], "sums start when the last rank is ready", **note)
    return ax
