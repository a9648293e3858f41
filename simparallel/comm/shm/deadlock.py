"""Deadlock detection for ranks that are processes: a search of the wait-for graph, without a timeout.

A rank that has slept for a while publishes a wait record: the words of shared memory that it waits for, each with
the rank that writes it. It then checks whether it belongs to a set of ranks that all wait, each for words that only
ranks of the set will write. A waiting rank writes nothing, so such a set can never continue. A check counts only if
no rank of the set began or ended a wait meanwhile, and two checks have to agree.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

from simparallel.base.units import format_ranks
from simparallel.comm.diagnosis import deadlock_error, stuck_ranks
from simparallel.comm.memory.segment import DONE, SharedSegment
from simparallel.comm.transport import Condition, fence

PATIENCE_S = 0.04  # sleep before a rank publishes its wait and checks
PERIOD_S = 0.02  # between two checks
_SHIFT = 40  # a published word has the writing rank above these bits, and the word's index below


class DeadlockDetector:
    """The wait record of one rank, and its part in the search.

    Each rank has one epoch word, which is odd while its published record is valid.
    """

    def __init__(self, segment: SharedSegment, rank: int) -> None:
        self._segment = segment
        self._rank = rank
        self._epoch_at = segment.map.wait_epoch(rank)
        self._seen: dict[int, int] = {}
        self._published = False
        self._next_look = 0.0

    def look(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        """Publish and check; called repeatedly while this rank waits for any of `conditions`.

        Raises:
            DeadlockError: this rank waits for ranks that can never continue.
        """
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + PERIOD_S
        if not self._published:
            self._publish(conditions, describe())
            return
        stuck = self._stuck()
        if stuck and stuck == self._seen:
            # Our record stays until we wait again, so that the others find the same deadlock.
            raise deadlock_error(self._segment, sorted(stuck))
        self._seen = stuck

    def behind(self, ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ranks that hold up `ranks`, directly or not: (those that wait for no rank, those that wait)."""
        found, waiting = list(ranks), []
        for rank in found:  # `found` grows: the ranks that hold up a rank are visited too
            # A record that is replaced while it is read counts as none.
            conditions = self._read(rank)
            if conditions:
                lagging = conditions[0].lagging(self._segment.words)
                if lagging:
                    waiting.append(rank)
                    found += [other for other in lagging if other not in (*found, self._rank)]
        return [rank for rank in found if rank not in waiting], waiting

    def end(self) -> None:
        """Withdraw the published record: the wait is over."""
        if self._published:
            self._segment.words[self._epoch_at] += 1
            self._published = False
            self._seen = {}
        self._next_look = 0.0

    def _publish(self, conditions: Sequence[Condition], text: str) -> None:
        needed_ways = conditions[0].ways()
        conditions = [way for condition in conditions for way in condition.ways()]
        area = array("q", [0])
        for needed in conditions:
            area += array("q", [needed.target, len(needed.indices)])
            for index, rank in zip(needed.indices, needed.ranks, strict=True):
                area.append(rank << _SHIFT | index)
        words = self._segment.words
        start, stop = self._segment.map.waits(self._rank)
        if len(area) > stop - start:
            # Too long for the record: only the timeout ends this wait.
            return
        area[0] = len(area)
        self._segment.reserve_words(self._rank, start, len(area))
        words[start : start + len(area)] = area
        lagging = [rank for way in needed_ways for rank in way.lagging(words)]
        self._segment.write_wait(self._rank, f"{text}, for {format_ranks(lagging)}")
        # The record has to be visible before the epoch that declares it valid.
        fence()
        words[self._epoch_at] += 1
        fence()
        self._published = True

    def _stuck(self) -> dict[int, int]:
        """Return the ranks, with epochs, of a set that can never continue and includes this rank; else empty."""
        words, control = self._segment.words, self._segment.map
        ranks = range(self._segment.world_size)
        epochs = {rank: words[control.wait_epoch(rank)] for rank in ranks}
        fence()
        waits = {rank: conditions for rank in ranks if (conditions := self._read(rank))}
        stuck = stuck_ranks(waits, lambda rank, stuck: all(self._hopeless(needed, stuck) for needed in waits[rank]))
        # Unchanged epochs: no wait of the set has begun or ended since they were read, so the conditions belong
        # together.
        fence()
        if any(words[control.wait_epoch(rank)] != epochs[rank] for rank in stuck) or self._rank not in stuck:
            return {}
        return {rank: epochs[rank] for rank in stuck}

    def _hopeless(self, needed: Condition, stuck: set[int]) -> bool:
        words = self._segment.words
        # A single word that is never written is enough, because a condition needs all of its words. The state is read
        # before the word: a rank may store its last word and leave between the two reads.
        pairs = zip(needed.indices, needed.ranks, strict=True)
        state = self._segment.map.state
        return any(
            (rank in stuck or words[state(rank)] == DONE) and words[index] < needed.target for index, rank in pairs
        )

    def _read(self, rank: int) -> list[Condition]:
        """Return the conditions that a rank waits for; empty if it has no record, or replaced it meanwhile."""
        words, epoch_at = self._segment.words, self._segment.map.wait_epoch(rank)
        epoch = words[epoch_at]
        if not epoch & 1:
            # The epoch before and after, like a sequence lock: an even or a changed one makes the copy invalid.
            return []
        fence()
        start, _ = self._segment.map.waits(rank)
        area = words[start : start + words[start]].tolist()
        fence()
        if words[epoch_at] != epoch:
            return []
        found, at = [], 1
        while at < len(area):
            target, count = area[at], area[at + 1]
            pairs = area[at + 2 : at + 2 + count]
            indices = tuple(pair & ((1 << _SHIFT) - 1) for pair in pairs)
            found.append(Condition(indices, tuple(pair >> _SHIFT for pair in pairs), target))
            at += 2 + count
        return found
