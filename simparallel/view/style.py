"""The look that all pictures share: colours, grids, titles, notes."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from typing import TYPE_CHECKING, Any

from simparallel.base.names import printable
from simparallel.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes

# Okabe and Ito, "Color Universal Design" (2008): distinguishable with any colour vision.
ORANGE, SKY, GREEN, PINK, RED, BLUE, YELLOW = (
    "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#D55E00", "#0072B2", "#F0E442",
)  # fmt: skip
DARK = "#10243E"
# Ranks 0 to 6 have these colours, ranks 7 to 13 lighter ones; then they repeat.
_RANKS = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW)


def check_any(who: str, things: Sized, form: str) -> None:
    """Raise InputError, which names the function `who` and the form of its argument, if there is nothing to draw."""
    if not things:
        raise InputError(f"{who}: nothing to draw; give {form}.")


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """Return the axes to draw into: `ax`, or None for those of a new figure of this size [inch]."""
    if ax is None:
        import matplotlib.pyplot as plt

        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return ax


def clean(ax: Axes) -> None:
    """Draw a faint grid behind the data, and hide the frame above and beside it."""
    ax.grid(True, color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def literal(text: str) -> str:
    """Return a text of a user for matplotlib, which shows it as it is, and not as a formula."""
    return printable(text).replace("$", r"\$")


def head(ax: Axes, title: str | None) -> None:
    """Set the title of a picture, if it has one."""
    if title:
        ax.set_title(printable(title), loc="left", fontsize=13, fontweight="bold", parse_math=False)


def labels(ax: Axes, xlabel: str, ylabel: str, title: str | None = None, size: int | None = 12) -> None:
    """Label both axes, and add the grid and the title that pictures of curves have."""
    ax.set_xlabel(xlabel, fontsize=size)
    ax.set_ylabel(ylabel, fontsize=size)
    clean(ax)
    head(ax, title)


def write(ax: Axes, x: float, y: float, text: str, size: float, **style: Any) -> None:
    """Write a text as it is, and not as a formula, by default with its middle at the point."""
    plain: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": size, "parse_math": False}
    ax.text(x, y, printable(text), **{**plain, **style})


def box(ax: Axes, x: float, y: float, width: float, height: float, **style: Any) -> None:
    """Draw a rectangle with its first corner at a point."""
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, **style))


def arrow(ax: Axes, start: Any, end: Any, zorder: float = 3, **style: Any) -> None:
    """Draw an arrow from one point to another."""
    ax.annotate("", end, start, arrowprops={"arrowstyle": "-|>", **style}, zorder=zorder)


def note(ax: Axes, text: str, point: Any, offset: Any, **style: Any) -> None:
    """Write a text beside a point, `offset` (1/72 inch) away from it, by default to its left."""
    ax.annotate(text, point, xytext=offset, textcoords="offset points", **{"ha": "right", "color": "0.35", **style})


def rank_colour(rank: int) -> tuple[float, ...]:
    """Return the colour of a rank: the same one in all pictures."""
    from matplotlib.colors import to_rgb

    share = (1.0, 0.45)[rank // len(_RANKS) % 2]
    return tuple(1 - share * (1 - c) for c in to_rgb(_RANKS[rank % len(_RANKS)]))


def readable_on(colour: Sequence[float] | np.ndarray) -> str:
    """Return black, or white on a dark colour (relative luminance of sRGB, WCAG 2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour[:3]]
    luminance = sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    # At 0.179 black and white have equal contrast: (l + 0.05) / 0.05 = 1.05 / (l + 0.05).
    return "black" if luminance > 0.179 else "white"
