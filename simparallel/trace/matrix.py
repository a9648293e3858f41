"""The bytes that each rank sends to each other rank."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import numpy as np

from simparallel.algorithms import DIRECT, offers
from simparallel.algorithms.rehearsal import Actor, rehearse
from simparallel.clock.event import Event

_TO_THE_NEXT = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")


def bytes_between(events: Iterable[Event], world_size: int) -> np.ndarray:
    """Return the bytes that rank i sends to rank j at [i, j]; a row adds up to the bytes that its events count as sent.

    The receivers are those of the algorithm whose bytes are counted. A collective that ran as messages has the
    receivers of these. Others are counted as a ring (all_reduce, reduce_scatter, all_gather), as a chain (broadcast,
    reduce), as messages from or to the root (scatter, gather), or as equal messages to all others.

    Args:
        events: of any ranks, in any order; for a collective, the events of all its ranks.
        world_size: number of ranks.
    """
    matrix = np.zeros((world_size, world_size))
    calls: dict[Any, dict[int, int]] = {}
    named: dict[Any, str] = {}
    for event in events:
        if event.sent_bytes and event.kind == "p2p":
            matrix[event.group] += event.sent_bytes
        elif len(event.group) > 1:
            call = event.name, event.group, event.stream, event.seq
            if event.sent_bytes:
                calls.setdefault(call, {})[event.rank] = event.sent_bytes
            # Only message-based algorithms have steps, and only in the events of ranks that are busy in every step.
            if event.step_ps:
                named[call] = event.algorithm
    for call, sent in calls.items():
        op, group, *_ = call
        senders = tuple(rank in sent for rank in group)
        counts = np.array([[sent.get(rank, 0)] for rank in group])
        matrix[np.ix_(group, group)] += counts * _receivers(op, named.get(call, DIRECT), senders)
    return matrix


@lru_cache(maxsize=1024)
def _receivers(op: str, algorithm: str, senders: tuple[bool, ...]) -> np.ndarray:
    """Return the share of position i's bytes that goes to position j at [i, j]."""
    traffic = np.zeros((0, 0))
    for root in range(len(senders)):
        traffic = _traffic(op, algorithm, len(senders), root)
        # Events do not record the root of a collective; it follows from the ranks that send nothing.
        if tuple(bool(row.any()) for row in traffic) == senders:
            break
    return traffic / np.maximum(traffic.sum(axis=1, keepdims=True), 1)


def _traffic(op: str, algorithm: str, size: int, root: int) -> np.ndarray:
    """Return the bytes from position i to position j at [i, j], in an arbitrary unit."""
    traffic = np.zeros((size, size))
    each = np.arange(size)
    if algorithm != DIRECT and offers(algorithm, op):
        # One element for each position, so the vector can be cut evenly.
        rehearse(algorithm, op, size, size, root=root, make_actor=partial(_TrafficCounter, traffic))
    elif op in _TO_THE_NEXT:
        traffic[each, (each + 1) % size] = 1
        if op == "broadcast":
            traffic[root - 1] = 0
    elif op == "reduce":
        traffic[each, each - 1] = 1
        traffic[root] = 0
    elif op == "gather":
        traffic[:, root] = each != root
    elif op == "scatter":
        traffic[root] = each != root
    else:
        traffic[:] = each[:, None] != each
    return traffic


class _TrafficCounter(Actor):
    """A position of the group that adds the bytes of its messages to a matrix."""

    def __init__(self, traffic: np.ndarray, rank: int, size: int, matcher: Any) -> None:
        super().__init__(rank, size, matcher)
        self._traffic = traffic

    def start_send(self, x: np.ndarray, dst: int) -> Any:
        self._traffic[self.rank, dst] += x.nbytes
        return super().start_send(x, dst)
