"""`python -m benchmarks collectives`: every collective, compared with other libraries and with memcpy.

All contenders are warm and take turns: each round runs the same exchange with every one of them.
A turn is a barrier and then as many calls as fit in about 30 ms; its time is the slowest
rank's. Reported are medians over rounds, and the median of the ratio to the best peer, see `contest`.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import simparallel as sp
from benchmarks.contest import Result, Turn, aligned, measure
from benchmarks.environments import choose_peers
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.peers.exchange import ITEM_BYTES, OPS, WHOLE, Call, Exchange, num_elements, private, turn
from benchmarks.writable import check_writable
from simparallel.base.units import format_seconds
from simparallel.errors import InputError, RunFailedError

OURS, SHARED, MEMCPY = "simparallel", "in the arena", "memcpy"


class Contender(Protocol):
    """The interface of a contender."""

    label: str

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        """Return the seconds that `count` calls took on the slowest rank.

        Raises:
            BenchError: a wrong result, or none at all.
        """

    def close(self) -> None:
        """End its processes. Repeated calls are no-ops."""


def checked(contender: Contender, op: str, elements: int) -> Turn:
    """Return the turns of an exchange as a function of the number of calls; the first turn checks the result."""
    # Once: checking takes time, and the first turns are not timed (see `measure`).
    checks = iter([True])
    return lambda count: contender.turn(op, elements, count, next(checks, False))


class Ours:
    """A warm `Cluster`, measured through its public functions with all checks on.

    Args:
        cluster: runs the calls.
        shared: allocate arrays in the devices' shared arenas, like gradient buckets.
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
            raise BenchError(f"{self.label}: {op} of {elements} elements gave a wrong result.", peer=self.label)
        # A collective has ended when the slowest rank has its result.
        return max(seconds for seconds, _ in results)

    def close(self) -> None:
        self._cluster.close()


def our_turn(op: str, elements: int, count: int, check: bool, shared: bool) -> tuple[float, bool]:
    """Run a turn on one of our ranks."""
    # Peers read large arrays of the arena in place; private ones are copied there first.
    room: Callable[[int], np.ndarray] = partial(sp.empty, shared=True) if shared else private
    exchange = Exchange(op, sp.get_rank(), sp.get_world_size(), elements, room)
    return turn(exchange, our_call(exchange), sp.barrier, count, check)


def our_call(exchange: Exchange) -> Call:
    """Return our function for this exchange; like the peers' it writes into the same result arrays in every call."""
    sent: Any = exchange.sent
    out: Any = exchange.received
    if exchange.op == "scatter" and sent is not None:
        # Our scatter takes a list with an entry for each rank.
        sent = list(sent.reshape(exchange.ranks, -1))
    if exchange.op == "gather" and out is not None:
        # Our gather fills a row for each rank.
        out = out.reshape(exchange.ranks, -1)
    if exchange.op == "barrier":
        return sp.barrier
    if exchange.op == "adasum":
        # Adasum is an op of our all_reduce; the peers have it as a call of its own.
        return partial(sp.all_reduce, sent, "adasum")
    if exchange.op in WHOLE:
        return partial(getattr(sp, exchange.op), sent)
    return partial(getattr(sp, exchange.op), sent, out=out)


class Memcpy:
    """`np.copyto` of the same number of bytes in one process: a lower bound of moving them once."""

    label = MEMCPY

    def turn(self, op: str, elements: int, count: int, check: bool) -> float:
        source, target = np.zeros((2, elements), np.float32) + 1
        # Untimed copies, as in the warm-up of the other contenders.
        for _ in range(2):
            np.copyto(target, source)
        start = time.perf_counter()
        for _ in range(count):
            np.copyto(target, source)
        return time.perf_counter() - start

    def close(self) -> None:
        pass


def size_bytes(elements: int) -> int:
    """Return the size of a float32 vector."""
    return elements * ITEM_BYTES


_BINARY = ((1 << 20, "MiB"), (1 << 10, "KiB"))


@dataclass
class Row:
    """One exchange, and each contender's time.

    Attributes:
        op, ranks: the collective, and the number of ranks.
        size_bytes: of the longest vector; 0 for the barrier.
        result: seconds per call, by contender and round.
        peers: contenders that are other libraries.
    """

    op: str
    ranks: int
    size_bytes: int
    result: Result
    peers: tuple[str, ...]

    @property
    def best_peer(self) -> str | None:
        """The peer with the smallest median."""
        return min(self.peers, key=self.result.median_s, default=None)

    @property
    def ratio_to_best_peer(self) -> float | None:
        """Our time divided by the best peer's; below 1 we are faster."""
        best = self.best_peer
        return None if best is None else self.result.ratio(OURS, best)

    @property
    def ratio_to_memcpy(self) -> float | None:
        """Our time divided by the time of copying as many bytes once."""
        return self.result.ratio(OURS, MEMCPY) if MEMCPY in self.result.times_s else None

    def bandwidth(self, label: str) -> float:
        """Return the algorithm bandwidth [byte/s]: the size of the exchange divided by its time."""
        return self.size_bytes / self.result.median_s(label)

    def document(self) -> dict[str, Any]:
        """Return the row as plain data."""
        labels = list(self.result.times_s)
        return {
            "op": self.op,
            "ranks": self.ranks,
            "size_bytes": self.size_bytes,
            "median_s": {label: self.result.median_s(label) for label in labels},
            # The least time is the one that other programs disturbed least.
            "least_s": {label: min(self.result.times_s[label]) for label in labels},
            "bandwidth_bytes_per_s": {label: self.bandwidth(label) for label in labels},
            "best_peer": self.best_peer,
            "ratio_to_best_peer": self.ratio_to_best_peer,
            "ratio_to_memcpy": self.ratio_to_memcpy,
            "times_s": self.result.times_s,
        }


def table(rows: Sequence[Row], labels: Sequence[str]) -> str:
    """Format a line per size: the time of each contender, our bandwidth, and our ratios to memcpy and the best peer."""
    head = [f"{rows[0].op}, {rows[0].ranks} ranks", *labels, "GB/s", "/ memcpy", "/ best peer"]
    lines = [head]
    for row in rows:
        times = [format_seconds(row.result.median_s(label)) if label in row.result.times_s else "-" for label in labels]
        ratios = [f"{r:.2f}" if r is not None else "-" for r in (row.ratio_to_memcpy, row.ratio_to_best_peer)]
        bandwidth = f"{row.bandwidth(OURS) / 1e9:.3g}" if row.size_bytes else "-"
        lines.append([format_size(row.size_bytes), *times, bandwidth, *ratios])
    return aligned(lines)


def format_size(size_bytes: int) -> str:
    """Format a size in binary units: "16 KiB". Exact if the unit divides it."""
    for unit, name in _BINARY:
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes} B"


SIZES = (4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 32 << 20)  # [byte]
TURN_S = 0.03
# The file formats of figures.
FORMATS = (".svg", ".png", ".pdf")
OURSELVES = (OURS, SHARED, MEMCPY)
Tell = Callable[[str], object]


def main(
    *,
    ranks: Sequence[int] = (2, 4, 8),
    ops: Sequence[str] | None = None,
    sizes: Sequence[int] | None = None,
    peers: Sequence[str] | None = None,
    rounds: int = 7,
    turn_s: float = TURN_S,
    out: str | Path | None = "runs/bench/collectives.svg",
    as_json: bool = False,
) -> list[Row]:
    """Measure, print tables or JSON, draw the figure, return the rows.

    Args:
        ranks: numbers of ranks, one table each.
        ops: names of collectives; all by default.
        sizes: bytes of the longest vector; from 4 B to 32 MiB by default.
        peers: names of peers; by default those with an environment.
        rounds: turns of each contender.
        turn_s: approximate length of a turn [s].
        out: the figure (.svg, .png or .pdf); None draws none.
        as_json: print JSON, and everything else to stderr.

    Raises:
        InputError: an unknown collective, peer or figure format, or a number out of range.
        OSError: the figure cannot be written.
        BenchError: simparallel returned a wrong result. (A peer with a wrong result is reported and left out.)
    """
    ops, sizes = list(ops or OPS), list(sizes or SIZES)
    _check(ranks, ops, sizes, rounds, out)
    output = sys.stderr if as_json else sys.stdout

    def tell(text: str) -> None:
        print(text, file=output, flush=True)

    chosen = choose_peers(peers)
    if out is not None:
        # Check it now rather than after twenty minutes of measurements.
        check_writable(out)
    missing = {peer.name: peer.setup_command for peer in chosen if not peer.is_ready}
    for peer in chosen:
        peer.tell_if_missing(tell)
    versions: dict[str, str] = {}
    rows = []
    for number in ranks:
        with contenders_of(number, [peer.name for peer in chosen if peer.is_ready], versions, tell) as contenders:
            for op in ops:
                measured = list(_measure(op, number, sizes, contenders, rounds, turn_s, tell))
                tell("\n" + table(measured, list(contenders)))
                rows += measured
    if as_json:
        print(json.dumps(_document(rows, versions, missing), indent=1))
    if out is not None and draw(rows, out):
        tell(f"\nwritten: {out}")
    return rows


def _check(ranks: Sequence[int], ops: Sequence[str], sizes: Sequence[int], rounds: int, out: str | Path | None) -> None:
    if out is not None and Path(out).suffix.lower() not in FORMATS:
        raise InputError(f"out: end {str(out)!r} in one of {', '.join(FORMATS)}.")
    for op in ops:
        if op not in OPS:
            raise InputError(f"ops: {op!r} is not a collective; choose from {', '.join(OPS)}.")
    for name, numbers in (("ranks", ranks), ("sizes", sizes), ("rounds", [rounds])):
        for number in numbers:
            if number < 1:
                raise InputError(f"{name}: {number} must be at least 1.")


@contextmanager
def contenders_of(
    ranks: int, names: Sequence[str], versions: dict[str, str], tell: Tell
) -> Iterator[dict[str, Contender]]:
    """Start the contenders, yield label -> contender, and end them all afterwards."""
    with ExitStack() as stack:
        cluster = stack.enter_context(sp.Cluster(ranks, echo=False))
        contenders: dict[str, Contender] = {OURS: Ours(cluster), SHARED: Ours(cluster, shared=True)}
        for peer in choose_peers(names):
            try:
                job = Job(peer, ranks)
            except BenchError as error:
                tell(f"left out with {ranks} ranks: {error}")
                continue
            stack.callback(job.close)
            # Only a peer that has started knows its version.
            versions[job.label] = job.version
            contenders[job.label] = job
        contenders[MEMCPY] = Memcpy()
        yield contenders


def _measure(
    op: str, ranks: int, sizes: Sequence[int], contenders: dict[str, Contender], rounds: int, turn_s: float, tell: Tell
) -> Iterator[Row]:
    """Yield a row per size. A peer that fails is reported and removed from `contenders`."""

    def leave_out(label: str, error: BenchError) -> None:
        # A peer may fail on this machine; our own failure is an error.
        if label in OURSELVES:
            raise error
        tell(f"left out from here on: {error}")
        contenders.pop(label).close()

    # Small sizes may round to the same number of elements.
    for elements in dict.fromkeys(num_elements(op, size, ranks) for size in sizes):
        turns = {
            label: checked(contender, op, elements)
            for label, contender in contenders.items()
            # A barrier has no data to copy or to place.
            if op != "barrier" or label not in (SHARED, MEMCPY)
        }
        result = measure(op, turns, rounds=rounds, turn_s=turn_s, leave_out=leave_out)
        peers = tuple(label for label in result.times_s if label not in OURSELVES)
        yield Row(op, ranks, size_bytes(elements), result, peers)


def _document(rows: list[Row], versions: Mapping[str, str], missing: Mapping[str, str]) -> dict[str, Any]:
    return {
        "machine": {
            "cores": len(os.sched_getaffinity(0)), "architecture": platform.machine(),
            "python": platform.python_version(), "numpy": np.__version__, "simparallel": sp.__version__,
        },
        "peers": dict(versions),
        "missing": dict(missing),
        "rows": [row.document() for row in rows],
    }  # fmt: skip


def draw(rows: Sequence[Row], out: str | Path) -> bool:
    """Write the figure; return False if there is nothing to draw."""
    from simparallel.view import save_figure

    drawn = figure(rows)
    if drawn is not None:
        save_figure(drawn, out)
    return drawn is not None


def figure(rows: Sequence[Row]) -> Any:
    """Draw times over sizes; return None if no row has a size."""
    from simparallel.view import plot_collectives

    points: dict[tuple[str, int], dict[str, list[tuple[float, float]]]] = {}
    for row in rows:
        # A barrier has no size, so no place on a logarithmic axis.
        if row.size_bytes:
            for label in row.result.times_s:
                curves = points.setdefault((row.op, row.ranks), {})
                curves.setdefault(label, []).append((row.size_bytes, row.result.median_s(label)))
    return plot_collectives(points, ours=(OURS, SHARED), limit=MEMCPY) if points else None
