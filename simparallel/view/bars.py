"""The bars of a timeline: one for each event, or one for each step if events are too thin to see."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.clock.event import Event, Lane
from simparallel.view.style import GREEN, ORANGE, PINK, RED, SKY, YELLOW

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {
    "forward": SKY, "backward": ORANGE, "optimizer": GREEN, "collective": PINK, "p2p": YELLOW, "copy": RED,
    "range": "#DDDDDD",
}  # fmt: skip
# Kinds that pictures call by another name.
SHOWN_NAMES = {"p2p": "message", "range": "mark"}
OTHER_COLOR = "#999999"
# Communication is hatched, so that it is distinguished by more than colour.
HATCHED = ("collective", "p2p", "copy")
LANE_HEIGHT = 0.84
# Below this width the events of a step cannot be distinguished.
_THINNEST_STEP_PT = 7.0
_THINNEST_BAR_PT = 3.0
# The width of an event without duration.
_NO_TIME_PT = 1.5

Bar = tuple[float, float]  # start and width, in units of the axis


def style(kind: str) -> dict[str, Any]:
    """Return the style of bars of a kind."""
    hatch = "////" if kind in HATCHED else None
    return {"facecolor": COLORS.get(kind, OTHER_COLOR), "edgecolor": "white", "hatch": hatch}


def draw_bars(
    ax: Axes, events: Sequence[Event], bars: Sequence[Bar], rows: dict[Lane, float], points_per_unit: float
) -> None:
    """Draw a bar per event, as one collection per lane and kind: single bars would take seconds for 20 000 events."""
    for (lane, kind), members in _by_lane_and_kind(events, bars).items():
        place = rows[lane] - LANE_HEIGHT / 2, LANE_HEIGHT
        # Keep messages without duration visible.
        if kind in HATCHED:
            least = _NO_TIME_PT / points_per_unit
            thin = [(start, least) for start, width in members if width < least]
            members = [bar for bar in members if bar[1] >= least]
            if thin:
                ax.broken_barh(thin, place, linewidth=0.5, edgecolor="0.4", facecolor=COLORS[kind], zorder=2.5)
            if not members:
                continue
        widths = sorted(width for _, width in members)
        # A white outline separates adjacent bars, but would cover bars of a few pixels.
        # The median decides for the whole lane, so that its bars look alike.
        outlined = widths[len(widths) // 2] * points_per_unit > 4
        ax.broken_barh(members, place, linewidth=0.8 if outlined else 0.0, zorder=2, **style(kind))


def draw_steps(ax: Axes, events: Sequence[Event], bars: Sequence[Bar], rows: dict[Lane, float]) -> None:
    """Draw ticks inside the bar of a message-based collective where its steps end."""
    for event, (start, width) in zip(events, bars, strict=True):
        if event.step_ps and width:
            # As shares of the bar, whose width is in units of the axis; the end of the last step is the bar's own.
            ends = np.cumsum(event.step_ps[:-1]) / sum(event.step_ps) * width + start
            low = rows[event.lane] + LANE_HEIGHT / 2
            ax.vlines(ends, low - LANE_HEIGHT / 3, low, color="black", linewidth=1.2, zorder=3)


def steps_per_bar(widths: Sequence[float], points_per_unit: float) -> int:
    """Return how many steps of these widths to combine in one bar, so that it is visible; 0 to draw single events."""
    step_pt = sum(widths) / len(widths) * points_per_unit
    if len(widths) < 2 or step_pt >= _THINNEST_STEP_PT:
        return 0
    return ceil(_THINNEST_BAR_PT / step_pt) if step_pt > 0 else len(widths)


def draw_shares(
    ax: Axes,
    events: Sequence[Event],
    bars: Sequence[Bar],
    rows: dict[Lane, float],
    edges: Sequence[float],
    covered: Sequence[Bar],
) -> None:
    """Draw a bar between each two edges in each lane; a colour's height is its share of the time of the steps there.

    Single events of less than a pixel would show a misleading pattern.

    Args:
        ax: axes to draw into.
        events: one for each bar.
        bars: start and width of each event.
        rows: vertical position of each lane.
        edges: edges of the drawn bars.
        covered: start and width of each step; the time between them was not recorded.
    """
    borders = np.asarray(edges)
    heights: dict[Lane, np.ndarray] = {}
    groups = _by_lane_and_kind(events, bars)
    # The floor avoids a division by 0 for steps without duration; their share is 0.
    times = np.maximum(np.diff(_busy_until(borders, covered)), 1e-300)
    for lane, kind in sorted(groups, key=lambda key: list(COLORS).index(key[1]) if key[1] in COLORS else 99):
        bottom = heights.setdefault(lane, np.zeros(len(borders) - 1))
        share = np.diff(_busy_until(borders, groups[lane, kind])) / times
        # Concurrent calls add up to more than the time.
        top = np.minimum(bottom + share, 1.0)
        # The axis points down: a lane is filled from its lower edge upwards.
        low = rows[lane] + LANE_HEIGHT / 2
        ax.fill_between(
            borders,
            # step="post" needs a value for the last edge, too.
            low - LANE_HEIGHT * np.append(bottom, bottom[-1]),
            low - LANE_HEIGHT * np.append(top, top[-1]),
            step="post",
            linewidth=0,
            zorder=2,
            **style(kind),
        )
        heights[lane] = top


def _busy_until(times: np.ndarray, bars: Sequence[Bar]) -> np.ndarray:
    """Return the total length of the bars' parts before each of these times."""
    # Sum of min(t, end) - start over all bars that have begun, by prefix sums over sorted starts and ends.
    starts, widths = np.array(sorted(bars)).T
    ends = np.sort(starts + widths)
    begun, ended = np.searchsorted(starts, times), np.searchsorted(ends, times)
    sum_starts, sum_ends = (np.concatenate([[0.0], np.cumsum(values)]) for values in (starts, ends))
    return (begun * times - sum_starts[begun]) - (ended * times - sum_ends[ended])


def _by_lane_and_kind(events: Sequence[Event], bars: Sequence[Bar]) -> dict[tuple[Lane, str], list[Bar]]:
    groups: dict[tuple[Lane, str], list[Bar]] = {}
    for event, bar in zip(events, bars, strict=True):
        groups.setdefault((event.lane, event.kind), []).append(bar)
    return groups
