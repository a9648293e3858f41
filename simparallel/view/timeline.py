"""The rank x device x stream timeline: who works, who communicates, who waits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from simparallel.cluster import PS_PER_S
from simparallel.errors import InputError
from simparallel.events import COMPUTE, Event
from simparallel.units import si_scale

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito, "Color Universal Design" (2008): told apart with any colour vision.
COLORS = {
    "forward": "#56B4E9",
    "backward": "#E69F00",
    "optimizer": "#009E73",
    "collective": "#CC79A7",
    "p2p": "#F0E442",
    "copy": "#D55E00",
}
_OTHER_COLOR = "#999999"
_HATCHED = ("collective", "p2p", "copy")  # communication differs in more than colour
_CLOCKS = {"sim": ("simulated time", PS_PER_S), "wall": ("wall time", 10**9)}
_LANE_HEIGHT = 0.84
_RANK_GAP = 0.45  # lanes
_NAME_SIZE_PT = 8.5

Lane = tuple[int, int, str]  # (rank, device, stream)


def plot_timeline(
    events: Sequence[Event], *, clock: str = "sim", ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw every event as a bar, in a lane per (rank, device, stream).

    Bars overlap where a stream's events do: in wall time, collectives in flight together.

    Args:
        events: of any ranks and steps, in any order.
        clock: "sim", the described hardware's time from the start of the run; or "wall", this
            machine's time from the first event.
        ax: axes to draw into; None makes a figure of a fitting size.
        title: of the axes.

    Raises:
        InputError: no events, or an unknown clock.
    """
    import matplotlib.pyplot as plt

    if clock not in _CLOCKS:
        raise InputError(f"plot_timeline: clock={clock!r} is not a clock; choose 'sim' or 'wall'.")
    if not events:
        raise InputError("plot_timeline: no events to draw; were they kept (keep_events) and selected?")
    spans, factor, label = _spans(events, clock)
    rows = _rows(events)
    height = max(rows.values()) + 1.0
    own_figure = ax is None
    if ax is None:
        _, ax = plt.subplots(figsize=(13, min(20.0, 1.5 + 0.42 * height)), layout="constrained")

    first = min(start for start, _ in spans) / factor
    last = max(end for _, end in spans) / factor
    margin = (last - first or 1.0) * 0.008
    ax.set_xlim(first - margin, last + margin)
    ax.set_ylim(height - 0.35, -1.15)  # rank 0 on top; above it, room for the step labels
    ax.set_xlabel(label, fontsize=12)
    ax.set_yticks(list(rows.values()), _lane_labels(list(rows)))
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
    if own_figure:  # the layout decides how wide the axes are, and so which names fit
        figure.draw_without_rendering()
    # Points (1/72 inch), because text is measured in them.
    points_per_unit = ax.get_window_extent().width * 72 / figure.dpi / (last - first + 2 * margin)
    bars = [(start / factor, (end - start) / factor) for start, end in spans]
    _draw_bars(ax, events, bars, rows, points_per_unit)
    _write_names(ax, events, bars, rows, points_per_unit)
    _mark_steps(ax, events, bars, points_per_unit)
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


def _rows(events: Iterable[Event]) -> dict[Lane, float]:
    """The vertical position of each lane: ranks and devices in order, compute above communication."""
    lanes = sorted(
        {(e.rank, e.device, e.stream) for e in events},
        key=lambda lane: (*lane[:2], lane[2] != COMPUTE, lane[2]),
    )
    rows: dict[Lane, float] = {}
    position, previous = -1.0, lanes[0][0]
    for lane in lanes:
        position += 1.0 if lane[0] == previous else 1.0 + _RANK_GAP
        rows[lane], previous = position, lane[0]
    return rows


def _lane_labels(lanes: Sequence[Lane]) -> list[str]:
    """The stream's name, after the device where a rank has several; first the rank, in bold."""
    labels = []
    with_devices = {rank for rank, device, _ in lanes if device}
    previous = None
    for rank, device, stream in lanes:
        name = stream.replace("$", r"\$")  # "$" would start a formula
        if rank in with_devices:
            name = f"sim:{device} {name}"
        labels.append(name if rank == previous else rf"$\bf{{rank\ {rank}}}$   {name}")
        previous = rank
    return labels


def _draw_lanes(ax: Axes, rows: dict[Lane, float]) -> None:
    """A faint band per lane, which shows idle time, and a line between ranks."""
    for row in rows.values():
        ax.axhspan(row - _LANE_HEIGHT / 2, row + _LANE_HEIGHT / 2, color="0.965", linewidth=0, zorder=0.2)
    for above, below in pairwise(rows):
        if above[0] != below[0]:
            ax.axhline((rows[above] + rows[below]) / 2, color="0.7", linewidth=0.8, zorder=0.5)


def _legend(ax: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [kind for kind in COLORS if kind in kinds]
    handles = [Patch(label=kind, **_style(kind)) for kind in known + sorted(kinds - set(known))]
    ax.legend(
        handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1.0, 1.0),
        frameon=False, borderaxespad=0.2, fontsize=11, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip


def _style(kind: str) -> dict[str, Any]:
    hatch = "////" if kind in _HATCHED else None
    return {"facecolor": COLORS.get(kind, _OTHER_COLOR), "edgecolor": "white", "hatch": hatch}


def _draw_bars(
    ax: Axes, events: Sequence[Event], bars: Sequence[tuple[float, float]], rows: dict[Lane, float],
    points_per_unit: float,
) -> None:  # fmt: skip
    """One collection per lane and kind: a bar per call would take seconds for 20 000 events."""
    groups: dict[tuple[Lane, str], list[tuple[float, float]]] = {}
    for event, bar in zip(events, bars, strict=True):
        lane = event.rank, event.device, event.stream
        groups.setdefault((lane, event.kind), []).append(bar)
    for (lane, kind), members in groups.items():
        widths = sorted(width for _, width in members)
        # A white outline parts neighbours, but would swallow bars of a few pixels.
        outlined = widths[len(widths) // 2] * points_per_unit > 4
        ax.broken_barh(
            members,
            (rows[lane] - _LANE_HEIGHT / 2, _LANE_HEIGHT),
            linewidth=0.8 if outlined else 0.0,
            zorder=2,
            **_style(kind),
        )


def _write_names(
    ax: Axes, events: Sequence[Event], bars: Sequence[tuple[float, float]], rows: dict[Lane, float],
    points_per_unit: float,
) -> None:  # fmt: skip
    """Names inside the bars that have room for them."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    @cache
    def width_pt(text: str) -> float:
        path = TextPath((0, 0), text, size=_NAME_SIZE_PT, prop=FontProperties(), usetex=False)
        return float(path.get_extents().width)

    for event, (start, width) in zip(events, bars, strict=True):
        room_pt = width * points_per_unit - 2
        if room_pt < _NAME_SIZE_PT or not event.name.strip():
            continue
        # "MatMul.backward" is "MatMul" where space is short: the colour says backward.
        texts = (event.name, event.name.partition(".")[0].partition(" ")[0])
        text = next((text for text in texts if text and width_pt(text) <= room_pt), None)
        if text is None:
            continue
        label = ax.text(
            start + width / 2, rows[event.rank, event.device, event.stream], text, fontsize=_NAME_SIZE_PT,
            color="black", ha="center", va="center_baseline", zorder=4, clip_on=True, parse_math=False,
        )  # fmt: skip
        if event.kind in _HATCHED:  # a plain patch keeps the name readable on the hatch
            label.set_bbox({"facecolor": COLORS[event.kind], "edgecolor": "none", "pad": 1.0})


def _mark_steps(
    ax: Axes, events: Sequence[Event], bars: Sequence[tuple[float, float]], points_per_unit: float
) -> None:
    """A faint line and a label where each step starts, if there are several."""
    starts: dict[int, float] = {}
    for event, (start, _) in zip(events, bars, strict=True):
        starts[event.step] = min(start, starts.get(event.step, start))
    if len(starts) < 2:
        return
    labelled_until = float("-inf")
    for step, start in sorted(starts.items(), key=lambda item: item[1]):
        ax.axvline(start, color="0.45", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        if start < labelled_until:
            continue  # too close to the label before
        ax.text(
            start + 4 / points_per_unit, -0.8, f"step {step}", fontsize=10, color="0.35",
            ha="left", va="center", zorder=4, clip_on=True,
        )  # fmt: skip
        labelled_until = start + 46 / points_per_unit
