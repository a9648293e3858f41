"""Tables of cells, such as the input, the right result and the result of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import ceil
from textwrap import fill
from typing import TYPE_CHECKING, Any

from simparallel.base.names import printable
from simparallel.errors import SimParallelError
from simparallel.view.style import RED, box, literal, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = tuple[str, Sequence[str]]
_MAX_ROWS, _MAX_CELLS = 16, 16
# Letters of 8.5 points that fit into the cells of a row.
_LETTERS = 70
LIGHT = "#B3DDF5"  # SKY, lighter: black text on it is legible in light and dark pictures


def plot_cells(
    blocks: Mapping[str, Sequence[Row]], title: str = "", draw: Callable[[Axes], None] | None = None
) -> Figure:
    """Draw blocks of labelled rows, and mark the cells of the last block that differ from the block before it.

    Rows are compared by label. An extra cell is marked, and so is the place of a missing one.

    Args:
        blocks: title -> rows, each a label and the texts of its cells; at most 16 rows and 16 cells are drawn.
        title: text above the picture.
        draw: draws the last block into axes of its own, in place of cells; if it raises a SimParallelError, cells are
            drawn.

    Returns:
        The matplotlib Figure.
    """
    import matplotlib.pyplot as plt

    shown = {name: list(rows)[:_MAX_ROWS] for name, rows in blocks.items()}
    *_, reference, last = [{}, *map(dict, shown.values())]
    name_of_last = list(shown)[-1]
    marked = {
        (label, i)
        for label in {**reference, **last}
        for i in range(max(len(reference.get(label, ())), len(last.get(label, ()))))
        if list(reference.get(label, ()))[i : i + 1] != list(last.get(label, ()))[i : i + 1]
    }
    # An answer without a result has a row of empty cells for each expected one.
    shown[name_of_last] = [(label, last.get(label, ())) for label in {**reference, **last}]
    heights = [5.0 if draw and name == name_of_last else len(rows) + 1.2 for name, rows in shown.items()]
    figure, axes = plt.subplots(
        len(shown), figsize=(9, 0.8 + 0.32 * sum(heights)), height_ratios=heights, layout="constrained", squeeze=False
    )
    figure.suptitle(fill(printable(title), 110), ha="left", x=0.02, fontsize=10, parse_math=False)
    width = max([4, *(min(len(row), _MAX_CELLS) for rows in shown.values() for _, row in rows)])
    for ax, (name, rows) in zip(axes[:, 0], shown.items(), strict=True):
        ax.set_title(literal(name), loc="left", fontsize=11, fontweight="bold")
        if draw and name == name_of_last:
            with suppress(SimParallelError):
                draw(ax)
                continue
            ax.clear()
            ax.set_title(literal(name), loc="left", fontsize=11, fontweight="bold")
        _draw_rows(ax, rows, width, marked if name == name_of_last else set())
    return figure


def _draw_rows(ax: Any, rows: Sequence[Row], width: int, marked: set[tuple[str, int]]) -> None:
    ax.set(xlim=(-0.35 * width, width), ylim=(max(1, len(rows)), 0))
    ax.axis("off")
    missing = "missing" if width * len("missing") <= _LETTERS else "–"
    for y, (label, cells) in enumerate(rows):
        write(ax, -0.1, y + 0.5, label, 9, ha="right")
        count = min(max([len(cells), *(i + 1 for name, i in marked if name == label)]), _MAX_CELLS)
        texts = [cells[x] if x < len(cells) else missing for x in range(count)]
        # A row of few long texts has wide cells.
        longest = max(map(len, texts), default=0)
        span = max(1, min(width // max(1, count), ceil(longest * width / _LETTERS)))
        for x, text in enumerate(texts):
            left, right = x * span + 0.04, (x + 1) * span - 0.04
            look: dict[str, Any] = {"facecolor": LIGHT}
            if (label, x) in marked:
                # Hatches mark a wrong cell for readers who do not see colours. They are a frame: text on them is not
                # legible.
                look = {"facecolor": "white", "edgecolor": RED, "hatch": "////", "linewidth": 1.8}
                box(ax, left + 0.05, y + 0.16, right - left - 0.1, 0.68, facecolor="white", zorder=1.5)
            box(ax, left, y + 0.06, right - left, 0.88, **look)
            size = min(8.5, 8.5 * span * _LETTERS / (width * max(1, len(text))))
            write(ax, x * span + span / 2, y + 0.5, text, size, color="black")
