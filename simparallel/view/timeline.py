"""The rank x device x stream timeline, which shows computation, communication and idle time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise, zip_longest
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from simparallel.base.units import format_numbers, format_seconds, si_scale
from simparallel.clock.event import Event, Lane, check_clock, lane_names, stream_order
from simparallel.errors import InputError
from simparallel.machine.cluster import PS_PER_S
from simparallel.view.bars import (
    COLORS,
    LANE_HEIGHT,
    SHOWN_NAMES,
    draw_bars,
    draw_shares,
    draw_steps,
    steps_per_bar,
    style,
)
from simparallel.view.names import mark_steps, write_names
from simparallel.view.style import axes, head, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_CLOCKS = {"sim": ("simulated time", PS_PER_S), "wall": ("wall time", 10**9)}
_RANK_GAP = 0.45  # lanes
_IDLE = "0.955"
# High enough for "all_reduce" in vertical letters.
_LANE_INCHES = 0.6
# Up to this number of ranks, equal ones are still drawn separately.
_MOST_RANKS = 8
# Up to this ratio of their lengths, both clocks are drawn on one scale.
_MOST_RATIO = 20


def plot_timeline(
    events: Sequence[Event],
    *,
    clock: str = "sim",
    ax: Axes | None = None,
    title: str | None = None,
    collapse: bool | None = None,
    until_s: float | None = None,
) -> Axes:
    """Draw every event as a bar, in a lane per (rank, device, stream). The first one starts at 0.

    Bars overlap if a stream's events do, like concurrent collectives in wall time. If there are too many steps
    for their events to be visible, one bar stands for one or more steps: a colour's height is its share of that
    time, and the axis label says so. Events without duration, such as a receive of a message that has already
    arrived, are thin bars.

    Args:
        events: events of any ranks and steps, in any order.
        clock: "sim", the described hardware's time; or "wall", this machine's.
        ax: axes to draw into, which keep their x limits if these were set; None makes a figure of a suitable size.
        title: title of the axes.
        collapse: draw ranks with the same events at the same times as one; None does so for more than 8 ranks on
            the "sim" clock.
        until_s: end of the time axis [s]; None ends it with the last event.

    Returns:
        The axes.

    Raises:
        InputError: no events, or an unknown clock.
    """
    check_clock(clock)
    ranks = {event.rank for event in events}
    if collapse is None:
        collapse = clock == "sim" and len(ranks) > _MOST_RANKS
    equal = equal_ranks(events, clock) if collapse else {rank: [rank] for rank in sorted(ranks)}
    lanes = _shown_lanes(lane_names(events), equal)
    events = [event for event in events if event.rank in equal]
    spans, factor, label = _spans(events, clock, until_s)
    rows = _rows(lanes)
    height = max(rows.values()) + 1.0
    # The height follows the number of lanes, up to a size that still fits on a page.
    ax = axes(ax, 13, min(20.0, 1.5 + _LANE_INCHES * height))

    last = max(end for _, end in spans) / factor
    # The caller's own limits stay.
    if ax.get_autoscalex_on():
        end = last if until_s is None else until_s * _CLOCKS[clock][1] / factor
        ax.set_xlim(0, (end or 1.0) * 1.008)
    # Put rank 0 on top, with space for the step labels above it.
    ax.set_ylim(height - 0.35, -1.15)
    ax.set_xlabel(label, fontsize=12)
    ax.set_yticks(list(rows.values()), _lane_labels(lanes, equal))
    ax.tick_params(axis="both", labelsize=11)
    ax.tick_params(axis="y", length=0)
    ax.grid(True, axis="x", color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right", "left"]].set_visible(False)
    head(ax, title)
    _draw_lanes(ax, rows)
    _legend(ax, {event.kind for event in events})

    scale = points_per_unit(ax)
    bars = [(start / factor, (end - start) / factor) for start, end in spans]
    starts = step_starts(events, bars)
    covered = step_spans(events, bars)
    together = steps_per_bar([width for _, width in covered], scale)
    if together:
        draw_shares(ax, events, bars, rows, [*list(starts.values())[::together], last], covered)
        each = "a step" if together == 1 else f"{together} steps"
        ax.set_xlabel(f"{label};  a bar is {each}, the height of a colour its share of that time", fontsize=12)
    else:
        draw_bars(ax, events, bars, rows, scale)
        figure: Any = ax.figure
        bar_pt = LANE_HEIGHT * ax.get_window_extent().height * 72 / figure.dpi / (height + 0.8)
        # The steps inside a collective are modelled; they are not measured.
        if clock == "sim":
            draw_steps(ax, events, bars, rows)
        write_names(ax, events, bars, rows, scale, bar_pt)
    mark_steps(ax, starts, scale)
    return ax


def plot_both_clocks(events: Sequence[Event], modelled: str, measured: str, *, collapse: bool | None = None) -> Axes:
    """Draw events at their simulated times, and below at their wall times, on one scale unless one is much shorter.

    Args:
        events: see `plot_timeline`.
        modelled: title of the simulated times.
        measured: title of the wall times.
        collapse: draw ranks with the same simulated times as one; see `plot_timeline`. On the wall clock, no ranks are
            equal.

    Returns:
        The upper axes.

    Raises:
        InputError: no events.
    """
    import matplotlib.pyplot as plt

    lengths_s = [
        max(end for _, end in _spans(events, clock)[0]) / ticks_per_s for clock, (_, ticks_per_s) in _CLOCKS.items()
    ]
    ranks, lanes = {event.rank for event in events}, lane_names(events)
    height = 2 * (1.5 + _LANE_INCHES * (len(lanes) + _RANK_GAP * len(ranks)))
    _, both = plt.subplots(2, 1, figsize=(13, min(20.0, height)), layout="constrained")
    measured = f"{measured}: {lengths_s[1] / lengths_s[0]:.3g} x as long" if lengths_s[0] else measured
    # On one scale, times that are much shorter would be a few pixels.
    is_one_scale = max(lengths_s) < _MOST_RATIO * min(lengths_s)
    until_s = max(lengths_s) if is_one_scale else None
    measured += "" if is_one_scale else ", on a scale of its own"
    for ax, clock, title in zip(both, _CLOCKS, (modelled, measured), strict=True):
        plot_timeline(events, clock=clock, ax=ax, title=title, collapse=collapse, until_s=until_s)
    # The legend of the upper axes serves both, and the title needs the room.
    legend = both[1].get_legend()
    if legend is not None:
        legend.remove()
    upper: Axes = both[0]
    return upper


def points_per_unit(ax: Axes) -> float:
    """Return the points (1/72 inch, the unit of text) per unit of the time axis."""
    figure: Any = ax.figure
    # Run the layout first: it decides the width of the axes.
    if engine := figure.get_layout_engine():
        engine.execute(figure)
    left, right = ax.get_xlim()
    return float(ax.get_window_extent().width * 72 / figure.dpi / (right - left))


def spans_in_units(events: Sequence[Event], clock: str) -> tuple[list[tuple[float, float]], str]:
    """Return start and width of each event in the unit of the axis, and the label of the axis.

    Raises:
        InputError: an unknown clock.
    """
    check_clock(clock)
    spans, factor, label = _spans(events, clock)
    return [(start / factor, (end - start) / factor) for start, end in spans], label


def _spans(
    events: Sequence[Event], clock: str, until_s: float | None = None
) -> tuple[list[tuple[int, int]], float, str]:
    """Return (start, end) of each event in ticks since the first start, ticks per shown unit, and the axis label."""
    if not events:
        raise InputError(
            'plot_timeline: no events to draw: nothing was recorded (record="off"), nothing happened, or nothing '
            "was selected."
        )
    what, ticks_per_s = _CLOCKS[clock]
    spans = [event.span(clock) for event in events]
    origin = min(start for start, _ in spans)
    spans = [(start - origin, end - origin) for start, end in spans]
    longest_s = max(end for _, end in spans) / ticks_per_s if until_s is None else until_s
    factor_s, prefix = si_scale([longest_s], largest=0)
    label = f"{what} [{prefix}s]"
    if clock == "sim" and origin:
        # The simulated clock starts with the run, so an offset means something; the wall clock counts from boot.
        label += f", 0 is {format_seconds(origin / ticks_per_s)} after the start"
    return spans, factor_s * ticks_per_s, label


def equal_ranks(events: Iterable[Event], clock: str = "sim") -> dict[int, list[int]]:
    """Group ranks with the same events at the same times: return first rank of a set -> all ranks of the set."""
    streams: dict[tuple[int, int], set[str]] = {}
    for event in events:
        streams.setdefault((event.rank, event.device), set()).add(event.stream)
    # Stream names contain groups and peers, which differ between equal ranks: compare positions of streams instead.
    places = {
        (*device, stream): place
        for device, found in streams.items()
        for place, stream in enumerate(sorted(found, key=stream_order))
    }
    done: dict[int, list[Any]] = {}
    for event in events:
        what = event.device, places[event.lane], event.name, event.kind, event.step, *event.span(clock)
        done.setdefault(event.rank, []).append(what)
    sets: dict[Any, list[int]] = {}
    for rank in sorted(done):
        sets.setdefault(tuple(sorted(done[rank])), []).append(rank)
    return {ranks[0]: ranks for ranks in sets.values()}


def _shown_lanes(lanes: Mapping[Lane, str], equal: Mapping[int, Sequence[int]]) -> dict[Lane, str]:
    """Return the lanes of the first rank of each set, with names that are common to the whole set."""
    names: dict[int, list[str]] = {}
    for (rank, _, _), name in lanes.items():
        names.setdefault(rank, []).append(name)
    shown: dict[Lane, str] = {}
    # Equal ranks have the same lanes in the same order, so the position identifies a lane in all of them.
    places: dict[int, int] = {}
    for lane in lanes:
        rank = lane[0]
        if rank in equal:
            place = places[rank] = places.get(rank, -1) + 1
            found = {names[twin][place] for twin in equal[rank]}
            start = commonprefix(list(found))
            shown[lane] = start if len(found) == 1 else f"{start}…]" if start.endswith("[") else f"{start}…"
    return shown


def step_starts(events: Sequence[Event], bars: Sequence[tuple[float, float]]) -> dict[int, float]:
    """Return step -> start of its first event on any rank, in order of time."""
    starts: dict[int, float] = {}
    for event, (start, _) in zip(events, bars, strict=True):
        starts[event.step] = min(start, starts.get(event.step, start))
    return dict(sorted(starts.items(), key=lambda item: item[1]))


def step_spans(events: Sequence[Event], bars: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return start and width of each step: up to the next step, or up to its last event if that step is missing."""
    # Ranks overlap: a step ends with the last of them.
    ends: dict[int, float] = {}
    for event, (start, width) in zip(events, bars, strict=True):
        ends[event.step] = max(start + width, ends.get(event.step, 0.0))
    starts = step_starts(events, bars)
    steps = list(starts)
    return [
        (starts[step], (starts[after] if after == step + 1 else ends[step]) - starts[step])
        for step, after in zip_longest(steps, steps[1:])
    ]


def _rows(lanes: Iterable[Lane]) -> dict[Lane, float]:
    """Return the vertical position of each lane, with a gap between ranks."""
    rows: dict[Lane, float] = {}
    position, previous = -1.0, None
    for lane in lanes:
        position += 1.0 + _RANK_GAP if previous not in (None, lane[0]) else 1.0
        rows[lane], previous = position, lane[0]
    return rows


def _lane_labels(lanes: Mapping[Lane, str], equal: Mapping[int, Sequence[int]]) -> list[str]:
    """Return the label of each lane; the first lane of a rank has the rank in bold before it."""
    labels = []
    previous = None
    for (rank, _, _), name in lanes.items():
        text = literal(name)
        who = rf"rank\ {rank}" if len(equal[rank]) == 1 else rf"ranks\ {format_numbers(equal[rank])}"
        who = who.replace(", ", r",\ ")
        labels.append(text if rank == previous else rf"$\bf{{{who}}}$   {text}")
        previous = rank
    return labels


def _draw_lanes(ax: Axes, rows: dict[Lane, float]) -> None:
    """Draw a faint band per lane, which shows idle time, and a line between ranks."""
    for row in rows.values():
        ax.axhspan(row - LANE_HEIGHT / 2, row + LANE_HEIGHT / 2, color=_IDLE, linewidth=0, zorder=0.2)
    for above, below in pairwise(rows):
        if above[0] != below[0]:
            ax.axhline((rows[above] + rows[below]) / 2, color="0.7", linewidth=0.8, zorder=0.5)


def _legend(ax: Axes, kinds: set[str]) -> None:
    from matplotlib.patches import Patch

    known = [kind for kind in COLORS if kind in kinds]
    handles = [Patch(label=SHOWN_NAMES.get(kind, kind), **style(kind)) for kind in known + sorted(kinds - set(known))]
    handles.append(Patch(label="idle", facecolor=_IDLE, edgecolor="0.8", linewidth=0.5))
    ax.legend(
        handles=handles,
        ncols=len(handles),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        borderaxespad=0.2,
        fontsize=11,
        handlelength=1.6,
        columnspacing=1.4,
    )
