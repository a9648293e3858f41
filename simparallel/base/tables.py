"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], sides: str) -> list[str]:
    """Return a line for each row, with two spaces between the columns and none at the end.

    Args:
        rows: the text of each cell; the first row may be the header.
        sides: "<" for each column that is aligned left, ">" right; the last sign is for all further columns.
    """
    signs = sides + sides[-1] * len(rows[0])
    formats = [f"{sign}{max(map(len, column))}" for sign, column in zip(signs, zip(*rows, strict=True), strict=False)]
    return ["  ".join(map(format, row, formats)).rstrip() for row in rows]
