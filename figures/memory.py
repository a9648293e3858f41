"""Memory of a device by category during a step of a small GPT, without and with recomputation of its blocks."""

from typing import Any

import numpy as np

import simparallel as sp

BATCH_SIZE, LENGTH = 20, 64


class Recomputed(sp.nn.Module):
    """A block whose activations are dropped after forward, and computed again in backward."""

    def __init__(self, block: sp.nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: sp.Tensor) -> sp.Tensor:
        return sp.nn.checkpoint(self.block, x)


def train(recompute: bool) -> None:
    """Two steps; the first one makes the optimizer's state."""
    model = sp.models.gpt(4096, width=256)
    if recompute:
        model.blocks = sp.nn.ModuleList([Recomputed(block) for block in model.blocks])
    optimizer = sp.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = np.zeros((BATCH_SIZE, LENGTH), int)
    for _ in range(2):
        logits = model(tokens)
        loss = sp.functions.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens.reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def draw() -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 1, figsize=(12, 8), layout="constrained")
    titles = "GPT: activations grow until backward frees them", "blocks are recomputed: less memory, more time"
    for ax, recompute, title in zip(axes, (False, True), titles, strict=True):
        trace = sp.dry_run(train, (recompute,)).trace
        sp.view.plot_memory(trace.select(steps=1).from_zero().events, ax=ax, title=title)
    limits = [(ax.dataLim.x1, ax.dataLim.y1) for ax in axes]
    for ax in axes:
        ax.set_xlim(0, max(x for x, _ in limits))
        ax.set_ylim(0, 1.2 * max(y for _, y in limits))
    return figure
