"""The order of a pipeline's rows: arrays of sample numbers, for a whole stretch of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from simparallel.backend import random_permutation, random_uniform


class Plan(NamedTuple):
    """The rows of a stretch of an epoch: row i holds the samples `starts[i] … stops[i]-1` of these arrays."""

    sample: np.ndarray  # number of each sample in the dataset, int64
    epoch: np.ndarray  # the epoch whose random numbers it gets, int64
    starts: np.ndarray
    stops: np.ndarray

    def rows(self, chosen: Any) -> Plan:
        return self._replace(starts=self.starts[chosen], stops=self.stops[chosen])


def buffered_order(seed: int, stream: str, count: int, buffer_size: int) -> np.ndarray:
    """The order in which a shuffling buffer gives `count` rows, int64, shape (count,).

    Row t (from 0) is drawn from a random place of the full buffer, and row t + buffer_size takes that
    place; what is in the buffer at the end follows in random order. So a place holds what came
    to it last: found by sorting the draws by place, without a loop.
    """
    size = min(buffer_size, count)
    draws = count - size
    places = (random_uniform(seed, stream, 0, draws) * size).astype(np.int64)
    # Behind the draws every place is asked once more, for what is left in it.
    asked = np.concatenate([places, np.arange(size)])
    by_place = np.argsort(asked, kind="stable")  # in each place: one time after the other
    before = np.empty(count, np.int64)  # what the place holds at that time
    before[by_place[1:]] = by_place[:-1] + size
    first = np.ones(count, bool)
    first[1:] = asked[by_place][1:] != asked[by_place][:-1]
    before[by_place[first]] = asked[by_place[first]]
    rest = before[draws:][random_permutation(seed, f"{stream}/rest", size)]
    return np.concatenate([before[:draws], rest])


def joined(plans: Iterator[Plan]) -> Plan:
    """Several stretches as one."""
    stretches = list(plans)
    if len(stretches) == 1:
        return stretches[0]
    offsets = np.cumsum([0, *(len(plan.sample) for plan in stretches[:-1])])
    shifted = [
        plan._replace(starts=plan.starts + offset, stops=plan.stops + offset)
        for plan, offset in zip(stretches, offsets, strict=True)
    ]
    return Plan(*(np.concatenate(arrays) for arrays in zip(*shifted, strict=True)))
