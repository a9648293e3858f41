"""Solutions to the exercises of the lesson on testing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import Phase, given, settings, strategies as st


def shrink_sizes(fails: Callable[[list[int]], bool], sizes: list[int]) -> list[int]:
    """Exercise 1: leave out the first number that may be left out, and begin again."""
    for i in range(len(sizes)):
        smaller = sizes[:i] + sizes[i + 1 :]
        if fails(smaller):
            return shrink_sizes(fails, smaller)
    return sizes


def sizes_from_cuts(cuts: Sequence[int], total: int) -> list[int]:
    """Exercise 2: bring every cut into the range 0 to total, and sort; sizes are the distances."""
    places = sorted(cut % (total + 1) for cut in cuts)
    return [b - a for a, b in pairwise([0, *places, total])]


def accepts_mean(program: Callable[[list[Any]], Sequence[float]]) -> bool:
    """Exercise 3: compare every rank with NumPy, for slices of any sizes; one number on the first rank is valid."""
    numbers = st.lists(st.integers(-9, 9), max_size=4)

    # The verdict is enough, so a failing case is not shrunk.
    @settings(derandomize=True, database=None, deadline=None, max_examples=40, phases=[Phase.generate])
    @given(st.integers(-9, 9), st.lists(numbers, min_size=1, max_size=4))
    def test(first: int, parts: list[list[int]]) -> None:
        parts[0].append(first)
        found = program(parts)
        assert len(found) == len(parts)
        np.testing.assert_allclose(found, np.concatenate(parts).mean(), rtol=1e-9, atol=1e-9)

    try:
        test()
    except AssertionError:
        return False
    return True
