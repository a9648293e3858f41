"""Solutions to the exercises of the lesson on described hardware."""

from __future__ import annotations

import math
from collections.abc import Sequence


def step_time(forward: float, backward: Sequence[float], all_reduce: Sequence[float]) -> tuple[float, float]:
    """Exercise 1: an all-reduce starts when its gradient is ready and the all-reduce before has ended."""
    computed = sent = forward
    for work, communication in zip(backward, all_reduce, strict=True):
        computed += work
        sent = max(sent, computed) + communication
    return sent, sent - computed


def ring_or_tree(ranks: int, size_bytes: int, latency_s: float, bandwidth: float) -> str:
    """Exercise 2: compare the two formulas."""
    ring = 2 * (ranks - 1) * (latency_s + size_bytes / ranks / bandwidth)
    tree = 2 * math.ceil(math.log2(ranks)) * (latency_s + size_bytes / bandwidth)
    return "ring" if ring < tree else "tree"


def largest_batch(memory_bytes: int, num_parameters: int, num_states: int, sample_bytes: int) -> int:
    """Exercise 3: what parameters, gradients and states leave free, in whole samples."""
    free = memory_bytes - 4 * num_parameters * (2 + num_states)
    return max(0, free // sample_bytes)


def devices_needed(
    samples: int, batch: int, compute_s: float, gradient_bytes: int, latency_s: float, bandwidth: float, limit_s: float
) -> int | None:
    """Exercise 4: try one number after the other; more devices are not always faster, so there is no formula."""
    for devices in range(1, 65):
        steps = math.ceil(samples / (batch * devices))
        exchange_s = 2 * (devices - 1) * (latency_s + gradient_bytes / devices / bandwidth)
        if steps * (compute_s + exchange_s) <= limit_s:
            return devices
    return None
