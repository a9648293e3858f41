"""Tables of cells: cells that differ from the block before are marked, missing ones too."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings, strategies as st

from simparallel.view import plot_cells

ROWS = st.dictionaries(st.sampled_from("abc"), st.lists(st.sampled_from(["0", "1"]), max_size=4), max_size=3)


def marked(figure: Any) -> int:
    """Return the number of marked cells of the last block."""
    return sum(patch.get_hatch() is not None for patch in figure.axes[-1].patches)


@settings(max_examples=15, deadline=None)
@given(ROWS, ROWS)
def test_different_cells_are_marked(a: dict[str, list[str]], b: dict[str, list[str]]) -> None:
    figure = plot_cells({"given": [("x", ["7"])], "expected": list(a.items()), "yours": list(b.items())})
    labels = {*a, *b}
    pairs = [(a.get(label, []), b.get(label, []), i) for label in labels for i in range(4)]
    assert marked(figure) == sum(x[i : i + 1] != y[i : i + 1] for x, y, i in pairs)
    plt.close(figure)


@pytest.mark.parametrize("count", [1, 16, 40])
def test_long_tables_are_cut(count: int) -> None:
    rows = [(str(i), ["1"] * count) for i in range(count)]
    figure = plot_cells({"expected": rows, "yours": rows}, title="one $ and two $")
    assert marked(figure) == 0
    assert len(figure.axes[-1].patches) == min(count, 16) ** 2
    plt.close(figure)


def test_last_block_may_be_drawn() -> None:
    figure = plot_cells({"expected": [("x", ["1"])], "yours": []}, draw=lambda ax: ax.plot([1, 2]))
    assert len(figure.axes[-1].lines) == 1
    plt.close(figure)
