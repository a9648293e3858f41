"""A data-parallel step of ResNet-50 for several bucket sizes: how much of the sums hides behind backward."""

from typing import Any

import numpy as np

import simparallel as sp

BUCKETS_MB = 0.25, 1, 4, 10, 25, 100
RANKS, BATCH_SIZE = 16, 32
LINK = sp.cluster.LinkSpec(20e-6, 5e9, notes="40 Gb/s; latency assumed")


def train(bucket_cap_mb: float) -> None:
    """Three steps: the last one has the buckets in the order of backward, and compares no models."""
    model = sp.parallel.DistributedDataParallel(sp.models.resnet50(), bucket_cap_mb=bucket_cap_mb)
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    images, labels = np.zeros((BATCH_SIZE, 3, 224, 224), np.float32), np.zeros(BATCH_SIZE, int)
    for _ in range(3):
        loss = sp.functions.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw() -> Any:
    rows = []
    for size in BUCKETS_MB:
        trace = sp.dry_run(train, (size,), world_size=RANKS, cluster="a100", nodes=RANKS, node_link=LINK).trace
        rows.append((f"{size:g} MB", trace.select(steps=2).summary()[0]))
    title = f"ResNet-50, {BATCH_SIZE} images for each of {RANKS} a100, joined by 40 Gb/s"
    ax = sp.view.plot_overlap(rows, title=title)
    ax.set_xlabel("bucket size: gradients that one all-reduce sums", fontsize=12)
    return ax
