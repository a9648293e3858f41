"""Memory of one rank by what it holds, over the number of ranks: a small GPT whose states have the letters of ZeRO."""

from contextlib import nullcontext
from typing import Any

import numpy as np

import simparallel as sp
from simparallel.view.memory import COLORS
from simparallel.view.style import labels

RANKS = 1, 2, 4, 8, 16, 32, 64
LENGTH, VOCABULARY, MICRO_BATCHES = 64, 256, 2
# Letters -> their name, and the bytes of parameters, gradients and Adam's state for each parameter on P ranks.
ROWS: dict[str, tuple[str, Any]] = {
    "RPR": ("R P R: DistributedDataParallel", lambda ranks: 16),
    "RPS": ("R P S: ZeRO-1", lambda ranks: 8 + 8 / ranks),
    "RSS": ("R S S: ZeRO-2", lambda ranks: 4 + 12 / ranks),
    "SSS": ("S S S: ZeRO-3", lambda ranks: 16 / ranks),
}
TOLD = {
    "parameters": "parameters, stored",
    "optimizer state": "optimizer state",
    "gradients": "gradients",
    "gathered": "parameters, gathered for a use",
    "buffers": "buffers",
    "activations": "activations",
}


def make() -> Any:
    with sp.parallel.no_init_parameters():
        return sp.models.gpt(VOCABULARY, LENGTH, num_layers=8, width=256)


def train(letters: str) -> None:
    """Two steps of Adam in micro-batches; the first one makes its state."""
    model = make()
    where: Any = dict(zip(("parameter", "gradient", "state"), letters, strict=True))
    for block in model.blocks:
        sp.parallel.fully_shard(block, **where)
    model = sp.parallel.fully_shard(model, **where)
    optimizer = sp.optim.Adam(model.parameters(), lr=1e-3)
    tokens = np.zeros((1, LENGTH), int)
    for _ in range(2):
        optimizer.zero_grad()
        for number in range(MICRO_BATCHES):
            with nullcontext() if number == MICRO_BATCHES - 1 else model.no_sync():
                scores = model(tokens).reshape(-1, VOCABULARY)
                (sp.functions.cross_entropy(scores, tokens.reshape(-1)) / MICRO_BATCHES).backward()
        optimizer.step()


def draw() -> Any:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 4, figsize=(14, 5.2), sharey=True, layout="constrained")
    places, num_parameters = np.arange(len(RANKS)), sum(p.size for p in make().parameters())
    for ax, (letters, (name, formula)) in zip(axes, ROWS.items(), strict=True):
        runs = [sp.dry_run(train, (letters,), world_size=ranks) for ranks in RANKS]
        held = [run.memory[0]["at_peak"] for run in runs]
        below = np.zeros(len(RANKS))
        for kind, told in TOLD.items():
            heights = np.array([each[kind] / 1e6 for each in held])
            ax.bar(places, heights, 0.78, below, color=COLORS[kind], label=told)
            below += heights
        states = [formula(ranks) * num_parameters / 1e6 for ranks in RANKS]
        ax.plot(places, states, "o--", color="black", markersize=5, linewidth=1.2, label="states by the formula")
        labels(ax, "ranks", "", name, 11)
        ax.grid(False, axis="x")
        ax.set_xticks(places, [str(ranks) for ranks in RANKS])
        ax.annotate(f"{below[-1]:.0f} MB", (places[-1], below[-1]), (0, 4), textcoords="offset points", ha="center")
    axes[0].margins(y=0.12)
    axes[0].set_ylim(bottom=0)
    axes[0].set_ylabel("alive at the peak of a step [MB]", fontsize=11)
    handles, told = axes[0].get_legend_handles_labels()
    figure.legend(handles[::-1], told[::-1], loc="outside lower center", ncols=4, frameon=False, fontsize=11)
    return figure
