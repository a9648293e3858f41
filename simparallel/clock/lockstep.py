"""The rule of time for ranks in lockstep: all do the same step at a time, so their clocks are one array.

The rule is that of `clock.program`:

    An action starts as soon as its stream has finished the action before it, all actions that it comes after have
    ended, and, in a collective, every other member is as far.

As there, each group has a stream, and so has each direction of messages between two ranks. But an action of all ranks
is one call here, and the calls come in an order in which they can run: no rank waits for a call that comes later. So
the clocks advance with each call, and nothing is kept but when each stream is free.

A search for a plan prices whole steps many times. As programs of ranks, a step on 1,024 ranks has about a million
actions, which take seconds to time; as arrays it takes 10 to 20 ms. `replay` in `search` makes the calls, and a test
writes the programs from the same calls: both give the same times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np

# The ranks of a collective or of a message, and its end [ps].
Running = tuple[np.ndarray, int]


class _Stream:
    """The stream of a group, or of one direction between two ranks; it is free at `free_ps`."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks, self.free_ps = np.array(ranks), 0

    def run(self, ready_ps: int, ps: int) -> Running:
        """Run what takes `ps` once its ranks are ready and the stream is free."""
        self.free_ps = max(int(ready_ps), self.free_ps) + ps
        return self.ranks, self.free_ps


class Lockstep:
    """The clocks of ranks that do the same steps, and of the streams between them.

    Args:
        num_ranks: number of ranks.

    Attributes:
        now: the time [ps] of each rank, int64, shape (num_ranks,).
    """

    def __init__(self, num_ranks: int) -> None:
        self.now = np.zeros(num_ranks, np.int64)
        # One stream for each group, and one for each direction between two ranks.
        self._group, self._direction = cache(_Stream), cache(_Stream)

    def compute(self, ps: int | Sequence[int]) -> None:
        """Let every rank compute.

        Args:
            ps: the time [ps] of each rank; one number if it is the same on all.
        """
        self.now += ps

    def collective(self, groups: Sequence[tuple[int, ...]], ps: Sequence[int]) -> list[Running]:
        """Issue a collective in each group, as with `async_op=True`; return what to wait for.

        Args:
            groups: the ranks of each group.
            ps: the time [ps] of the collective in each group.
        """
        streams = map(self._group, groups)
        return [stream.run(self.now[stream.ranks].max(), each) for stream, each in zip(streams, ps, strict=True)]

    def wait(self, running: Iterable[Running]) -> None:
        """Let ranks wait for the ends of what they take part in."""
        for ranks, end_ps in running:
            self.now[ranks] = np.maximum(self.now[ranks], end_ps)

    def messages(self, pairs: Sequence[tuple[int, int]], ps: Sequence[int]) -> None:
        """Send messages at once; senders and receivers wait until they have arrived.

        Args:
            pairs: sender and receiver of each message; those of one pair run one after the other, in this order.
            ps: the time [ps] of each message.
        """
        streams = map(self._direction, pairs)
        # All are issued before any rank waits.
        self.wait([stream.run(self.now[stream.ranks[0]], each) for stream, each in zip(streams, ps, strict=True)])
