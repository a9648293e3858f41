"""The breakdown of a time: how long each device computes, communicates, and does neither.

All times are lengths of unions of intervals. So communication that no computing hides is the union of both without
that of computing, and idle time is what is left of the makespan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from simparallel.clock.event import COMPUTE, DEVICE, KIND, RANGE, STEP, STREAM, Event

# Number of disjoint intervals that later ones may still overlap.
_UNFINISHED = 4096
_SUMMED = tuple(
    Event._fields.index(name)
    for name in ("wall_start_ns", "wall_end_ns", "sim_start_ps", "sim_end_ps", "flops", "sent_bytes")
)


class Totals(NamedTuple):
    """Totals over all events of one device; times are lengths of unions of intervals."""

    num_events: int
    steps: int  # steps of the rank's optimizer
    start_ps: int  # of the first event
    end_ps: int  # of the last event
    compute_ps: int
    communication_ps: int
    busy_ps: int  # compute or communication
    wall_compute_ns: int
    wall_communication_ns: int
    sent_bytes: int
    flops: int


class Tally:
    """The totals of the events of one rank, summed up batch by batch."""

    def __init__(self) -> None:
        self._devices: dict[int, _DeviceTally] = {}
        self._num_steps, self._newest = 0, -1

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        """Add events, given as tuples in the order of `Event`; optimizer steps must not go back between batches."""
        done = {row[STEP] for row in rows if row[KIND] == "optimizer" and row[STEP] > self._newest}
        self._num_steps += len(done)
        self._newest = max(done, default=self._newest)
        # Ranges are marks of the user, not work.
        if RANGE in set(map(itemgetter(KIND), rows)):
            rows = [row for row in rows if row[KIND] != RANGE]
        devices = set(map(itemgetter(DEVICE), rows))
        for device in devices:
            found = rows if len(devices) == 1 else [row for row in rows if row[DEVICE] == device]
            self._devices.setdefault(device, _DeviceTally()).add(found)

    def totals(self) -> dict[int, Totals]:
        """Return device number -> its totals, ascending."""
        return {device: found.totals(self._num_steps) for device, found in sorted(self._devices.items())}


class _DeviceTally:
    def __init__(self) -> None:
        # From the first start to the last end.
        self.span_ps: tuple[int, ...] = ()
        # By fields of `Totals`.
        self.sums: Counter[str] = Counter()
        self.unions: defaultdict[str, _Union] = defaultdict(_Union)

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        wall_starts, wall_ends, starts, ends, flops, sent = (_integers(rows, field) for field in _SUMMED)
        computes = np.fromiter([row[STREAM] == COMPUTE for row in rows], bool, len(rows))
        times = *self.span_ps, int(starts.min()), int(ends.max())
        self.span_ps = min(times), max(times)
        self.sums.update(num_events=len(rows), flops=int(flops.sum()), sent_bytes=int(sent.sum()))
        self.unions["busy_ps"].add(starts, ends)
        for what, chosen in (("compute", computes), ("communication", ~computes)):
            self.unions[f"{what}_ps"].add(starts[chosen], ends[chosen])
            self.unions[f"wall_{what}_ns"].add(wall_starts[chosen], wall_ends[chosen])

    def totals(self, num_steps: int) -> Totals:
        start_ps, end_ps = self.span_ps
        lengths = {name: union.length for name, union in self.unions.items()}
        return Totals(steps=num_steps, start_ps=start_ps, end_ps=end_ps, **self.sums, **lengths)


class _Union:
    """Length of the union of intervals that come in batches.

    The newest `_UNFINISHED` disjoint intervals can still absorb overlaps, so batches need to be ordered only roughly.
    A call that lasts longer than that many idle gaps would be counted twice where it overlaps older intervals.
    """

    def __init__(self) -> None:
        self._finished = 0
        self._starts = self._ends = np.empty(0, np.int64)

    @property
    def length(self) -> int:
        return self._finished + int((self._ends - self._starts).sum())

    def add(self, starts: np.ndarray, ends: np.ndarray) -> None:
        starts, ends = np.concatenate([self._starts, starts]), np.concatenate([self._ends, ends])
        # A stable sort is nearly linear here: both parts are nearly sorted.
        order = np.argsort(starts, kind="stable")
        # After the running maximum of the ends, an interval of the union ends where the next start lies beyond it.
        starts, ends = starts[order], np.maximum.accumulate(ends[order])
        gaps = starts[1:] > ends[:-1]
        starts, ends = starts[np.append(True, gaps)[: len(starts)]], ends[np.append(gaps, True)[: len(ends)]]
        done = max(0, len(starts) - _UNFINISHED)
        self._finished += int((ends[:done] - starts[:done]).sum())
        self._starts, self._ends = starts[done:], ends[done:]


def _integers(rows: Sequence[tuple[Any, ...]], field: int) -> np.ndarray:
    """Return a field of all rows as int64, or as exact Python integers if they are too large."""
    try:
        return np.fromiter(map(itemgetter(field), rows), np.int64, len(rows))
    except OverflowError:
        return np.array([row[field] for row in rows], object)


def add_up(events: Iterable[Event]) -> dict[tuple[int, int], Totals]:
    """Return (rank, device) -> totals of its events, ascending."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    totals: dict[tuple[int, int], Totals] = {}
    for rank, found in sorted(by_rank.items()):
        # The same sums as in a running recorder, so a loaded trace has the same summary.
        tally = Tally()
        tally.add(found)
        totals |= {(rank, device): total for device, total in tally.totals().items()}
    return totals


def makespan_ps(totals: Mapping[tuple[int, int], Totals]) -> int:
    """Return the simulated time [ps] from the first start to the last end; 0 without events."""
    if not totals:
        return 0
    return max(one.end_ps for one in totals.values()) - min(one.start_ps for one in totals.values())
