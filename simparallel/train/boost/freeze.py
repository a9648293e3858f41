"""grad_freeze of MindSpore's boost: some steps train the last layers only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simparallel.autograd import Tensor
from simparallel.backend import random_uniform


def freeze_sequence(groups: int, freeze_type: int, full_share: float, steps: int, seed: int = 0) -> list[int]:
    """Return for each step the number j of the first trained group; 0 trains all.

    Args:
        groups: number of parameter groups.
        freeze_type: 0 "continuous": 0, 0, …, 0, 1, 2, …, groups - 1, repeated. 1 "interval": random j
            interleaved with zeros in the ratio that `full_share` gives; P(j) decreases linearly to the last group.
        full_share: share of the steps that train all groups (MindSpore's `freeze_p`).
        steps: length of the list.
        seed: for the random j, the same on every rank.
    """
    if groups == 1:
        return [0] * steps
    if freeze_type == 0:
        # zeros / (zeros + groups - 1) is about full_share.
        zeros = max(1, round(full_share * (groups - 1) / (1 - full_share)))
        turn = [0] * zeros + list(range(1, groups))
        return (turn * (steps // len(turn) + 1))[:steps]
    # Inverse transform sampling of j from linearly falling probabilities.
    # The weights of j = 1 … groups - 1.
    weights = np.arange(groups - 1, 0, -1)
    draws = random_uniform(seed, "grad_freeze", 0, steps)
    choices = 1 + np.searchsorted(np.cumsum(weights) / weights.sum(), draws, side="right")
    sequence, frozen = [0], 0
    while len(sequence) < steps:
        # Spread the frozen steps evenly, so that every prefix has about the requested share.
        if frozen < (1 - full_share) * len(sequence):
            sequence.append(int(choices[frozen]))
            frozen += 1
        else:
            sequence.append(0)
    return sequence[:steps]


def frozen_layers(parameters: Sequence[Tensor], groups: int) -> list[list[Tensor]]:
    """Return the frozen parameters for each j: all in the groups before group j; groups are about equally long."""
    count = len(parameters)
    return [list(parameters[: count * j // groups]) for j in range(groups)]
