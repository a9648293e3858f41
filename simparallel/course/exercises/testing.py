"""Exercises of lesson 9: testing your own parallel code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, pairwise
from typing import Any

import numpy as np

from simparallel.course.exercises.exercise import Case, Values, call_case, exercise
from simparallel.course.exercises.remarks import Remark

# Possible failures of the slices of ranks, by name.
_FAILURES: dict[str, Callable[[list[int]], bool]] = {
    "one of 3 or more": lambda sizes: any(size >= 3 for size in sizes),
    "two are equal": lambda sizes: len(set(sizes)) < len(sizes),
    "an empty slice and one of 2": lambda sizes: 0 in sizes and 2 in sizes,
    "an odd number of slices": lambda sizes: len(sizes) % 2 == 1,
}
_LISTS = ([3, 0, 2, 0, 1], [0, 3, 3, 2, 0], [5, 1, 4, 1, 5, 0, 2, 6, 2])


@exercise(lesson=9, failure=tuple(_FAILURES), sizes=_LISTS)
def shrink_sizes(failure: str, sizes: list[int]) -> Case:
    """Remove numbers from a failing list until removing any other number would make it pass."""
    fails = _FAILURES[failure]

    def without(case: Sequence[int]) -> list[list[int]]:
        return [[*case[:i], *case[i + 1 :]] for i in range(len(case))]

    expected = list(sizes)
    while smaller := [case for case in without(expected) if fails(case)]:
        expected = smaller[0]

    def judge(expected: Values, found: Values) -> str | None:
        case = list(found["shrunk"])
        left = iter(sizes)
        if not all(size in left for size in case):
            return Remark("{} is not {} with numbers left out", case, sizes)
        if not fails(case):
            return Remark("{} does not fail", case)
        return next(
            (Remark("{} is not minimal, {} fails, too", case, one) for one in without(case) if fails(one)), None
        )

    given = {"sizes": sizes, "fails if": [failure]}
    return call_case(given, {"shrunk": expected}, judge, calls=[(fails, sizes)], form=list)


@exercise(lesson=9, ranks=range(1, 5), total=(*range(1, 5), 0))
def sizes_from_cuts(ranks: int, total: int) -> Case:
    """Turn any integers into the sizes of all ranks' slices, so that every way to slice is possible."""
    choices = list(combinations_with_replacement(range(total + 1), ranks - 1))
    # Draws with equal and unordered numbers, and one outside of the range.
    draws = dict.fromkeys([*choices, *(choice[::-1] for choice in choices), (3 * total + 7,) * (ranks - 1)])
    ways = {tuple(b - a for a, b in pairwise([0, *choice, total])) for choice in choices}

    def judge(expected: Values, found: Values) -> str | None:
        for draw, sizes in found.items():
            if len(sizes) != ranks:
                return Remark("{}: {} sizes for {} ranks", draw, len(sizes), ranks)
            if min(sizes) < 0:
                return Remark("{}: a negative size in {}", draw, sizes)
            if sum(sizes) != total:
                return Remark("{}: {} has the sum {}, expected {}", draw, sizes, sum(sizes), total)
        missing = sorted(ways - {tuple(map(int, sizes)) for sizes in found.values()})
        return Remark("no cuts give the sizes {}", list(missing[0])) if missing else None

    expected = {
        f"cuts {list(draw)}": [b - a for a, b in pairwise([0, *sorted(cut % (total + 1) for cut in draw), total])]
        for draw in draws
    }
    calls = [(list(draw), total) for draw in draws]
    return call_case({"ranks": ranks, "total": total}, expected, judge, calls=calls, form=list)


def _mean(parts: Sequence[np.ndarray]) -> list[float]:
    """Return the mean of all numbers, 0 without any, for each rank."""
    numbers = np.concatenate(parts)
    return [float(numbers.mean()) if len(numbers) else 0.0] * len(parts)


# Programs that a test must refuse: name -> result of each rank, from the numbers of each rank.
_PROGRAMS: dict[str, Callable[[Sequence[np.ndarray]], list[float]]] = {
    "the right one": _mean,
    "each rank has its own mean": lambda parts: [float(part.mean()) if len(part) else 0.0 for part in parts],
    "the mean of the means": lambda parts: [float(np.mean([part.mean() for part in parts if len(part)]))] * len(parts),
    "a rank without numbers has no result": lambda parts: [
        mean if len(part) else 0.0 for part, mean in zip(parts, _mean(parts), strict=True)
    ],
    "the last rank is left out": lambda parts: _mean(parts[:-1] or parts)[:1] * len(parts),
    "negative numbers count as 0": lambda parts: _mean([np.maximum(part, 0) for part in parts]),
    "too large by 0.1%": lambda parts: [1.001 * mean for mean in _mean(parts)],
}


@exercise(lesson=9, program=tuple(_PROGRAMS))
def accepts_mean(program: str) -> Case:
    """Return whether a program computes the mean over all ranks: a test of your own."""
    is_right = program == "the right one"

    def judge(expected: Values, found: Values) -> str | None:
        if found["accepted"] is is_right:
            return None
        return (
            Remark("your test refuses a right program")
            if is_right
            else Remark("your test accepts a wrong program: {}", program)
        )

    def checked(parts: Sequence[Any]) -> list[float]:
        arrays = [np.asarray(part, np.float64) for part in parts]
        if not sum(map(len, arrays)):
            raise ValueError("no rank has a number, so there is no mean")
        return _PROGRAMS[program](arrays)

    return call_case({"program": [program]}, {"accepted": is_right}, judge, calls=[(checked,)], form=bool)
