"""Tables of cells: cells that differ from the block before are marked, missing ones too."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
import pytest
from hypothesis import given, settings, strategies as st

from simparallel.errors import ScheduleError
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


def test_result_that_cannot_be_drawn_has_cells() -> None:
    def draw(ax: Any) -> None:
        ax.plot([1, 2])
        raise ScheduleError("no schedule")

    plt.close("all")
    figure = plot_cells({"expected": [("x", ["1"])], "yours": [("x", ["2"])]}, draw=draw)
    assert (marked(figure), len(figure.axes[-1].lines), len(plt.get_fignums())) == (1, 0, 1)
    plt.close(figure)


@pytest.mark.parametrize("style", ["default", "dark_background"])
@pytest.mark.parametrize("count", [1, 5, 16])
def test_text_of_wrong_cells_is_legible(count: int, style: str) -> None:
    """It is black on white, of 6 points or more, and does not reach the hatches."""
    wrong = {1: "LOCAL_WORLD_SIZE=2", 5: "-1.235e+06", 16: "-18"}[count]
    with plt.style.context(style):
        figure = plot_cells({"expected": [("x", ["7"] * count)], "yours": [("x", [wrong] * count)]})
        figure.canvas.draw()
    ax = figure.axes[-1]
    white = [
        patch.get_window_extent() for patch in ax.patches if not patch.get_hatch() and patch.get_facecolor()[0] == 1
    ]
    texts = [text for text in ax.texts if text.get_text() == wrong]
    assert len(texts) == len(white) == count
    for text, box in zip(texts, white, strict=True):
        extent = text.get_window_extent()
        assert box.x0 <= extent.x0 < extent.x1 <= box.x1
        assert text.get_fontsize() >= 6
        assert text.get_color() == "black"
    plt.close(figure)
