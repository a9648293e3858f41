"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat


def aligned(rows: Sequence[Sequence[str]], signs: str = "<") -> list[str]:
    """Return a line for each row, with columns that are aligned and two spaces apart.

    Args:
        rows: the text of each cell; all rows have as many.
        signs: "<" or ">" for each column: aligned to the left or to the right. The last is that of all further columns.
    """
    columns = []
    for column, sign in zip(zip(*rows, strict=True), chain(signs, repeat(signs[-1])), strict=False):
        width = max(map(len, column))
        columns.append([f"{cell:{sign}{width}}" for cell in column])
    return ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
