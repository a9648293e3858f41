"""The text in a timeline: the names of events inside their bars, and the numbers of steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from simparallel.base.names import printable
from simparallel.clock.event import Event, Lane
from simparallel.view.bars import COLORS, HATCHED, Bar
from simparallel.view.style import literal, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_PT, _SMALLEST_PT = 8.5, 6.0
# Free space on each side of a name.
_MARGIN_PT = 2.0
_STEP_SIZE_PT = 10.0


@cache
def width_pt(text: str) -> float:
    """Return the width of a text [pt] per point of font size."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    # Measured on the outlines, so no figure has to be drawn.
    path = TextPath((0, 0), literal(text), size=100, prop=FontProperties(), usetex=False)
    return float(path.get_extents().width) / 100


def distinct_lengths(names: Iterable[str]) -> dict[str, int]:
    """Return short name -> how many of its first letters distinguish it from the other ones."""
    texts = sorted(set(map(_short, names)))
    common = [len(commonprefix(pair)) for pair in pairwise(texts)]
    return {text: 1 + max(pair) for text, pair in zip(texts, pairwise([0, *common, 0]), strict=False)}


def _short(name: str) -> str:
    """Return "MatMul" of "MatMul.backward": the colour shows that it is backward."""
    return name.partition(".")[0].partition(" ")[0]


def fitted(name: str, across_pt: float, upright_pt: float, least: int = 3) -> tuple[str, float, bool] | None:
    """Return (text, size [pt], whether it is vertical) of a name in a bar; None if it does not fit.

    Tries horizontal text first, then vertical, then smaller, then truncated, in the direction that keeps more letters.

    Args:
        name: name of the event.
        across_pt: width of the bar [pt].
        upright_pt: height of the bar [pt].
        least: letters that a truncated name keeps.
    """
    texts = [text for text in dict.fromkeys((name, _short(name))) if text.strip()]
    for text in texts:
        if upright_pt >= _SIZE_PT and width_pt(text) * _SIZE_PT + 2 * _MARGIN_PT <= across_pt:
            return text, _SIZE_PT, False
    if not texts or across_pt < _SMALLEST_PT + 0.5:
        # Too narrow even for a vertical line of small letters.
        return None
    room_pt = upright_pt - 3
    text = texts[-1]
    size_pt = min(_SIZE_PT, across_pt - 0.5, room_pt / width_pt(text))
    if size_pt >= _SMALLEST_PT:
        return text, size_pt, True
    kept = [text[:length] + "…" for length in range(least, len(text) - 1)]
    wide_pt = across_pt - 2 * _MARGIN_PT if upright_pt >= _SIZE_PT else 0.0
    ways = ((_SIZE_PT, wide_pt, False), (_SMALLEST_PT, room_pt, True))
    fitting = [(text, size, up) for size, length, up in ways for text in kept if width_pt(text) * size <= length]
    return max(fitting, key=lambda one: len(one[0]), default=None)


def write_names(
    ax: Axes,
    events: Sequence[Event],
    bars: Sequence[Bar],
    rows: dict[Lane, float],
    points_per_unit: float,
    height_pt: float,
) -> None:
    """Write names into the bars that have space for them.

    Args:
        ax: axes with the bars.
        events: one for each bar.
        bars: start and width of each.
        rows: vertical position of each lane.
        points_per_unit: scale of the time axis.
        height_pt: height of a bar.
    """
    left, right = ax.get_xlim()
    least = distinct_lengths(printable(event.name) for event in events)
    for event, (start, width) in zip(events, bars, strict=True):
        name = printable(event.name)
        found = fitted(name, width * points_per_unit, height_pt, max(3, least[_short(name)]))
        # The caller's axes may show only a part of the time.
        if found is None or not left <= start + width / 2 <= right:
            continue
        text, size_pt, upright = found
        look: dict[str, Any] = {"color": "black", "zorder": 4, "clip_on": True}
        look |= {"rotation": 90} if upright else {"va": "center_baseline"}
        # A plain background keeps the name readable on the hatch.
        if event.kind in HATCHED:
            look["bbox"] = {"facecolor": COLORS[event.kind], "edgecolor": "none", "pad": 0.0 if upright else 1.0}
        write(ax, start + width / 2, rows[event.lane], text, size_pt, **look)


def mark_steps(ax: Axes, starts: dict[int, float], points_per_unit: float, height: float = -0.8) -> None:
    """Draw a faint line and a label at the start of steps, at as many as fit without overlapping labels.

    Args:
        ax: axes to draw into.
        starts: start of each step; nothing is drawn for a single step.
        points_per_unit: scale of the time axis.
        height: position of the labels on the other axis.
    """
    if len(starts) < 2:
        return
    gap, air = 4 / points_per_unit, 10 / points_per_unit

    def width(step: int) -> float:
        return width_pt(f"step {step}") * _STEP_SIZE_PT / points_per_unit

    left, right = ax.get_xlim()
    typical = (max(starts.values()) - min(starts.values())) / (len(starts) - 1)
    needed = width(max(starts)) + gap + air
    # Round numbers of steps between labels, as on any axis.
    every = next((n for n in _round_numbers(len(starts)) if n * typical >= needed), 1)
    free_from = float("-inf")
    for step, start in sorted(starts.items(), key=lambda item: item[1]):
        if step % every or start < max(free_from, left) or start > right:
            continue
        until = start + gap + width(step)
        if until + gap > right:  # a drawn text is a little wider than its outlines
            continue
        ax.axvline(start, color="0.45", linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        look = {"color": "0.35", "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 1.0}}
        write(ax, start + gap, height, f"step {step}", _STEP_SIZE_PT, ha="left", zorder=4, clip_on=True, **look)
        free_from = until + air


def _round_numbers(limit: int) -> list[int]:
    """Return 1, 2, 5, 10, 20, … up to about `limit`."""
    return sorted(digit * 10**power for power in range(len(str(limit)) + 1) for digit in (1, 2, 5))
