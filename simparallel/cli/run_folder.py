"""The files that a run writes to its directory: the trace, the numbers, the pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

from simparallel.base.files import write_atomically
from simparallel.trace import Trace
from simparallel.view import plot_loss, save_figure

Metrics = Mapping[int, list[tuple[int, str, float]]]
SHOWN_STEPS = 2
# Removed before a run, so that no file of an older run is taken for one of this run.
FILES = ("trace.json", "trace.html", "timeline.png", "loss.png", "metrics.json")


def mean_over_ranks(metrics: Metrics, name: str) -> list[tuple[int, float]]:
    """Return (step, mean over the ranks) of the values logged under `name`, in order of step."""
    values: dict[int, list[float]] = {}
    for notes in metrics.values():
        for step, noted, value in notes:
            if noted == name:
                values.setdefault(step, []).append(value)
    return [(step, sum(found) / len(found)) for step, found in sorted(values.items())]


def middle_steps(trace: Trace) -> list[int]:
    """Return `SHOWN_STEPS` steps from the middle of the run, as many as fit into a picture, if possible consecutive.

    The trace of a long run has gaps between its recorded steps.
    """
    steps = trace.steps
    last = max(0, len(steps) - SHOWN_STEPS)
    # Prefer two steps that follow each other; among those, the pair next to the middle.
    firsts = [i for i in range(last + 1) if steps[min(i + 1, len(steps) - 1)] <= steps[i] + 1] or [0]
    first = min(firsts, key=lambda i: abs(i - min(len(steps) // 2, last)))
    return steps[first : first + SHOWN_STEPS]


def write_trace(directory: Path, trace: Trace) -> list[Path]:
    """Write `trace.json`, and `timeline.png` with two steps from the middle of the run; return their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    trace.save(directory / "trace.json")
    written = [directory / "trace.json"]
    if trace.events:
        axes = trace.timeline(steps=middle_steps(trace))
        written.append(save_and_close(axes, directory / "timeline.png"))
    return written


def write_losses(directory: Path, curves: Mapping[str, list[tuple[int, float]]]) -> list[Path]:
    """Write `loss.png` with the curves that are not empty; return its path, or nothing if all are empty."""
    filled = {name: curve for name, curve in curves.items() if curve}
    if not filled:
        return []
    return [save_and_close(plot_loss(filled), directory / "loss.png")]


def write_metrics(directory: Path, trace: Trace, metrics: Metrics, numbers: Mapping[str, Any]) -> Path:
    """Write `metrics.json`: `numbers`, each rank's totals of the trace, and the values that ranks logged.

    "metrics" is name -> [[step, mean over the ranks], ...]; null stands for values that are not finite, since JSON
    has no NaN.
    """
    path = directory / "metrics.json"
    names = sorted({name for notes in metrics.values() for _, name, _ in notes})
    noted = {
        name: [[step, value if isfinite(value) else None] for step, value in mean_over_ranks(metrics, name)]
        for name in names
    }
    content = {**numbers, "cluster": trace.cluster.name, "ranks": trace.summary(), "metrics": noted}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def save_and_close(axes: Any, path: Path) -> Path:
    """Save an Axes' figure, and close it."""
    import matplotlib.pyplot as plt

    save_figure(axes, path)
    # pyplot keeps every figure alive until it is closed.
    plt.close(axes.figure)
    return path
