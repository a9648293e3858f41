"""What happened when: events, the recorder of one device, its two clocks and its memory.

Every event carries wall time (what this machine did) and simulated time (what the described
device would have done). The simulated clock is a set of streams: one for compute, one for each
communication group, as NCCL and HCCL serialise per communicator. An operation advances its
stream; waiting for a collective joins the compute stream with that collective's end.

Simulated time is integer picoseconds, so equal programs give equal timelines, bit for bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any, NamedTuple

from simparallel.cluster import ClusterSpec
from simparallel.memory import MemoryAccount

COMPUTE = "compute"


class Event(NamedTuple):
    """One thing that a device did. Times are half-open intervals."""

    rank: int
    stream: str  # "compute", or "comm <group>"
    name: str  # "MatMul", "MatMul.backward", "SGD.step", "all_reduce", ...
    kind: str  # "forward" | "backward" | "optimizer" | "collective" | "p2p"
    step: int  # optimizer steps finished before it
    wall_start_ns: int  # CLOCK_MONOTONIC, comparable between the ranks of one machine
    wall_end_ns: int
    sim_start_ps: int
    sim_end_ps: int
    flops: int  # 0 for communication
    size_bytes: int  # moved in memory (compute) or payload (communication)
    sent_bytes: int  # what the modelled algorithm sends from this rank; 0 for compute
    group: tuple[int, ...]  # ranks of a communication, () for compute
    seq: int  # number of the collective in its group, -1 for compute


class Recorder:
    """The clocks and the events of one rank. Not thread-safe: one rank, one thread.

    Args:
        rank: global rank of the device.
        cluster: the described hardware that prices operations.
        keep_events: False keeps the clocks and drops the events.
        memory_bytes: capacity of the device's memory; None for no limit.
    """

    def __init__(
        self, rank: int, cluster: ClusterSpec, *, keep_events: bool = True, memory_bytes: int | None = None
    ) -> None:
        self.rank = rank
        self.cluster = cluster
        self.step = 0
        self.keep_events = keep_events
        self.memory = MemoryAccount(memory_bytes, f"rank {rank}")
        self.clock_ps: dict[str, int] = {COMPUTE: 0}
        # Plain tuples in Event's field order; building an Event each time costs twice as much.
        self._rows: list[tuple[Any, ...]] = []
        self.metrics: list[tuple[int, str, float]] = []  # (step, name, value), see `log`
        # (op, shapes, ...) -> (duration_ps, flops, bytes). The owner of the key fills it.
        self.prices: dict[Any, tuple[int, int, int]] = {}

    @property
    def now_ps(self) -> int:
        """Simulated time of the compute stream [ps]."""
        return self.clock_ps[COMPUTE]

    def price(self, flops: int, size_bytes: int, itemsize: int) -> tuple[int, int, int]:
        """(duration [ps], flops, bytes) of work on this rank's device."""
        device = self.cluster.device
        return device.time_ps(flops, size_bytes, itemsize), flops, size_bytes

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: tuple[int, int, int]
    ) -> None:
        """Advance the compute stream by `price` and note the event."""
        duration_ps, flops, size_bytes = price
        start_ps = self.clock_ps[COMPUTE]
        end_ps = start_ps + duration_ps
        self.clock_ps[COMPUTE] = end_ps
        if self.keep_events:
            self._rows.append(
                (self.rank, COMPUTE, name, kind, self.step, wall_start_ns, wall_end_ns,
                 start_ps, end_ps, flops, size_bytes, 0, (), -1)
            )  # fmt: skip

    def work(
        self, name: str, kind: str, wall_start_ns: int, flops: int, size_bytes: int, itemsize: int
    ) -> None:
        """`compute` for work that ends now, at the price of its flops and bytes, which is kept."""
        key = name, flops, size_bytes, itemsize
        price = self.prices.get(key)
        if price is None:
            price = self.prices[key] = self.price(flops, size_bytes, itemsize)
        self.compute(name, kind, wall_start_ns, perf_counter_ns(), price)

    def communicate(
        self, name: str, kind: str, stream: str, wall_start_ns: int, wall_end_ns: int,
        sim_start_ps: int, sim_end_ps: int, size_bytes: int, sent_bytes: int,
        group: tuple[int, ...], seq: int,
    ) -> None:  # fmt: skip
        """Set the clock of `stream` to the end of a communication and note the event."""
        self.clock_ps[stream] = sim_end_ps
        if self.keep_events:
            self._rows.append(
                (self.rank, stream, name, kind, self.step, wall_start_ns, wall_end_ns,
                 sim_start_ps, sim_end_ps, 0, size_bytes, sent_bytes, group, seq)
            )  # fmt: skip

    def join(self, until_ps: int) -> None:
        """The compute stream waits for something that ends at `until_ps`."""
        if until_ps > self.clock_ps[COMPUTE]:
            self.clock_ps[COMPUTE] = until_ps

    def next_step(self) -> None:
        """Count a finished optimizer step; later events carry the next number."""
        self.step += 1

    def log(self, **values: float) -> None:
        """Note numbers of the current step, such as a loss."""
        self.metrics += [(self.step, name, float(value)) for name, value in values.items()]

    @property
    def events(self) -> list[Event]:
        return [Event(*row) for row in self._rows]


class _Current(threading.local):
    recorder: Recorder | None = None  # in the class: what a thread lacks is found without an error


_current = _Current()


def current_recorder() -> Recorder | None:
    """The recorder of the rank that this thread plays, or None outside of a run."""
    return _current.recorder


def set_recorder(recorder: Recorder | None) -> None:
    """Make `recorder` this thread's current one from now on."""
    _current.recorder = recorder


@contextmanager
def use_recorder(recorder: Recorder | None) -> Iterator[Recorder | None]:
    """Make `recorder` this thread's current one inside the block."""
    before = current_recorder()
    set_recorder(recorder)
    try:
        yield recorder
    finally:
        set_recorder(before)
