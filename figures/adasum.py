"""Two gradients at three angles, with their sum, mean and Adasum."""

from typing import Any

import simparallel as sp
from benchmarks.adasum_lab import vectors

CASES = {
    "nearly parallel": ((2, 0.4), (1.6, 1)),
    "orthogonal": ((2, 0), (0, 1.5)),
    "against each other": ((2, 0.3), (-1, 1)),
}


def draw() -> Any:
    return sp.view.plot_vectors({title: vectors(*pair) for title, pair in CASES.items()})
