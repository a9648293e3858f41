"""The strategies of a plan: a row for each op, a square for each dim of its inputs, coloured by the number of cuts."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from textwrap import fill
from typing import TYPE_CHECKING, Any

from simparallel.base.names import printable
from simparallel.view.style import DARK, box, check_any, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# An op's name and its cuts for each input; None for an op that runs as the program says.
Row = tuple[str, Sequence[Sequence[int]] | None]

# At most this many rows in a column, and columns beside each other; further columns stand below.
MOST_ROWS, MOST_COLUMNS = 40, 5
# Sizes in inches.
_ROW, _CELL, _GAP, _LETTER = 0.2, 0.38, 0.14, 0.072
_UNCUT = "#E8E8E8"
# Other inputs, such as a bias, follow from these two.
_SHOWN_INPUTS = 2
_MOST_LETTERS = 34


def plot_plan(rows: Sequence[Row], *, title: str = "", ax: Axes | None = None) -> Axes:
    """Draw the cuts of each op's first two inputs: mostly the data and the weight.

    A square stands for a dim, the first one at the left. Its number says into how many slices the dim is cut; an empty
    square is a whole dim.

    Args:
        rows: name and cuts of each op, in the order of the program.
        title: title of the picture.
        ax: axes to draw into; None makes a figure.

    Returns:
        The matplotlib Axes.

    Raises:
        InputError: no rows.
    """
    import matplotlib.pyplot as plt

    check_any("plot_plan", rows, "[(name, cuts of each input), ...]")
    shown = [cuts[:_SHOWN_INPUTS] if cuts else () for _, cuts in rows]
    most = max([cut for cuts in shown for entry in cuts for cut in entry], default=1)
    # Columns of equal length look like one table.
    num_columns = ceil(len(rows) / MOST_ROWS)
    length = ceil(len(rows) / num_columns)
    names = [name if len(name) <= _MOST_LETTERS else f"…{name[1 - _MOST_LETTERS :]}" for name, _ in rows]
    # Every column has the same places, so that equal inputs stand below each other.
    widths = [max((len(cuts[i]) for cuts in shown if len(cuts) > i), default=0) for i in range(_SHOWN_INPUTS)]
    left = max(map(len, names)) * _LETTER + _GAP
    starts = left, left + widths[0] * _CELL + _GAP
    column_width = starts[1] + max(widths[1], 1) * _CELL + 2 * _GAP
    across, bands = min(num_columns, MOST_COLUMNS), ceil(num_columns / MOST_COLUMNS)
    band_height = (length + 2) * _ROW
    width, height = across * column_width, bands * band_height
    if ax is None:
        figure = plt.figure(figsize=(max(width, 6), height + 0.8))
        # The unit of the axes is an inch, so that letters and squares fit together.
        ax = figure.add_axes((0, 0, width / max(width, 6), height / (height + 0.8)))
    colours = plt.get_cmap("viridis_r")
    for column in range(num_columns):
        x0, y0 = column % across * column_width, column // across * band_height
        for i, text in enumerate(("input 0", "input 1")):
            if widths[i]:
                write(ax, x0 + starts[i], y0 + 0.5 * _ROW, text, 8, ha="left", color="0.35")
        for number in range(column * length, min((column + 1) * length, len(rows))):
            y = y0 + (number - column * length + 1) * _ROW
            write(ax, x0 + left - _GAP / 2, y + _ROW / 2, names[number], 8, ha="right", color=DARK)
            if rows[number][1] is None:
                place = x0 + starts[0], y + _ROW / 2
                write(ax, *place, "as the program says", 8, ha="left", color="0.35", style="italic")
            for start, entry in zip(starts, shown[number], strict=False):
                for dim, cut in enumerate(entry):
                    x = x0 + start + dim * _CELL
                    # Doubling the slices is a step of equal size; the lightest colours are for the fewest.
                    share = 0.15 + 0.75 * log2(cut) / max(log2(most), 1)
                    colour: Any = colours(share) if cut > 1 else _UNCUT
                    box(ax, x, y, _CELL, _ROW, facecolor=colour, edgecolor="white", linewidth=1)
                    if cut > 1:
                        ink = "white" if share > 0.45 else "black"
                        write(ax, x + _CELL / 2, y + _ROW / 2, str(cut), 8, color=ink)
    ax.set_xlim(0, width)
    # The first op is at the top.
    ax.set_ylim(height, 0)
    ax.set_axis_off()
    legend = "a square for each dim: the number of its slices; grey: whole"
    # 12 letters of the title to an inch, and at least six inches of them.
    head = "\n".join([fill(printable(title), max(int(width * 12), 72)), legend] if title else [legend])
    ax.set_title(head, loc="left", fontsize=9, color="0.2", parse_math=False)
    return ax
