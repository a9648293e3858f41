"""The transport for ranks that are threads of one process and take turns: the same order on every run.

Exactly one rank runs at a time. A rank that has to wait passes the turn to the next one, in the order of ranks, that
can continue; so does a rank that asks whether a work is done, if it is not. If no rank can continue, all of them wait
for each other: the deadlock is found at once, and its error lists the place where each rank waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from simparallel.comm.diagnosis import error_of, last_calls
from simparallel.comm.memory.segment import ABORT_INTERRUPT, FAILED, RUNNING, SharedSegment
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, AbstractTransport, Condition
from simparallel.errors import DeadlockError

Switch = Callable[[int], None]


def _nothing(rank: int) -> None:
    """Do nothing: the ranks share no state that has to be saved and restored at a switch."""


class RoundRobin:
    """The turn of the ranks, and the conditions that the others wait for.

    Args:
        world_size: number of ranks.
        leave, enter: called by a rank that passes its turn on, and when it gets it back.

    Attributes:
        running: the rank that has the turn; -1 before the first turn.
        since_s: start of the turn, by the monotonic clock.
    """

    def __init__(self, world_size: int, leave: Switch = _nothing, enter: Switch = _nothing) -> None:
        self.gates = [threading.Lock() for _ in range(world_size)]
        for gate in self.gates:
            # All gates are closed at first; the rank that gets the turn finds its gate open.
            gate.acquire()
        self.transports: list[InlineTransport] = []
        self.running, self.since_s = -1, 0.0
        self._leave, self._enter = leave, enter
        self.blocked: dict[int, tuple[Sequence[Condition], Callable[[], str]]] = {}
        # Ranks that gave way while polling, and can continue.
        self.looking: dict[int, Callable[[], str]] = {}
        self.deadlock: dict[int, str] | None = None
        # Whether a rank has ended or failed. Before, no wait has to look at the states of all.
        self.has_ended = False

    def begin(self, rank: int) -> None:
        """Wait until it is the turn of `rank`."""
        self.gates[rank].acquire()
        self._enter(rank)

    def give(self, rank: int) -> None:
        """Begin the turn of `rank`."""
        self.running, self.since_s = rank, time.monotonic()
        self.gates[rank].release()

    def give_way(self, rank: int) -> None:
        """Pass the turn to the next rank that can continue, until it comes back."""
        if self.pass_on(rank):
            self.begin(rank)

    def pass_on(self, rank: int) -> bool:
        """Give the turn to the next rank that can continue; False if that is `rank` itself."""
        # The next rank first and this one last: the order of turns is the same on every run.
        order = (*range(rank + 1, len(self.gates)), *range(rank + 1))
        chosen = next((r for r in order if self._can_run(r)), None)
        if chosen is None:
            # No rank can continue. The first one in order gets the turn, to raise the error.
            waiting = sorted(self.blocked)
            if not waiting:
                return True  # all ranks have ended
            self.deadlock = {self.transports[r].rank: self.blocked[r][1]() for r in waiting}
            chosen = next(r for r in order if r in waiting)
        if chosen == rank:
            return False
        self._leave(rank)
        self.give(chosen)
        return True

    def _can_run(self, rank: int) -> bool:
        transport = self.transports[rank]
        if transport.state_of(transport.rank) != RUNNING:
            return False
        if rank not in self.blocked:
            return True
        return transport.may_go_on(self.blocked[rank][0])


class InlineTransport(AbstractTransport):
    """The transport of one rank in a world of threads."""

    def __init__(
        self, segment: SharedSegment, rank: int, turns: RoundRobin, timeout_s: float = DEFAULT_TIMEOUT_S,
        **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(segment, rank, timeout_s, **settings)
        # This rank's index among the ranks that run (`SharedSegment.ranks`): turns are numbered by it.
        self.turns, self._turn = turns, len(turns.transports)
        turns.transports.append(self)
        self.start()

    def set_state(self, state: int) -> None:
        super().set_state(state)
        self.turns.has_ended |= state != RUNNING

    def sees(self, where: slice, what: bytes) -> bool:
        """Return False: other ranks run only while this one waits, so polling is useless."""
        return False

    def wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        turns = self.turns
        # Conditions are looked at again after each turn, because other ranks may have changed the words.
        while not any(self.met(condition) for condition in conditions):
            self._check(conditions[0], describe)
            turns.blocked[self._turn] = conditions, describe
            try:
                turns.give_way(self._turn)
            finally:
                del turns.blocked[self._turn]

    def looked(self, needed: Condition, describe: Callable[[], str], looked_s: float) -> None:
        self._check(needed, describe)
        turns, missing = self.turns, needed.lagging(self.words)
        if looked_s > self.timeout_s:
            raise self._late_error(missing, "; ".join(map(self._text_of, missing)), describe)
        turns.looking[self._turn] = describe
        try:
            turns.give_way(self._turn)
        finally:
            del turns.looking[self._turn]

    def _check(self, needed: Condition, describe: Callable[[], str]) -> None:
        if self.words[self.segment.map.abort()] == ABORT_INTERRUPT:
            raise KeyboardInterrupt
        if self.turns.deadlock is not None:
            raise self._deadlock_error()
        if self.turns.has_ended:
            self.check_health(needed, describe)

    def _text_of(self, rank: int) -> str:
        """Describe where a rank that has passed the turn on is now."""
        turn = self.segment.ranks.index(rank)
        blocked = self.turns.blocked.get(turn)
        place = blocked[1] if blocked else self.turns.looking.get(turn)
        waits = f"which waits in {place()}" if place else last_calls(self.segment, rank)
        return f"rank {rank}, {waits}"

    def notify(self, index: int) -> None:
        """Do nothing: no other rank is running or asleep."""

    def may_go_on(self, conditions: Sequence[Condition]) -> bool:
        """Return whether a condition is met, or there is a reason to stop waiting."""
        if any(self.met(condition) for condition in conditions) or self.turns.deadlock is not None:
            return True
        if self.words[self.segment.map.abort()]:
            return True
        if not self.turns.has_ended:
            return False
        # A failed rank ends every wait, because the failure has to be raised.
        states = [self.state_of(rank) for rank in self.segment.ranks]
        if any(state >= FAILED for state in states):
            return True
        return self.gone(conditions[0]) is not None

    def end(self) -> None:
        """Pass the turn on for good. The rank's state must already tell how it ended."""
        self.turns.pass_on(self._turn)

    def _deadlock_error(self) -> DeadlockError:
        waiting = self.turns.deadlock or {}
        # A world of one continues after the error.
        if self.world_size == 1:
            self.turns.deadlock = None
        return error_of(waiting, self.world_size)
