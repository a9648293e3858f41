"""The critical path of events: the chain that sets their length. And the events that belong to one communication."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from simparallel.clock.event import COMPUTE, RANGE, Event

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


def critical_path(
    events: Sequence[Event], waits: Sequence[Sequence[int]] | None = None, last: int | None = None
) -> list[int]:
    """Return the indices of the events that the simulated time consists of, in order of time.

    Found backwards from the last end. An event waited for an event that ended when it started. Of several, it is one on
    its own stream, else one on the compute stream, else one that was received before one that was sent, and of the
    lowest rank.

    Args:
        events: in any order.
        waits: event -> the events that it waits for. None if that is unknown, as in a trace: then these are all events
            of its ranks, and for a receive that ends with its message the send. Where no event ended at that time, the
            path has a gap, and goes on with the last event before it: after steps that were not kept, and where a
            device waited for its interpreter.
        last: the event at the end of the path; None for the one that ends last.

    Cost: about 5 us an event.
    """
    walk = _Walk(events) if waits is None else None
    path: list[int] = []
    work = (i for i, event in enumerate(events) if event.kind != RANGE)
    index = max(work, key=lambda i: (events[i].sim_end_ps, -i), default=None) if last is None else last
    while index is not None:
        path.append(index)
        if walk is not None:
            index = walk.before(index)
        elif waits is not None:
            ended = [i for i in waits[index] if events[i].sim_end_ps == events[index].sim_start_ps]
            index = _chosen(events, index, ended)
    return path[::-1]


def _chosen(events: Sequence[Event], index: int, ended: Sequence[int]) -> int | None:
    """Return which of the events that ended at its start an event waited for."""

    def order(other: int) -> tuple[bool, bool, bool, int, int]:
        event = events[other]
        is_own = event.lane == events[index].lane
        # Later events first: events that take no time share their end with the event before them.
        return not is_own, event.stream != COMPUTE, event.name == "send", event.rank, -other

    return min(ended, key=order, default=None)


class _Walk:
    """A walk back through a trace, from each event to the event that it waited for; it visits each event once."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._members = {index: members for members in communications(events) for index in members}
        self._seen: set[int] = set()
        self._ends_at: dict[tuple[Place, int], list[int]] = {}
        # Rank -> its (end, index), ascending.
        self._ends: dict[int, list[tuple[int, int]]] = {}
        for index, event in enumerate(events):
            if event.kind == RANGE:
                continue
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
            return _chosen(self.events, index, ended)
        earlier = [self._last_before(rank, ready_ps) for rank in dict.fromkeys(rank for rank, _ in places)]
        return max((found for found in earlier if found), default=(0, None))[1]

    def _last_before(self, rank: int, time_ps: int) -> tuple[int, int] | None:
        ends = self._ends[rank]
        place = bisect_left(ends, (time_ps,))
        return ends[place - 1] if place else None
