"""Steps that repeat: once the clocks of all streams differ as before an earlier step, the times repeat, too."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from simparallel.errors import InputError
from simparallel.simulate.algebra import solve
from simparallel.simulate.task_graph import TaskGraph, Times


@dataclass(frozen=True)
class Steps:
    """The times of a number of equal steps, of which only the first differ.

    Attributes:
        count: number of steps.
        found: times of the first steps.
        first: number of the step from which on steps repeat; `len(found)` if none does.
        shift_ps: time after which they repeat, `len(found) - first` steps later [ps].
    """

    count: int
    found: list[Times]
    first: int
    shift_ps: int

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Times:
        """Return the times of a step.

        Raises:
            IndexError: there is no such step.
        """
        if not -self.count <= number < self.count:
            raise IndexError(f"step {number} of {self.count}")
        number %= self.count
        if number < len(self.found):
            return self.found[number]
        periods, place = divmod(number - self.first, len(self.found) - self.first)
        times, shift_ps = self.found[self.first + place], periods * self.shift_ps
        return replace(
            times, starts=times.starts + shift_ps, ends=times.ends + shift_ps, clocks=times.clocks + shift_ps
        )


def repeat(graph: TaskGraph, count: int, clocks: np.ndarray | None = None) -> Steps:
    """Return the times of `count` steps, each of which begins on every stream where the one before ended.

    Args:
        graph: the tasks of one step, which waits for its own calls only.
        count: number of steps.
        clocks: when each stream is free before the first step [ps], integers, shape (streams,); None for 0.

    Raises:
        InputError: count below 1, or clocks of a wrong shape or dtype.

    Cost: that of the steps until the first repetition. If some ranks run ahead of the others without end, there is
        none, and all steps are computed.
    """
    if count < 1:
        raise InputError(f"repeat: count={count!r} must be 1 or more.")
    found: list[Times] = []
    # State before a step -> (number of the step, its earliest clock). The state is all clocks, relative to that one.
    known: dict[bytes, tuple[int, int]] = {}
    clocks = np.zeros(len(graph.streams), np.int64) if clocks is None else clocks
    for number in range(count):
        begin_ps = int(clocks.min()) if len(clocks) else 0
        first, before_ps = known.setdefault((clocks - begin_ps).tobytes(), (number, begin_ps))
        if first < number:
            return Steps(count, found, first, begin_ps - before_ps)
        found.append(solve(graph, clocks=clocks))
        clocks = found[-1].clocks
    return Steps(count, found, count, 0)
