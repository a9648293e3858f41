"""Pictures: their contents, reproducible files, and reuse of axes."""

import math
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from refusals import refused

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from hypothesis import example, given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.text import Text

from simparallel.clock.event import Event, lane_names
from simparallel.clock.recorder import Recorder, WorkPrice
from simparallel.errors import InputError
from simparallel.layout.layout import Layout
from simparallel.machine.cluster import describe
from simparallel.machine.device import DeviceWork
from simparallel.trace import Trace
from simparallel.view import plot_both_clocks, plot_loss, plot_slices, plot_timeline, save_figure
from simparallel.view.names import distinct_lengths, fitted
from simparallel.view.style import rank_colour


@pytest.fixture(autouse=True)
def _close_figures() -> Iterator[None]:
    yield
    plt.close("all")


def training(num_ranks: int = 2, num_steps: int = 2, num_layers: int = 2, scale: int = 1) -> Trace:
    """Make a data-parallel run: forward, backward with an overlapped all_reduce, optimizer."""
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
                    recorder.compute(
                        "MatMul", kind, wall, wall + 900, WorkPrice(duration, work=DeviceWork("", 10**6, 8))
                    )
                    wall += 1000
            start = recorder.now_ps - duration
            end = start + 4 * duration
            recorder.communicate(
                "all_reduce", "collective", "comm world", wall, wall + 500, start, end, 8, 8, group, step
            )
            wall += 500
            recorder.join(end)
            recorder.compute(
                "SGD.step", "optimizer", wall, wall + 100, WorkPrice(9_000_000 * scale, work=DeviceWork("", 100, 8))
            )
            wall += 100
            recorder.next_step()
        events += recorder.events
    return Trace(events, cluster, name="data parallel")


def bars(ax: Axes) -> list[Any]:
    return [item for item in ax.collections if isinstance(item, PolyCollection)]


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


@settings(max_examples=6, deadline=None)
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


def test_bars_match_the_events() -> None:
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
def test_axis_has_a_fitting_unit(scale: int, unit: str) -> None:
    assert training(scale=scale).timeline().get_xlabel() == f"simulated time [{unit}]"


def test_wall_clock_starts_at_zero() -> None:
    ax = training().timeline(clock="wall")
    assert ax.get_xlabel() == "wall time [µs]"
    assert ax.get_xlim()[0] <= 0 < ax.get_xlim()[1] < 20


def test_legend_title_names_and_steps() -> None:
    trace = training()
    ax = trace.timeline()
    legend = ax.get_legend()
    assert legend is not None
    kinds = ["forward", "backward", "optimizer", "collective"]
    assert [text.get_text() for text in legend.get_texts()] == [*kinds, "idle"]
    assert "data parallel" in ax.get_title(loc="left")
    assert texts(ax).count("all_reduce") == 4
    assert {"step 0", "step 1"} <= set(texts(ax))
    assert not any(text.startswith("step") for text in texts(trace.timeline(steps=1)))


@settings(max_examples=6, deadline=None)
@given(st.integers(2, 400), st.sampled_from(["sim", "wall"]))
@example(368, "sim")
def test_step_labels_do_not_overlap(num_steps: int, clock: str) -> None:
    ax = training(1, num_steps).timeline(clock=clock)
    figure: Any = ax.figure
    figure.draw_without_rendering()
    labels = [text for text in ax.texts if text.get_text().startswith("step")]
    assert labels
    assert len({label.get_text() for label in labels}) == len(labels)
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.x0)
    lines = [ax.transData.transform((line.get_xdata()[0], 0))[0] for line in ax.lines if line.is_dashed()]
    assert len(lines) == len(labels)
    edges = ax.get_window_extent()
    for before, after in pairwise([*boxes, None]):
        assert edges.x0 <= before.x0 < before.x1 <= edges.x1
        assert after is None or before.x1 < after.x0
        assert not any(before.x0 <= line <= before.x1 for line in lines)
    plt.close("all")


@settings(max_examples=4, deadline=None)
@given(st.integers(150, 600))
def test_thin_bars_become_shares_of_their_step(num_steps: int) -> None:
    trace = training(1, num_steps)
    ax = trace.timeline()
    assert "the height of a colour its share" in ax.get_xlabel()
    areas = [item for item in ax.collections if isinstance(item, PolyCollection)]
    assert len(areas) == 4
    # An area over the lane's height is the time spent on that kind.
    spent = sorted(
        sum(e.sim_end_ps - e.sim_start_ps for e in trace.events if e.kind == kind)
        for kind in {e.kind for e in trace.events}
    )
    scale = 10**9 if "[ms]" in ax.get_xlabel() else 10**6
    drawn = sorted(area_of(item.get_paths()[0].vertices) / 0.84 * scale for item in areas)
    assert drawn == pytest.approx(spent, rel=1e-6)
    assert not any(text in ("MatMul", "all_reduce") for text in texts(ax))
    plt.close("all")


def area_of(corners: np.ndarray) -> float:
    """Return the area of a polygon by the shoelace formula."""
    x, y = corners.T
    return abs(float(np.dot(x, np.roll(y, 1)) - np.dot(y, np.roll(x, 1)))) / 2


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 12), st.sampled_from(["ReLU", "Linear", "CrossEntropy.backward", "$x^"]))
def test_names_stay_inside_their_bars(num_layers: int, name: str) -> None:
    trace = training(2, 2, num_layers)
    ax = plot_timeline([event._replace(name=name) for event in trace.events])
    figure: Any = ax.figure
    figure.draw_without_rendering()
    places = [path.get_extents() for item in bars(ax) for path in item.get_paths()]
    written = [text for text in ax.texts if not text.get_text().startswith("step")]
    assert written
    for text in written:
        box = text.get_window_extent().transformed(ax.transData.inverted())
        x, y = (box.x0 + box.x1) / 2, (box.y0 + box.y1) / 2
        bar = next(p for p in places if p.x0 <= x <= p.x1 and p.y0 <= y <= p.y1)
        upright = text.get_rotation() == 90
        # A line is higher than its letters.
        assert upright or (bar.x0 <= box.x0 and box.x1 <= bar.x1)
        assert not upright or (bar.y0 <= max(box.y0, box.y1) and abs(box.y1 - box.y0) <= bar.y1 - bar.y0)
    plt.close("all")


def test_long_names_are_upright() -> None:
    assert fitted("Linear.backward", 200, 30) == ("Linear.backward", 8.5, False)
    assert fitted("Linear.backward", 40, 30) == ("Linear", 8.5, False)
    text, size_pt, upright = fitted("Linear", 12, 30) or ("", 0.0, False)
    assert (text, upright) == ("Linear", True)
    assert size_pt > 7
    text, size_pt, upright = fitted("CrossEntropy", 12, 30) or ("", 0.0, False)
    assert text.endswith("…")
    assert "CrossEntropy".startswith(text[:-1])
    # "all_g…" and "all_r…", or nothing.
    least = distinct_lengths(["all_reduce", "all_gather", "all_gather.backward", "Linear"])
    assert least == {"all_reduce": 5, "all_gather": 5, "Linear": 1}
    assert (fitted("all_gather", 12, 25, least["all_gather"]) or ("", 0.0, False))[0] == "all_g…"
    assert fitted("all_gather", 12, 18, least["all_gather"]) is None
    assert fitted("reduce_scatter", 45, 20) == ("reduce_…", 8.5, False)
    assert distinct_lengths([]) == {}
    assert fitted("Linear", 5, 30) is None
    assert fitted("Linear", 200, 4) is None
    assert fitted(" ", 200, 30) is None


def test_lanes_of_groups_are_named_by_their_ranks() -> None:
    events = [
        Event(0, stream, "all_reduce", "collective", 0, 0, 1, 0, 1, 0, 8, 8, group, 0)
        for stream, group in {
            "comm world": (0, 1, 2, 3),
            "comm 1": (0, 2),
            "comm 2": (0, 2),
            "comm 3": (0, 1, 2),
            "compute": (),
        }.items()
    ]
    named = ["compute", "comm [0, 2]", "comm [0, 2] (2)", "comm [0–2]", "comm world"]
    assert list(lane_names(events).values()) == named
    labels = [label.get_text().split("$   ")[-1] for label in plot_timeline(events).get_yticklabels()]
    assert labels == named
    moved = [event._replace(device=1) for event in events[-1:]]
    assert list(lane_names(moved).values()) == ["sim:1 compute"]


def test_given_limits_are_kept() -> None:
    _, ax = plt.subplots()
    ax.set_xlim(-5, 500)
    assert training().timeline(ax=ax).get_xlim() == (-5, 500)


def test_messages_are_labelled() -> None:
    legend = plot_timeline([training(1, 1).events[0]._replace(kind="p2p")]).get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["message", "idle"]


def test_given_axes_are_used() -> None:
    """No further figure is opened."""
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
        training(1, 1).events[0]._replace(name="$x_", kind="$odd", stream="comm $1$", sim_end_ps=0, wall_end_ns=10**9)
    )
    for clock in ("sim", "wall"):
        ax = plot_timeline([event], clock=clock, title="$")
        assert "[s]" in ax.get_xlabel()
        plt.figure(plt.get_fignums()[-1]).draw_without_rendering()
        assert ax.figure is plt.gcf()


def test_nothing_to_draw() -> None:
    with refused(InputError):
        plot_timeline([])
    with refused(InputError):
        training(num_steps=5).timeline(steps=99)
    with refused(InputError):
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


def test_one_step_has_one_number() -> None:
    ax = plot_loss({"a": [1.0]})
    left, right = ax.get_xlim()
    assert [tick for tick in ax.get_xticks() if left <= tick <= right] == [0]


def test_nonfinite_losses_are_noted() -> None:
    nan = math.nan
    ax = plot_loss({"a": [nan, math.inf], "b": [(0, nan)]})
    assert texts(ax) == ["no finite loss"]

    ax = plot_loss({"a": [1.0, 0.8, nan, 0.5, nan, 0.4, 0.3], "b": [nan], "c": [1.0, 1.0]})
    assert texts(ax) == []
    first, second, _ = ax.get_lines()
    assert first.get_marker() == "o"
    assert first.get_markevery() == [3]  # without neighbours, so without a line
    assert second.get_label() == "b (no finite loss)"


# Slices.


def test_slices_label_numbers_and_dims() -> None:
    layout = Layout((2, 2), ("dp", "mp"))
    ax = plot_slices(
        [("x", layout("dp", "mp"), (4, 4)), ("y", layout("dp"), (4,)), ("z", layout("dp", "None", "mp"), (2, 2, 2))]
    )
    written = texts(ax)
    assert "numbers: the ranks that hold the slice" in written
    assert [text for text in written if "dim" in text] == ["dim 1 →", "← dim 0", "dim 0 →", "dim 2 →", "← dims 0, 1"]
    for patch in ax.patches:
        colour = patch.get_facecolor()
        label = next(t for t in ax.texts if patch.contains_point(ax.transData.transform(t.get_position())))
        assert label.get_color() == ("white" if colour[:3] == rank_colour(0) else "black")
    with refused(InputError):
        plot_slices([])


@pytest.mark.parametrize("history", [{}, {"a": []}, {"a": ["x"]}, {"a": [(1, 2, 3)]}, {"a": [None]}])
def test_bad_curves(history: dict[str, Any]) -> None:
    figures = plt.get_fignums()
    with refused(InputError):
        plot_loss(history)
    assert plt.get_fignums() == figures


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
    with refused(InputError):
        save_figure(plot_loss({"a": [1.0]}), tmp_path / "a.docx")
    assert list(tmp_path.iterdir()) == []


def test_traces_do_not_import_the_plotting_library() -> None:
    code = "import simparallel.trace, simparallel.view, sys; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}


def test_both_clocks_are_drawn_on_one_scale() -> None:
    """On two where one is more than 20 times as long; the title says how much longer."""
    trace = training()
    length_s = trace.makespan_s
    for ratio, is_one_scale in ((0.5, True), (3, True), (19, True), (21, False), (0.01, False)):
        stretched = [
            event._replace(
                wall_start_ns=10**15 + round(event.sim_start_ps * ratio),
                wall_end_ns=10**15 + round(event.sim_end_ps * ratio),
                sim_start_ps=1000 * event.sim_start_ps,
                sim_end_ps=1000 * event.sim_end_ps,
            )
            for event in trace.events
        ]
        upper = Trace(stretched, trace.cluster, timed_by="a GPU").timeline(clock="both")
        both = upper.figure.axes
        ends = [ax.get_xlim()[1] / 1.008 * UNITS[ax.get_xlabel().split("[")[1].split("]")[0]] for ax in both]
        longest_s = 1000 * length_s * np.array([1.0, ratio])
        assert ends == pytest.approx([max(longest_s)] * 2 if is_one_scale else longest_s)
        assert upper.get_title(loc="left").endswith(": modelled")
        assert both[1].get_title(loc="left").startswith("measured on a GPU by its events: ")
        assert ("scale of its own" in both[1].get_title(loc="left")) is not is_one_scale


def test_both_clocks_need_a_figure() -> None:
    _, ax = plt.subplots()
    with refused(InputError):
        training().timeline(ax, clock="both")
    with refused(InputError):
        plot_both_clocks([], "", "")


@pytest.mark.parametrize("name", [r"$\frac{a$", "$x$", "\x1b[31mred", "a\ud800b", "\x00\x7f"], ids=range(5))
def test_names_of_users_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    """No formulas, and no control characters in pictures and tables."""
    made = training(1, 1)
    events = [event._replace(name=name, stream=f"{event.stream} {name}") for event in made.events]
    trace = Trace(events, made.cluster, name=name)
    texts = [trace.table(), trace._repr_html_()]
    slices = [(name, Layout((2,), ("x",))("x", "None"), (4, 4))]
    for number, axes in enumerate(
        (trace.timeline(clock="both"), plot_loss({name: [1.0], "b": [2.0]}), plot_slices(slices, title=name))
    ):
        path = tmp_path / f"{number}.svg"
        axes.figure.savefig(path)
        ElementTree.parse(path)
        texts += [text.get_text() for text in axes.figure.findobj(Text)]
    for text in texts:
        assert not set(text) & {"\x1b", "\ud800", "\x00", "\x7f"}
