"""The bytes that each rank sends to each other rank, as a matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.base.units import format_bytes, si_scale
from simparallel.errors import InputError
from simparallel.view.style import axes, box, head, readable_on, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = "YlGnBu"
# With more ranks a cell is too small for its number.
_MOST_NUMBERS = 8


def plot_communication_matrix(
    matrix: Any, nodes: Sequence[Sequence[int]] = (), ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw the bytes from each rank (row) to each other rank (column), with a border around each node.

    Args:
        matrix: [i, j] are the bytes from rank i to rank j, as `Trace.communication_matrix()`.
        nodes: the ranks of each node, consecutive ones, as `trace.cluster.nodes`; a single node has no border.
        ax: axes to draw into; None makes a figure.
        title: title of the axes; None for the sum of all bytes.

    Returns:
        The axes.

    Raises:
        InputError: not a square matrix of numbers that are at least 0.
    """
    import matplotlib.pyplot as plt

    values = np.asarray(matrix, float)
    if values.ndim != 2 or values.shape[0] != values.shape[1] or not values.size or not (values >= 0).all():
        raise InputError(
            f"plot_communication_matrix: got shape {values.shape}; expected the bytes, at least 0, from each rank to "
            "each rank: trace.communication_matrix()."
        )
    size = len(values)
    ax = axes(ax, 6.4, 5.4)
    factor, prefix = si_scale([values.max()], smallest=0, largest=12)
    # White stands for no bytes, and for nothing else.
    shown = np.ma.masked_equal(values / factor, 0)
    colours = plt.get_cmap(_COLOURS).with_extremes(bad="white")
    image = ax.imshow(shown, cmap=colours, vmin=-0.12 * (shown.max() or 1), vmax=shown.max() or 1)
    if size <= _MOST_NUMBERS:
        for i, j in zip(*np.nonzero(values), strict=True):
            number = f"{values[i, j] / factor:.3g}" if values[i, j] > 0.01 * factor else "< 0.01"
            ink = readable_on(image.to_rgba(shown[i, j]))
            write(ax, j, i, number, 9, color=ink)
    if len(nodes) > 1:
        for ranks in nodes:
            corner, count = min(ranks) - 0.5, len(ranks)
            box(ax, corner, corner, count, count, fill=False, edgecolor="0.35", linewidth=1.4, ls="--")
    ticks = range(0, size, max(1, size // 8))
    ax.set_xticks(ticks)
    ax.set_yticks(ticks)
    ax.set_xticks(np.arange(size - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(size - 1) + 0.5, minor=True)
    ax.grid(which="minor", color="0.88", linewidth=0.6)
    ax.tick_params(which="both", length=0)
    ax.set_xlabel("to rank", fontsize=11)
    ax.set_ylabel("from rank", fontsize=11)
    bar: Any = ax.figure
    bar = bar.colorbar(image, ax=ax, shrink=0.8)
    bar.ax.set_ylim(0, None)
    bar.set_label(f"sent [{prefix}B]", fontsize=11)
    head(ax, f"{format_bytes(round(values.sum()))} in all" if title is None else title)
    return ax
