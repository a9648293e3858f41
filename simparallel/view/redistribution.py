"""The flow of a redistribution: what each rank holds before and after each step, and the bytes between ranks."""

from __future__ import annotations

from itertools import permutations
from math import prod
from typing import TYPE_CHECKING, Any

from simparallel.base.units import format_bytes
from simparallel.errors import InputError
from simparallel.layout.boxes import boxes_of, size_of
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import Redistribution, Step
from simparallel.view.style import axes, box, head, rank_colour, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# A tensor is drawn as a square; columns are this far apart, rows 1 + _ROW_GAP.
_COLUMN, _ROW_GAP = 3.2, 0.28
_MOST_RANKS = 16
# Width of a flow of the whole tensor.
_WHOLE_PT = 16.0


def plot_redistribution(
    plan: Redistribution, itemsize: int = 4, ax: Axes | None = None, title: str | None = None
) -> Axes:
    """Draw a column of tensors for each layout of the plan, with the part that each rank holds, and flows between them.

    The last dim runs to the right, all others downwards. A hatched part is an addend of a sum. The width of a flow is
    its share of the tensor; below stand the step, and the bytes that a rank receives.

    Args:
        plan: the result of `plan_redistribution`; `Tensor.redistribute` moves slices by such a plan.
        itemsize: bytes of an item.
        ax: axes to draw into; None makes a figure.
        title: title of the axes.

    Returns:
        The axes.

    Raises:
        InputError: more than 16 ranks, or a tensor without dims.
    """
    if len(plan.ranks) > _MOST_RANKS or not plan.shape:
        raise InputError(
            f"plot_redistribution: {len(plan.ranks)} ranks and shape {plan.shape}; at most {_MOST_RANKS} ranks and at "
            "least one dim can be drawn."
        )
    rows = {rank: number * (1 + _ROW_GAP) for number, rank in enumerate(sorted(plan.ranks))}
    columns = len(plan.steps) + 1
    height = max(rows.values()) + 1
    ax = axes(ax, 2.6 * columns + 0.4, 0.72 * height + 1.3)
    layouts = [plan.source, *(step.layout for step in plan.steps)]
    flows = [_flows(plan, step) for step in plan.steps]
    size = max(prod(plan.shape), 1)
    for number, layout in enumerate(layouts):
        left = number * (1 + _COLUMN)
        _holders(ax, layout, plan.shape, left, rows)
        write(ax, left + 0.5, -0.35, _text(layout), 11, va="bottom", fontweight="bold")
    for number, (step, flow) in enumerate(zip(plan.steps, flows, strict=True)):
        start, stop = number * (1 + _COLUMN) + 1.08, (number + 1) * (1 + _COLUMN) - 0.08
        for (src, dst), count in sorted(flow.items()):
            _flow(ax, (start, rows[src] + 0.5), (stop, rows[dst] + 0.5), rank_colour(src), _WHOLE_PT * count / size)
        received = sorted(set(step.received_bytes(itemsize)))
        span = " to ".join(map(format_bytes, dict.fromkeys((received[0], received[-1]))))
        text = f"{step.kind}\n" + (f"{span} to each rank" if received[-1] else "no communication")
        write(ax, (start + stop) / 2, height + 0.2, text, 10, va="top", color="0.25")
    ax.set_xlim(-1.15, (columns - 1) * (1 + _COLUMN) + 1.15)
    ax.set_ylim(height + 1.1, -1.3)
    ax.set_aspect("equal", anchor="N")
    ax.set_axis_off()
    head(ax, title)
    return ax


def _text(layout: Layout) -> str:
    cuts = ", ".join("+".join(axes) or "whole" for axes in layout.axes_by_dim)
    return f"({cuts})" + (f"\npartial {', '.join(layout.partial)}" if layout.partial else "")


def _flows(plan: Redistribution, step: Step) -> dict[tuple[int, int], float]:
    """Return (src, dst) -> elements between different ranks; of a reduction, as if each rank sent to every other."""
    found: dict[tuple[int, int], float] = {}
    for move in step.moves:
        if move.source != move.target:
            found[move.source, move.target] = found.get((move.source, move.target), 0) + size_of(move.box)
    if step.exchange is None:
        received = dict(zip(plan.ranks, step.received_bytes(1), strict=True))
        found = {pair: received[pair[1]] / (len(group) - 1) for group in step.groups for pair in permutations(group, 2)}
    return found


def _holders(ax: Axes, layout: Layout, shape: tuple[int, ...], left: float, rows: dict[int, float]) -> None:
    """Draw each rank's tensor: what it holds is coloured."""
    boxes: Any = boxes_of(layout, shape)
    for rank, top in rows.items():
        box(ax, left, top, 1, 1, facecolor="0.94", edgecolor="0.75", linewidth=0.8, zorder=2)
        if rank in boxes:
            x, width = _part([boxes[rank][-1]], [shape[-1]])
            y, height = _part(boxes[rank][:-1], shape[:-1])
            look = {"facecolor": rank_colour(rank), "hatch": "///" if layout.partial else None}
            box(ax, left + x, top + y, width, height, edgecolor="white", linewidth=0.6, zorder=3, **look)
        if left == 0:
            write(ax, left - 0.12, top + 0.5, f"rank {rank}", 10, ha="right")


def _part(bounds: Any, shape: Any) -> tuple[float, float]:
    """Return start and length of a box along one direction of the picture, as shares."""
    start, length = 0.0, 1.0
    for (low, high), size in zip(bounds, shape, strict=True):
        start += length * low / max(size, 1)
        length *= (high - low) / max(size, 1)
    return start, length


def _flow(ax: Axes, start: tuple[float, float], stop: tuple[float, float], colour: Any, width_pt: float) -> None:
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    middle = (start[0] + stop[0]) / 2
    path = Path([start, (middle, start[1]), (middle, stop[1]), stop], [Path.MOVETO, *[Path.CURVE4] * 3])
    ax.add_patch(PathPatch(path, fill=False, edgecolor=colour, linewidth=max(width_pt, 0.8), alpha=0.75, zorder=1))
