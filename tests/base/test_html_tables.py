"""HTML of objects in notebooks: every text is escaped, and every object of a lesson shows itself."""

from html import unescape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import simparallel as sp
from simparallel.base.html import frame, table
from simparallel.base.names import printable
from simparallel.search.explanation import Explanation, Option
from simparallel.search.plan import Plan, PlannedOp


class Cells(HTMLParser):
    """The texts of the cells of a table, and the tags that are no part of one."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.others: list[str] = []
        self.is_in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.is_in_cell = tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        elif self.is_in_cell:
            self.rows[-1].append("")
        elif tag != "table":
            self.others.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.is_in_cell = False

    def handle_data(self, data: str) -> None:
        if self.is_in_cell:
            self.rows[-1][-1] += data


texts = st.text() | st.sampled_from(["<b>", "</td>", "&amp;", "<script>alert(1)</script>", '"'])


@given(st.lists(st.lists(texts, min_size=1, max_size=3), min_size=1, max_size=4))
def test_cells_are_the_texts(rows: list[list[str]]) -> None:
    """Control characters and lone surrogates are escapes."""
    found = Cells(table(rows))
    assert found.rows == [[printable(text) for text in row] for row in rows]
    assert found.others == []


def test_title_notes_and_colours() -> None:
    found = table([["a"], ["1"]], title="<i>", notes=["x < y"], colours={(1, 0): "#fff"})
    assert "<b>&lt;i&gt;</b>" in found
    assert "<small>x &lt; y</small>" in found
    assert "background: #fff; color: black" in found
    assert table([], title="t").count("<table") == 0


def test_long_tables_are_cut() -> None:
    found = table([["number"], *([str(i)] for i in range(1000))])
    assert len(Cells(found).rows) == 201
    assert "and 800 more rows" in found


@given(texts)
def test_frame_holds_the_whole_page(page: str) -> None:
    found = frame(page, 100, page)
    source = found.split('srcdoc="', 1)[1].split('"', 1)[0]
    assert unescape(source) == page
    assert found.count("<iframe") == 1


def things() -> dict[str, Any]:
    layout = sp.Layout((2, 4), ("dp", "mp"))
    x = sp.Tensor(np.arange(6.0).reshape(2, 3), requires_grad=True)
    matmul = sp.ops.MatMul().shard(((2, 4), (4, 1)))
    return {
        "shape (2, 3), float64, requires_grad": x,
        "shape (2, 3, 4), float32": sp.Tensor(np.zeros((2, 3, 4), np.float32)),
        "shape (100,), int64": sp.Tensor(np.arange(100)),
        "shape (), float32": sp.Tensor(1.5),
        "<th>mp</th>": layout,
        "dim 1: 3": layout("dp", "mp"),
        "0–7": layout("None", "None"),
        "zb_h1: 3 ranks": sp.pipeline_schedule("zb_h1", 3, 4),
        "1 ops on 8 devices; by hand": Plan(
            8, (PlannedOp("fc1.MatMul", "MatMul", ((4, 8), (8, 2)), ((8, 1), (1, 1))),)
        ),
        "no input is redistributed": Explanation("<fc1>", (Option(((8, 1), (1, 1)), None, 1, 2, 3, 4),), ()),
        "device matrix": matmul.plan((32, 784), (784, 512), device_num=8),
    }


@pytest.mark.parametrize("told", things())
def test_objects_show_themselves(told: str) -> None:
    shown = things()[told]._repr_html_()
    assert told in shown
    assert shown.count("<table>") == shown.count("</table>")


def test_layout_picture_names_the_holders() -> None:
    shown = Cells(sp.Layout((2, 2, 2), ("dp", "sp", "mp"))("dp", "mp")._repr_html_())
    assert shown.rows == [["", "dim 1: 0", "dim 1: 1"], ["dim 0: 0", "0, 2", "1, 3"], ["dim 0: 1", "4, 6", "5, 7"]]


def test_schedule_table_is_its_grid() -> None:
    schedule = sp.pipeline_schedule("1f1b", 2, 3)
    shown = Cells(schedule._repr_html_())
    for line, row in zip(schedule.grid(), shown.rows[1:], strict=True):
        assert [text.strip(".") for text in line.split()[1:]] == row[1:]


def cut() -> str:
    layout = sp.Layout((2,), ("dp",))
    x = sp.parallel.distribute_tensor(np.arange(8.0).reshape(4, 2), layout("dp", "None"))
    return x._repr_html_()


def test_cut_tensor_shows_the_slices_of_all_ranks() -> None:
    first, second = sp.launch(cut, world_size=2, transport="inline")
    assert "slice (2, 2) on this rank" in first
    assert "x[0:2, 0:2]" in first
    assert "x[2:4, 0:2]" in first
    assert Cells(first).rows[1] == ["0", "1"]
    assert Cells(second).rows[1] == ["4", "5"]


def test_results_show_values_and_trace() -> None:
    results = sp.launch(lambda: "<b>", world_size=2, transport="inline")
    assert Cells(results._repr_html_().partition("<p>")[0]).rows == [
        ["rank", "returned"],
        ["0", "'<b>'"],
        ["1", "'<b>'"],
    ]
