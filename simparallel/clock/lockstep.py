"""The rule of time for ranks in lockstep: all do the same step at a time, so their clocks are one array.

The rule is that of `clock.program`:

    An action starts as soon as its stream has finished the action before it, all actions that it comes after have
    ended, and, in a collective, every other member is as far.

As there, each group has a stream, and so has each direction of messages between two ranks. But an action of all ranks
is one call here, and the calls come in an order in which they can run: no rank waits for a call that comes later. So
the clocks advance with each call, and nothing is kept but when each stream is free.

An interpreter of a rank, where it has a clock, is a stream, too: work and communications start once it has reached
them, and it goes on.

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
        issue_ps: the time [ps] that the interpreter of each rank takes to start a communication; one number if it is
            the same on all, None for ranks without the clock of an interpreter.
        lead_ps: how far the interpreters are ahead at the beginning [ps].

    Attributes:
        now: the time [ps] of each rank, int64, shape (num_ranks,).
        host: the time [ps] of each rank's interpreter, int64, shape (num_ranks,).
    """

    def __init__(self, num_ranks: int, issue_ps: int | Sequence[int] | None = None, lead_ps: int = 0) -> None:
        self.now, self.host = np.zeros(num_ranks, np.int64), np.full(num_ranks, -lead_ps, np.int64)
        self._lead_ps = lead_ps
        self._issue_ps = None if issue_ps is None else np.broadcast_to(np.asarray(issue_ps, np.int64), num_ranks)
        # One stream for each group, and one for each direction between two ranks.
        self._group, self._direction = cache(_Stream), cache(_Stream)

    @property
    def host_ps(self) -> int:
        """The time [ps] that the slowest interpreter has taken to start all so far."""
        return int(self.host.max()) + self._lead_ps

    def compute(self, ps: int | Sequence[int], host_ps: int | Sequence[int] = 0) -> None:
        """Let every rank compute.

        Args:
            ps: the time [ps] of each rank; one number if it is the same on all.
            host_ps: the time [ps] that the interpreter of each rank takes to start the work.
        """
        if self._issue_ps is not None:
            np.maximum(self.now, self.host, out=self.now)
            self.host += host_ps
        self.now += ps

    def _issue(self, ranks: np.ndarray) -> np.ndarray:
        """Start a communication on these ranks; return when each is ready for it [ps]."""
        if self._issue_ps is None:
            return self.now[ranks]
        ready = np.maximum(self.now[ranks], self.host[ranks])
        self.host[ranks] += self._issue_ps[ranks]
        return ready

    def collective(self, groups: Sequence[tuple[int, ...]], ps: Sequence[int]) -> list[Running]:
        """Issue a collective in each group, as with `async_op=True`; return what to wait for.

        Args:
            groups: the ranks of each group.
            ps: the time [ps] of the collective in each group.
        """
        streams = map(self._group, groups)
        return [stream.run(self._issue(stream.ranks).max(), each) for stream, each in zip(streams, ps, strict=True)]

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
        streams = [self._direction(pair) for pair in pairs]
        # All are issued before any rank waits, the receives first; a receive ends no earlier than it was issued.
        received = [(stream.ranks[1:], int(self._issue(stream.ranks[1:])[0])) for stream in streams]
        sent = [stream.run(self._issue(stream.ranks[:1])[0], each) for stream, each in zip(streams, ps, strict=True)]
        self.wait([*received, *sent])
