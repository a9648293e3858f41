"""Deadlock detection without shared memory.

A rank that has waited for a while sends all others a wait record: the ranks it waits for, and the last epoch that it
has heard from each of them. A set of ranks can never continue if each of them waits for ranks of the set, and each
record has the current epochs of the ranks it names. Messages between two ranks arrive in order, so such a record was
made after the arrival of everything that those ranks had sent before their waits, and none of it helped. A rank that
continues announces it before it sends anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.base.units import format_ranks
from simparallel.comm.diagnosis import deadlock_error, stuck_ranks
from simparallel.comm.memory.segment import DONE
from simparallel.comm.mpi.codec import decode, encode
from simparallel.comm.transport import AbstractTransport, Condition

# Time that a rank waits before it sends its record.
PATIENCE_S = 0.1


class MpiDeadlockDetector:
    """The wait records of all ranks, and one rank's part in the search.

    Args:
        transport: the rank's transport.
        tell: sends the rank's epoch and record to all others; None: it continues.
    """

    def __init__(self, transport: AbstractTransport, tell: Callable[[int, np.ndarray | None], None]) -> None:
        self._transport, self._tell_all = transport, tell
        # The epoch of each rank: odd while it waits and has sent a record; each such wait has a new one.
        self._epochs = [0] * transport.world_size
        # By rank.
        self._records: dict[int, dict[str, Any]] = {}
        self._since = 0.0

    def begin(self) -> None:
        """Begin a wait."""
        # Withdraw the record of a wait that ended with an error.
        self.end()
        self._since = time.monotonic()

    def look(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        """Send a record if it changed, and check; called repeatedly while this rank waits for any of `conditions`.

        Raises:
            DeadlockError: this rank waits for ranks that can never continue.
        """
        transport, me, words = self._transport, self._transport.rank, self._transport.words
        if not self._epochs[me] & 1:
            if time.monotonic() - self._since < PATIENCE_S:
                return
            self._epochs[me] += 1
        needs = [way.lagging(words) for condition in conditions for way in condition.ways()]
        known = {str(rank): self._epochs[rank] for ranks in needs for rank in ranks}
        own = self._records.get(me)
        # Sent again when a known epoch has changed: the others must see which epochs it knew.
        if own is None or (own["needs"], own["known"]) != (needs, known):
            ranks = [rank for way in conditions[0].ways() for rank in way.lagging(words)]
            text = f"{describe()}, for {format_ranks(ranks)}"
            own = self._records[me] = {"needs": needs, "known": known, "text": text}
            transport.segment.write_wait(me, text)
            self._send(encode(own))
        stuck = stuck_ranks(self._records, self._is_stuck)
        if me in stuck:
            raise deadlock_error(transport.segment, sorted(stuck))

    def end(self) -> None:
        """End the wait, and tell the others."""
        me = self._transport.rank
        if self._epochs[me] & 1:
            self._epochs[me] += 1
            del self._records[me]
            self._send(None)

    def heard(self, rank: int, epoch: int, payload: np.ndarray | None) -> None:
        """Store another rank's wait record; None for the end of its wait."""
        self._epochs[rank] = epoch
        if payload is None:
            self._records.pop(rank, None)
        else:
            self._records[rank] = record = decode(payload)
            self._transport.segment.write_wait(rank, record["text"])

    def text_of(self, rank: int) -> str | None:
        """Return the description of a rank's wait, if it has sent a record."""
        record = self._records.get(rank)
        return None if record is None else record["text"]

    def _send(self, payload: np.ndarray | None) -> None:
        self._tell_all(self._epochs[self._transport.rank], payload)

    def _is_stuck(self, rank: int, stuck: set[int]) -> bool:
        record = self._records[rank]
        return all(
            any(
                self._transport.state_of(other) == DONE
                # A record that knew another epoch may be outdated: the other rank may have sent something since.
                or (other in stuck and record["known"][str(other)] == self._epochs[other])
                for other in needed
            )
            for needed in record["needs"]
        )
