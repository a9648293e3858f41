"""A pipeline schedule over time: a lane for each rank, a box for each action."""

from __future__ import annotations

from itertools import groupby, pairwise
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from simparallel.view.style import DARK, GREEN, ORANGE, SKY, YELLOW, axes, box, head, note, readable_on, write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simparallel.parallel.pipeline import Schedule

_KINDS = {"F": (SKY, "forward"), "B": (ORANGE, "backward"), "I": (YELLOW, "input gradient"), "W": (GREEN, "weights")}
# Later stages of a rank are darker.
_SHADES = (0.0, 0.35, 0.55)
_LETTER_IN = 0.075
_BUBBLE = "0.95"
# A lane reaches this far to both sides of its middle.
_HALF = 0.42
# With a curve below the boxes, they take this part of the lane.
_UPPER = 0.55


def plot_schedule(
    schedule: Schedule,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    critical_path: bool = False,
    live: bool = False,
    **times: Any,
) -> Axes:
    """Draw a schedule: what each rank does when, with the micro-batch in each box; empty space is the bubble.

    Args:
        schedule: the schedule.
        ax: axes to draw into; None makes a figure.
        title: None for the schedule's own, with its bubble.
        critical_path: outline a longest chain of actions, with lines where it changes the rank.
        live: draw below the boxes how many micro-batches have live activations over time: as an area, with its
            maximum, if they are kept until the weight gradient; as a line, if only until the input gradient.
        times: as for `Schedule.cost`: forward, input_gradient, weight_gradient, message.

    Returns:
        The matplotlib Axes.

    Raises:
        InputError: a bad time; ScheduleError: the schedule deadlocks.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    cost = schedule.cost(**times)
    height = 2 * _HALF * (_UPPER if live else 1)
    ax = axes(ax, 12, 0.6 + (0.8 if live else 0.45) * schedule.ranks)
    figure: Any = ax.figure
    seen: dict[str, set[Any]] = {}
    for rank, action, (start, end) in schedule.boxes(**times):
        colour, name = _KINDS[action.kind]
        shade = _SHADES[min(action.stage // schedule.ranks, len(_SHADES) - 1)]
        face = tuple(part * (1 - shade) for part in to_rgb(colour))
        seen.setdefault(name, set()).add(face)
        box(ax, start, rank - _HALF, end - start, height, facecolor=face, edgecolor="white", linewidth=0.6)
        room = figure.get_figwidth() * 0.8 * (end - start) / max(cost.makespan, 1)
        if room > _LETTER_IN * len(str(action.microbatch)):
            middle = (start + end) / 2, rank - _HALF + height / 2
            write(ax, *middle, str(action.microbatch), 7, color=readable_on(face))
    ax.set_xlim(0, cost.makespan)
    ax.set_ylim(schedule.ranks - 0.5, -0.5)
    ax.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    ax.set_facecolor(_BUBBLE)
    ax.spines[["top", "right"]].set_visible(False)
    share = cost.bubble / cost.makespan if cost.makespan else 0
    head(ax, f"{schedule.title}: bubble {cost.bubble:g} of {cost.makespan:g} ({share:.0%})" if title is None else title)
    shades = {name: sorted(faces, reverse=True) for name, faces in seen.items()}
    handles: list[Any] = [tuple(Patch(color=face, label=name) for face in faces) for name, faces in shades.items()]
    handles.append(Patch(label="bubble", facecolor=_BUBBLE, edgecolor="0.8", linewidth=0.5))
    if live:
        handles += _draw_live(schedule, ax, **times)
    if critical_path:
        handles += _draw_path(schedule, ax, height, **times)
    ax.legend(
        handles=handles,
        labels=[*shades, *(handle.get_label() for handle in handles[len(shades) :])],
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        title="darker: later stages of a rank" if any(len(faces) > 1 for faces in shades.values()) else None,
        title_fontsize=8,
        alignment="left",
        loc="center left",
        bbox_to_anchor=(1, 0.5),
        fontsize=8,
        frameon=False,
    )
    return ax


def _draw_path(schedule: Schedule, ax: Axes, height: float, **times: Any) -> list[Any]:
    """Outline the parts of a critical path on each rank, and connect them; return the entries of the legend."""
    from matplotlib.patches import Rectangle

    style: dict[str, Any] = {"fill": False, "edgecolor": DARK, "linewidth": 1.6}
    stays = []
    for rank, cells in groupby(schedule.critical_path(**times), key=itemgetter(0)):
        spans = [span for _, _, span in cells]
        start, end = spans[0].start, spans[-1].end
        box(ax, start, rank - _HALF, end - start, height, **style)
        stays.append((rank, start, end))
    for (source, _, end), (target, start, _) in pairwise(stays):
        # From the edge of one lane to the near edge of the other one.
        y = [rank - _HALF + (height if rank < other else 0) for rank, other in ((source, target), (target, source))]
        ax.plot([end, start], y, color=DARK, linewidth=1.6)
    return [Rectangle((0, 0), 1, 1, label="critical path", **style)]


def _draw_live(schedule: Schedule, ax: Axes, **times: Any) -> list[Any]:
    """Draw how many activations are live on each rank over time; return the entries of the legend."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch
    from matplotlib.patheffects import withStroke

    cost = schedule.cost(**times)
    line: dict[str, Any] = {"color": "0.35", "linewidth": 0.8}
    # The rest of a lane has room for the curve and a number above it.
    unit = 2 * _HALF * (1 - _UPPER) * 0.6 / max(1, *cost.peak_live_at_weight_gradient)
    for rank in range(schedule.ranks):
        until_weights, until_inputs = (_live(schedule, rank, releases, **times) for releases in ("WB", "IB"))
        x, y = [*until_weights, cost.makespan], [*until_weights.values(), 0]
        floor = rank + _HALF
        ax.fill_between(x, [floor - unit * live for live in y], floor, step="post", color="0.75", linewidth=0)
        x, y = [*until_inputs, cost.makespan], [*until_inputs.values(), 0]
        ax.step(x, [floor - unit * live for live in y], where="post", **line)
        first = max(until_weights, key=until_weights.__getitem__)
        most = until_weights[first]
        look = {"ha": "left", "color": "black", "path_effects": [withStroke(linewidth=2, foreground="0.95")]}
        note(ax, str(most), (first, floor - unit * most), (1, 1), fontsize=7, zorder=5, **look)
    return [Patch(color="0.75", label="live activations"), Line2D([], [], label="until input gradient", **line)]


def _live(schedule: Schedule, rank: int, releases: str, **times: Any) -> dict[float, int]:
    """Return time -> live activations from then on: from the start of a forward to the end of its release."""
    levels, now = {0.0: 0}, 0
    for owner, action, span in schedule.boxes(**times):
        if owner == rank and action.kind == "F":
            now += 1
            levels[span.start] = now
        elif owner == rank and action.kind in releases:
            now -= 1
            levels[span.end] = now
    return levels
