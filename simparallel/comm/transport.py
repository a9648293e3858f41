"""What a transport gives to the collectives: shared words, and a way to wait for them.

A `Condition` is "these words have reached this number". Ranks that are processes wait for one by
spinning, yielding and sleeping (`shm`); ranks that are threads hand the turn to one another
(`inline`). Everything else is the same code for both.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simparallel.comm.segment import (
    DONE,
    FAILED,
    FAILED_BY_OTHERS,
    RECORD_BYTES,
    RUNNING,
    SITE_BYTES,
    SITES,
    Arena,
    Segment,
)
from simparallel.errors import RankFailedError

DEFAULT_TIMEOUT_S = 60.0
LEFT = "left normally"
_PACKAGE = str(Path(__file__).resolve().parent.parent) + os.sep


class Condition(NamedTuple):
    """Met when `words[i] >= target` for every i in `indices`."""

    indices: tuple[int, ...]
    ranks: tuple[int, ...]  # who writes each of these words
    target: int


class AbstractTransport:
    """One rank's end of the shared memory.

    Attributes:
        rank, world_size: who we are.
        segment, arena: the shared memory, and this rank's part of it.
    """

    def __init__(
        self, segment: Segment, rank: int, timeout_s: float = DEFAULT_TIMEOUT_S, arena: Arena | None = None
    ) -> None:
        self.segment = segment
        self.rank = rank
        self.world_size = segment.world_size
        self.timeout_s = timeout_s
        self.arena = arena or Arena(segment, rank)  # arrays in an arena may outlive a run
        self.words = segment.words
        self._site_numbers: dict[tuple[int, int], int] = {}
        self._site_codes: list[Any] = []

    # --- what differs ------------------------------------------------------------------------------

    def wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        """Return when any of `conditions` is met; the first is the one that is needed.

        Raises:
            RankFailedError: another rank failed, or left while it was needed.
            DeadlineError, DeadlockError: no progress.
            KeyboardInterrupt: the launcher was interrupted.
        """
        raise NotImplementedError

    def notify(self, index: int) -> None:
        """Called after a word was stored: wake whoever sleeps on it."""
        raise NotImplementedError

    # --- what is common ----------------------------------------------------------------------------

    def met(self, condition: Condition) -> bool:
        words, target = self.words, condition.target
        for index in condition.indices:  # noqa: SIM110 (a generator costs twice the time here)
            if words[index] < target:
                return False
        return True

    def lagging(self, condition: Condition) -> list[int]:
        """Ranks that the condition still waits for."""
        pairs = zip(condition.indices, condition.ranks, strict=True)
        return [rank for index, rank in pairs if self.words[index] < condition.target]

    def set_state(self, state: int) -> None:
        self.words[self.segment.map.state(self.rank)] = state

    def state_of(self, rank: int) -> int:
        return self.words[self.segment.map.state(rank)]

    def fail(self, report: dict[str, Any]) -> None:
        """Publish why this rank failed; the others raise in their next wait."""
        summary, time_ns = report["summary"][:4000], report.get("time_ns", 0)
        while len(record := json.dumps({"summary": summary, "time_ns": time_ns})) > RECORD_BYTES:
            summary = summary[: len(summary) // 2]  # escapes may be long
        self.segment.write_record(self.rank, record)
        self.set_state(FAILED_BY_OTHERS if report.get("secondary") else FAILED)

    def check_health(self, needed: Condition, describe: Callable[[], str]) -> None:
        """Raise if another rank failed, or one that is needed has left."""
        states = [self.state_of(rank) for rank in range(self.world_size)]
        for rank in self.lagging(needed):
            if states[rank] == DONE:
                raise RankFailedError(
                    f"rank {self.rank} waits in {describe()}, but rank {rank} left its function normally and "
                    "will never come. All ranks of a group must make the same calls.",
                    rank=rank, cause=LEFT,
                )  # fmt: skip
        for wanted in (FAILED, FAILED_BY_OTHERS):
            if wanted in states:
                raise self._failed_error(states.index(wanted), describe)

    def _failed_error(self, rank: int, describe: Callable[[], str]) -> RankFailedError:
        report = json.loads(self.segment.read_record(rank))
        return RankFailedError(
            f"rank {self.rank} was stopped in {describe()}: rank {rank} failed with {report['summary']}",
            rank=rank, cause=report["summary"],
        )  # fmt: skip

    def call_site(self) -> int:
        """The number of the user's line that made this call, readable by peers even after we die."""
        frame: Any = sys._getframe(2)
        while (code := frame.f_code).co_filename.startswith(_PACKAGE):
            frame = frame.f_back
            if frame is None:
                return 0
        key = (id(code), frame.f_lineno)  # the hash of a code object costs more than all the rest
        number = self._site_numbers.get(key)
        if number is None:
            number = self._site_numbers[key] = self._intern_site(code, frame.f_lineno)
        return number

    def _intern_site(self, code: Any, line: int) -> int:
        self._site_codes.append(code)  # keeps its id taken
        number = min(len(self._site_numbers) + 1, SITES - 1)  # the last one is shared by the rest
        file = code.co_filename
        if not file.startswith("<"):
            file = os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file
        text = f"{file}:{line} in {code.co_name}"[-SITE_BYTES:]  # the end has the line
        self.segment.write_site(self.rank, number, text if number < SITES - 1 else "(one of many places)")
        return number

    def site_text(self, rank: int, number: int) -> str:
        return self.segment.read_site(rank, number) if number else "(unknown place)"

    def start(self) -> None:
        self.words[self.segment.map.pid(self.rank)] = os.getpid()
        self.set_state(RUNNING)
