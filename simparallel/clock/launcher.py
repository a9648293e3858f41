"""`Launcher`: the clock of an interpreter that starts operations."""

from __future__ import annotations


class Launcher:
    """The Python interpreter of a rank, which starts the operations of all its devices, one at a time.

    A rank with one device that computes without an interpreter has no launcher: the price of an operation includes its
    launch.

    Args:
        now_ps: time at which it can start the next operation.
        turns: number of threads that take turns, so that each start takes as many times longer; 0 starts operations
            without taking time.

    Attributes:
        launched_ps: start of the last operation.
    """

    def __init__(self, now_ps: int, turns: int = 1) -> None:
        self.now_ps = self.launched_ps = now_ps
        self.turns = turns

    def moment(self) -> int:
        """Return `now_ps` for what comes after it or waits for it, see `Recorder.moment`."""
        return self.now_ps

    def launch(self, duration_ps: int) -> int:
        """Start the next operation, which takes the interpreter this time; return the time of its start [ps]."""
        self.launched_ps = self.moment()
        self.spend(duration_ps * self.turns)
        return self.launched_ps

    def spend(self, duration_ps: int) -> None:
        """Be busy for a time."""
        self.now_ps += duration_ps

    def wait(self, until_ps: int) -> None:
        """Wait until a time, given as a moment."""
        self.now_ps = max(self.now_ps, until_ps)
