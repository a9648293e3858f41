"""Loss curves, drawn so that overlapping curves remain distinguishable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

from simparallel.errors import InputError
from simparallel.view.style import DARK, GREEN, ORANGE, PINK, RED, SKY, YELLOW, axes, check_any, labels, literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = (ORANGE, SKY, GREEN, PINK, YELLOW, RED)
# The last curve is on top of all others: dark, thin and dashed, so that the curves below it show.
_TOP_COLOR = DARK
_THINNEST_PT = 1.8
_MARK_UP_TO = 40  # points; more marks than that hide the dashes


def plot_loss(
    history: Mapping[str, Sequence[float] | Sequence[tuple[int, float]]],
    *,
    ax: Axes | None = None,
    title: str | None = None,
) -> Axes:
    """Draw loss over training step, a curve per entry.

    Each curve is thinner than the previous one and on top of it, so equal curves appear as
    a thin dashed line inside a wide light one: put the reference last. Losses that are not finite
    leave gaps.

    Args:
        history: name of the curve -> losses, or (step, loss) pairs.
        ax: axes to draw into; None makes a figure.
        title: title of the axes; by default the names, and with two curves their largest difference.

    Returns:
        The axes.

    Raises:
        InputError: no curve, a curve without points, or points in neither form.
    """
    from matplotlib.ticker import MaxNLocator

    curves = {name: _points(name, values) for name, values in history.items()}
    check_any("plot_loss", curves, '{"4 devices": [0.9, 0.7, ...]}')
    ax = axes(ax, 8, 4.5)
    last = len(curves) - 1
    # More curves on top of each other need a wider first one.
    widest_pt = min(10.0, 4.0 + 2.0 * last)
    for number, (name, (steps, losses)) in enumerate(curves.items()):
        on_top = number == last
        width = widest_pt - (widest_pt - _THINNEST_PT) * (number / last if last else 1.0)
        # A point without neighbours has no line and needs a mark; marks on wide lines would hide the next curve.
        marks = list(range(len(steps))) if on_top and len(steps) <= _MARK_UP_TO else _lone(losses)
        has_any = any(map(isfinite, losses))
        ax.plot(
            steps,
            losses,
            label=literal(name if has_any else f"{name} (no finite loss)"),
            color=_TOP_COLOR if on_top else _COLORS[number % len(_COLORS)],
            # A single curve has nothing below it to show through the gaps.
            linestyle=(0, (4, 2)) if on_top and last else "-",
            linewidth=width,
            marker="o" if marks else None,
            markevery=marks or None,
            markersize=width + 2.5,
            markeredgewidth=0,
            zorder=3 + number,
        )
    labels(ax, "training step", "loss", _title(curves) if title is None else title)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    if not any(isfinite(loss) for _, losses in curves.values() for loss in losses):
        ax.text(0.5, 0.5, "no finite loss", transform=ax.transAxes, ha="center", va="center", fontsize=14)
        ax.set_yticks([])
    ax.legend(frameon=False, handlelength=3.5, fontsize="large")
    return ax


def _title(curves: Mapping[str, tuple[list[float], list[float]]]) -> str:
    """Return the default title; with two curves it gives their largest difference, which the picture may not show."""
    title = f"Training loss: {', '.join(curves)}"
    if len(curves) != 2:
        return title
    title = f"Training loss: {' and '.join(curves)}"
    first, second = (dict(zip(*points, strict=True)) for points in curves.values())
    shared = [abs(first[s] - second[s]) for s in first.keys() & second.keys() if isfinite(first[s] - second[s])]
    if not shared:
        return title
    return f"{title} differ by {max(shared):.1g} at most" if max(shared) else f"{title} are equal"


def _lone(losses: Sequence[float]) -> list[int]:
    """Return the indices of finite losses without finite neighbours, which have no line."""
    # Padded on both sides, so that the first and last points need no special case.
    known = [False, *map(isfinite, losses), False]
    return [n for n in range(len(losses)) if known[n + 1] and not known[n] and not known[n + 2]]


def _points(name: str, values: Sequence[Any]) -> tuple[list[float], list[float]]:
    """Return (steps, losses) of one curve."""
    rows = list(values)
    if not rows:
        raise InputError(f"plot_loss: curve {name!r} has no points.")
    try:
        numbered = rows if all(isinstance(row, tuple | list) for row in rows) else enumerate(rows)
        pairs = [(float(step), float(loss)) for step, loss in numbered]
    except (TypeError, ValueError) as error:
        raise InputError(f"plot_loss: curve {name!r} must be losses or (step, loss) pairs: {error}.") from error
    return [step for step, _ in pairs], [loss for _, loss in pairs]
