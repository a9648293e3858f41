"""Plans in time and memory: many that were tried, known ones with names, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simparallel.base.units import si_scale
from simparallel.errors import InputError
from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, RED, SKY, axes, labels, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KNOWN = ((BLUE, "o"), (GREEN, "^"), (ORANGE, "P"), (PINK, "X"), (SKY, "v"))
_FRONT_MARKS = "osD*"

Point = tuple[float, float]  # time [s], memory [byte]


def plot_search_landscape(
    front: Mapping[str, Sequence[Point]],
    known: Mapping[str, Point] | None = None,
    tried: Sequence[Point] = (),
    *,
    ax: Axes | None = None,
    title: str | None = None,
    tried_label: str = "tried",
) -> Axes:
    """Draw plans by the time of their step and the memory of a device, both axes logarithmic.

    Args:
        front: kind of a plan -> (time [s], memory [byte]) of its plans on the front, each kind with a mark of its own;
            a line joins the plans of all kinds.
        known: name -> (time, memory) of plans to compare with.
        tried: (time, memory) of further plans, in grey.
        ax: axes to draw into; None makes a figure.
        title: title of the axes.
        tried_label: what the further plans are, for the legend.

    Returns:
        The axes.

    Raises:
        InputError: no plan on the front, or a number that is not positive.
    """
    from matplotlib.ticker import LogLocator, NullLocator

    known = known or {}
    points = [point for each in front.values() for point in each]
    everything = [*points, *known.values(), *tried]
    if not points or min(min(point) for point in everything) <= 0:
        raise InputError("plot_search_landscape: give {kind: [(time in s, memory in bytes), ...]}, numbers above 0.")
    ax = axes(ax, 8, 6)
    time, time_prefix = si_scale([max(t for t, _ in points)], largest=0)
    size, size_prefix = si_scale([max(m for _, m in points)], smallest=0, largest=12)

    def columns(found: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [t / time for t, _ in found], [m / size for _, m in found]

    if tried:
        ax.plot(*columns(tried), ".", color="0.72", markersize=5, label=tried_label)
    # More memory helps only from the next plan on: the front is a staircase.
    times, sizes = columns(sorted(points, key=lambda point: point[1]))
    ax.step(times, sizes, where="pre", color=RED, linewidth=1.3, zorder=2)
    for (kind, plans), mark in zip(front.items(), _FRONT_MARKS, strict=False):
        style: Any = {"color": RED, "markeredgecolor": "white", "markeredgewidth": 0.6, "zorder": 4}
        ax.plot(*columns(plans), mark, markersize=7, label=literal(kind), **style)
    for number, (name, point) in enumerate(known.items()):
        colour, mark = _KNOWN[number % len(_KNOWN)]
        ax.plot(
            *columns([point]), mark, markersize=11, color=colour, markeredgecolor="black", zorder=5, label=literal(name)
        )
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    memory = f"memory of a device, as modelled [{size_prefix}B]"
    labels(ax, f"predicted time of a step [{time_prefix}s]", memory, title)
    ax.legend(fontsize=10, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
