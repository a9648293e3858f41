"""Draws who holds which part of a tensor."""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from simparallel.layout import Layout

_GAP = 0.35  # between two tensors, in widths of one


def plot_slices(tensors: list[tuple[str, Layout, tuple[int, ...]]], title: str = "", ax: Any = None) -> Any:
    """Draw tensors as grids of slices, one beside the other; a slice has the colour of the first rank that holds it.

    The last dim runs to the right, all others downwards, the first being outermost. Every slice is
    marked with the ranks that hold it.

    Args:
        tensors: (name, called layout, global shape) of each.
        title: above the picture.
        ax: where to draw; None makes a figure.

    Returns:
        The matplotlib Axes.
    """
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    if ax is None:
        _, ax = plt.subplots(figsize=(3.2 * len(tensors) + 0.4, 3.6), layout="constrained")
    colours = plt.get_cmap("tab20")
    for number, (name, layout, shape) in enumerate(tensors):
        left = number * (1 + _GAP)
        cuts = layout.cuts
        across, down = (cuts[-1] if cuts else 1), prod(cuts[:-1])
        holders: dict[tuple[int, ...], list[int]] = {chunk: [] for chunk in product(*map(range, cuts))}
        for rank in layout.rank_list:
            holders[tuple(layout.chunk(rank, dim) for dim in range(len(cuts)))].append(rank)
        for i, ranks in enumerate(holders.values()):
            row, column = divmod(i, across)
            corner = left + column / across, 1 - (row + 1) / down
            colour = colours(ranks[0] % 20) if len(holders) > 1 else "0.85"
            ax.add_patch(
                Rectangle(corner, 1 / across, 1 / down, facecolor=colour, edgecolor="white", linewidth=1.5)
            )
            text = _ranks(ranks)
            size = max(4.0, min(10.0, 60 / across / max(len(text), 2) * 1.6, 130 / down))
            ax.text(
                corner[0] + 0.5 / across,
                corner[1] + 0.5 / down,
                text,
                ha="center",
                va="center",
                fontsize=size,
            )
        partial = f"\naddends along {', '.join(layout.partial)}" if layout.partial else ""
        ax.text(left + 0.5, 1.04, f"{name}  {shape}{partial}", ha="center", va="bottom", fontsize=9)
    ax.set_xlim(-0.05, len(tensors) * (1 + _GAP) - _GAP + 0.05)
    ax.set_ylim(-0.05, 1.25)
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=10)
    return ax


def _ranks(ranks: list[int]) -> str:
    """Ranks in words: "3", "0, 4", "0–7", "0, 2, … 6"."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    if len(ranks) > 4:
        return f"{ranks[0]}, {ranks[1]}, … {ranks[-1]}"
    return ", ".join(map(str, ranks))
