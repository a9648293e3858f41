"""Bubble and memory of pipeline schedules: a point for each, and the front of those that a search found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.view.style import BLUE, GREEN, ORANGE, RED, axes, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simparallel.parallel.pipeline import Schedule

# Where a label may stand beside its point, in 1/72 inch: the nearest place comes first.
_PLACES = [
    (x * far, y * far, ha, va)
    for far in (1, 2, 4, 7)
    for x, y, ha, va in (
        (7, 0, "left", "center"), (0, 7, "center", "bottom"), (0, -7, "center", "top"), (-7, 0, "right", "center"),
        (5, 5, "left", "bottom"), (5, -5, "left", "top"), (-5, 5, "right", "bottom"), (-5, -5, "right", "top"),
    )
]  # fmt: skip


def plot_schedule_tradeoff(
    schedules: Iterable[Schedule], found: Iterable[Schedule] = (), ax: Axes | None = None, *, title: str | None = None,
    forward: float = 1, input_gradient: float = 1, weight_gradient: float = 1, message: float = 0,
) -> Axes:  # fmt: skip
    """Draw the bubble of schedules over the memory of the rank that holds most, and the front of those that were found.

    With n stages on a rank, each is n times smaller, in time and in memory, except in bidirectional schedules.

    Args:
        schedules: points with their names.
        found: schedules of `search_schedule` with one stage on each rank: a line.
        ax: axes to draw into; None makes a figure.
        title: None for the numbers of ranks and micro-batches.
        forward, input_gradient, weight_gradient: times of the part of the model that a rank has.
        message: latency between two ranks, in the unit of the times.

    Returns:
        The matplotlib Axes.

    Raises:
        InputError: a bad time; ScheduleError: a schedule deadlocks.
    """

    def point(schedule: Schedule) -> tuple[float, float]:
        parts = 1 if schedule.placement == "bidirectional" else schedule.chunks
        cost = schedule.cost(forward / parts, input_gradient / parts, weight_gradient / parts, message)
        return max(cost.peak_live_at_weight_gradient) / parts, 100 * cost.bubble / cost.makespan

    ax = axes(ax, 9, 5.5)
    # Schedules at the same point share a label.
    names: dict[tuple[float, float, str], list[str]] = {}
    shown = list(schedules)
    for schedule in shown:
        many = ORANGE if schedule.chunks > 1 else BLUE
        colour = GREEN if schedule.placement == "bidirectional" else many
        names.setdefault((*point(schedule), colour), []).append(schedule.name)
    front = sorted(map(point, found))
    steps: list[tuple[float, float]] = []
    if front:
        # The bubble stays until there is memory for the next schedule.
        ends = [*(x for x, _ in front[1:]), max([front[-1][0], *(x for x, _, _ in names)])]
        steps = [corner for (x, y), end in zip(front, ends, strict=True) for corner in ((x, y), (end, y))]
        ax.plot(*zip(*steps, strict=True), color=RED, linewidth=1.5, zorder=1)
        ax.plot(
            *zip(*front, strict=True), "D", color=RED, markersize=5, label="found by search, one stage on each rank"
        )
    kinds = {BLUE: "one stage on each rank", ORANGE: "several stages on each rank", GREEN: "two replicas of the model"}
    for colour, kind in kinds.items():
        points = [(x, y) for x, y, own in names if own == colour]
        if points:
            ax.plot(*zip(*points, strict=True), "o", color=colour, markersize=7, label=kind)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.margins(0.08)
    ranks = shown[0].ranks
    most = f"most live activations of a rank [micro-batches of 1/{ranks} of the model]"
    title = f"{ranks} ranks, {shown[0].microbatches} micro-batches" if title is None else title
    labels(ax, most, "bubble [% of the makespan]", title, size=None)
    ax.legend(loc="upper right", frameon=False, fontsize=9)
    _label(ax, [(x, y, ", ".join(own)) for (x, y, _), own in names.items()], steps)
    return ax


def _label(ax: Axes, labels: Sequence[tuple[float, float, str]], line: Sequence[tuple[float, float]]) -> None:
    """Write each label (x, y, text) beside its point, at the nearest place that covers no point, text or line."""
    from matplotlib.transforms import Bbox

    figure: Any = ax.figure
    figure.draw_without_rendering()
    points = ax.transData.transform([(x, y) for x, y, _ in labels])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in points]
    corners: Any = ax.transData.transform(line) if line else []
    taken += [Bbox([ends.min(0) - 2, ends.max(0) + 2]) for ends in map(np.array, pairwise(corners))]
    legend = ax.get_legend()
    if legend is not None:
        taken.append(legend.get_window_extent())
    for x, y, text in labels:
        label: Any = None
        for dx, dy, ha, va in _PLACES:
            if label is not None:
                label.remove()
            label = ax.annotate(
                text, (x, y), (dx, dy), textcoords="offset points", ha=ha, va=va, color="0.2", fontsize=9,
                arrowprops={"arrowstyle": "-", "color": "0.6"} if abs(dx) + abs(dy) > 14 else None,
            )  # fmt: skip
            box = Bbox.from_bounds(*label.get_window_extent().bounds)
            is_inside = ax.bbox.containsx(box.x0) and ax.bbox.containsx(box.x1)
            if is_inside and not any(box.overlaps(other) for other in taken):
                break
        taken.append(box)
