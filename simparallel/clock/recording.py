"""The recording of a run: the events of a bounded number of whole steps, and exact totals of all events.

Events of a step are kept or dropped together, and the step numbers alone decide which steps are kept. So ranks that
drop events still have the same steps, and a kept collective is complete on all ranks.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from simparallel.errors import InputError

COMPUTE, RANGE = "compute", "range"
RECORD = ("off", "summary", "full")
# Limit for all ranks together, and the least for each rank.
EVENTS_PER_RUN, EVENTS_PER_RANK = 100_000, 500
# Number of first and of last steps that are always kept, unless they are too large.
_ENDS = 4
# Level at which only the first and the last step are kept.
_TOP = 40
# Number of disjoint intervals that later ones may still overlap.
_UNFINISHED = 4096


class Event(NamedTuple):
    """One operation of a device. Times are half-open intervals."""

    rank: int
    stream: str  # "compute", "comm <group>", "send to <rank>", "copy out", "copy in"; "range" of marks
    name: str  # "MatMul", "MatMul.backward", "SGD.step", "all_reduce", ...
    kind: str  # one of recorder.KINDS
    step: int  # optimizer steps finished before it
    wall_start_ns: int  # CLOCK_MONOTONIC, comparable between ranks of a machine; on a GPU, when the operation ran
    wall_end_ns: int
    sim_start_ps: int
    sim_end_ps: int
    flops: int  # 0 for communication
    size_bytes: int  # moved in memory (compute) or payload (communication)
    sent_bytes: int  # sent from this rank by the modelled algorithm; 0 for compute
    group: tuple[int, ...]  # ranks of a communication, () for compute
    seq: int  # number of the collective in its group, of the copy in its rank, -1 for compute
    device: int = 0  # number of the device in its rank
    live_bytes: tuple[int, ...] = ()  # live at its end, by memory.CATEGORIES; () if not recorded
    step_ps: tuple[int, ...] = ()  # times of a message-based algorithm's steps, if their sum is the event's time
    algorithm: str = ""  # algorithm that a collective's time assumes: "ring", "tree", "hierarchical", …
    layer: str = ""  # path of the module that called the op, such as "body.fc1"; "" outside of modules

    @property
    def lane(self) -> tuple[int, int, str]:
        """Rank, device and stream."""
        return self.rank, self.device, self.stream


_RANK, _STREAM, _KIND, _STEP = (Event._fields.index(name) for name in ("rank", "stream", "kind", "step"))
WALL_START, WALL_END = (Event._fields.index(name) for name in ("wall_start_ns", "wall_end_ns"))
_SUMMED = tuple(
    Event._fields.index(name)
    for name in ("wall_start_ns", "wall_end_ns", "sim_start_ps", "sim_end_ps", "flops", "sent_bytes")
)
_DEVICE = Event._fields.index("device")
_step_of = itemgetter(_STEP)
_kind_of = itemgetter(_KIND)
_device_of = itemgetter(_DEVICE)


def check_record(record: bool | str) -> str:
    """Return the recording mode: "off", "summary" or "full"; True means "full" and False "off".

    Raises:
        InputError: any other value.
    """
    if isinstance(record, bool):
        return "full" if record else "off"
    if record not in RECORD:
        raise InputError(
            f"record={record!r} is not one of {', '.join(RECORD)}: no events, exact totals with the events of "
            "some steps, or all events."
        )
    return record


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
        done = {row[_STEP] for row in rows if row[_KIND] == "optimizer" and row[_STEP] > self._newest}
        self._num_steps += len(done)
        self._newest = max(done, default=self._newest)
        # Ranges are marks of the user, not work.
        if RANGE in set(map(_kind_of, rows)):
            rows = [row for row in rows if row[_KIND] != RANGE]
        devices = set(map(_device_of, rows))
        for device in devices:
            found = rows if len(devices) == 1 else [row for row in rows if row[_DEVICE] == device]
            self._devices.setdefault(device, _DeviceTally()).add(found)

    def totals(self) -> dict[int, Totals]:
        """Return device number -> its totals, ascending."""
        return {
            device: found.totals(self._num_steps) for device, found in sorted(self._devices.items()) if found.num_events
        }


class _DeviceTally:
    def __init__(self) -> None:
        self.num_events = self.sent_bytes = self.flops = 0
        self.start_ps = self.end_ps = 0
        self.compute, self.communication, self.busy = _Union(), _Union(), _Union()
        self.wall_compute, self.wall_communication = _Union(), _Union()

    def add(self, rows: Sequence[tuple[Any, ...]]) -> None:
        wall_starts, wall_ends, starts, ends, flops, sent = (_integers(rows, field) for field in _SUMMED)
        computes = np.fromiter([row[_STREAM] == COMPUTE for row in rows], bool, len(rows))
        first, last = int(starts.min()), int(ends.max())
        self.start_ps = min(self.start_ps, first) if self.num_events else first
        self.end_ps = max(self.end_ps, last) if self.num_events else last
        self.num_events += len(rows)
        self.flops += int(flops.sum())
        self.sent_bytes += int(sent.sum())
        self.busy.add(starts, ends)
        for chosen, simulated, wall in (
            (computes, self.compute, self.wall_compute),
            (~computes, self.communication, self.wall_communication),
        ):
            simulated.add(starts[chosen], ends[chosen])
            wall.add(wall_starts[chosen], wall_ends[chosen])

    def totals(self, num_steps: int) -> Totals:
        return Totals(
            self.num_events,
            num_steps,
            self.start_ps,
            self.end_ps,
            self.compute.length,
            self.communication.length,
            self.busy.length,
            self.wall_compute.length,
            self.wall_communication.length,
            self.sent_bytes,
            self.flops,
        )


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


class Recorded(NamedTuple):
    """A rank's recording, in the form that is sent to the launcher."""

    rows: list[tuple[Any, ...]] = []  # events, as tuples
    totals: dict[int, Totals] | None = None  # by device; None if no event was dropped
    level: int = 0
    last_step: int = 0
    timed_by: str = ""  # the GPU whose events gave the wall times of its operations; "" for the host's clock


class Recording:
    """The events of one rank: all of them, or only some whole steps once the limit is reached.

    It then keeps the first and the last steps, and in between two out of four, later two out of eight, sixteen and so
    on: two consecutive steps show how one follows the other. A single step that is too large (a program without an
    optimizer is one step) keeps its first and last events. Events are added to the totals before they are dropped.

    Args:
        limit: number of events to keep; None for all.

    Attributes:
        rows: the events, as tuples in the order of `Event`. A caller that appends must call `thin` when `limit` is
            reached.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.rows: list[tuple[Any, ...]] = []
        self.limit = sys.maxsize if limit is None else limit
        self._level = 0
        self._tally: Tally | None = None
        # Number of rows at the start of the list that the tally includes.
        self._added = 0
        # Several threads may drive the devices of a rank.
        self._lock = threading.Lock()

    def thin(self, step: int) -> None:
        """Drop steps until half of the limit is free. `step` is the current one, which is kept."""
        with self._lock:
            # Other threads may append at the same time: only handle the rows that are there now.
            count = len(self.rows)
            if count < self.limit:
                return
            rows = self.rows[:count]
            # Before any row is dropped.
            self._add(rows)
            rows = [row for _, found in groupby(rows, _step_of) for row in self._shortened(list(found))]
            rows = kept(rows, self._level, step)
            # Half the limit, so that thinning, which looks at all rows, is needed only once per limit / 2 new events.
            while len(rows) > self.limit // 2 and self._level < _TOP:
                # With a stride beyond the present step only both ends are left, and another level would not help.
                self._level = self._level + 1 if 1 << self._level <= step else _TOP
                rows = kept(rows, self._level, step)
            self.rows[:count] = rows
            self._added = len(rows)

    def _add(self, rows: list[tuple[Any, ...]]) -> None:
        if self._tally is None:
            self._tally = Tally()
        self._tally.add(rows[self._added :])

    def _shortened(self, step: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        ends = self.limit // 8
        return step if len(step) <= 2 * ends else step[:ends] + step[-ends:]

    def recorded(self) -> Recorded:
        """Return the kept events, with totals if events were dropped."""
        last_step = max(map(_step_of, self.rows), default=0)
        if self._tally is None:
            return Recorded(self.rows, None, 0, last_step)
        self._add(self.rows)
        self._added = len(self.rows)
        return Recorded(kept(self.rows, self._level, last_step), self._tally.totals(), self._level, last_step)


def kept(rows: Iterable[tuple[Any, ...]], level: int, last_step: int) -> list[tuple[Any, ...]]:
    """Return the rows whose steps are kept at a level: both ends, and pairs of consecutive steps in between.

    Each level keeps a subset of the steps of the previous level.
    """
    stride, ends = 2 << level, _ENDS if level < _TOP else 1
    if level == 0:
        return list(rows)
    return [row for row in rows if row[_STEP] % stride < 2 or row[_STEP] < ends or row[_STEP] > last_step - ends]


def join(found: Sequence[Recorded]) -> tuple[list[Event], dict[tuple[int, int], Totals] | None]:
    """Merge the recordings of all ranks: events of the same steps, and (rank, device) -> totals.

    Totals are None if no rank dropped events.
    """
    # Thin all ranks to the level of the rank that dropped most, so that every kept collective is complete.
    level, last = (max((one.level for one in found), default=0), max((one.last_step for one in found), default=0))
    events = [Event(*row) for one in found for row in kept(one.rows, level, last)]
    if all(one.totals is None for one in found):
        return events, None
    totals: dict[tuple[int, int], Totals] = {}
    for one in found:
        if one.rows:
            # A recording has the events of one rank.
            rank = one.rows[0][_RANK]
            totals |= {(rank, device): total for device, total in _totals_of(one).items()}
    return events, totals


def timer_of(found: Iterable[Recorded]) -> str:
    """Return the names of the GPUs whose events gave the wall times of all ranks; "" for the host's clock."""
    return ", ".join(sorted({one.timed_by for one in found if one.timed_by}))


def _totals_of(one: Recorded) -> dict[int, Totals]:
    if one.totals is not None:
        return one.totals
    tally = Tally()
    tally.add(one.rows)
    return tally.totals()
