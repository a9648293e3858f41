"""The critical path of events: the chain that sets their length. And the events that belong to one communication."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from simparallel.clock.recording import COMPUTE, RANGE, Event

# (rank, device)
Place = tuple[int, int]


def communications(events: Sequence[Event]) -> list[list[int]]:
    """Return the indices of the events of each communication: members of a collective, ends of a message or a copy.

    Those with one event in the trace are included; events are in order of simulated time.
    """
    calls: dict[tuple[Any, ...], list[int]] = {}
    seen: dict[tuple[Any, ...], int] = {}
    for index in sorted(range(len(events)), key=lambda i: (events[i].sim_start_ps, events[i].sim_end_ps)):
        event = events[index]
        # Not a communication.
        if event.seq < 0:
            continue
        # The two ends of a message or a copy are on different streams, so the stream cannot be part of their key.
        stream = event.stream if event.kind == "collective" else ""
        call = event.kind, stream, event.group, event.seq
        # Sequence numbers restart when a program runs again: the n-th call with a number on one rank belongs to the
        # n-th on the others.
        end = event.rank, event.device, event.stream, call
        repeat = seen[end] = seen.get(end, -1) + 1
        calls.setdefault((*call, repeat), []).append(index)
    return list(calls.values())


def critical_path(events: Sequence[Event]) -> list[int]:
    """Return the indices of the events that the simulated time consists of, in order of time.

    Found backwards from the last end. An event waited for an event of one of its ranks that ended when it started. Of
    several, it is one on its own stream, else one on the compute stream, else one that was received before one that was
    sent, and of the lowest rank. A receive that ends with its message waited for the send. Where no event ended at that
    time, the path has a gap, and goes on with the last event before it: after steps that were not kept, and where a
    device waited for its interpreter.

    Cost: about 5 us an event.
    """
    walk = _Walk(events)
    path: list[int] = []
    index = max(walk.work, key=lambda i: (events[i].sim_end_ps, -i), default=None)
    while index is not None:
        path.append(index)
        index = walk.before(index)
    return path[::-1]


class _Walk:
    """A walk back through a trace, from each event to the event that it waited for; it visits each event once.

    Attributes:
        work: indices of all events but the marks of the program.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.work = [index for index, event in enumerate(events) if event.kind != RANGE]
        self._members = {index: members for members in communications(events) for index in members}
        self._seen: set[int] = set()
        self._ends_at: dict[tuple[Place, int], list[int]] = {}
        # Rank -> its (end, index), ascending.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        for index in self.work:
            event = events[index]
            self._ends_at.setdefault(((event.rank, event.device), event.sim_end_ps), []).append(index)
            self._ends.setdefault(event.rank, []).append((event.sim_end_ps, index))
        for ends in self._ends.values():
            ends.sort()

    def before(self, index: int) -> int | None:
        """Return the event that an event waited for; None at the beginning."""
        event, members = self.events[index], self._members.get(index, [index])
        ready_ps = event.sim_start_ps
        if event.kind == "p2p":
            sends = [i for i in members if self.events[i].name == "send" and i not in self._seen]
            members = [index]
            if event.name == "recv" and sends:
                self._seen.add(index)
                # A receive takes no time of its own: it ends with the message, or at once if the message was there.
                if self.events[sends[0]].sim_end_ps == event.sim_end_ps:
                    return sends[0]
                ready_ps = event.sim_end_ps
        self._seen.update(members)
        places = dict.fromkeys((self.events[i].rank, self.events[i].device) for i in members)
        ended = [i for place in places for i in self._ends_at.get((place, ready_ps), ()) if i not in self._seen]
        if ended:
            return min(ended, key=lambda i: self._order(event, i))
        earlier = [self._last_before(rank, ready_ps) for rank in dict.fromkeys(rank for rank, _ in places)]
        return max((found for found in earlier if found), default=(0, None))[1]

    def _order(self, event: Event, index: int) -> tuple[bool, bool, bool, int, int]:
        other = self.events[index]
        is_own = other.stream == event.stream and other.rank == event.rank and other.device == event.device
        # Later events first: events that take no time share their end with the event before them.
        return not is_own, other.stream != COMPUTE, other.name == "send", other.rank, -index

    def _last_before(self, rank: int, time_ps: int) -> tuple[int, int] | None:
        ends = self._ends[rank]
        place = bisect_left(ends, (time_ps,))
        return ends[place - 1] if place else None
