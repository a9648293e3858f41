"""Exercises of lesson 8: debugging. Each is a faulty program from the zoo, to be fixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.course.exercises.exercise import Case, Values, by_rank, exercise, integers, run_ranks


def _case(given: Values, expected: list[Any], inputs: list[tuple[Any, ...]]) -> Case:
    """Return a case of a program for ranks: the result of each rank, for the arguments of each rank."""

    def run(answer: Callable[..., Any]) -> Values:
        return by_rank(run_ranks(answer, inputs))

    return Case(given, by_rank(expected), run)


@exercise(lesson=8, ranks=range(1, 5), size=(1, 3))
def pass_around(ranks: int, size: int) -> Case:
    """Send x to the next rank, and return the x of the rank before."""
    inputs = integers(ranks, size)
    return _case(by_rank(inputs), list(np.roll(inputs, 1, axis=0)), [(x.copy(),) for x in inputs])


@exercise(lesson=8, ranks=range(1, 4), steps=range(1, 5), seed=(2, 3))
def stop_together(ranks: int, steps: int, seed: int) -> Case:
    """Return the number of steps until the mean loss of all ranks is below a limit."""
    losses, limit = np.abs(integers(seed + ranks * steps)[seed:]).reshape(ranks, steps), 7
    below = np.flatnonzero(losses.mean(axis=0) < limit)
    count = int(below[0]) + 1 if len(below) else steps
    return _case({**by_rank(losses), "limit": limit}, [count] * ranks, [(own.tolist(), float(limit)) for own in losses])


@exercise(lesson=8, ranks=range(1, 5), samples=range(1, 6))
def mean_of_samples(ranks: int, samples: int) -> Case:
    """Return the mean over the samples of all ranks, which may have different numbers of them, or none."""
    rows = integers(samples, 2)
    parts = [rows[rank * samples // ranks : (rank + 1) * samples // ranks] for rank in range(ranks)]
    return _case(by_rank(parts), [rows.mean(axis=0)] * ranks, [(part.copy(),) for part in parts])
