"""Speed over the number of ranks, measured and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simparallel.errors import InputError
from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, RED, SKY, axes, labels, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_STYLES = ((BLUE, "o"), (RED, "s"), (GREEN, "D"), (ORANGE, "^"), (PINK, "v"), (SKY, "P"))


def plot_scaling(
    rates: Mapping[str, Sequence[tuple[int, float]]],
    *,
    cores: int | None = None,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw for each curve how many times faster n ranks are than one (or the fewest), beside the ideal of n times.

    Args:
        rates: name of the curve -> (ranks, samples per second) pairs; speeds are relative to the pair of fewest
            ranks of the curve.
        cores: cores of the machine that was measured; numbers of ranks above it are in a grey region, because there
            ranks share cores.
        ax: axes to draw into; None makes a figure.
        title: title of the axes.

    Returns:
        The axes.

    Raises:
        InputError: no curve, a curve without points, or a number that is not positive.
    """
    from matplotlib.ticker import NullLocator

    if not rates or not all(rates.values()) or min(min(pair) for points in rates.values() for pair in points) <= 0:
        raise InputError("plot_scaling: give {name: [(ranks, samples per second), ...]}, with numbers above 0.")
    ax = axes(ax, 8, 5)
    counts = sorted({count for points in rates.values() for count, _ in points})
    left, right = counts[0] / 1.25, counts[-1] * 1.25
    if cores is not None and counts[-1] > cores:
        # The edge lies between the last number that fits and the next one.
        ax.axvspan(
            cores * 1.19, right, color="0.92", zorder=0, label=f"more ranks than the {cores} cores of the machine"
        )
    ax.plot(counts, [count / counts[0] for count in counts], color="0.45", ls=(0, (1, 1.5)), lw=1.8, label="n times")
    for number, (name, points) in enumerate(rates.items()):
        colour, mark = _STYLES[number % len(_STYLES)]
        ranks, speeds = zip(*sorted(points), strict=True)
        shown = [speed / speeds[0] * ranks[0] / counts[0] for speed in speeds]
        ax.plot(ranks, shown, color=colour, marker=mark, markersize=7, linewidth=2.2, label=literal(name))
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    ax.set_xticks(counts)
    ax.set_xlim(left, right)
    unit = "one rank" if counts[0] == 1 else f"{counts[0]} ranks"
    labels(ax, "ranks", f"speed, in units of {unit}", title)
    ax.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax
