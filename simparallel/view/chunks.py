"""Chunks of arrays on ranks: which rank's values each chunk contains, before and after a collective or step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

from simparallel.base.names import printable
from simparallel.errors import InputError
from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, RED, SKY, YELLOW, box, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = (ORANGE, SKY, GREEN, PINK, YELLOW, BLUE, RED)
# The values that a chunk contains: (rank, chunk) of each addend; none for an empty chunk.
Chunk = Sequence[tuple[int, int]]


def plot_chunks(panels: Mapping[str, Sequence[Sequence[Chunk]]], *, columns: int = 4, title: str = "") -> Figure:
    """Draw the chunks of all ranks, a panel for each state: a row for each rank, a cell for each chunk.

    A value is written as a letter for the rank that it comes from and the number of its chunk: "B2" is chunk 2 of rank
    1, and "AB2" the sum of chunk 2 of ranks 0 and 1. A cell has a stripe in the colour of each of these ranks.

    Args:
        panels: title -> for each rank its chunks, each the (rank, chunk) of all addends in it, none for an empty chunk.
        columns: number of panels in a row.
        title: text above the picture.

    Returns:
        The matplotlib Figure.

    Raises:
        InputError: nothing to draw, fewer than one column, or a rank above 25.
    """
    import matplotlib.pyplot as plt

    if not panels or columns < 1:
        raise InputError(f"plot_chunks: {len(panels)} panels in {columns} columns; give at least one of each.")
    if any(
        rank >= len(ascii_uppercase) for rows in panels.values() for row in rows for cell in row for rank, _ in cell
    ):
        raise InputError(f"plot_chunks: a letter for each rank, so the last rank is {len(ascii_uppercase) - 1}.")
    columns = min(columns, len(panels))
    height = max(len(rows) for rows in panels.values())
    width = max([1, *(len(row) for rows in panels.values() for row in rows)])
    lines = ceil(len(panels) / columns)
    size = columns * (0.58 * width + 0.75), lines * (0.4 * height + 0.5) + (0.4 if title else 0)
    figure, axes = plt.subplots(lines, columns, figsize=size, layout="constrained", squeeze=False)
    if title:
        figure.suptitle(printable(title), ha="left", x=0.02, fontsize=12, fontweight="bold", parse_math=False)
    for ax in axes.flat:
        ax.set_axis_off()
    for ax, (name, rows) in zip(axes.flat, panels.items(), strict=False):
        ax.set_title(printable(name), loc="left", fontsize=11, parse_math=False)
        ax.set(xlim=(-1.1, width), ylim=(height, 0))
        for rank, row in enumerate(rows):
            write(ax, -0.12, rank + 0.5, f"rank {rank}", 9, ha="right")
            for place, cell in enumerate(row):
                _draw_chunk(ax, place, rank, cell)
    return figure


def _draw_chunk(ax: Any, x: int, y: int, cell: Chunk) -> None:
    left, bottom, width, height = x + 0.04, y + 0.07, 0.92, 0.86
    ranks = sorted({rank for rank, _ in cell})
    for i, rank in enumerate(ranks):
        part, colour = width / len(ranks), _COLORS[rank % len(_COLORS)]
        box(ax, left + i * part, bottom, part, height, facecolor=colour, alpha=0.55)
    box(ax, left, bottom, width, height, fill=False, edgecolor="0.75", linewidth=0.8)
    text = "".join(ascii_uppercase[rank] for rank in ranks) + ",".join(map(str, sorted({chunk for _, chunk in cell})))
    write(ax, x + 0.5, y + 0.5, text, 9 if len(text) < 6 else 7)
