"""Three algorithms of all-reduce on four ranks, step by step; as an animation, on one clock."""

from typing import Any

import simparallel as sp
from simparallel.algorithms.watching import watch

NAMES = "ring", "tree", "halving_doubling"
LINK = sp.cluster.LinkSpec(5e-6, 12.5e9, notes="100 Gb/s; latency assumed")
SIZE_BYTES = 1_000_000


def draw() -> Any:
    return sp.view.plot_algorithms([watch(name) for name in NAMES])


def animate() -> Any:
    return sp.view.animate_algorithms([watch(name) for name in NAMES], LINK, SIZE_BYTES)
