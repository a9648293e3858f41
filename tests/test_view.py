"""Pictures: what is in them, that they are the same every time, and that axes are reused."""

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection

from simparallel.cluster import describe
from simparallel.errors import InputError
from simparallel.events import Event, Recorder
from simparallel.trace import Trace
from simparallel.view import plot_loss, plot_timeline, save_figure


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def training(num_ranks: int = 2, num_steps: int = 2, num_layers: int = 2, scale: int = 1) -> Trace:
    """A data-parallel run: forward, backward with an all_reduce beside it, optimizer."""
    cluster = describe(num_ranks)
    group = tuple(range(num_ranks))
    events: list[Event] = []
    for rank in group:
        recorder = Recorder(rank, cluster)
        wall = 10**9 + rank
        for step in range(num_steps):
            for kind in ("forward", "backward"):
                for layer in range(num_layers):
                    duration = 6_000_000 * scale + 100_000 * layer
                    recorder.compute("MatMul", kind, wall, wall + 900, (duration, 10**6, 8))
                    wall += 1000
            start = recorder.now_ps - duration
            end = start + 4 * duration
            recorder.communicate(
                "all_reduce", "collective", "comm world", wall, wall + 500, start, end, 8, 8, group, step
            )
            wall += 500
            recorder.join(end)
            recorder.compute("SGD.step", "optimizer", wall, wall + 100, (9_000_000 * scale, 100, 8))
            wall += 100
            recorder.next_step()
        events += recorder.events
    return Trace(events, cluster, name="data parallel")


def bars(ax: Axes) -> list[Any]:
    return [item for item in ax.collections if isinstance(item, PolyCollection)]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.sampled_from(["sim", "wall"]))
def test_one_lane_per_rank_and_stream(num_ranks: int, num_steps: int, clock: str) -> None:
    trace = training(num_ranks, num_steps)
    ax = trace.timeline(clock=clock)
    lanes = [(rank, stream) for rank in trace.ranks for stream in trace.streams(rank)]
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert len(labels) == len(lanes)
    for (rank, stream), label in zip(lanes, labels, strict=True):
        assert label.endswith(stream)
        assert (f"rank\\ {rank}" in label) == (stream == "compute")
    rows = [float(row) for row in ax.get_yticks()]
    assert rows == sorted(set(rows))
    # Every event is one polygon in its lane; one collection per lane and kind.
    assert sum(len(item.get_paths()) for item in bars(ax)) == len(trace)
    assert len(bars(ax)) == len({(e.rank, e.stream, e.kind) for e in trace.events})
    centers = {round(float(path.vertices[:4, 1].mean()), 6) for item in bars(ax) for path in item.get_paths()}
    assert centers == {round(row, 6) for row in rows}
    plt.close("all")


def test_bars_lie_where_the_events_are() -> None:
    trace = training(1, 1)
    ax = trace.timeline()
    drawn = sorted(
        (float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max()))
        for item in bars(ax)
        for path in item.get_paths()
    )
    expected = sorted((e.sim_start_ps / 1e6, e.sim_end_ps / 1e6) for e in trace.events)
    for got, want in zip(drawn, expected, strict=True):
        assert got == pytest.approx(want)


@pytest.mark.parametrize(("scale", "unit"), [(1, "µs"), (100, "ms"), (10**6, "s")])
def test_the_axis_has_a_fitting_unit(scale: int, unit: str) -> None:
    assert training(scale=scale).timeline().get_xlabel() == f"simulated time [{unit}]"


def test_the_wall_clock_starts_at_zero() -> None:
    ax = training().timeline(clock="wall")
    assert ax.get_xlabel() == "wall time [µs]"
    assert ax.get_xlim()[0] <= 0 < ax.get_xlim()[1] < 20


def test_legend_title_names_and_steps() -> None:
    trace = training()
    ax = trace.timeline()
    legend = ax.get_legend()
    assert legend is not None
    kinds = ["forward", "backward", "optimizer", "collective"]
    assert [text.get_text() for text in legend.get_texts()] == kinds
    assert "data parallel" in ax.get_title(loc="left")
    assert texts(ax).count("all_reduce") == 4
    assert {"step 0", "step 1"} <= set(texts(ax))
    assert not any(text.startswith("step") for text in texts(trace.timeline(steps=1)))


def test_many_steps_are_labelled_sparsely() -> None:
    labels = [text for text in texts(training(1, 60).timeline()) if text.startswith("step")]
    assert 2 <= len(labels) < 40


def test_given_axes_are_used_and_nothing_else_is_opened() -> None:
    _, axes = plt.subplots(2)
    assert training().timeline(ax=axes[0]) is axes[0]
    assert plot_loss({"a": [1.0]}, ax=axes[1]) is axes[1]
    assert len(plt.get_fignums()) == 1


def test_many_events_need_few_artists() -> None:
    trace = training(2, 5, num_layers=300)
    ax = trace.timeline()
    assert len(bars(ax)) == 2 * 4
    assert len(ax.texts) < 200


def test_odd_events_are_drawn() -> None:
    """No duration at all, an unknown kind, names that look like formulas."""
    event = (
        training(1, 1)
        .events[0]
        ._replace(name="$x_", kind="$odd", stream="comm $1$", sim_end_ps=0, wall_end_ns=10**9)
    )
    for clock in ("sim", "wall"):
        ax = plot_timeline([event], clock=clock, title="$")
        assert "[s]" in ax.get_xlabel()
        plt.figure(plt.get_fignums()[-1]).draw_without_rendering()
        assert ax.figure is plt.gcf()


def test_nothing_to_draw() -> None:
    with pytest.raises(InputError, match="no events"):
        plot_timeline([])
    with pytest.raises(InputError, match="no events"):
        training().timeline(steps=99)
    with pytest.raises(InputError, match="'sundial'"):
        training().timeline(clock="sundial")


# Loss curves.


def test_equal_curves_are_both_visible() -> None:
    losses = [2.0, 1.0, 0.5]
    ax = plot_loss({"4 devices": losses, "1 device": losses})
    below, above = ax.get_lines()
    assert below.get_linewidth() > 2 * above.get_linewidth()
    assert below.get_zorder() < above.get_zorder()
    assert below.get_color() != above.get_color()
    assert above.is_dashed()
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["4 devices", "1 device"]
    assert ax.get_xlabel() == "training step"
    assert ax.get_ylabel() == "loss"


def test_both_forms_of_a_curve() -> None:
    ax = plot_loss({"losses": [3.0, math.nan, 1.0], "pairs": [(0, 3.0), (10, 2.0)], "point": [(5, 1.0)]})
    assert [np.asarray(line.get_xdata()).tolist() for line in ax.get_lines()] == [[0, 1, 2], [0, 10], [5]]
    assert ax.get_lines()[2].get_marker() == "o"


@pytest.mark.parametrize("history", [{}, {"a": []}, {"a": ["x"]}, {"a": [(1, 2, 3)]}, {"a": [None]}])
def test_bad_curves(history: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="plot_loss"):
        plot_loss(history)
    assert plt.get_fignums() == []


# Files.


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_equal_pictures_are_equal_files(tmp_path: Path, suffix: str) -> None:
    paths = [save_figure(training().timeline(), tmp_path / "new" / f"{n}{suffix}", dpi=50) for n in "ab"]
    contents = [path.read_bytes() for path in paths]
    assert contents[0] == contents[1]
    assert len(contents[0]) > 1000
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"a{suffix}", f"b{suffix}"]


def test_axes_and_figures_save_alike(tmp_path: Path) -> None:
    ax = plot_loss({"a": [1.0, 0.5]})
    one, two = save_figure(ax, tmp_path / "1.png"), save_figure(ax.figure, tmp_path / "2.png")
    assert one.read_bytes() == two.read_bytes()


def test_unknown_picture_format(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.svg, \.pdf"):
        save_figure(plot_loss({"a": [1.0]}), tmp_path / "a.docx")
    assert list(tmp_path.iterdir()) == []


def test_traces_do_not_import_the_plotting_library() -> None:
    code = "import simparallel.trace, simparallel.view, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
