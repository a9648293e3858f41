"""The transport for ranks that are MPI processes, on one machine or several: each keeps a copy of the shared memory.

Every word has one writer, which sends it to the ranks that wait for it, together with the data that belong to it: a
collective's header and payload, a message and its payload, a call site, the reason of a failure. Messages between two
ranks arrive in order, so a rank reads the same values in its copy as in shared memory, a little later. All
checks, groups, messages and algorithms are therefore the same code.

Fault injection and pickled objects are not available over MPI.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.comm.diagnosis import last_calls
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import DONE, FAILED, FAILED_BY_OTHERS, SharedSegment
from simparallel.comm.mpi.deadlock import MpiDeadlockDetector
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, AbstractTransport, Condition
from simparallel.errors import DeadlockError

# Address space for the messages of each rank.
ARENA_BYTES = 4 << 30
YIELDS = 500
SLEEP_S = 0.0002
HEALTH_S = 0.02
# After a failure: time for the other ranks to report where it stopped them.
GRACE_S = 1.0
TAG = 1
MPICH_MEMORY = "/dev/shm/mpich_shm_"
# A message consists of words and of bytes. The words: index and new value of the word to set; the kind of the bytes
# (see below); start and length of two blocks of words to copy; the words of these blocks, `h.USED` at most.
HEAD_WORDS, _COPIED_AT = 40, 7
NOTHING, PARCEL, MESSAGE, SITE, RECORD, WAIT = range(6)


def is_available() -> bool:
    """Return whether mpi4py is installed, without importing it: the import starts MPI."""
    return find_spec("mpi4py") is not None


@cache
def world() -> Any:
    """Return the communicator of all processes that the launcher started. Starts MPI.

    Collective: over all of them, the first time.
    """
    from mpi4py import MPI

    _unname_memory(MPI.COMM_WORLD)
    return MPI.COMM_WORLD


def _unname_memory(world: Any) -> None:
    """Unlink the memory that MPICH shares on this machine; it would stay if the job were aborted or killed.

    All ranks have mapped it once MPI has started, and MPICH does not need the name at its own end. Open MPI attaches
    later, and its launcher removes leftovers.
    """
    paths: set[str] = set()
    with suppress(OSError), open("/proc/self/maps", encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if MPICH_MEMORY in line}
    world.Barrier()
    for path in paths:
        with suppress(OSError):  # another rank has unlinked it
            os.unlink(path)


def nodes_of(world: Any) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each machine. Collective over `world`."""
    from mpi4py import MPI

    here = world.Split_type(MPI.COMM_TYPE_SHARED)
    # Equal smallest ranks mean the same machine.
    first = np.array([world.rank])
    here.Allreduce(MPI.IN_PLACE, first, MPI.MIN)
    here.Free()
    firsts = np.empty(world.size, first.dtype)
    world.Allgather(first, firsts)
    return tuple(tuple(np.flatnonzero(firsts == number).tolist()) for number in np.unique(firsts))


class MpiTransport(AbstractTransport):
    """The transport of one rank that is an MPI process.

    Args:
        world: an mpi4py communicator that is used here only (`Dup()`).
        timeout_s: how long a rank waits for another one.
        check: see `transport.CHECKS`.
    """

    def __init__(self, world: Any, timeout_s: float = DEFAULT_TIMEOUT_S, check: str = "full") -> None:
        super().__init__(SharedSegment(world.size, arena_bytes=ARENA_BYTES), world.rank, timeout_s, check=check)
        from mpi4py import MPI

        # Payloads received, by (mark, its value)
        self.parcels: dict[tuple[int, int], np.ndarray] = {}
        self._world = world
        self._cells = np.frombuffer(self.words, np.int64)  # `words` as an array
        self._status, self._any = MPI.Status(), MPI.ANY_SOURCE
        self._sending: deque[tuple[Any, np.ndarray]] = deque()
        # Receives by sender, in the order they were sent.
        self._coming: dict[int, deque[tuple[Any, np.ndarray]]] = {}
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        # First words of the blocks received from others.
        self._reserved: set[int] = set()
        self._copies = {rank: Arena(self.segment, rank) for rank in peers}
        control = self.segment.map
        self._sent = {control.sent(self.rank, rank): rank for rank in peers}
        self._taken = {control.taken(self.rank, rank): rank for rank in peers}
        tell_wait = partial(self._tell_all, control.wait_epoch(self.rank), kind=WAIT)
        self._deadlocks = MpiDeadlockDetector(self, tell_wait)

    # --- sending words -------------------------------------------------------------------------------

    def notify(self, index: int) -> None:
        """Send a stored mailbox word to the other side, together with its message."""
        if index in self._taken:
            self.tell(self._taken[index], index, self.words[index])
        elif index in self._sent:
            dst, number = self._sent[index], self.words[index] - 1
            header = self.segment.map.message(self.rank, dst, number)
            offset, size = self.words[header + h.OFFSET], self.words[header + h.NBYTES]
            payload = self.segment.array(self.rank, offset, (size,), np.dtype(np.uint8))
            self.tell(dst, index, number + 1, [(header, h.USED)], payload, MESSAGE)

    def tell(
        self,
        rank: int,
        index: int,
        value: int,
        blocks: Sequence[tuple[int, int]] = (),
        payload: np.ndarray | None = None,
        kind: int = PARCEL,
    ) -> None:
        """Send a word to another rank, with blocks of words, (start, length), and bytes to store there before it."""
        size = 0 if payload is None else payload.nbytes
        message = np.empty(8 * HEAD_WORDS + size, np.uint8)
        head = message[: 8 * HEAD_WORDS].view(np.int64)
        head[:_COPIED_AT] = 0
        # Fixed length, so that a receiver finds the payload without reading the blocks.
        head[:3] = index, value, NOTHING if payload is None else kind
        at = _COPIED_AT
        for number, (start, length) in enumerate(blocks):
            head[3 + 2 * number : 5 + 2 * number] = start, length
            head[at : at + length] = self._cells[start : start + length]
            at += length
        if payload is not None and size:
            message[8 * HEAD_WORDS :].view(payload.dtype).reshape(payload.shape)[...] = payload
        self._sending.append((self._world.Isend(message, rank, TAG), message))

    def _tell_all(self, index: int, value: int, payload: np.ndarray | str | None, kind: int) -> None:
        if isinstance(payload, str):
            payload = np.frombuffer(payload.encode(), np.uint8)
        for rank in self._copies:
            self.tell(rank, index, value, (), payload, kind)

    def set_state(self, state: int) -> None:
        super().set_state(state)
        record = self.segment.read_record(self.rank) if state in (FAILED, FAILED_BY_OTHERS) else None
        self._tell_all(self.segment.map.state(self.rank), state, record, RECORD)

    def _intern_site(self, code: Any, line: int) -> int:
        number = super()._intern_site(code, line)
        self._tell_all(number, 0, self.segment.read_site(self.rank, number), SITE)
        return number

    # --- receiving words -----------------------------------------------------------------------------

    def met(self, condition: Condition) -> bool:
        if super().met(condition):
            return True
        self.poll()
        return super().met(condition)

    def poll(self) -> None:
        """Apply the messages that have arrived, and release buffers that were sent. Never waits."""
        # A matched probe takes the message out of the queue at once, so no other receive can get it.
        while (message := self._world.Improbe(self._any, TAG, self._status)) is not None:
            # Receives are started in the order of arrival and applied in the same order for each sender.
            raw = np.empty(self._status.Get_count(), np.uint8)
            self._coming.setdefault(self._status.source, deque()).append((message.Irecv(raw), raw))
        for src, queue in self._coming.items():
            while queue and queue[0][0].Test():
                self._apply(src, queue.popleft()[1])
        # MPI reads the buffer until the send is complete, so it is kept until then.
        while self._sending and self._sending[0][0].Test():
            self._sending.popleft()

    def _apply(self, src: int, message: np.ndarray) -> None:
        head, payload = message[: 8 * HEAD_WORDS].view(np.int64), message[8 * HEAD_WORDS :]
        index, value, kind, *blocks = head[:_COPIED_AT].tolist()
        at = _COPIED_AT
        # Blocks before the word itself: a rank that sees the word finds them in place.
        for start, length in zip(blocks[::2], blocks[1::2], strict=True):
            self._reserve(start, length)
            self._cells[start : start + length] = head[at : at + length]
            at += length
        if kind == PARCEL:
            self.parcels[index, value] = payload
        elif kind == MESSAGE and payload.size:
            offset = self.words[blocks[0] + h.OFFSET]
            self._copies[src]._fallocate_to(offset + payload.size)
            self.segment.array(src, offset, payload.shape, payload.dtype)[...] = payload
        elif kind == SITE:
            self.segment.write_site(src, index, payload.tobytes().decode())
            return
        elif kind == RECORD:
            self.segment.write_record(src, payload.tobytes().decode())
        elif index == self.segment.map.wait_epoch(src):
            self._deadlocks.heard(src, value, payload if kind == WAIT else None)
        self._reserve(index, 1)
        self.words[index] = value

    def _reserve(self, start: int, length: int) -> None:
        """Reserve words that another rank has sent; this rank may not have created their group yet."""
        if length and start not in self._reserved:
            self.segment.reserve_words(self.rank, start, length)
            self._reserved.add(start)

    # --- waiting ---------------------------------------------------------------------------------------

    def wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        self._deadlocks.begin()
        try:
            self._wait(conditions, describe)
        except DeadlockError:
            # The record stays valid, so that the other ranks find the same deadlock.
            raise
        except BaseException:
            self._deadlocks.end()
            raise
        self._deadlocks.end()

    def _wait(self, conditions: Sequence[Condition], describe: Callable[[], str]) -> None:
        since = time.monotonic()
        looks, next_check = 0, 0.0
        while True:
            self.poll()
            if any(super(MpiTransport, self).met(condition) for condition in conditions):
                return
            looks = self._pause(looks)
            # Health and deadlocks are looked at only once the rank has begun to sleep.
            if looks == YIELDS and (now := time.monotonic()) >= next_check:
                self.check_health(conditions[0], describe)
                self._deadlocks.look(conditions, describe)
                next_check = now + HEALTH_S
                self._check_time(conditions[0], describe, now - since)

    def _pause(self, looks: int) -> int:
        """Yield the core, or sleep after `YIELDS` polls: MPI has no wait with a limit. Return the number of polls."""
        if looks < YIELDS:
            os.sched_yield()
            return looks + 1
        time.sleep(SLEEP_S)
        return looks

    def looked(self, needed: Condition, describe: Callable[[], str], looked_s: float) -> None:
        self.poll()
        os.sched_yield()
        self.check_health(needed, describe)
        self._check_time(needed, describe, looked_s)

    def _check_time(self, needed: Condition, describe: Callable[[], str], waited_s: float) -> None:
        if waited_s > self.timeout_s and (missing := needed.lagging(self.words)):
            waits = {rank: self._deadlocks.text_of(rank) for rank in missing}
            details = "; ".join(
                f"rank {rank}, {f'which waits in {text}; ' if text else ''}{last_calls(self.segment, rank)}"
                for rank, text in waits.items()
            )
            raise self._late_error(missing, details, describe)

    # --- the end ---------------------------------------------------------------------------------------

    def wait_for_the_others(self) -> bool:
        """Wait until all ranks have ended and all is sent (after a failure, briefly); return whether they have."""
        deadline, looks = None, 0
        while True:
            self.poll()
            states = [self.state_of(rank) for rank in range(self.world_size)]
            if not self._sending and all(state >= DONE for state in states):
                return True
            if deadline is None and any(state >= FAILED for state in states):
                # The root cause reports before another rank ends the job.
                is_cause = states[self.rank] == FAILED
                deadline = time.monotonic() + (GRACE_S if is_cause else 2 * GRACE_S)
            if deadline is not None and time.monotonic() > deadline:
                return False
            looks = self._pause(looks)

    def stop(self, code: int) -> None:
        self.wait_for_the_others()
        self.abort(code)

    def abort(self, code: int) -> None:
        """End all processes of the job, on all machines. Does not return."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(code or 1)
