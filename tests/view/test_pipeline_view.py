"""Pictures of pipeline schedules: a box for each action, at its time."""

from __future__ import annotations

from itertools import pairwise

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

import simparallel as sp
from simparallel.view import plot_schedule


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe_v", "dualpipe"])
@pytest.mark.parametrize("message", [0, 0.5])
def test_boxes_are_the_actions(name, message):
    schedule = sp.pipeline_schedule(name)
    ax = plot_schedule(schedule, message=message)
    boxes = [box for box in ax.patches if isinstance(box, Rectangle)]
    assert len(boxes) == sum(text.count("+") + 1 for row in schedule.actions for text in row)
    cost = schedule.cost(message=message)
    assert ax.get_xlim() == (0, cost.makespan)
    lanes = {}
    for box in boxes:
        lanes.setdefault(round(box.get_y() + 0.42), []).append((box.get_x(), box.get_x() + box.get_width()))
    for lane in lanes.values():
        lane.sort()
        assert all(before[1] <= after[0] + 1e-9 for before, after in zip(lane, lane[1:], strict=False))
        assert sum(end - start for start, end in lane) == pytest.approx(cost.work)
    assert f"bubble {cost.bubble:g} of {cost.makespan:g}" in ax.get_title(loc="left")
    plt.close("all")


@pytest.mark.parametrize("name", ["gpipe", "interleaved_1f1b", "dualpipe_v", "zb_h1"])
def test_every_shade_is_in_the_legend(name):
    ax = plot_schedule(sp.pipeline_schedule(name), live=True)
    drawn = {box.get_facecolor() for box in ax.patches} | {tuple(curve.get_facecolor()[0]) for curve in ax.collections}
    legend = ax.get_legend()
    shown = {patch.get_facecolor() for patch in legend.findobj(Rectangle)}
    assert drawn | {ax.get_facecolor()} == shown
    stages = sp.pipeline_schedule(name).chunks
    assert legend.get_title().get_text() == ("darker: later stages of a rank" if stages > 1 else "")
    plt.close("all")


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "interleaved_zb"])
@pytest.mark.parametrize("message", [0, 0.5])
def test_outlines_and_lines_are_the_critical_path(name, message):
    """Outlines are the stays on a rank, and lines their messages: together they cover the makespan."""
    schedule = sp.pipeline_schedule(name)
    ax = plot_schedule(schedule, critical_path=True, message=message)
    stays = [box for box in ax.patches if not box.get_fill()]
    path = schedule.critical_path(message=message)
    assert len(stays) == 1 + sum(before[0] != after[0] for before, after in pairwise(path))
    starts = [box.get_x() for box in stays]
    ends = [box.get_x() + box.get_width() for box in stays]
    assert (starts[0], ends[-1]) == (0, schedule.cost(message=message).makespan)
    assert [tuple(line.get_xdata()) for line in ax.lines] == list(zip(ends[:-1], starts[1:], strict=True))
    assert all(after - before == message for before, after in zip(ends, starts[1:], strict=False))
    plt.close("all")


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb_h2", "v_half", "dualpipe_v", "chimera"])
@pytest.mark.parametrize("message", [0, 0.5])
def test_curves_have_the_peaks_of_the_cost(name, message):
    schedule = sp.pipeline_schedule(name)
    cost = schedule.cost(message=message)
    ax = plot_schedule(schedule, live=True, message=message)
    drawn = [int(text.get_text()) for text in ax.texts if isinstance(text, Annotation)]
    assert tuple(drawn) == cost.peak_live_at_weight_gradient
    assert len(ax.collections) == len(ax.lines) == schedule.ranks
    for rank, (line, fill) in enumerate(zip(ax.lines, ax.collections, strict=True)):
        floor, top = max(line.get_ydata()), min(line.get_ydata())
        filled = fill.get_paths()[0].vertices[:, 1]
        assert (floor, filled.max()) == pytest.approx((rank + 0.42,) * 2)
        # Curves and boxes share no place of a lane.
        assert filled.min() > rank - 0.42 + max(box.get_height() for box in ax.patches)
        shares = (floor - top) / (floor - filled.min())
        at_inputs, at_weights = cost.peak_live_at_input_gradient[rank], cost.peak_live_at_weight_gradient[rank]
        assert shares == pytest.approx(at_inputs / at_weights)
    plt.close("all")


def test_given_axes_and_title():
    _, ax = plt.subplots()
    assert plot_schedule(sp.pipeline_schedule("gpipe", 2, 2), ax, title="mine") is ax
    assert ax.get_title(loc="left") == "mine"
    plt.close("all")
