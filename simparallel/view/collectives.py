"""Times of collectives over their sizes compared with other libraries, with a panel per number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from simparallel.errors import InputError
from simparallel.view.style import BLUE, GREEN, ORANGE, PINK, RED, SKY, check_any, clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_OUR_COLOR = BLUE
# Each peer has a colour and a mark, so that it is recognised without colour vision.
_PEERS = ((RED, "s"), (ORANGE, "^"), (GREEN, "D"), (PINK, "v"), (SKY, "P"))
_LIMIT_COLOR = "0.45"

Points = Sequence[tuple[float, float]]  # (size [byte], time [s])


def plot_collectives(
    points: Mapping[tuple[str, int], Mapping[str, Points]], *, ours: Sequence[str] = (), limit: str = ""
) -> Figure:
    """Draw time per call over size, both axes logarithmic.

    Args:
        points: (collective, ranks) -> contender -> points. A row of panels per collective, a
            column per number of ranks.
        ours: contenders that are emphasised; the first one most.
        limit: contender that is a lower bound, such as memcpy, drawn as a grey line without marks.

    Raises:
        InputError: no points, or a size or time that is not positive.
    """
    import matplotlib.pyplot as plt

    _check(points)
    ops = list(dict.fromkeys(op for op, _ in points))
    ranks = list(dict.fromkeys(number for _, number in points))
    # dict.fromkeys keeps the order of first appearance, unlike a set.
    names = list(dict.fromkeys(name for curves in points.values() for name in curves))
    styles = _styles(names, ours, limit)
    figure, panels = plt.subplots(
        len(ops),
        len(ranks),
        figsize=(4.6 * len(ranks), 0.7 + 3.6 * len(ops)),
        squeeze=False,
        sharex=True,
        # One scale for all numbers of ranks of a collective, so that panels can be compared.
        sharey="row",
        layout="constrained",
    )
    for row, op in zip(panels, ops, strict=True):
        for ax, number in zip(row, ranks, strict=True):
            _panel(ax, points.get((op, number), {}), styles)
            ax.set_title(f"{op}, {number} ranks", fontsize=12)
        row[0].set_ylabel("time per call", fontsize=11)
    for ax in panels[-1]:
        ax.set_xlabel("size of the vector", fontsize=11)
    # One legend for all panels: a contender may be missing from some of them.
    handles = {h.get_label(): h for ax in panels.flat for h in ax.get_lines() if h.get_label() in styles}
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside upper center",
        ncols=len(names),
        frameon=False,
        fontsize=11,
        handlelength=3,
    )
    return figure


def _check(points: Mapping[tuple[str, int], Mapping[str, Points]]) -> None:
    pairs = [pair for curves in points.values() for curve in curves.values() for pair in curve]
    check_any("plot_collectives", pairs, "{(collective, ranks): {contender: [(bytes, seconds), ...]}}")
    for size, seconds in pairs:
        if not (size > 0 and seconds > 0):
            raise InputError(
                f"plot_collectives: size {size} and time {seconds}: the axes are logarithmic, so both must be above 0."
            )


def _styles(names: Sequence[str], ours: Sequence[str], limit: str) -> dict[str, dict[str, Any]]:
    """Return name -> style of its line."""
    peers = [name for name in names if name not in ours and name != limit]
    styles: dict[str, dict[str, Any]] = {}
    for number, name in enumerate(peers):
        color, mark = _PEERS[number % len(_PEERS)]
        styles[name] = {"color": color, "marker": mark, "markersize": 5, "linewidth": 1.4, "zorder": 3}
    for number, name in enumerate(ours):
        styles[name] = {
            "color": _OUR_COLOR, "marker": "o", "markersize": 6, "zorder": 6 - number,
            "linewidth": 1.6 if number else 3.2, "linestyle": (0, (4, 2)) if number else "-",
            "markerfacecolor": "white" if number else _OUR_COLOR,
        }  # fmt: skip
    styles[limit] = {"color": _LIMIT_COLOR, "linestyle": (0, (1, 1.5)), "linewidth": 2, "zorder": 2}
    return styles


def _panel(ax: Axes, curves: Mapping[str, Points], styles: Mapping[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from simparallel.base.units import format_seconds

    for name, curve in curves.items():
        sizes, times = zip(*sorted(curve), strict=True)
        ax.plot(sizes, times, label=name, **styles[name])
    # Sizes are powers of two.
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.xaxis.set_major_locator(LogLocator(base=32))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda size, _: _format_size(size)))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: format_seconds(seconds)))
    clean(ax)


def _format_size(size_bytes: float) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:g} {name}"
    return f"{size_bytes:g} B"
