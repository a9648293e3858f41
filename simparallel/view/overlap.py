"""The time of a data-parallel step over the bucket size: computing, and communication that is hidden or exposed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simparallel.base.units import si_scale
from simparallel.view.style import BLUE, DARK, ORANGE, SKY, axes, check_any, labels, literal, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_overlap(
    rows: Sequence[tuple[str, Mapping[str, float]]], ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw a bar for each setting: the time of computing, and on top of it that of exposed communication.

    Beside it stands all communication; the part that computing hides is lighter.

    Args:
        rows: label of each setting, such as a bucket size, and its times as in `Trace.summary()`: "compute_time_s",
            "communication_time_s", "exposed_communication_s".
        ax: axes to draw into; None makes a figure.
        title: title of the axes.

    Returns:
        The axes.

    Raises:
        InputError: no rows.
    """
    check_any("plot_overlap", rows, "[(label, times), ...]")
    ax = axes(ax, 9, 5)
    compute, communication, exposed = (
        [times[key] for _, times in rows]
        for key in ("compute_time_s", "communication_time_s", "exposed_communication_s")
    )
    factor, prefix = si_scale([max(a + b for a, b in zip(compute, exposed, strict=True))], largest=0)
    for number in range(len(rows)):
        busy, all_s, open_s = (values[number] / factor for values in (compute, communication, exposed))
        is_first = number == 0
        left, right = number - 0.21, number + 0.21
        ax.bar(left, busy, 0.38, color=SKY, label="computing" if is_first else None)
        ax.bar(
            left, open_s, 0.38, bottom=busy, color=ORANGE, hatch="////", edgecolor="white",
            label="exposed communication" if is_first else None,
        )  # fmt: skip
        ax.bar(right, open_s, 0.38, color=ORANGE, hatch="////", edgecolor="white")
        ax.bar(
            right, all_s - open_s, 0.38, bottom=open_s, color=BLUE, hatch="....", edgecolor="white",
            label="communication behind computing" if is_first else None,
        )  # fmt: skip
        top = busy + open_s
        note(ax, f"{top:.3g}", (left, top), (0, 3), ha="center", fontsize=10, color=DARK, fontweight="bold")
    ax.set_xticks(range(len(rows)), [literal(name) for name, _ in rows])
    ax.tick_params(axis="x", length=0)
    labels(ax, "", f"simulated time of a step [{prefix}s]", title)
    ax.grid(False, axis="x")
    # Space for the legend above the bars.
    ax.margins(y=0.22)
    ax.legend(frameon=False, fontsize=11, ncols=3, loc="upper center")
    return ax
