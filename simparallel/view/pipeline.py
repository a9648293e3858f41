"""A pipeline schedule over time: a lane for each rank, a box for each action."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simparallel.view.style import GREEN, ORANGE, SKY, YELLOW, head

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from simparallel.parallel.pipeline import Schedule

_KINDS = {"F": (SKY, "forward"), "B": (ORANGE, "backward"), "I": (YELLOW, "input gradient"), "W": (GREEN, "weights")}
# Later stages of a rank are darker.
_SHADES = (0.0, 0.35, 0.55)
_LETTER_IN = 0.075


def plot_schedule(schedule: Schedule, ax: Axes | None = None, *, title: str | None = None, **times: Any) -> Axes:
    """Draw a schedule: what each rank does when, with the micro-batch in each box; empty space is the bubble.

    Args:
        schedule: the schedule.
        ax: axes to draw into; None makes a figure.
        title: None for the schedule's own, with its bubble.
        times: as for `Schedule.cost`: forward, input_gradient, weight_gradient, message.

    Returns:
        The matplotlib Axes.

    Raises:
        InputError: a bad time; ScheduleError: the ranks wait for each other.
    """
    import matplotlib.pyplot as plt
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Patch, Rectangle

    cost = schedule.cost(**times)
    if ax is None:
        _, ax = plt.subplots(figsize=(12, 0.6 + 0.45 * schedule.ranks), layout="constrained")
    figure: Any = ax.figure
    seen = {}
    for rank, action, (start, end) in schedule.boxes(**times):
        colour, name = _KINDS[action.kind]
        seen[name] = colour
        shade = _SHADES[min(action.stage // schedule.ranks, len(_SHADES) - 1)]
        face = tuple(part * (1 - shade) for part in to_rgb(colour))
        ax.add_patch(
            Rectangle((start, rank - 0.42), end - start, 0.84, facecolor=face, edgecolor="white", linewidth=0.6)
        )
        room = figure.get_figwidth() * 0.9 * (end - start) / max(cost.makespan, 1)
        if room > _LETTER_IN * len(str(action.microbatch)):
            ax.text(
                (start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=7,
                color="white" if shade > 0.4 else "black",
            )  # fmt: skip
    ax.set_xlim(0, cost.makespan)
    ax.set_ylim(schedule.ranks - 0.5, -0.5)
    ax.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    ax.set_facecolor("0.95")
    ax.spines[["top", "right"]].set_visible(False)
    share = cost.bubble / cost.makespan if cost.makespan else 0
    head(ax, f"{schedule.title}: bubble {cost.bubble:g} of {cost.makespan:g} ({share:.0%})" if title is None else title)
    handles = [Patch(color=colour, label=name) for name, colour in seen.items()]
    ax.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, fontsize=8, frameon=False)
    return ax
