"""Tables for terminals."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], signs: str = "<") -> list[str]:
    """Return a line for each row, with columns that are aligned and two spaces apart.

    Args:
        rows: the text of each cell; all rows have as many.
        signs: "<" or ">" for each column: aligned to the left or to the right. The last is that of all further columns.
    """
    signs += signs[-1] * len(rows[0])
    formats = [f"{sign}{max(map(len, column))}" for sign, column in zip(signs, zip(*rows, strict=True), strict=False)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]
