"""Wrong answers to the exercises on pipelines: exercise -> a part of the text about the failing case -> answer."""

from __future__ import annotations

import math
from collections.abc import Callable


def lists(make: Callable[[int, int], list[str]]) -> Callable[[int, int], list[list[str]]]:
    """Return an answer: lists with the actions of `make` on each rank."""
    return lambda ranks, count: [[f"{rank}{cell}" for cell in make(ranks, count)] for rank in range(ranks)]


WRONG = {
    "lists_of_1f1b": {
        "ranks=1, microbatches=2: schedule 1f1b": lists(lambda p, m: [f"{kind}{i}" for kind in "FB" for i in range(m)]),
        "makespan 12, expected 9": lists(lambda p, m: [f"{kind}{i}" for i in range(m) for kind in "FB"]),
        "ranks=1, microbatches=1": lists(lambda p, m: [f"F{i}" for i in range(m)]),
    },
    "fewest_microbatches": {
        "micro-batches is 1, expected 2": lambda p, s: max(1, int((p - 1) * (1 - s) / s)),
        "micro-batches is 0, expected 1": lambda p, s: math.ceil((p - 1) * (1 - s) / s),
        "micro-batches is 3, expected 2": lambda p, s: max(1, math.ceil((p - 1) / s)),
    },
    "balanced_stages": {
        "is possible": lambda t, p: [len(t) // p] * (p - 1) + [len(t) - len(t) // p * (p - 1)],
        "an empty stage": lambda t, p: [len(t)] + [0] * (p - 1),
        "there are 3": lambda t, p: [len(t) // p] * p,
    },
}
