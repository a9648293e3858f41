"""Pictures of chunks: each cell names its addends, and has a stripe in the colour of each rank."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from refusals import refused

from simparallel.errors import InputError
from simparallel.view import plot_chunks


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def cells(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if not text.get_text().startswith("rank")]


def test_cells_name_their_addends() -> None:
    panels = {"before": [[[(0, 0)], [(0, 1)]], [[(1, 0)], []]], "after": [[[(0, 0), (1, 0)]], [[]]]}
    before, after = plot_chunks(panels).axes
    assert (before.get_title(loc="left"), after.get_title(loc="left")) == ("before", "after")
    assert cells(before) == ["A0", "A1", "B0", ""]
    assert cells(after) == ["AB0", ""]
    # A frame for each cell, and a stripe for each rank in it.
    assert (len(before.patches), len(after.patches)) == (4 + 3, 2 + 2)
    assert before.patches[0].get_facecolor() == after.patches[0].get_facecolor() != after.patches[1].get_facecolor()


def test_panels_in_rows() -> None:
    figure = plot_chunks({str(i): [[[(i, 0)]]] for i in range(5)}, columns=2, title="Five")
    assert len(figure.axes) == 6
    assert [bool(ax.texts) for ax in figure.axes] == [True] * 5 + [False]


def test_refusals_of_chunks() -> None:
    for panels, columns in (({}, 4), ({"x": [[[(0, 0)]]]}, 0), ({"x": [[[(26, 0)]]]}, 4)):
        with refused(InputError):
            plot_chunks(panels, columns=columns)
