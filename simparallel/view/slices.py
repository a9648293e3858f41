"""Pictures of the slices of tensors and the ranks that hold them."""

from __future__ import annotations

from itertools import accumulate, product
from math import prod
from typing import Any

from simparallel.base.units import format_numbers
from simparallel.layout.layout import Layout
from simparallel.view.style import axes, box, check_any, literal, rank_colour, readable_on, write

# The gap between two tensors, in widths of a tensor.
_GAP = 0.35
_UNCUT = (0.85, 0.85, 0.85, 1.0)


def plot_slices(tensors: list[tuple[str, Layout, tuple[int, ...]]], title: str = "", ax: Any = None) -> Any:
    """Draw tensors side by side as grids of slices; a slice has the colour of the first rank that holds it.

    The last dim runs to the right, all others downwards with the first dim outermost, as arrows show. Every slice
    is labelled with the ranks that hold it.

    Args:
        tensors: (name, layout called with aliases, global shape) of each.
        title: title of the picture.
        ax: axes to draw into; None makes a figure.

    Returns:
        The matplotlib Axes.

    Raises:
        InputError: no tensors.
    """
    check_any("plot_slices", tensors, "[(name, layout, shape), ...]")
    ax = axes(ax, 3.2 * len(tensors) + 0.4, 3.9)
    for number, (name, layout, shape) in enumerate(tensors):
        left = number * (1 + _GAP)
        cuts = layout.cuts
        # A picture has two directions: the last dim runs across, all others down.
        across, down = (cuts[-1] if cuts else 1), prod(cuts[:-1])
        lengths = [[stop - start for start, stop in spans] for spans in layout.spans(shape)]
        rows, columns = _bands(list(map(prod, product(*lengths[:-1])))), _bands(lengths[-1] if cuts else [1])
        holders: dict[tuple[int, ...], list[int]] = {chunk: [] for chunk in product(*map(range, cuts))}
        for rank in layout.rank_list:
            holders[tuple(layout.chunk(rank, dim) for dim in range(len(cuts)))].append(rank)
        for i, ranks in enumerate(holders.values()):
            (_, bottom, height), (start, _, width) = rows[i // across], columns[i % across]
            if not height or not width:
                # An empty slice has no area to draw.
                continue
            # The first holder gives the colour, so a rank has the same colour in all tensors.
            colour = rank_colour(ranks[0]) if len(holders) > 1 else _UNCUT
            x, y = left + start, 1 - bottom
            box(ax, x, y, width, height, facecolor=colour, edgecolor="white", linewidth=1.5)
            text = format_numbers(ranks)
            # The largest font that fits into the width and height of a slice.
            size = max(4.0, min(10.0, 160 / across / (0.62 * max(len(text), 2)), 130 / down))
            write(ax, x + 0.5 * width, y + 0.5 * height, text, size, color=readable_on(colour))
        _name_dims(ax, left, len(cuts))
        partial = f"\naddends along {', '.join(layout.partial)}" if layout.partial else ""
        write(ax, left + 0.5, 1.04, f"{name}  {shape}{partial}", 9, va="bottom")
    ax.set_xlim(-0.15, len(tensors) * (1 + _GAP) - _GAP + 0.05)
    ax.set_ylim(-0.3, 1.25)
    middle = (len(tensors) * (1 + _GAP) - _GAP) / 2
    write(ax, middle, -0.16, "numbers: the ranks that hold the slice", 9, va="top", color="0.3")
    ax.set_axis_off()
    if title:
        ax.set_title(literal(title), fontsize=10)
    return ax


def _bands(lengths: list[int]) -> list[tuple[float, float, float]]:
    """Return (start, stop, length) of adjacent parts as shares of the total; equal parts if all are empty."""
    lengths = lengths if any(lengths) else [1] * len(lengths)
    stops, total = list(accumulate(lengths)), sum(lengths)
    return [((e - n) / total, e / total, n / total) for e, n in zip(stops, lengths, strict=True)]


def _name_dims(ax: Any, left: float, ndim: int) -> None:
    """Write the directions of a tensor's dims: below it, and vertically beside it with a downward arrow."""
    if ndim:
        write(ax, left + 0.5, -0.03, f"dim {ndim - 1} →", 8, va="top", color="0.3")
    if ndim > 1:
        down = "dim 0" if ndim == 2 else f"dims {', '.join(map(str, range(ndim - 1)))}"
        write(ax, left - 0.03, 0.5, f"← {down}", 8, ha="right", rotation=90, color="0.3")
