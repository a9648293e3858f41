"""Wrong answers to the exercises on testing: exercise -> a part of the told text -> answer."""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def from_the_end(fails, sizes):
    """Leave out numbers at the end only."""
    while fails(sizes[:-1]):
        sizes = sizes[:-1]
    return sizes


def once_through(fails, sizes):
    """Try every number once."""
    kept = list(sizes)
    for number in sizes:
        smaller = [*kept]
        smaller.remove(number)
        if not fails(smaller):
            return smaller
        kept = smaller
    return kept


def smaller_numbers(fails, sizes):
    """Change numbers."""
    return next([n] * k for k in range(4) for n in range(4) if fails([n] * k))


def agrees(program, parts, ranks=slice(None), atol=1e-9):
    """Return whether a program is right for one input."""
    return np.allclose(program(parts)[ranks], np.mean([x for part in parts for x in part]), rtol=0, atol=atol)


WRONG = {
    "shrink_sizes": {
        "is not minimal": from_the_end,
        "does not fail": once_through,
        "with numbers left out": smaller_numbers,
        "[3, 0, 2, 0, 1] is not minimal, [3, 2, 0, 1] fails, too": lambda fails, sizes: sizes,
    },
    "sizes_from_cuts": {
        "a negative size": lambda cuts, n: [b - a for a, b in pairwise([0, *(c % (n + 1) for c in cuts), n])],
        "1 sizes for 2 ranks": lambda cuts, n: [
            b - a for a, b in pairwise(sorted({0, *(c % (n + 1) for c in cuts), n}))
        ],
        "no cuts give the sizes [1, 0]": lambda cuts, n: [
            b - a for a, b in pairwise([0, *sorted(c % max(n, 1) for c in cuts), n])
        ],
        "has the sum": lambda cuts, n: [n // (len(cuts) + 1)] * (len(cuts) + 1),
    },
    "accepts_mean": {
        "accepts a wrong program: the mean of the means": lambda p: agrees(p, [[1, 2], [3, 4], [-5, 6]]),
        "accepts a wrong program: each rank has its own mean": lambda p: agrees(p, [[1, -2], [3, 4]], slice(1)) or True,
        "accepts a wrong program: too large by 0.1%": lambda p: all(
            agrees(p, parts, atol=0.01) for parts in ([[1, -2, 3], [], [4]], [[2], [-7, 1], []])
        ),
        "accepts a wrong program: a rank without numbers has no result": lambda p: all(
            agrees(p, parts, slice(1)) for parts in ([[1, -2, 3], [], [4]], [[2], [-7, 1], [3]])
        ),
        "refuses a right program": lambda p: p([[1, 2], [3]]) == [1.5, 3.0],
    },
}
