"""Who takes part in `bench collectives`: we ourselves, plain memory copies, and the peers' jobs.

Every contender is warm: its processes stay for the whole measurement, and sleep while another
one has its turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np

import simparallel as sp
from simparallel.bench.peers.exchange import ITEM_BYTES, WHOLE, Call, Exchange, private, turn
from simparallel.errors import BenchError, RunFailedError

OURS, SHARED, MEMCPY = "simparallel", "in the arena", "memcpy"


class Contender(Protocol):
    """Somebody who can be measured."""

    label: str

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        """Seconds that `count` calls took, on the slowest rank.

        Raises:
            BenchError: a wrong result, or none.
        """

    def close(self) -> None:
        """End its processes. May be called again."""


class Ours:
    """A warm `Cluster`, measured as any program sees it: public functions, all checks on.

    Args:
        cluster: its devices.
        shared: arrays live in the devices' shared arenas, as buckets of gradients do.
    """

    def __init__(self, cluster: sp.Cluster, shared: bool = False) -> None:
        self.label = SHARED if shared else OURS
        self._cluster = cluster
        self._shared = shared

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        try:
            results = self._cluster.run(our_turn, op, elements, count, check, self._shared)
        except RunFailedError as error:
            raise BenchError(f"{self.label}, {op}: {error}", peer=self.label) from error
        if not all(right for _, right in results):
            raise BenchError(f"{self.label}: {op} of {elements} elements came out wrong.", peer=self.label)
        return max(seconds for seconds, _ in results)

    def close(self) -> None:
        self._cluster.close()


def our_turn(op: str, elements: int, count: int, check: bool, shared: bool) -> tuple[float, bool]:
    """What each of our ranks does in a turn."""
    room: Callable[[int], np.ndarray] = partial(sp.empty, shared=True) if shared else private
    exchange = Exchange(op, sp.get_rank(), sp.get_world_size(), elements, room)
    return turn(exchange, our_call(exchange), sp.barrier, count, check)


def our_call(exchange: Exchange) -> Call:
    """Our function for this exchange; results go where they went before, as those of the peers do."""
    sent: Any = exchange.sent
    out: Any = exchange.received
    if exchange.op == "scatter" and sent is not None:
        sent = list(sent.reshape(exchange.ranks, -1))
    if exchange.op == "gather" and out is not None:
        out = out.reshape(exchange.ranks, -1)
    if exchange.op == "barrier":
        return sp.barrier
    if exchange.op == "adasum":
        return partial(sp.all_reduce, sent, "adasum")
    if exchange.op in WHOLE:
        return partial(getattr(sp, exchange.op), sent)
    return partial(getattr(sp, exchange.op), sent, out=out)


class Memcpy:
    """`np.copyto` of as many bytes, in one process: the least that moving them once can cost."""

    label = MEMCPY

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        source, target = np.zeros((2, elements), np.float32) + 1
        for _ in range(2):
            np.copyto(target, source)
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(target, source)
        return time.perf_counter() - start

    def close(self) -> None:
        pass


def size_bytes(elements: int) -> int:
    """Size of a vector."""
    return elements * ITEM_BYTES
