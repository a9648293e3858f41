"""Exercises of lesson 8: debugging. Each is a faulty program from the zoo, to be fixed."""

from __future__ import annotations

import numpy as np

from simparallel.course.exercises.exercise import Case, by_rank, exercise, integers, ranks_case


@exercise(lesson=8, ranks=range(1, 5), size=(1, 3))
def pass_around(ranks: int, size: int) -> Case:
    """Send x to the next rank, and return the x of the rank before."""
    inputs = integers(ranks, size)
    return ranks_case(by_rank(inputs), np.roll(inputs, 1, axis=0), [(x,) for x in inputs])


@exercise(lesson=8, ranks=range(1, 4), steps=range(1, 5), seed=(2, 3))
def stop_together(ranks: int, steps: int, seed: int) -> Case:
    """Return the number of steps until the mean loss of all ranks is below a limit."""
    losses, limit = np.abs(integers(seed + ranks * steps)[seed:]).reshape(ranks, steps), 7
    below = np.flatnonzero(losses.mean(axis=0) < limit)
    count = int(below[0]) + 1 if len(below) else steps
    inputs = [(own.tolist(), float(limit)) for own in losses]
    return ranks_case({**by_rank(losses), "limit": limit}, [count] * ranks, inputs)


@exercise(lesson=8, ranks=range(1, 5), samples=range(1, 6))
def mean_of_samples(ranks: int, samples: int) -> Case:
    """Return the mean over the samples of all ranks, which may have different numbers of them, or none."""
    rows = integers(samples, 2)
    parts = [rows[rank * samples // ranks : (rank + 1) * samples // ranks] for rank in range(ranks)]
    return ranks_case(by_rank(parts), [rows.mean(axis=0)] * ranks, [(part,) for part in parts])
