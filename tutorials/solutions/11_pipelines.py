"""Solutions to the exercises of the lesson on pipelines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate


def lists_of_1f1b(ranks: int, microbatches: int) -> list[list[str]]:
    """Exercise 1: rank r does `ranks - r - 1` forwards, then one of each by turns, then the last backwards."""
    lists = []
    for rank in range(ranks):
        forwards = [f"{rank}F{m}" for m in range(microbatches)]
        backwards = [f"{rank}B{m}" for m in range(microbatches)]
        warm_up = min(ranks - rank - 1, microbatches)
        pairs = zip(forwards[warm_up:], backwards, strict=False)
        steady = [action for pair in pairs for action in pair]
        lists.append(forwards[:warm_up] + steady + backwards[microbatches - warm_up :])
    return lists


def fewest_microbatches(ranks: int, share: float) -> int:
    """Exercise 2: solve (ranks - 1) / (microbatches + ranks - 1) <= share; there is at least one micro-batch."""
    return max(1, math.ceil((ranks - 1) * (1 - share) / share))


def balanced_stages(times: Sequence[int], ranks: int) -> list[int]:
    """Exercise 3: best[n] is the slowest stage, and the layers of each, of the first n layers in the stages so far."""
    until = [0, *accumulate(times)]
    best = {n: (until[n], [n]) for n in range(1, len(times) + 1)}
    for stage in range(1, ranks):
        best = {
            n: min((max(best[k][0], until[n] - until[k]), [*best[k][1], n - k]) for k in range(stage, n))
            for n in range(stage + 1, len(times) + 1)
        }
    return best[len(times)][1]
