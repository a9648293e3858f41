"""Pictures of the Adasum laboratory: the accuracy of each method, and the price of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from simparallel.base.units import format_seconds
from simparallel.errors import InputError
from simparallel.view.style import BLUE, GREEN, PINK, RED, SKY, axes, clean, labels, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each method has a colour and a mark, so that it is recognised without colour vision.
_METHODS = ((GREEN, "o"), (RED, "s"), (BLUE, "D"), (SKY, "v"), (PINK, "P"))


def plot_accuracies(accuracies: Mapping[str, Sequence[tuple[int, Sequence[float]]]]) -> Axes:
    """Draw test accuracy over the number of workers: for each method the mean as a curve, and a dot for each seed.

    Args:
        accuracies: method -> (workers, accuracies of the seeds). Methods are shifted sideways, since some are nearly
            equal.

    Raises:
        InputError: nothing to draw.
    """
    from matplotlib.ticker import FuncFormatter, NullLocator

    if not accuracies or not all(accuracies.values()):
        raise InputError("plot_accuracies: no points.")
    ax = axes(None, 8, 4.5)
    counts = sorted({count for points in accuracies.values() for count, _ in points})
    for (method, points), (color, mark) in zip(accuracies.items(), _METHODS, strict=False):
        # By a factor, because the axis is logarithmic.
        aside = 1.05 ** (list(accuracies).index(method) - (len(accuracies) - 1) / 2)
        xs, means = zip(*((count * aside, float(np.mean(values))) for count, values in points), strict=True)
        ax.plot(xs, means, label=method, color=color, marker=mark, markersize=7, linewidth=2.2)
        for x, (_, values) in zip(xs, points, strict=True):
            ax.plot([x] * len(values), values, mark, color=color, markersize=3.5, alpha=0.6)
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, [str(count) for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlim(counts[0] / 1.4, counts[-1] * 1.4)
    # As many digits as a tick needs: in a small range, ticks differ only in the second decimal.
    ax.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.6g}%"))
    ax.set_title("at the learning rate of a single worker; small marks: each seed", fontsize=12)
    labels(ax, "workers", "test accuracy")
    # Outside of the axes, where it covers no point.
    ax.legend(frameon=False, fontsize=11, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_costs(rows: Sequence[Mapping[str, float]]) -> Figure:
    """Draw time and bytes of Adasum and of a sum over the size of the vector, all axes logarithmic.

    The bytes are nearly equal, so the points are labelled with the additional bytes of Adasum.

    Args:
        rows: "size_bytes", "sum_s", "adasum_s", "ratio", "sum_bytes", "adasum_bytes".

    Raises:
        InputError: nothing to draw.
    """
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if not rows:
        raise InputError("plot_costs: no rows.")
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    sizes = [row["size_bytes"] for row in rows]
    for ax, unit, title in ((left, "s", "time per call"), (right, "bytes", "sent by each rank, halving and doubling")):
        for op, label, (color, mark), width in (
            ("sum", "sum", _METHODS[1], 5.0),
            ("adasum", "Adasum", _METHODS[2], 2.0),
        ):
            heights = [row[f"{op}_{unit}"] for row in rows]
            ax.plot(sizes, heights, label=label, color=color, marker=mark, markersize=width + 4, linewidth=width)
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=10 if ax is left else 2)
        ax.set_xticks(sizes, [f"{size / (1 << 20):g} MiB" for size in sizes])
        for axis in (ax.xaxis, ax.yaxis):
            axis.set_minor_locator(NullLocator())
        ax.set_title(title, fontsize=12)
        ax.set_xlabel("size of the vector", fontsize=11)
        clean(ax)
    for row in rows:
        more = row["adasum_bytes"] - row["sum_bytes"]
        for ax, text, height in ((left, f"{row['ratio']:.1f} x", "adasum_s"), (right, f"+ {more:g} B", "adasum_bytes")):
            note(ax, text, (row["size_bytes"], row[height]), (-6, 5), fontsize=11, color="black")
    for ax in (left, right):
        # Space for the text of the first point.
        ax.margins(x=0.3, y=0.2)
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    sent = [row["sum_bytes"] for row in rows]
    right.set_yticks(sent, [f"{size / (1 << 20):g} MiB" for size in sent])
    left.legend(frameon=False, fontsize=11, loc="upper left")
    return figure
