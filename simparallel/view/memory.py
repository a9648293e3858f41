"""The memory of a device over time: parameters, gradients, optimizer state, activations, stacked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from simparallel.base.units import format_bytes, si_scale
from simparallel.clock.event import Event
from simparallel.clock.memory import CATEGORIES
from simparallel.errors import InputError
from simparallel.view.names import mark_steps
from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, SKY, YELLOW, axes, labels, note
from simparallel.view.timeline import points_per_unit, spans_in_units, step_starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = dict(zip(CATEGORIES, (BLUE, ORANGE, GREEN, SKY, "#999999", PINK, YELLOW), strict=True))
# With more steps, single operations would be too thin to see.
_MOST_STEPS = 60


def plot_memory(
    events: Sequence[Event], *, clock: str = "sim", ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw the live memory of one device after each of its operations, by category.

    With more than 60 steps only the peak of each step is drawn, and the axis label says so.

    Args:
        events: events of one device, in any order; communication events have no memory figures.
        clock: "sim", the described hardware's time; or "wall", this machine's. The first event starts at 0.
        ax: axes to draw into; None makes a figure.
        title: title of the axes.

    Returns:
        The axes.

    Raises:
        InputError: no event has memory figures, events of several devices, or an unknown clock.
    """
    noted = [event for event in events if event.live_bytes]
    if not noted:
        raise InputError('plot_memory: no event records the live memory: record a run with record="full".')
    devices = sorted({(event.rank, event.device) for event in noted})
    if len(devices) > 1:
        raise InputError(f"plot_memory: events of {len(devices)} devices; choose one, such as {devices[0]}.")
    noted.sort(key=lambda event: (event.sim_end_ps, event.wall_end_ns))
    bars, label = spans_in_units(noted, clock)
    ends = np.array([start + width for start, width in bars])
    live = np.array([event.live_bytes for event in noted], np.float64)
    peak = int(live.sum(axis=1).max())
    factor, prefix = si_scale([peak], smallest=0, largest=12)
    live /= factor
    starts = step_starts(noted, bars)
    if len(starts) > _MOST_STEPS:
        steps = np.array([event.step for event in noted])
        # The moment of the highest total, with its categories: the peaks of single categories may be at other moments.
        fullest = [int(np.argmax(np.where(steps == step, live.sum(axis=1), -1.0))) for step in starts]
        ends, live = np.array([*starts.values(), ends[-1]]), live[[*fullest, fullest[-1]]]
        label += ";  the peak of each step"
    else:
        # Leave a gap for steps that were not recorded: NaN interrupts the areas.
        jumps = [i for i in range(1, len(noted)) if noted[i].step > noted[i - 1].step + 1]
        ends, live = np.insert(ends, jumps, ends[jumps]), np.insert(live, jumps, np.nan, axis=0)
    ax = axes(ax, 13, 4)
    tops = live.cumsum(axis=1)
    # An older file has fewer categories.
    for number, category in enumerate(CATEGORIES[: live.shape[1]]):
        if np.nanmax(live[:, number]) > 0:
            below = tops[:, number] - live[:, number]
            ax.fill_between(
                ends, below, tops[:, number], step="post", linewidth=0, color=COLORS[category], label=category
            )
    ax.axhline(peak / factor, color="0.3", linewidth=1, linestyle=(0, (4, 3)))
    ax.set_xlim(0, float(np.nanmax(ends)) or 1.0)
    # A fifth above the peak is for the labels of steps.
    ax.set_ylim(0, peak / factor * 1.2 or 1.0)
    text, place = f"peak {format_bytes(peak)}", (1, peak / factor)
    note(ax, text, place, (-4, 3), xycoords=("axes fraction", "data"), fontsize=11, va="bottom", color="0.3")
    labels(ax, label, f"alive [{prefix}B]", title)
    ax.tick_params(axis="both", labelsize=11)
    handles, names = ax.get_legend_handles_labels()
    # Reversed, so that the legend has the order of the stack.
    ax.legend(handles[::-1], names[::-1], loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=11)
    mark_steps(ax, starts, points_per_unit(ax), peak / factor * 1.13)
    return ax
