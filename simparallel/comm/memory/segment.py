"""The memory that all ranks share: one unnamed mapping with a fixed byte map.

The mapping is a memfd (or, where there is none, a file that is unlinked at birth), so nothing is left behind,
whichever process is killed. It is created once, large and sparse, and no rank ever maps again. Pages are reserved
with posix_fallocate when they are first needed, so a lack of memory is a Python error and not a SIGBUS. Only the
writer of a page reserves it; its readers never touch a page that the writer has not reserved.

The byte map, from the start of the mapping:

    control   int64 words; each word has exactly one writer (see `ControlMap`)
    sites     per rank: 4096 interned call sites of 256 bytes, "train.py:31 in step", each reserved when written
    waiting   per rank: 1024 bytes of text, the call in which the rank waits
    records   per rank: 16 KiB of JSON, the reason why the rank failed
    arenas    per rank: `arena_bytes` for payloads; the slots of its groups first, then a heap

There are no locks. A writer stores the payload first, then the header, then the sequence number; a reader that sees
the number may therefore read the other two.
"""

from __future__ import annotations

import errno
import gc
import math
import mmap
import os
import weakref
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from simparallel.base.system import missing_for_processes, parts_with_data, reserve
from simparallel.comm.memory.memfd import available_memory, free_of, open_unnamed
from simparallel.errors import SharedMemoryError

PAGE = 4096
# Bytes in a cache line. A word that one rank polls while another writes its neighbour has a line of its own.
LINE = 64
WORD = 8

# Payloads up to this size travel in a group's double-buffered slot.
SLOT_BYTES = 16 * 1024
# The header has to be equal on all ranks; the note beside it tells peers where the payload is.
HEADER_WORDS = 16
NOTE_WORDS = 16
MESSAGE_WORDS = HEADER_WORDS + NOTE_WORDS
NUM_MARKS = 4
# Messages in flight between two ranks. 16 headers of 32 words fill one page.
RING = 16
SITES, SITE_BYTES = 4096, 256
WAIT_BYTES = 1024
# Room for a published wait, in units of P + 1 words: waits in 64 groups take P + 1 words each, and waits for a
# message from or to every rank 3 words each.
WAITS = 72
RECORD_BYTES = 16 * 1024
DEFAULT_ARENA_BYTES = 16 << 30
SMALLEST_ARENA_BYTES = 64 << 20
# For ranks that are threads. Windows backs all of a mapping at once, by memory or its paging file.
THREAD_ARENA_BYTES = 1 << 30 if hasattr(mmap, "MAP_PRIVATE") else SMALLEST_ARENA_BYTES

# States of a rank. FAILED_BY_OTHERS: it raised only because another rank had failed.
IDLE, RUNNING, DONE, FAILED, FAILED_BY_OTHERS = range(5)


@dataclass(frozen=True)
class ControlMap:
    """Offsets of the control words, in words from the start of the mapping. P is the number of ranks.

    launcher   8                abort, lost                           written by the launcher
    host       P x 8            exit status of rank r                 written by the host process (`runtime.ranks.host`)
    status     P x 8            state, pid, length of the failure
                                record, epoch of the wait record      written by rank r
    sleeping   P                1 while rank r sleeps                 written by rank r
    sent       P x P x 8        messages sent from r to q             written by r
    taken      P x P x 8        messages from q taken by r            written by r
    groups     G x              one block for each group, in which rank r writes:
      marks      4 x P            arrive (even numbers, odd numbers), phase (inside a collective), done
      headers    2 x P x 16       the call of rank r, for even and for odd numbers
      notes      2 x P x 16       the place of its payload, call site and simulated time
    waits      P x 72 (P + 1)   the words that rank r waits for       written by rank r
    messages   P x P x 16 x 32  headers of messages from r to q       written by r

    A factor of 8 words is one cache line for each word that is polled. Everything about a collective exists twice,
    for even and for odd sequence numbers, because a rank may already be in collective n + 1 while a slower one still
    reads n; it cannot be in n + 2, see `views`. The same word of all ranks is contiguous, so one comparison of bytes
    checks all marks, and another one all headers. The block of a group of a world with P = 2, in words:

        0 1 arrive, even   2 3 arrive, odd   4 5 phase   6 7 done   8 … 71 headers   72 … 135 notes

    G is `max_groups`, the world included; a device matrix of P ranks has up to P / 2 groups along each axis.

    The words up to the world's notes are reserved from the start. Those of another group are reserved when the group
    is created, those of messages (a page for each sender and receiver) at their first message, and those of waits when
    a rank publishes its first one.
    """

    world_size: int

    def place(self, rank: int) -> int:
        """Return the place of a rank's words among those of all ranks."""
        return rank

    def running(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return those of the ranks that run: all but in a folded dry run."""
        return ranks

    def _pair(self, first: int, second: int) -> int:
        return self.place(first) * self.world_size + self.place(second)

    @property
    def max_world_groups(self) -> int:
        """Number of groups that all ranks may create together; their numbers come first."""
        return 64 + 4 * self.world_size

    @property
    def local_groups(self) -> int:
        """Number of groups that each rank may create with their members alone."""
        return 1 + 16 // self.world_size

    @property
    def max_groups(self) -> int:
        return self.max_world_groups + self.local_groups * self.world_size

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        p = self.world_size
        sizes = (8, 8 * p, 8 * p, round_up(p, 8), p * p * 8, p * p * 8, self.max_groups * self.group_words,
                 WAITS * p * (p + 1))  # fmt: skip
        # Each area begins where the previous one ends.
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        # Message slots begin on a page of their own, because each pair of ranks reserves its page when it first needs
        # it.
        messages = round_up(starts.pop(), PAGE // WORD)
        return (*starts, messages, messages + p * p * RING * MESSAGE_WORDS)

    @cached_property
    def _mark_words(self) -> int:
        return round_up(NUM_MARKS * self.world_size, LINE // WORD)

    @cached_property
    def group_words(self) -> int:
        """Words that one group takes."""
        return self._mark_words + 2 * self.world_size * (HEADER_WORDS + NOTE_WORDS)

    @property
    def num_first_words(self) -> int:
        """Number of words that every run needs; they come first."""
        return self.group(1)

    def abort(self) -> int:
        """Index of the abort word: 0, or the reason why all ranks have to stop (see `ABORT_INTERRUPT`)."""
        return self._starts[0]

    def lost(self) -> int:
        """Index of the word for a lost rank: 0, or 1 + a rank that ended without a status from the host process."""
        return self._starts[0] + 1

    def exit_of(self, rank: int) -> int:
        """Index of a rank's exit word: 0 while the process lives; 1 + exit code; minus the signal's number."""
        return self._starts[1] + 8 * self.place(rank)

    def state(self, rank: int) -> int:
        return self._starts[2] + 8 * self.place(rank)

    def pid(self, rank: int) -> int:
        return self.state(rank) + 1

    def record_length(self, rank: int) -> int:
        return self.state(rank) + 2

    def wait_epoch(self, rank: int) -> int:
        """Index of a rank's epoch: odd while `waits` holds a valid wait record."""
        return self.state(rank) + 3

    def sleeping(self, rank: int) -> int:
        return self._starts[3] + self.place(rank)

    def sent(self, src: int, dst: int) -> int:
        return self._starts[4] + self._pair(src, dst) * 8

    def taken(self, dst: int, src: int) -> int:
        return self._starts[5] + self._pair(dst, src) * 8

    def group(self, group: int) -> int:
        """Index of the first of a group's `group_words`."""
        return self._starts[6] + group * self.group_words

    def mark(self, group: int, rank: int, which: int) -> int:
        """Index of a mark; `which`: 0 arrive at even, 1 arrive at odd numbers, 2 phase, 3 done.

        The marks of all ranks are contiguous for each `which`: one comparison of bytes checks every rank.
        """
        return self.group(group) + which * self.world_size + self.place(rank)

    def header(self, group: int, parity: int, rank: int) -> int:
        return self.group(group) + self._mark_words + (parity * self.world_size + self.place(rank)) * HEADER_WORDS

    def note(self, group: int, parity: int, rank: int) -> int:
        headers = 2 * self.world_size * HEADER_WORDS
        first = self.group(group) + self._mark_words + headers
        return first + (parity * self.world_size + self.place(rank)) * NOTE_WORDS

    def waits(self, rank: int) -> tuple[int, int]:
        """First and past-the-last word of a rank's wait record, see `deadlock.DeadlockDetector`."""
        size = WAITS * (self.world_size + 1)
        start = self._starts[7] + self.place(rank) * size
        return start, start + size

    def message(self, src: int, dst: int, number: int) -> int:
        return self._starts[8] + (self._pair(src, dst) * RING + number % RING) * MESSAGE_WORDS

    def group_of(self, index: int) -> int | None:
        """Return the group that a word belongs to, or None."""
        start, stop = self._starts[6:8]
        return (index - start) // self.group_words if start <= index < stop else None

    @property
    def num_words(self) -> int:
        return self._starts[9]


ABORT_INTERRUPT = 1


def round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)


class SharedSegment:
    """The mapping of one world, in any process that holds its descriptor.

    Args:
        world_size: number of ranks.
        fd: descriptor of an existing segment; None creates one.
        arena_bytes: address space of each rank; 0 takes as much as the machine allows, up to 16 GiB.
        is_private: map memory that no other process sees; a forked process gets a copy. Always so on systems without
            device processes.
        control: the map of the words; None for the usual one.

    Attributes:
        ranks: the ranks that run: all of them, unless ranks with the same program are run once (`comm.dry.folding`).
        words: the control words, `memoryview` of int64. They are accessed by aligned single loads and stores, never
            by a read-modify-write from two ranks.

    Raises:
        SharedMemoryError: not even the smallest arena could be mapped.
    """

    def __init__(
        self,
        world_size: int,
        fd: int | None = None,
        arena_bytes: int = 0,
        *,
        is_private: bool = False,
        control: ControlMap | None = None,
    ) -> None:
        self.world_size = world_size
        self.ranks: Sequence[int] = range(world_size)
        self.map = control or ControlMap(world_size)
        self._first_bytes = round_up(self.map.num_first_words * WORD, PAGE)
        self._sites_at = round_up(self.map.num_words * WORD, PAGE)
        self._waits_at = self._sites_at + world_size * SITES * SITE_BYTES
        self._records_at = self._waits_at + world_size * WAIT_BYTES
        self._arenas_at = round_up(self._records_at + world_size * RECORD_BYTES, PAGE)
        self.is_private = is_private or bool(missing_for_processes())
        if self.is_private:
            self.fd = -1
            self.mmap = self._map_private(self._arenas_at + world_size * round_up(arena_bytes, PAGE))
        else:
            self.fd = self._create(arena_bytes) if fd is None else fd
            self.mmap = mmap.mmap(self.fd, os.fstat(self.fd).st_size)
        self._closer = weakref.finalize(self, _close, self.fd)
        self._closer.atexit = False
        self.arena_bytes = (len(self.mmap) - self._arenas_at) // world_size
        self.words = memoryview(self.mmap)[: self.map.num_words * WORD].cast("q")
        self._bytes = np.frombuffer(self.mmap, np.uint8)
        self.address = self._bytes.__array_interface__["data"][0]

    def _create(self, arena_bytes: int) -> int:
        # Ask for a large address space; after each refusal, for a quarter as much.
        least = self.map.max_groups * 2 * SLOT_BYTES + PAGE
        wanted = max(round_up(arena_bytes or DEFAULT_ARENA_BYTES, PAGE), least)
        parts = (0, self._first_bytes), (self._waits_at, self._arenas_at - self._waits_at)
        at_once = sum(length for _, length in parts)
        while True:
            total = self._arenas_at + self.world_size * wanted
            fd = -1
            try:
                fd = open_unnamed(total, at_once + self.world_size * 2 * SLOT_BYTES)
                # On a memfd, `reserve` would fail only once all memory of the machine is taken.
                if 0 < free_of(fd) < at_once:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                for start, length in parts:
                    reserve(fd, start, length)
                mmap.mmap(fd, total).close()
                return fd
            except (OSError, ValueError, OverflowError) as error:
                free = free_of(fd) if fd >= 0 else 0
                if fd >= 0:
                    os.close(fd)
                wanted //= 4
                if arena_bytes or wanted < max(SMALLEST_ARENA_BYTES, least):
                    raise self._refusal(total, at_once, free, error) from error

    def _map_private(self, total: int) -> mmap.mmap:
        try:
            if not hasattr(mmap, "MAP_PRIVATE"):  # Windows
                try:
                    return mmap.mmap(-1, total)
                except OSError:
                    # Earlier runs that the garbage collector has not freed may take up what the system can back.
                    gc.collect()
                    return mmap.mmap(-1, total)
            return mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise self._refusal(total, 0, available_memory(), error) from error

    def _refusal(self, total: int, at_once: int, free: int, error: Exception) -> SharedMemoryError:
        return SharedMemoryError(
            f"{self.world_size} ranks need {total} bytes of address space and {at_once} bytes of shared memory "
            f"at once: {error}. Use fewer ranks, raise the limit (ulimit -v, container memory, --shm-size), or pass a "
            "smaller arena_bytes.",
            needed_bytes=total,
            available_bytes=free,
        )

    def reserve(self, rank: int, start: int, length: int) -> None:
        """Reserve memory for `length` bytes from `start`, on behalf of `rank`; existing contents are kept.

        Raises:
            SharedMemoryError: there is not enough memory.
        """
        # The kernel allocates private memory page by page by itself.
        if self.is_private:
            return
        try:
            reserve(self.fd, start, length)
        except OSError as error:
            free = free_of(self.fd)
            raise SharedMemoryError(
                f"rank {rank}: {length} bytes of shared memory cannot be reserved; {free} are available: "
                f"{error}. Raise the limit (container memory, --shm-size), or use fewer ranks or smaller arrays.",
                needed_bytes=length,
                available_bytes=free,
            ) from error

    def reserve_words(self, rank: int, start: int, length: int) -> None:
        """Reserve control words; `start` and `length` count words."""
        self.reserve(rank, start * WORD, length * WORD)

    def need(self, ranks: Iterable[int], purpose: str = "") -> None:
        """Demand that these ranks run. Does nothing here; in a folded dry run, some ranks stand for others, see there.

        Args:
            ranks: those that no other rank can stand for, such as both neighbours where the size of a slice changes.
            purpose: `Communicator.purpose` of later collectives with uneven parts, which need no further ranks.
        """

    def call_of(self, group: int, parity: int, rank: int) -> list[int]:
        """Return header and note of a rank's call, in the order of `call_header`; zeros if the group does not exist."""
        found = array("q")
        for start, length in (
            (self.map.header(group, parity, rank), HEADER_WORDS),
            (self.map.note(group, parity, rank), NOTE_WORDS),
        ):
            begin, size = start * WORD, length * WORD
            # Read through the descriptor: a load from the mapping would allocate the page.
            found.frombytes(self.mmap[begin : begin + size] if self.fd < 0 else os.pread(self.fd, size, begin))
        return found.tolist()

    def close_fd(self) -> None:
        """Close the descriptor; the mapping stays until its last array is gone.

        No further memory can be reserved afterwards.
        """
        self._closer()
        self.fd = -1

    def arena_at(self, rank: int) -> int:
        """Return the byte position of a rank's arena."""
        return self._arenas_at + self.map.place(rank) * self.arena_bytes

    def array(self, rank: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return a view of payload memory, which keeps the mapping alive."""
        size = math.prod(shape)
        if size == 0 or dtype.itemsize == 0:
            return np.empty(shape, dtype)
        view = np.frombuffer(self.mmap, dtype, size, self.arena_at(rank) + offset)
        return view if len(shape) == 1 else view.reshape(shape)

    # --- texts ------------------------------------------------------------------------------------

    def write_site(self, rank: int, number: int, text: str) -> None:
        """Store a call site. A long text keeps its end, which has the line number. Raises as `reserve`."""
        data = _encoded(text)[-SITE_BYTES:].lstrip(_INNER_BYTES)  # begin with a whole character
        start = self._sites_at + (self.map.place(rank) * SITES + number) * SITE_BYTES
        self.reserve(rank, start, SITE_BYTES)
        self._write(start, SITE_BYTES, data)

    def read_site(self, rank: int, number: int) -> str:
        return self._read_text(self._sites_at + (self.map.place(rank) * SITES + number) * SITE_BYTES, SITE_BYTES)

    def write_wait(self, rank: int, text: str) -> None:
        """Store the call in which `rank` waits. A long text loses its middle, because its end has the call site."""
        data = _encoded(text)
        if len(data) > WAIT_BYTES:
            begin = data[: WAIT_BYTES // 2 - 5].decode(errors="ignore")
            end = data[-WAIT_BYTES // 2 :].decode(errors="ignore")
            data = f"{begin} … {end}".encode()
        self._write(self._waits_at + self.map.place(rank) * WAIT_BYTES, WAIT_BYTES, data)

    def read_wait(self, rank: int) -> str:
        return self._read_text(self._waits_at + self.map.place(rank) * WAIT_BYTES, WAIT_BYTES)

    def write_record(self, rank: int, text: str) -> None:
        """Store the reason why `rank` failed. The length is stored last, so a reader sees all of it or nothing."""
        data = _encoded(text)[:RECORD_BYTES]
        self._write(self._records_at + self.map.place(rank) * RECORD_BYTES, RECORD_BYTES, data)
        self.words[self.map.record_length(rank)] = len(data)

    def read_record(self, rank: int) -> str:
        start = self._records_at + self.map.place(rank) * RECORD_BYTES
        length = self.words[self.map.record_length(rank)]
        return bytes(self.mmap[start : start + length]).decode(errors="replace")

    def _read_text(self, start: int, limit: int) -> str:
        return bytes(self.mmap[start : start + limit]).rstrip(b"\0").decode(errors="replace")

    def _write(self, start: int, limit: int, data: bytes) -> None:
        self.mmap[start : start + limit] = data.ljust(limit, b"\0")

    def reset(self) -> None:
        """Clear all words and texts and free their memory. Only while no rank is running."""
        self.mmap[: self._first_bytes] = bytes(self._first_bytes)
        start, stop = self._first_bytes, self._waits_at
        try:
            self.mmap.madvise(mmap.MADV_REMOVE, start, stop - start)
        except (AttributeError, OSError):  # not supported by this system or file system: overwrite with zeros
            for begin, end in parts_with_data(self.fd, start, stop):
                self.mmap[begin:end] = bytes(end - begin)


# Continuation bytes: no UTF-8 character begins with one.
_INNER_BYTES = bytes(range(0x80, 0xC0))


def _encoded(text: str) -> bytes:
    """Encode as UTF-8; bytes of a file name that are not UTF-8 become \\udc followed by the byte."""
    return text.encode(errors="backslashreplace")
