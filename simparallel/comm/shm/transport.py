"""The transport for ranks that are processes on shared memory: waiting, and detecting a wait that cannot end.

A waiting rank spins for a moment (only if every rank has a core of its own), then yields its core a few hundred
times, then sleeps on a futex for at most 20 ms at a time. After each sleep it checks whether a rank has failed, died
or left, or whether the launcher wants all ranks to stop; a little later also whether ranks wait for each other
(`deadlock`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from simparallel.base.system import process_fields, usable_cores
from simparallel.comm.diagnosis import last_calls
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.memfd import is_disabled
from simparallel.comm.memory.segment import ABORT_INTERRUPT, WORD, SharedSegment
from simparallel.comm.shm.deadlock import PATIENCE_S, DeadlockDetector
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, AbstractTransport, Condition, fence
from simparallel.errors import DeadlineError, DeadlockError, RankFailedError

# Polls before the first yield; few, because two ranks may share a core although others are idle.
SPINS = 20
YIELDS = 300
# Upper limit for yielding: where many programs compete for the cores, one yield may take a hundred times as long.
YIELD_S = 0.005
SLEEP_S = 0.02
_NUMBERS = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98}
_SYS_FUTEX = _NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
# Not "private": the word is shared between processes.
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_STATES = {"T": "is stopped (SIGSTOP or a debugger)", "t": "is stopped by a debugger",
           "D": "waits for a disk or device", "Z": "has ended", "R": "is running user code"}  # fmt: skip

_SURE = "TtZ"  # in these states a rank makes no more progress
GRACE_S = 0.5  # after the timeout: time for ranks that hold up others to publish the ranks that hold them up


def spread(rank: int, world_size: int) -> None:
    """Move this process to its share of the cores, then let the scheduler move it again.

    Ranks that are woken one after the other for a run may start with five on one core and three on the other; as
    long as they only yield to each other, the scheduler sees no imbalance.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = os.sched_getaffinity(0)
    if world_size > 1 and len(cores) > 1:
        # Not permitted: leave the placement to the system.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, {sorted(cores)[rank * len(cores) // world_size]})
            os.sched_setaffinity(0, cores)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """Sleeping until a 32-bit word changes, and waking the sleepers. Without futex: short sleeps."""

    def __init__(self, address: int) -> None:
        self.available = _SYS_FUTEX is not None and not is_disabled("futex")
        self._address = address
        if self.available:
            self._syscall = ctypes.CDLL(None, use_errno=False).syscall
            self._limit = _Timespec(0, int(SLEEP_S * 1e9))

    def sleep(self, index: int, value: int) -> None:
        """Sleep until word `index` differs from `value` (low 32 bits), 20 ms at most."""
        if not self.available:
            # Without a futex no rank can be woken, so sleeps have to be short.
            time.sleep(0.0002)
            return
        word = ctypes.c_void_p(self._address + WORD * index)  # little-endian: the low half comes first
        low = ctypes.c_uint(value & 0xFFFFFFFF)
        self._syscall(_SYS_FUTEX, word, _FUTEX_WAIT, low, ctypes.byref(self._limit), None, 0)

    def wake(self, index: int) -> None:
        if self.available:
            word = ctypes.c_void_p(self._address + WORD * index)
            self._syscall(_SYS_FUTEX, word, _FUTEX_WAKE, 0x7FFFFFFF, None, None, 0)


class ShmTransport(AbstractTransport):
    """The transport of one rank that is a process."""

    def __init__(
        self,
        segment: SharedSegment,
        rank: int,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        arena: Arena | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(segment, rank, timeout_s, arena, **settings)
        self._deadlocks = DeadlockDetector(segment, rank)
        self._futex = Futex(segment.address)
        self._own_sleep = segment.map.sleeping(rank)
        start = WORD * segment.map.sleeping(0)
        self._sleepers = slice(start, start + WORD * self.world_size)
        self._all_awake = bytes(WORD * self.world_size)
        self._spins = SPINS if self.world_size <= usable_cores() else 0

    def start(self) -> None:
        super().start()
        spread(self.rank, self.world_size)

    def sees(self, where: slice, what: bytes) -> bool:
        memory, give_way = self.memory, os.sched_yield
        for _ in range(self._spins):
            if memory[where] == what:
                return True
        end = time.monotonic() + YIELD_S
        for i in range(YIELDS):
            if memory[where] == what:
                return True
            give_way()
            if i & 31 == 31 and time.monotonic() > end:
                break
        return False

    def wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        met = self.met
        first = conditions[0]
        try:
            # Spin on the condition that the caller needs; the others only advance other lanes.
            for _ in range(self._spins):
                if met(first):
                    return
            end = time.monotonic() + YIELD_S
            # Yield the core; the clock is read once in 32 yields.
            for i in range(YIELDS):
                for condition in conditions:
                    if met(condition):
                        return
                os.sched_yield()
                if i & 31 == 31 and time.monotonic() > end:
                    break
            self._sleep_until_met(conditions, describe)
        except KeyboardInterrupt:
            self.interrupted(first, describe)
            raise

    def looked(self, needed: Condition, describe: Callable[[], str], looked_s: float) -> None:
        os.sched_yield()
        self._check(needed, describe, time.monotonic() - looked_s)

    def interrupted(self, needed: Condition, describe: Callable[[], str]) -> None:
        if self.words[self.segment.map.abort()] != ABORT_INTERRUPT:
            # The interrupt follows a failure that this rank had not noticed.
            self.check_health(needed, describe)

    def _sleep_until_met(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        words, first = self.words, conditions[0]
        since = time.monotonic()
        # Withdraw the record of a wait that ended with an error.
        self._deadlocks.end()
        is_shown = False
        try:
            while True:
                # Announce the sleep, then check once more. A writer stores its word, then looks for sleepers
                # (`notify`). With a fence between the two on either side, one sees the other: no wake-up is lost.
                words[self._own_sleep] = 1
                fence()
                if any(self.met(condition) for condition in conditions):
                    return
                # A futex watches one word: sleep on the first that is still missing.
                for index in first.indices:
                    value = words[index]
                    # All words may have been stored since the check above.
                    if value < first.target:
                        self._futex.sleep(index, value)
                        break
                if any(self.met(condition) for condition in conditions):
                    return
                self._check(first, describe, since)
                if time.monotonic() > since + PATIENCE_S:
                    self._deadlocks.look(conditions, describe)
        except (DeadlockError, DeadlineError):
            # Keep the published record, so that the other ranks find the same deadlock.
            is_shown = True
            raise
        finally:
            words[self._own_sleep] = 0
            if not is_shown:
                self._deadlocks.end()

    def notify(self, index: int) -> None:
        # The store before this call has to be visible before the sleepers' words are read.
        fence()
        if self.memory[self._sleepers] != self._all_awake:
            self._futex.wake(index)

    def _check(self, needed: Condition, describe: Callable[[], str], since: float) -> None:
        words, control = self.words, self.segment.map
        if words[control.abort()] == ABORT_INTERRUPT:
            raise KeyboardInterrupt
        try:
            self.check_health(needed, describe)
        except RankFailedError:
            # A rank that an interrupt has ended since then is no cause.
            if words[control.abort()] == ABORT_INTERRUPT:
                raise KeyboardInterrupt from None
            # The failed rank may have arrived before it failed. Then this rank can go on, and finds the cause itself,
            # such as calls that differ.
            if not self.met(needed):
                raise
        late_s = time.monotonic() - since - self.timeout_s
        if late_s > 0 and (missing := needed.lagging(self.words)):
            idle, waiting = self._deadlocks.behind(missing)
            if late_s < GRACE_S and not any(self._state(rank) in _SURE for rank in idle):
                # A rank that seems busy may be about to publish the ranks it waits for.
                return
            raise self._late_error(missing, self._process_texts(idle, waiting), describe)

    def _process_texts(self, idle: list[int], waiting: list[int]) -> str:
        """List the ranks that hold up the others, those that wait for no rank first."""
        texts = [f"rank {rank} {self._process_state(rank)}, {last_calls(self.segment, rank)}" for rank in idle]
        texts += [f"rank {rank} waits in {self.segment.read_wait(rank)}" for rank in waiting[:3]]
        return "; ".join(texts) + f"; and {len(waiting) - 3} more that wait" * (len(waiting) > 3)

    def _state(self, rank: int) -> str:
        """Return the letter of /proc for the state of a rank's process, see `_STATES`; "" if it cannot be read."""
        return next(iter(process_fields(self.words[self.segment.map.pid(rank)])), "")

    def _process_state(self, rank: int) -> str:
        """Describe the state of a rank's process, for errors."""
        pid, state = self.words[self.segment.map.pid(rank)], self._state(rank)
        return f"(pid {pid}) {_STATES.get(state, 'sleeps or waits')}" if state else "cannot be looked at"
