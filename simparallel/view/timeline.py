"""The rank x device x stream timeline: who works, who communicates, who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from simparallel.cluster import PS_PER_S
from simparallel.errors import InputError
from simparallel.events import Event, lane_names
from simparallel.units import si_scale
from simparallel.view.bars import COLORS, LANE_HEIGHT, Lane, draw_bars, draw_shares, steps_per_bar, style
from simparallel.view.names import mark_steps, write_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CLOCKS = {"sim": ("simulated time", PS_PER_S), "wall": ("wall time", 10**9)}
_RANK_GAP = 0.45  # lanes
_LANE_INCHES = 0.5  # a name of six letters can stand upright
_KIND_NAMES = {"p2p": "message"}


def plot_timeline(
    events: Sequence[Event], *, clock: str = "sim", ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw every event as a bar, in a lane per (rank, device, stream).

    Bars overlap where a stream's events do: in wall time, collectives in flight together. Where steps are so
    many that their events could not be seen, there is one bar for a step, or for several: how high a colour
    stands in it is its share of that time, and the axis says so.

    Args:
        events: of any ranks and steps, in any order.
        clock: "sim", the described hardware's time from the start of the run; or "wall", this
            machine's time from the first event.
        ax: axes to draw into, whose limits of x stay if they were set; None makes a figure of a fitting size.
        title: of the axes.

    Raises:
        InputError: no events, or an unknown clock.
    """
    import matplotlib.pyplot as plt

    if clock not in _CLOCKS:
        raise InputError(f"plot_timeline: clock={clock!r} is not a clock; choose 'sim' or 'wall'.")
    if not events:
        raise InputError(
            "plot_timeline: no events to draw: nothing was recorded (record=False), nothing happened, or nothing "
            "was selected."
        )
    spans, factor, label = _spans(events, clock)
    lanes = lane_names(events)
    rows = _rows(lanes)
    height = max(rows.values()) + 1.0
    if ax is None:
        figsize = (13, min(20.0, 1.5 + _LANE_INCHES * height))
        _, ax = plt.subplots(figsize=figsize, layout="constrained")

    first = min(start for start, _ in spans) / factor
    last = max(end for _, end in spans) / factor
    if ax.get_autoscalex_on():
        margin = (last - first or 1.0) * 0.008
        ax.set_xlim(first - margin, last + margin)
    ax.set_ylim(height - 0.35, -1.15)  # rank 0 on top; above it, room for the step labels
    ax.set_xlabel(label, fontsize=12)
    ax.set_yticks(list(rows.values()), _lane_labels(lanes))
    ax.tick_params(axis="both", labelsize=11)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    if title:
        ax.set_title(title, loc="left", fontsize=13, fontweight="bold", parse_math=False)
    _draw_lanes(ax, rows)
    _legend(ax, {event.kind for event in events})

    figure: Any = ax.figure
    figure.draw_without_rendering()  # the layout decides how wide the axes are, and so which names fit
    # Points (1/72 inch), because text is measured in them.
    extent, (left, right) = ax.get_window_extent(), ax.get_xlim()
    points_per_unit = extent.width * 72 / figure.dpi / (right - left)
    bars = [(start / factor, (end - start) / factor) for start, end in spans]
    starts = _step_starts(events, bars)
    together = steps_per_bar(list(starts.values()), last, points_per_unit)
    if together:
        draw_shares(ax, events, bars, rows, [*list(starts.values())[::together], last])
        each = "a step" if together == 1 else f"{together} steps"
        ax.set_xlabel(
            f"{label};  a bar is {each}, the height of a colour its share of that time", fontsize=12
        )
    else:
        draw_bars(ax, events, bars, rows, points_per_unit)
        bar_pt = LANE_HEIGHT * extent.height * 72 / figure.dpi / (height + 0.8)
        write_names(ax, events, bars, rows, points_per_unit, bar_pt)
    mark_steps(ax, starts, points_per_unit)
    return ax


def _spans(events: Sequence[Event], clock: str) -> tuple[list[tuple[int, int]], float, str]:
    """(start, end) of each event in clock ticks, ticks per shown unit, and the axis label."""
    what, ticks_per_s = _CLOCKS[clock]
    if clock == "sim":
        spans = [(event.sim_start_ps, event.sim_end_ps) for event in events]
    else:
        origin = min(event.wall_start_ns for event in events)
        spans = [(event.wall_start_ns - origin, event.wall_end_ns - origin) for event in events]
    length_s = (max(end for _, end in spans) - min(start for start, _ in spans)) / ticks_per_s
    factor_s, prefix = si_scale([length_s], largest=0)
    return spans, factor_s * ticks_per_s, f"{what} [{prefix}s]"


def _step_starts(events: Sequence[Event], bars: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Step -> where its first event starts, on any rank; in the order of time."""
    starts: dict[int, float] = {}
    for event, (start, _) in zip(events, bars, strict=True):
        starts[event.step] = min(start, starts.get(event.step, start))
    return dict(sorted(starts.items(), key=lambda item: item[1]))


def _rows(lanes: Iterable[Lane]) -> dict[Lane, float]:
    """The vertical position of each lane, with a gap between ranks."""
    rows: dict[Lane, float] = {}
    position, previous = -1.0, None
    for lane in lanes:
        position += 1.0 + _RANK_GAP if previous not in (None, lane[0]) else 1.0
        rows[lane], previous = position, lane[0]
    return rows


def _lane_labels(lanes: dict[Lane, str]) -> list[str]:
    """The name of each lane; before it the rank, in bold, where a rank begins."""
    labels = []
    previous = None
    for (rank, _, _), name in lanes.items():
        text = name.replace("$", r"\$")  # "$" would start a formula
        labels.append(text if rank == previous else rf"$\bf{{rank\ {rank}}}$   {text}")
        previous = rank
    return labels


def _draw_lanes(ax: Axes, rows: dict[Lane, float]) -> None:
    """A faint band per lane, which shows idle time, and a line between ranks."""
    for row in rows.values():
        ax.axhspan(row - LANE_HEIGHT / 2, row + LANE_HEIGHT / 2, color="0.965", linewidth=0, zorder=0.2)
    for above, below in pairwise(rows):
        if above[0] != below[0]:
            ax.axhline((rows[above] + rows[below]) / 2, color="0.7", linewidth=0.8, zorder=0.5)


def _legend(ax: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [kind for kind in COLORS if kind in kinds]
    handles = [
        Patch(label=_KIND_NAMES.get(kind, kind), **style(kind)) for kind in known + sorted(kinds - set(known))
    ]
    ax.legend(
        handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1.0, 1.0),
        frameon=False, borderaxespad=0.2, fontsize=11, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip
