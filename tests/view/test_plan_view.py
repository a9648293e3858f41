"""The picture of a plan: rows, squares, labels that stay apart."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from refusals import refused

from simparallel.errors import InputError
from simparallel.view import plan
from simparallel.view.plan import MOST_COLUMNS, MOST_ROWS, plot_plan


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_squares_are_dims_and_numbers_are_cuts():
    ax = plot_plan([("fc", ((8, 1), (1, 2), (1,))), ("loss", None), ("sum", ((1,),))], title="a plan")

    texts = [text.get_text() for text in ax.texts]
    assert [text for text in texts if text.isdigit()] == ["8", "2"]
    assert "as the program says" in texts
    assert len(ax.patches) == 5  # a bias is not shown
    assert ax.get_title(loc="left").startswith("a plan\n")


@pytest.mark.parametrize(("count", "most_rows"), [(1, MOST_ROWS), (MOST_ROWS + 1, MOST_ROWS), (63, 9)])
def test_texts_stay_apart(count, most_rows, monkeypatch):
    """In one column, in two, and in seven, of which two stand below the other ones."""
    monkeypatch.setattr(plan, "MOST_ROWS", most_rows)
    ax = plot_plan([(f"layer{number}.a.name.of.many.letters.Linear", ((1024, 1), (8, 1))) for number in range(count)])

    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts]
    # Sorted by the left edge, only neighbours can overlap.
    boxes.sort(key=lambda box: (round(box.y0), box.x0))
    for box, other in zip(boxes, boxes[1:], strict=False):
        assert round(box.y0) != round(other.y0) or box.x1 <= other.x0
    columns = {round(text.get_position()[0], 6) for text in ax.texts if text.get_text().endswith("Linear")}
    assert len(columns) == min(-(-count // most_rows), MOST_COLUMNS)


def test_nothing_to_draw():
    with refused(InputError):
        plot_plan([])
