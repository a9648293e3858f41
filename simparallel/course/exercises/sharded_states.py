"""Exercises of lesson 12: sharded states."""

from __future__ import annotations

import numpy as np

from simparallel.course.exercises.exercise import Case, by_rank, call_case, exercise, frugal_case, integers

_RATE, _BETA = 0.5, 0.75


@exercise(lesson=12, size=range(1, 9), ranks=range(1, 5))
def rows_of_rank(size: int, ranks: int) -> Case:
    """Return the rows (start, stop) that a rank stores: chunks of one size, the last ones shorter or empty."""
    chunk = -(-size // ranks)
    expected = by_rank((min(rank * chunk, size), min((rank + 1) * chunk, size)) for rank in range(ranks))
    calls = [(size, ranks, rank) for rank in range(ranks)]
    return call_case({"rows": size, "ranks": ranks}, expected, calls=calls, form=list)


@exercise(lesson=12, ranks=range(1, 5), chunk=range(1, 4))
def sharded_step(ranks: int, chunk: int) -> Case:
    """Make a step with a momentum in slices: the result of data parallelism, with the bytes of its all-reduce."""
    weights, momentum, *gradients = integers(ranks + 2, ranks * chunk)
    result = weights - _RATE * (_BETA * momentum + np.mean(gradients, axis=0))
    own = np.split(momentum, ranks)
    given = {"weights": weights} | by_rank(np.concatenate(pair) for pair in zip(gradients, own, strict=True))
    inputs = [(weights, *pair, _RATE, _BETA) for pair in zip(gradients, own, strict=True)]
    return frugal_case(given, [result] * ranks, inputs, ranks * chunk)


@exercise(lesson=12, ranks=(1, 2, 4, 8), letters=("RPR", "RPS", "RSS", "SSS"), count=(8, 1000))
def bytes_of_states(ranks: int, letters: str, count: int) -> Case:
    """Return the bytes of parameters, gradients and Adam's two moments on a rank, in float32."""
    sizes = [
        size * (count // ranks if letter == "S" else count) for letter, size in zip(letters, (4, 4, 8), strict=True)
    ]
    given = {"letters": letters, "count": count, "ranks": ranks}
    return call_case(given, {"bytes": sizes})
