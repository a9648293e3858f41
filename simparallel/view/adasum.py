"""Pictures of Adasum: gradients as vectors, and their orthogonality during training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.view.style import BLUE, DARK, GREEN, ORANGE, PINK, RED, SKY, arrow, axes, check_any, labels, note

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^vP"
_LAYERS = (ORANGE, SKY, GREEN, PINK, RED, BLUE)
# Wide arrows are drawn first, so that overlapping ones remain distinguishable.
_ARROWS = {"sum": (ORANGE, 8.0), "mean": (GREEN, 4.5), "Adasum": (DARK, 2.0)}


def plot_orthogonality(ratios: Mapping[str, Sequence[float]], workers: int, smooth: int = 9) -> Axes:
    """Draw the orthogonality of the workers' gradients during training: a curve per layer, and their mean.

    Args:
        ratios: layer -> ||T||^2 / sum ||g||^2 in each step.
        workers: number of workers; equal gradients give 1/workers.
        smooth: number of steps averaged per point.

    Raises:
        InputError: nothing to draw.
    """
    steps = min(map(len, ratios.values()), default=0)
    check_any("plot_orthogonality", range(steps), "{layer: [ratio of each step, ...]}")
    ax = axes(None, 8, 4.5)
    curves = {layer: _smoothed(values, smooth) for layer, values in ratios.items()}
    for number, (layer, curve) in enumerate(curves.items()):
        is_bias = layer.endswith("bias")
        ax.plot(
            curve,
            label=layer,
            color=_LAYERS[number % len(_LAYERS)],
            linewidth=1.3,
            linestyle="--" if is_bias else "-",
            marker=_MARKS[number % len(_MARKS)],
            markersize=5,
            markevery=(3 * number, max(len(curve) // 7, 1)),
        )
    ax.plot(np.mean(list(curves.values()), axis=0), label="mean of the layers", color=DARK, linewidth=3)
    for level, text in ((1.0, "all orthogonal"), (1 / workers, "all equal")):
        ax.axhline(level, color="0.45", linestyle=(0, (1, 1.5)), linewidth=1.6)
        note(ax, text, (1.0, level), (-4, 3), xycoords=("axes fraction", "data"), fontsize=10)
    ax.set_title(f"how orthogonal the gradients of {workers} workers are, layer by layer", fontsize=12)
    ax.set_ylim(0, 1.08)
    labels(ax, "training step", r"$\|T(g_1 \ldots g_n)\|^2 \;/\; \sum\|g_i\|^2$")
    ax.legend(frameon=False, fontsize=10, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return ax


def plot_vectors(cases: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Draw two gradients, their sum, mean and Adasum as arrows, with a panel for each case.

    Args:
        cases: title -> {"g1", "g2", "sum", "mean", "Adasum"} -> (x, y).

    Raises:
        InputError: nothing to draw.
    """
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    check_any("plot_vectors", cases, "{title: {'g1': (x, y), ...}}")
    figure, panels = plt.subplots(1, len(cases), figsize=(3.9 * len(cases), 4.4), squeeze=False, layout="constrained")
    for ax, (title, arrows) in zip(panels[0], cases.items(), strict=True):
        for name, vector in arrows.items():
            color, width = _ARROWS.get(name, ("0.6", 2.0))
            look: Any = {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 12 + 2.5 * width, "joinstyle": "miter"}
            arrow(ax, (0, 0), vector, color=color, linewidth=width, **look)
            if name not in _ARROWS:
                length = max(float(np.hypot(*vector)), 1e-9)
                note(ax, name, vector, tuple(11 * x / length for x in vector), fontsize=12, ha="center", va="center")
        xs, ys = zip((0, 0), *arrows.values(), strict=True)
        # A square around all arrows, a quarter larger than they are.
        middle, half = (max(xs) + min(xs)) / 2, 0.62 * max(max(xs) - min(xs), max(ys) - min(ys))
        ax.set_xlim(middle - half, middle + half)
        middle = (max(ys) + min(ys)) / 2
        ax.set_ylim(middle - half, middle + half)
        # Angles between the arrows are the message, so both axes need one scale.
        ax.set_aspect("equal")
        ax.set_title(title, fontsize=12)
        ax.grid(True, color="0.92", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.tick_params(length=0, labelbottom=False, labelleft=False)
        for spine in ax.spines.values():
            spine.set_color("0.8")
    handles = [Line2D([], [], color=color, linewidth=width) for color, width in _ARROWS.values()]
    figure.legend(handles, list(_ARROWS), loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    return figure


def _smoothed(values: Sequence[float], width: int) -> np.ndarray:
    """Return the moving average of values, with narrower windows at the ends."""
    array = np.asarray(values, float)
    # The window is centred; at the ends it has fewer values, without padding.
    half = width // 2
    return np.array([np.nanmean(array[max(0, i - half) : i + half + 1]) for i in range(len(array))])
