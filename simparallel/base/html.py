"""HTML of objects in notebooks: tables and frames, with all text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from simparallel.base.names import printable

# Light colours, for cells with black text.
PALE = ("#BCDFF5", "#F6D9A0", "#A9DCCB", "#EBCADB", "#F2C4A8", "#A8CBE4", "#F8F3B5", "#D9D9D9")

# A notebook keeps every table in its file.
_MOST_ROWS = 201


def table(
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    notes: Sequence[str] = (),
    left: bool = False,
    colours: Mapping[tuple[int, int], str] | None = None,
) -> str:
    """Return a table.

    Args:
        rows: the text of each cell; the first row is the header.
        title: a line above it.
        notes: lines below it.
        left: align the cells left, like text; notebooks align them right, like numbers.
        colours: (number of the row, of the column) -> CSS colour behind the cell.
    """
    lines = []
    if len(rows) > _MOST_ROWS:
        notes = [f"and {len(rows) - _MOST_ROWS} more rows", *notes]
    for i, row in enumerate(rows[:_MOST_ROWS]):
        tag = "td" if i else "th"
        cells = []
        for j, text in enumerate(row):
            colour = (colours or {}).get((i, j))
            style = "text-align: left;" * left
            style += f"background: {colour}; color: black; text-align: center;" if colour else ""
            cells.append(f"<{tag}{f' style={style!r}' if style else ''}>{escaped(text)}</{tag}>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    above = f"<p><b>{escaped(title)}</b></p>" if title else ""
    below = f"<small>{'<br>'.join(map(escaped, notes))}</small>" if notes else ""
    body = f"<table>{''.join(lines)}</table>" if lines else ""
    return f"{above}{body}{below}"


def escaped(text: str) -> str:
    """Escape a text for HTML, and its control characters."""
    return escape(printable(text))


def frame(page: str, height: int, title: str) -> str:
    """Return a frame with a whole page in it, which keeps its styles and scripts apart from the notebook's."""
    return (
        f'<iframe title="{escaped(title)}" srcdoc="{escape(page)}" sandbox="allow-scripts" loading="lazy" '
        f'style="width: 100%; height: {height}px; border: 1px solid #d5dae0; border-radius: 6px"></iframe>'
    )
