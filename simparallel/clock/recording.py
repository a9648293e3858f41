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

from simparallel.clock.breakdown import Tally, Totals, add_up
from simparallel.clock.event import RANK, STEP, Event
from simparallel.errors import InputError

RECORD = ("off", "summary", "full")
# Limit for all ranks together, and the least for each rank.
EVENTS_PER_RUN, EVENTS_PER_RANK = 100_000, 500
# Number of first and of last steps that are always kept, unless they are too large.
_ENDS = 4
# Level at which only the first and the last step are kept.
_TOP = 40


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
            rows = [row for _, found in groupby(rows, itemgetter(STEP)) for row in self._shortened(list(found))]
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
        last_step = max(map(itemgetter(STEP), self.rows), default=0)
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
    return [row for row in rows if row[STEP] % stride < 2 or row[STEP] < ends or row[STEP] > last_step - ends]


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
            rank = one.rows[0][RANK]
            known = None if one.totals is None else {(rank, device): total for device, total in one.totals.items()}
            totals |= add_up(map(Event._make, one.rows)) if known is None else known
    return events, totals


def timer_of(found: Iterable[Recorded]) -> str:
    """Return the names of the GPUs whose events gave the wall times of all ranks; "" for the host's clock."""
    return ", ".join(sorted({one.timed_by for one in found if one.timed_by}))
