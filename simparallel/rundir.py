"""What a run leaves in its directory: the trace, the numbers, the pictures."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simparallel.files import write_atomically
from simparallel.trace import Trace
from simparallel.view import plot_loss, save_figure

Metrics = Mapping[int, list[tuple[int, str, float]]]
SHOWN_STEPS = 2
FILES = ("trace.json", "timeline.png", "loss.png", "metrics.json")


def mean_over_ranks(metrics: Metrics, name: str) -> list[tuple[int, float]]:
    """What the ranks noted under `name`, averaged: (step, value) in order."""
    values: dict[int, list[float]] = {}
    for notes in metrics.values():
        for step, noted, value in notes:
            if noted == name:
                values.setdefault(step, []).append(value)
    return [(step, sum(found) / len(found)) for step, found in sorted(values.items())]


def write_trace(directory: Path, trace: Trace) -> list[Path]:
    """`trace.json`, and `timeline.png` with two steps from the middle of the run."""
    directory.mkdir(parents=True, exist_ok=True)
    trace.save(directory / "trace.json")
    written = [directory / "trace.json"]
    if trace.events:
        steps = sorted(trace.steps)
        first = max(0, min(len(steps) // 2, len(steps) - SHOWN_STEPS))
        axes = trace.timeline(steps=steps[first : first + SHOWN_STEPS])
        written.append(save_and_close(axes, directory / "timeline.png"))
    return written


def write_losses(directory: Path, curves: Mapping[str, list[tuple[int, float]]]) -> list[Path]:
    """`loss.png` with the curves that hold anything."""
    filled = {name: curve for name, curve in curves.items() if curve}
    if not filled:
        return []
    return [save_and_close(plot_loss(filled), directory / "loss.png")]


def write_metrics(directory: Path, trace: Trace, numbers: Mapping[str, Any]) -> Path:
    """`metrics.json`: `numbers`, and per rank what the trace adds up to."""
    path = directory / "metrics.json"
    content = {**numbers, "cluster": trace.cluster.name, "ranks": trace.summary()}
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())
    return path


def save_and_close(axes: Any, path: Path) -> Path:
    """Save an Axes' figure, and let go of it."""
    import matplotlib.pyplot as plt

    save_figure(axes, path)
    plt.close(axes.figure)
    return path
