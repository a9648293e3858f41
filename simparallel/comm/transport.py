"""The interface between collectives and transports: shared words, and a way to wait for them.

A `Condition` is "these words have reached this number". Ranks that are processes wait for one by spinning, yielding
and sleeping (`shm.transport`); ranks that are threads pass the turn to one another (`inline`). All other code is
common to both.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Sequence
from sys import _getframe
from typing import Any, NamedTuple

from simparallel.base.callsite import is_inside, short_place
from simparallel.base.system import KILL, memory_barrier
from simparallel.comm.call_header import COMPARED, OP
from simparallel.comm.diagnosis import counts, deadlock_error, last_calls
from simparallel.comm.fault_spec import Faults
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import DONE, FAILED, FAILED_BY_OTHERS, RECORD_BYTES, RUNNING, SITES, SharedSegment
from simparallel.errors import CommError, DeadlineError, DeadlockError, RankFailedError

DEFAULT_TIMEOUT_S = 60.0
LEFT = "left normally"
# Levels of checking collectives, as the number of header words that have to be equal: "full" compares everything
# that has to match; "light" the purpose and the op; "off" nothing, and records no call sites.
CHECKS = {"full": COMPARED, "light": OP + 1, "off": 0}
UNKNOWN_END = "ended, and the host process does not say how"
UNSEEN_END = "ended, and the system does not say how"
_ENDS = ("was killed by", "exited with", UNKNOWN_END, UNSEEN_END)  # causes other than an exception
_INSIDE: dict[int, int] = {}  # stands for code of this package, which is skipped to find the user's call site


class Condition(NamedTuple):
    """A condition, met when `words[i] >= target` for every i in `indices`, or when one of `instead` is met."""

    indices: tuple[int, ...]
    # The rank that writes each of these words.
    ranks: tuple[int, ...]
    target: int
    instead: tuple[Condition, ...] = ()

    def ways(self) -> list[Condition]:
        """Return the alternatives, each of which is enough."""
        return [self, *self.instead]

    def lagging(self, words: memoryview) -> list[int]:
        """Return the ranks whose words, in these shared words, have not reached the target; without alternatives."""
        pairs = zip(self.indices, self.ranks, strict=True)
        return [rank for index, rank in pairs if words[index] < self.target]


def any_of(conditions: Sequence[Condition]) -> Condition:
    """Return a condition that is met when any of these is."""
    return conditions[0]._replace(instead=tuple(conditions[1:]))


class AbstractTransport:
    """One rank's access to the shared memory.

    Attributes:
        rank, world_size: this rank and the number of ranks.
        unknown_end: description of the end of a process whose exit status is unknown.
        segment, arena: the shared memory, and this rank's part of it.
        words, memory: the shared words; the same memory from its start as bytes.
        compared: number of header words that have to be equal, see `CHECKS`.
        faults: this rank's injected faults, or None.
    """

    unknown_end = UNKNOWN_END

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        arena: Arena | None = None,
        *,
        check: str = "full",
        faults: Faults | None = None,
    ) -> None:
        self.segment = segment
        self.rank = rank
        self.world_size = segment.world_size
        self.timeout_s = timeout_s
        # Passed in, because arrays in an arena may outlive a run.
        self.arena = arena or Arena(segment, rank)
        self.words = segment.words
        # The whole mapping as bytes; it begins with the words.
        self.memory = segment.mmap
        self.faults = faults
        self.compared = CHECKS[check]
        # Without checks, no rank compares call sites or shows them: save the search on every call.
        if check == "off":
            self.call_site = _no_call_site  # type: ignore[method-assign]
        self._sites: dict[int, dict[int, int]] = {}  # number of a call site, by code object and instruction
        self._lines: dict[tuple[str, int], int] = {}  # number of a call site, by file and line
        self._site_codes: list[Any] = []

    # --- implemented by each transport -------------------------------------------------------------

    def sees(self, where: slice, what: bytes) -> bool:
        """Poll for a while; return whether the memory shows these bytes. If not, the caller has to `wait`."""
        raise NotImplementedError

    def wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        """Return when any of `conditions` is met; the first is the one that the caller needs.

        Args:
            conditions: conditions to wait for.
            describe: describes the waiting call, for errors.

        Raises:
            RankFailedError: another rank failed, or left while it was needed.
            DeadlineError, DeadlockError: no progress.
            KeyboardInterrupt: the launcher was interrupted.
        """
        raise NotImplementedError

    def looked(self, needed: Condition, describe: Callable[[], str], looked_s: float) -> None:
        """Raise the errors that `wait` would raise, for a rank that polls instead of waiting.

        Args:
            needed: the condition that it polls for, which is not met.
            describe: describes the polling call, for errors.
            looked_s: for how long it has polled.
        """
        raise NotImplementedError

    def interrupted(self, needed: Condition, describe: Callable[[], str]) -> None:
        """Raise the failure that a KeyboardInterrupt announces, if it is not a Ctrl-C."""

    def notify(self, index: int) -> None:
        """Wake the ranks that sleep on a word; called after it was stored."""
        raise NotImplementedError

    # --- common to all transports ------------------------------------------------------------------

    def met(self, condition: Condition) -> bool:
        words, target = self.words, condition.target
        for index in condition.indices:
            # Words before alternatives: nearly every poll of a wait ends here.
            if words[index] < target:
                return condition.instead != () and any(map(self.met, condition.instead))
        return True

    def gone(self, condition: Condition) -> int | None:
        """Return a rank that has left its function, so that no alternative can ever be met; None if one can."""

        def left(way: Condition) -> int | None:
            # The state is read before the word: a rank may store its last word and leave between the two reads.
            pairs = zip(way.indices, way.ranks, strict=True)
            return next((r for i, r in pairs if self.state_of(r) == DONE and self.words[i] < way.target), None)

        gone = [
            left(way)
            for way in condition.ways()
            if not condition.instead or way.ranks != (self.rank,)  # a waiting rank sends itself nothing
        ]
        return None if None in gone else gone[0]

    def set_state(self, state: int) -> None:
        self.words[self.segment.map.state(self.rank)] = state

    def state_of(self, rank: int) -> int:
        return self.words[self.segment.map.state(rank)]

    def fail(self, report: dict[str, Any], error: BaseException | None = None) -> None:
        """Publish why this rank failed; the others raise in their next wait."""
        summary, more = report["summary"][:4000], {"time_ns": report.get("time_ns", 0)}
        # All ranks of the cycle raise this same error, see `_failed_error`.
        if isinstance(error, DeadlockError):
            more["deadlock"] = list(error.facts["waiting"])
        elif isinstance(error, RankFailedError) and report.get("secondary"):
            # Peers that read this record name the root cause, and not this rank, which it merely stopped.
            more["culprit"], more["cause"] = error.facts["rank"], str(error.facts["cause"])[:2000]
        while len(record := json.dumps({"summary": summary, **more})) > RECORD_BYTES:
            summary = summary[: len(summary) // 2]  # JSON escapes may make it longer
        self.segment.write_record(self.rank, record)
        self.set_state(FAILED_BY_OTHERS if report.get("secondary") else FAILED)

    def check_health(self, needed: Condition, describe: Callable[[], str]) -> None:
        """Raise if another rank failed, or if a rank that is needed has left."""
        # The order decides which error is raised: root causes come before ranks that failed because of others.
        ranks = self.segment.ranks
        states = [self.state_of(rank) for rank in ranks]
        gone = self.gone(needed)
        if gone is not None:
            raise self._left_error(gone, needed, describe)
        if FAILED in states:
            raise self._failed_error(ranks[states.index(FAILED)], describe)
        for rank in ranks:
            code = self.words[self.segment.map.exit_of(rank)]
            if code:
                raise self._death_error(rank, code, describe)
        lost = self.words[self.segment.map.lost()]
        if lost:
            raise self._death_error(lost - 1, 0, describe)
        if FAILED_BY_OTHERS in states:
            raise self._failed_error(ranks[states.index(FAILED_BY_OTHERS)], describe)

    def _late_error(self, missing: list[int], details: str, describe: Callable[[], str]) -> DeadlineError:
        return DeadlineError(
            f"rank {self.rank} waited {self.timeout_s:g} s in {describe()}. Missing: {details}. Raise timeout_s "
            "(--timeout) if that rank may work that long.",
            rank=self.rank,
            missing=missing,
            timeout_s=self.timeout_s,
        )

    def _left_error(self, rank: int, needed: Condition, describe: Callable[[], str]) -> RankFailedError:
        # A word of no group is one of a message: then the last calls of that rank are all there is to tell.
        group = self.segment.map.group_of(needed.indices[0])
        segment = self.segment
        far = last_calls(segment, rank) if group is None else counts(segment, group, self.rank, rank)
        return RankFailedError(
            f"rank {self.rank} waits in {describe()}, but rank {rank} returned from its function and "
            f"will never join: {far}.{self._last_words(rank)} All ranks of a group must make the same calls.",
            rank=rank,
            cause=LEFT,
        )

    def write_last_words(self, text: str) -> None:
        """Record a possible reason before this rank leaves normally."""
        self.segment.write_record(self.rank, json.dumps({"summary": text[:2000]}))

    def _last_words(self, rank: int) -> str:
        """Return the error or exit code that a rank reported when it left, or an empty text."""
        record = self.segment.read_record(rank)
        return f" It reported: {json.loads(record)['summary']}." if record else ""

    def _death_error(self, rank: int, code: int, describe: Callable[[], str]) -> RankFailedError:
        """Build the error for a dead rank; `code`: 1 + exit code, or minus the signal's number, or 0 if unknown."""
        how = f"exited with code {code - 1}" if code > 0 else self.unknown_end
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        if code == -KILL:
            how += " (often the out-of-memory killer)"
        return RankFailedError(
            f"rank {self.rank} was stopped in {describe()}: rank {rank} (pid "
            f"{self.words[self.segment.map.pid(rank)]}) {how}; {last_calls(self.segment, rank)}.",
            rank=rank,
            cause=how,
        )

    def _failed_error(self, rank: int, describe: Callable[[], str]) -> CommError:
        record = json.loads(self.segment.read_record(rank))
        if self.rank in record.get("deadlock", ()):
            return deadlock_error(self.segment, record["deadlock"])
        # Name the root cause, not the rank that it stopped.
        if "culprit" in record:
            culprit, cause = record["culprit"], record["cause"]
            what = f"rank {culprit} {'failed with ' * (not cause.startswith(_ENDS))}{cause} (reported by rank {rank})"
            rank = culprit
        else:
            cause = record["summary"]
            what = f"rank {rank} failed with {cause}"
        return RankFailedError(f"rank {self.rank} was stopped in {describe()}: {what}", rank=rank, cause=cause)

    def call_site(self, above: int = 3) -> int:
        """Return the id of the line of the user's program that made this call; 0 if there is none.

        Peers look up its text by rank and id, see `site_text`, even after this rank has died.

        Args:
            above: number of frames to skip, which are always code of this package.
        """
        frame: Any = _getframe(above)
        sites = self._sites
        # The first frame outside this package is the user's.
        while frame is not None:
            # Looked up by id: hashing a code object costs more than all the rest.
            numbers = sites.get(id(frame.f_code))
            if numbers is None:
                numbers = self._sites_in(frame.f_code)
            if numbers is not _INSIDE:
                # The instruction is the key: one line of a loop or of several calls is looked up without its line
                # number.
                return numbers.get(frame.f_lasti) or self._number_of(frame, numbers)
            frame = frame.f_back
        return 0

    def _sites_in(self, code: Any) -> dict[int, int]:
        """Return the call sites, by instruction, of a code object that is seen for the first time."""
        # Keeps the object alive, so its id is not reused.
        self._site_codes.append(code)
        numbers = self._sites[id(code)] = _INSIDE if is_inside(code.co_filename) else {}
        return numbers

    def _number_of(self, frame: Any, numbers: dict[int, int]) -> int:
        """Return the number of a line that makes a call for the first time."""
        file, line = frame.f_code.co_filename, frame.f_lineno
        number = self._lines.get((file, line))
        if number is None:
            number = self._lines[file, line] = self._intern_site(frame.f_code, line)
        numbers[frame.f_lasti] = number
        return number

    def _intern_site(self, code: Any, line: int) -> int:
        # All further lines share the last number.
        number = min(len(self._lines) + 1, SITES - 1)
        text = short_place(code.co_filename, line, code.co_name)
        self.segment.write_site(self.rank, number, text if number < SITES - 1 else "(one of many places)")
        return number

    def site_text(self, rank: int, number: int) -> str:
        return self.segment.read_site(rank, number) if number else "(unknown place)"

    def start(self) -> None:
        self.words[self.segment.map.pid(self.rank)] = os.getpid()
        self.set_state(RUNNING)


def _no_call_site(above: int = 3) -> int:
    return 0


# --- the order of stores -------------------------------------------------------------------------------

_fence_lock = threading.Lock()

if platform.machine() in ("x86_64", "AMD64", "i686"):

    def order() -> None:
        """Make stores visible in program order. x86 guarantees it, so this is a no-op."""

    def fence() -> None:
        """Make earlier stores visible before later loads. Any locked instruction does it; a lock has one."""
        _fence_lock.acquire()
        _fence_lock.release()

else:
    order = fence = memory_barrier()
