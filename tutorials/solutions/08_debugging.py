"""Solutions to the exercises of the lesson on debugging."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import simparallel as sp


def pass_around(x: np.ndarray) -> np.ndarray:
    """Exercise 1: begin to send, receive, and wait for the end of the send."""
    rank, ranks = sp.get_rank(), sp.get_world_size()
    received = np.empty_like(x)
    sending = sp.isend(x, (rank + 1) % ranks)
    sp.recv(received, (rank - 1) % ranks)
    sending.wait()
    return received


def stop_together(losses: Sequence[float], limit: float) -> int:
    """Exercise 2: all ranks decide by the same number."""
    count = 0
    for loss in losses:
        count += 1
        if sp.all_reduce(np.array([loss]), "mean")[0] < limit:
            break
    return count


def mean_of_samples(rows: np.ndarray) -> np.ndarray:
    """Exercise 3: sum samples and their number over the ranks, and divide at the end."""
    return sp.all_reduce(rows.sum(axis=0)) / sp.all_reduce(np.array([float(len(rows))]))
