"""Pictures of bubble and memory: a point for each schedule, and labels that do not overlap."""

from __future__ import annotations

from itertools import combinations

import matplotlib.pyplot as plt
import pytest

import simparallel as sp
from simparallel.view import plot_schedule_tradeoff


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (6, 12)])
def test_tradeoff_labels_do_not_overlap(ranks, microbatches):
    names = ["gpipe", "1f1b", "eager_1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "zb_h2", "interleaved_zb"]
    names += ["zbv", "v_half", "v_min", "dualpipe_v", "dualpipe", "chimera"]
    schedules = [sp.pipeline_schedule(name, ranks, microbatches) for name in names]
    found = [sp.search_schedule(ranks, microbatches, memory, states=500).schedule for memory in range(1, ranks + 1)]
    ax = plot_schedule_tradeoff(schedules, found)
    assert sorted(name for text in ax.texts for name in text.get_text().split(", ")) == sorted(names)
    ax.figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in ax.texts] + [ax.get_legend().get_window_extent()]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    plt.close("all")


def test_tradeoff_points_are_costs():
    """Two stages on a rank are half as large each; two replicas have whole stages."""
    schedules = [sp.pipeline_schedule(name) for name in ("zb_h1", "zbv", "dualpipe")]
    ax = plot_schedule_tradeoff(schedules, [schedules[0]], forward=2, input_gradient=2, weight_gradient=2)
    points = {text.get_text(): text.xy for text in ax.texts}
    assert points == {"zb_h1": (4, 300 / 27), "zbv": (4, 300 / 51), "dualpipe": (5, 200 / 26)}
    assert ax.lines[0].get_xydata().tolist() == [[4, 300 / 27], [5, 300 / 27]]
    assert ax.get_title(loc="left") == "4 ranks, 8 micro-batches"
    assert plot_schedule_tradeoff(schedules, ax=ax, title="mine") is ax
    assert ax.get_title(loc="left") == "mine"
    plt.close("all")
