"""Collectives step by step: what each rank holds, and the messages that change it; as a picture and as an animation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.algorithms.watching import ChunkMessage, Watched
from simparallel.base.units import format_bytes, format_seconds
from simparallel.machine.links import LinkSpec
from simparallel.view.style import GREEN, RED, arrow, check_any, readable_on, write

if TYPE_CHECKING:
    from matplotlib.animation import FuncAnimation
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Lightness grows with the number of summed values, so the picture is readable in grey, too.
_COLOURS = "YlGnBu"
_FRAMES_PER_SECOND = 8


def plot_algorithms(watched: Sequence[Watched]) -> Figure:
    """Draw the steps of collectives: a row for each, a panel for each step, and the result at the end.

    A panel has a row of chunks for each rank. The number in a chunk says how many ranks' values it contains; an arrow
    is a chunk on its way, which is added or stored where it ends.

    Args:
        watched: results of `algorithms.watching.watch`.

    Raises:
        InputError: nothing to draw.
    """
    import matplotlib.pyplot as plt

    check_any("plot_algorithms", watched, "[watch('ring'), ...]")
    columns = max(each.num_steps for each in watched) + 1
    size = max(each.num_ranks for each in watched)
    side = 0.47 * size
    # The last row is higher by the line below it.
    heights = [*[side + 0.95] * (len(watched) - 1), side + 1.25]
    figure = plt.figure(figsize=(columns * (side + 0.12) + 0.5, sum(heights)), layout="constrained")
    parts: Any = figure.subfigures(len(watched), 1, squeeze=False, height_ratios=heights)
    for part, each in zip(parts.flat, watched, strict=True):
        part.suptitle(_summary(each), x=0.01, ha="left", fontsize=13, fontweight="bold")
        for step, ax in enumerate(part.subplots(1, columns)):
            if step > each.num_steps:
                ax.set_axis_off()
                continue
            _panel(ax, each, step)
            messages = [message for message in each.messages if message.step == step]
            ax.set_title(f"step {step + 1}" if step < each.num_steps else "result", fontsize=11)
            for message, chunk, lane in _lanes(messages):
                _arrow(ax, message, chunk, lane)
            if step:
                ax.set_yticklabels([])
    part.supxlabel(
        "number: how many ranks' values a chunk contains; time with latency α, n bytes, and β for each byte",
        x=0.01, ha="left", fontsize=11, color="0.25",
    )  # fmt: skip
    return figure


def animate_algorithms(
    watched: Sequence[Watched], link: LinkSpec, size_bytes: int, seconds: float = 8
) -> FuncAnimation:
    """Show collectives side by side on one clock: a step takes the latency of the link and the time of its bytes.

    Args:
        watched: results of `algorithms.watching.watch`.
        link: the described link between any two ranks.
        size_bytes: size of the vector.
        seconds: length of the animation.

    Returns:
        An animation, for `save_animation`; in a notebook `HTML(animation.to_jshtml())` shows it.

    Raises:
        InputError: nothing to draw.
    """
    import matplotlib.pyplot as plt
    from matplotlib.animation import FuncAnimation

    check_any("animate_algorithms", watched, "[watch('ring'), ...]")
    ends = [_ends(each, link, size_bytes) for each in watched]
    last = max(times[-1] for times in ends)
    frames = round(seconds * _FRAMES_PER_SECOND)
    # The last sixth shows the results.
    shown = max(frames * 5 // 6, 1)
    side = 0.62 * max(each.num_ranks for each in watched)
    figure, axes = plt.subplots(
        1, len(watched), figsize=(len(watched) * (side + 0.9), side + 1.7), squeeze=False, layout="constrained"
    )

    def draw(frame: int) -> list[Any]:
        now_s = last * min(frame / shown, 1)
        for ax, each, times in zip(axes[0], watched, ends, strict=True):
            step = int(np.searchsorted(times, now_s, side="right")) - 1
            ax.clear()
            _panel(ax, each, min(step, each.num_steps))
            done = step >= each.num_steps
            state = f"done after {format_seconds(times[-1])}" if done else f"step {step + 1} of {each.num_steps}"
            ax.set_title(f"{_name(each)}\n{state}", fontsize=12, color=GREEN if done else "black")
            if not done:
                progress = (now_s - times[step]) / (times[step + 1] - times[step])
                for message in each.messages:
                    if message.step == step:
                        _moving_chunks(ax, each, message, progress)
        figure.supxlabel(
            f"{format_bytes(size_bytes)} on {watched[0].num_ranks} ranks: {now_s * 1e6:6.0f} µs", fontsize=12
        )
        return []

    draw(0)
    figure.draw_without_rendering()
    # Fixed places: panels must not move between frames.
    figure.set_layout_engine("none")
    return FuncAnimation(figure, draw, frames=frames, interval=1000 / _FRAMES_PER_SECOND)


def _ends(each: Watched, link: LinkSpec, size_bytes: int) -> np.ndarray:
    """Return the start [s] of the first step, and the end of each."""
    steps = [link.latency_s + share * size_bytes / link.bandwidth_bytes_per_s for share in each.step_shares]
    return np.cumsum([0.0, *steps])


def _name(each: Watched) -> str:
    return f"{each.op}, {each.algorithm.replace('_', ' and ')}"


def _summary(each: Watched) -> str:
    """Return name and cost: steps, and bytes in units of the vector."""
    return f"{_name(each)}: {each.num_steps} steps, time {each.num_steps} α + {each.share:g} n β"


def _panel(ax: Axes, each: Watched, step: int) -> None:
    """Draw the chunks of all ranks after `step` steps."""
    counts, size = each.counts(step), each.num_ranks
    ax.imshow(_shades(counts, size), interpolation="nearest")
    for rank, chunk in np.ndindex(counts.shape):
        count = int(counts[rank, chunk])
        ink = readable_on(_shades(np.array(count), size))
        weight = "bold" if count == size else "normal"
        write(ax, chunk - 0.24, rank, str(count), 11, color=ink, fontweight=weight)
    ax.set_xticks(range(size), [f"c{chunk}" for chunk in range(size)])
    ax.set_yticks(range(size), [f"rank {rank}" for rank in range(size)])
    ax.set_xticks(np.arange(size - 1) + 0.5, minor=True)
    ax.set_yticks(np.arange(size - 1) + 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=2)
    ax.tick_params(which="both", length=0, labelsize=9)
    ax.spines[:].set_visible(False)


def _shades(counts: np.ndarray, size: int) -> Any:
    from matplotlib import colormaps

    return colormaps[_COLOURS](0.08 + 0.8 * (counts - 1) / max(size - 1, 1))


def _lanes(messages: Sequence[ChunkMessage]) -> Iterator[tuple[ChunkMessage, int, int]]:
    """Yield (message, chunk, lane): arrows of a chunk that pass the same rank have different lanes."""
    taken: dict[tuple[int, int], list[range]] = {}
    for message in messages:
        for chunk in range(message.start, message.stop):
            span = range(min(message.src, message.dst), max(message.src, message.dst) + 1)
            lane = 0
            while any(set(span) & set(other) for other in taken.get((chunk, lane), ())):
                lane += 1
            taken.setdefault((chunk, lane), []).append(span)
            yield message, chunk, lane


def _arrow(ax: Axes, message: ChunkMessage, chunk: int, lane: int) -> None:
    x = chunk + 0.08 + 0.24 * lane
    look = {"color": RED, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}
    arrow(ax, (x, message.src), (x, message.dst), zorder=4, **look)
    ax.plot([x], [message.src], "o", color=RED, markersize=4, zorder=4)


def _moving_chunks(ax: Axes, each: Watched, message: ChunkMessage, progress: float) -> None:
    """Draw the chunks of a message at their place between two ranks."""
    from matplotlib.patches import FancyBboxPatch

    # Smoothstep: the chunk accelerates, and then slows down.
    y = message.src + (message.dst - message.src) * (3 - 2 * progress) * progress**2
    x = message.start - 0.42 + (0.1 if message.dst > message.src else 0.3)
    box = FancyBboxPatch(
        (x, y - 0.2), message.stop - message.start - 0.4, 0.4, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor=RED, edgecolor="white", linewidth=1, alpha=0.9, zorder=5,
    )  # fmt: skip
    ax.add_patch(box)
