"""A contest: several implementations of the same work, measured in turns on the same machine.

Absolute times on a shared machine mean little. Contenders take turns within each round and alternate their order from
round to round; we report the median ratio over pairs of consecutive rounds, which cancels effects of the order and of
the preceding contender.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from benchmarks.errors import BenchError
from simparallel.base import blas
from simparallel.base.units import format_seconds

CHECKOUT = Path(__file__).parents[1]
Turn = Callable[[int], float]  # number of steps -> seconds
# The largest number of steps in a turn.
MAX_COUNT = 5000


def printed_apart(code: str, variables: Mapping[str, str] | None = None) -> str:
    """Run Python code in a process of its own, which finds `benchmarks`, too; return what it prints.

    Args:
        code: the program.
        variables: environment variables to set.
    """
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); {code}"]
    environment = {**os.environ, **(variables or {})}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout


@dataclass
class Result:
    """Times per step [s] of each contender, one entry per round."""

    title: str
    times_s: dict[str, list[float]] = field(default_factory=dict)
    extra: dict[str, object] = field(default_factory=dict)

    def median_s(self, name: str) -> float:
        # Medians, because other programs on the machine disturb single turns.
        return statistics.median(self.times_s[name])

    def ratio(self, name: str, to: str) -> float:
        """Return the median of `name`'s time divided by `to`'s, over pairs of consecutive rounds."""
        ours, theirs = (_with_next(self.times_s[one]) for one in (name, to))
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def _with_next(times_s: list[float]) -> list[float]:
    """Return the sums of neighbours; for a single time, itself."""
    # Each pair has one round in each order.
    return [a + b for a, b in pairwise(times_s)] or times_s


def measure(
    title: str,
    turns: Mapping[str, Turn],
    *,
    rounds: int,
    turn_s: float,
    leave_out: Callable[[str, BenchError], None] | None = None,
) -> Result:
    """Measure all contenders, interleaved.

    Args:
        title: title of the row.
        turns: name -> function that runs a number of steps and returns the seconds they took.
        rounds: turns of each contender.
        turn_s: approximate length of a turn [s]; at least one step.
        leave_out: called with the name and the error of a contender that fails, which then has no times. By default
            the error is raised.
    """
    # A contender that fails is removed from `counts`, and so from the rounds that follow.
    result, counts = Result(title), dict.fromkeys(turns, 1)

    def step_s(name: str) -> float | None:
        try:
            return turns[name](counts[name]) / counts[name]
        except BenchError as error:
            if leave_out is None:
                raise
            leave_out(name, error)
            del counts[name]
            # Times of some rounds only would pair up wrong rounds.
            result.times_s.pop(name, None)
            return None

    for name in turns:
        for share in (0.1, 0.5, 1.0):
            # Estimate over more and more steps: a single one is not representative.
            if (found_s := step_s(name)) is None:
                break
            counts[name] = fitting(found_s, share * turn_s)
    for i in range(rounds):
        # Every other round in reverse, so that no contender always follows the same one.
        for name in list(counts)[:: 1 if i % 2 == 0 else -1]:
            if (found_s := step_s(name)) is not None:
                result.times_s.setdefault(name, []).append(found_s)
    return result


def fitting(step_s: float, turn_s: float) -> int:
    """Return the number of steps that take about `turn_s`."""
    # The floor keeps a clock that shows 0 s from dividing by 0.
    return max(1, min(MAX_COUNT, int(turn_s / max(step_s, 1e-9))))


def tell_bound(output: TextIO) -> None:
    """Print a note if BLAS may not choose its kernels: libraries with a BLAS of their own then have an advantage."""
    if blas.kernel_override():
        print(f"note: {blas.kernel_override()}", file=output)


def table(results: list[Result], base: str) -> str:
    """Format one line per result: the times, and the ratio of `base` to each other contender."""
    names = list(dict.fromkeys(name for result in results for name in result.times_s))
    others = [name for name in names if name != base]
    head = ["", *names, *(f"{base} / {name}" for name in others)]
    rows = [head]
    for result in results:
        # A contender that failed in this row has no times.
        times = [format_seconds(result.median_s(n)) if n in result.times_s else "-" for n in names]
        ratios = [f"{result.ratio(base, n):.2f}" if n in result.times_s else "-" for n in others]
        rows.append([result.title, *times, *ratios])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]], widest: Sequence[str] = ()) -> str:
    """Format rows of cells as columns, the first one aligned to the left; `widest` may widen the columns."""
    widths = [max(map(len, column)) for column in zip(*rows, *([widest] if widest else []), strict=True)]
    return "\n".join(
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    )
