"""How orthogonal the gradients of 16 workers are while they train on digits with Adasum, layer by layer."""

from typing import Any

import simparallel as sp
from benchmarks.adasum_lab import Setup, train

WORKERS = 16
SETUP = Setup(epochs=10)


def draw() -> Any:
    return sp.view.plot_orthogonality(train("adasum", WORKERS, 0, SETUP, watch=True).ratios, WORKERS)
