"""Pictures of pipeline schedules: a box for each action, at its time."""

from __future__ import annotations

import matplotlib.pyplot as plt
import pytest
from matplotlib.patches import Rectangle

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


def test_given_axes_and_title():
    _, ax = plt.subplots()
    assert plot_schedule(sp.pipeline_schedule("gpipe", 2, 2), ax, title="mine") is ax
    assert ax.get_title(loc="left") == "mine"
    plt.close("all")
