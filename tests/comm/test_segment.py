"""The shared memory segment: every word and byte has one owner, and all of it is freed."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import threading
from array import array

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.comm.memory import segment as comm_segment
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import (
    HEADER_WORDS,
    LINE,
    MESSAGE_WORDS,
    NOTE_WORDS,
    NUM_MARKS,
    PAGE,
    RECORD_BYTES,
    RING,
    SITE_BYTES,
    SITES,
    SLOT_BYTES,
    WORD,
    ControlMap,
    SharedSegment,
)
from simparallel.errors import SharedMemoryError
from simparallel.testing.strategies import world_sizes

ARENA_BYTES = 4 << 20
HEAP_AT = ControlMap(2).max_groups * 2 * SLOT_BYTES
HEAP_BYTES = ARENA_BYTES - HEAP_AT


@pytest.fixture
def segment():
    segment = SharedSegment(2, arena_bytes=ARENA_BYTES)
    yield segment
    segment.close_fd()


def count_fds() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# --- control words ----------------------------------------------------------------------------------


@settings(max_examples=6)
@given(world_sizes(6))
def test_every_word_has_one_meaning(size):
    control, ranks = ControlMap(size), range(size)
    taken = np.zeros(control.num_words, int)

    def take(start, length=1):
        taken[start : start + length] += 1

    take(control.abort())
    for rank in ranks:
        for name in ("exit_of", "state", "pid", "sleeping", "record_length", "wait_epoch"):
            take(getattr(control, name)(rank))
        first, end = control.waits(rank)
        take(first, end - first)
        for group in range(control.max_groups):
            for which in range(NUM_MARKS):
                take(control.mark(group, rank, which))
            for parity in (0, 1):
                take(control.header(group, parity, rank), HEADER_WORDS)
                take(control.note(group, parity, rank), NOTE_WORDS)
        for other in ranks:
            take(control.sent(rank, other))
            take(control.taken(rank, other))
            for number in range(RING):
                take(control.message(rank, other, number), MESSAGE_WORDS)
                assert control.message(rank, other, number + RING) == control.message(rank, other, number)
    assert taken.max() == 1


def test_regions_do_not_touch(segment):
    """Fill every region with its own byte, the whole of it, and look at all of them afterwards."""
    arenas = [segment.array(rank, 0, (segment.arena_bytes,), np.dtype(np.uint8)) for rank in range(2)]
    for rank, arena in enumerate(arenas):
        arena[:4096] = arena[-4096:] = 10 + rank
    for rank in range(2):
        segment.write_record(rank, str(rank) * RECORD_BYTES)
        for number in range(SITES):
            segment.write_site(rank, number, f"{rank}" * (SITE_BYTES - 4) + f"{number:04}")
    lengths = [segment.words[segment.map.record_length(rank)] for rank in range(2)]
    segment.words[-1] = -1
    for rank, arena in enumerate(arenas):
        assert set(arena[:4096]) == set(arena[-4096:]) == {10 + rank}
        assert segment.read_record(rank) == str(rank) * RECORD_BYTES
        for number in range(SITES):
            assert segment.read_site(rank, number) == f"{rank}" * (SITE_BYTES - 4) + f"{number:04}"
    assert lengths == [RECORD_BYTES] * 2


@given(st.text(max_size=300), st.text(max_size=300))
def test_texts_come_back(site, record):
    segment = SharedSegment(1, arena_bytes=ARENA_BYTES)
    site = site.replace("\0", "x")
    segment.write_site(0, 7, site)
    segment.write_record(0, record)
    assert segment.read_record(0) == record
    assert segment.read_site(0, 7) == site.encode()[-SITE_BYTES:].decode(errors="ignore")  # the end of a long one
    segment.close_fd()


def test_undecodable_file_names_survive(segment):
    name = os.fsdecode(b"caf\xe9/train.py:31 in step")
    for write, read in ((segment.write_wait, segment.read_wait), (segment.write_record, segment.read_record)):
        write(0, name)
        assert read(0) == r"caf\udce9/train.py:31 in step"
    segment.write_site(0, 1, name)
    assert segment.read_site(0, 1) == r"caf\udce9/train.py:31 in step"


@pytest.mark.parametrize("holes", [True, False], ids=["holes", "zeros"])
def test_reset_clears_control_words_only(segment, monkeypatch, holes):
    if not holes:  # as on macOS
        monkeypatch.delattr(mmap, "MADV_REMOVE")
    arena = Arena(segment, 1)
    x = arena.empty((100,), np.dtype(np.int64))
    x[...] = 5
    segment.words[:] = memoryview(array("q", range(len(segment.words))))
    segment.reset()
    assert not any(segment.words)
    assert (x == 5).all()


def reserved_bytes(segment: SharedSegment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_memory_grows_with_use(segment):
    before, control = reserved_bytes(segment), segment.map
    assert before < (control.num_first_words * WORD + 2 * RECORD_BYTES) + 4 * PAGE
    assert segment.call_of(control.max_groups - 1, 1, 1) == [0] * MESSAGE_WORDS
    assert reserved_bytes(segment) == before  # looking up a call that was never made reserves no memory
    segment.reserve_words(0, control.message(0, 1, 0), RING * MESSAGE_WORDS)
    assert reserved_bytes(segment) == before + PAGE
    segment.words[control.message(0, 1, 3)] = 7
    segment.reserve_words(0, control.message(0, 1, 0), RING * MESSAGE_WORDS)
    assert segment.words[control.message(0, 1, 3)] == 7
    for number in range(SITES):
        segment.write_site(1, number, "train.py:31")
    assert reserved_bytes(segment) >= before + SITES * SITE_BYTES
    segment.reset()
    assert reserved_bytes(segment) == before
    assert segment.words[control.message(0, 1, 3)] == 0


def test_pages_without_posix_fallocate_keep_their_data(segment, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    start, length = segment.map.waits(0)[0] * WORD, 5 * PAGE
    segment.mmap[start + PAGE : start + PAGE + 5] = b"words"
    before = reserved_bytes(segment)
    segment.reserve(0, start, length)
    segment.reserve(0, start, length)
    assert reserved_bytes(segment) > before + 3 * PAGE
    assert segment.mmap[start : start + length].strip(b"\0") == b"words"


@pytest.mark.parametrize("use", [
    lambda: sp.send(np.ones(1), dst=1 - sp.get_rank()),
    lambda: sp.new_group([0, 1]),
    lambda: sp.barrier(),
], ids=["letters", "group", "site"])  # fmt: skip
def test_lack_of_control_memory_is_an_error(monkeypatch, use):
    def program():
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(comm_segment, "reserve", full)
        with pytest.raises(SharedMemoryError, match=r"rank \d: \d+ bytes .* \d+ "):
            use()
        monkeypatch.undo()

    sp.launch(program, world_size=2, transport="inline")


def test_mappings_of_one_descriptor_share_memory(segment):
    other = SharedSegment(2, fd=os.dup(segment.fd))
    assert other.arena_bytes == segment.arena_bytes
    offset = Arena(segment, 1).allocate(800)
    segment.array(1, offset, (10, 10), np.dtype(np.float64))[...] = 3
    assert (other.array(1, offset, (10, 10), np.dtype(np.float64)) == 3).all()
    other.words[3] = 9
    assert segment.words[3] == 9
    other.close_fd()


# --- the heap ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 300_000)), max_size=30))
def test_allocations_never_overlap_and_merge_again(steps):
    segment = SharedSegment(1, arena_bytes=ARENA_BYTES)
    arena = Arena(segment, 0)
    untouched = list(arena._free)
    live: dict[int, int] = {}
    for choice, size in steps:
        if choice == 0 and live:
            offset = sorted(live)[size % len(live)]
            del live[offset]
            arena.free(offset)
            continue
        room = max((length for _, length in arena._free), default=0)
        if room < -(-size // LINE) * LINE:
            with refused(SharedMemoryError) as caught:
                arena.allocate(size)
            assert caught.value.available_bytes == room
            continue
        offset = arena.allocate(size)
        assert offset % LINE == 0
        assert offset >= segment.map.max_groups * 2 * SLOT_BYTES
        assert offset + size <= segment.arena_bytes
        assert all(offset + size <= start or start + length <= offset for start, length in live.items())
        live[offset] = size
    for offset in live:
        arena.free(offset)
    assert arena._free == untouched
    segment.close_fd()


def test_array_is_freed_with_its_last_view(segment):
    arena = Arena(segment, 0)
    x = arena.empty((40, 50), np.dtype(np.float32))
    assert x.flags.c_contiguous
    assert x.flags.aligned
    assert arena.offset_of(x) == HEAP_AT
    assert arena.offset_of(x[3:]) == arena.offset_of(x) + 3 * 200
    assert arena.offset_of(x[:, 1:]) is None
    assert arena.offset_of(np.ones(3)) is None
    assert Arena(segment, 1).offset_of(x) is None
    flat = x.reshape(-1)
    assert arena.offset_of(flat[2:].view(np.float64)) == HEAP_AT + 8
    assert arena.offset_of(flat[1:-1].view(np.float64)) is None  # not at a multiple of its size
    assert arena.offset_of(flat[2:-2].view(np.complex128)) is None
    assert arena.offset_of(flat[1:1999].view("f4, f8")) == HEAP_AT + 4  # 12 bytes may start anywhere
    view = x[1:][2]
    del x, flat
    assert len(arena._free) == 1
    assert arena._free[0][0] > HEAP_AT
    del view
    assert arena._free == [(HEAP_AT, HEAP_BYTES)]


def test_array_outlives_its_segment():
    segment = SharedSegment(1, arena_bytes=ARENA_BYTES)
    x = Arena(segment, 0).empty((1000,), np.dtype(np.int64))
    segment.close_fd()
    del segment
    gc.collect()
    x[...] = 7
    assert x.sum() == 7000


def test_fork_of_world_of_one_has_a_copy():
    """A program alone may fork workers that use the world of one, each for itself."""
    x = sp.empty(1000, shared=True)
    x[...] = 1
    ends = []
    for child in range(1, 4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                x[...] = child
                for i in range(200):
                    assert sp.all_gather(np.array([i])).tolist() == [i]
                    assert (sp.all_reduce(x, "sum") == child).all()
                code = 0
            finally:
                os._exit(code)
        ends.append(pid)
    for i in range(300):
        assert sp.all_reduce(np.array([i, 1])).tolist() == [i, 1]
    assert [os.waitpid(pid, 0)[1] for pid in ends] == [0, 0, 0]
    assert (x == 1).all()


def test_unavailable_private_memory_is_reported():
    with refused(SharedMemoryError):
        SharedSegment(1, arena_bytes=1 << 61, is_private=True)


def test_full_arena_reports_numbers(segment):
    arena = Arena(segment, 0)
    kept = arena.empty((HEAP_BYTES - 1000,), np.dtype(np.uint8))
    with refused(SharedMemoryError) as caught:
        arena.allocate(2000)
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (2048, 960)
    del kept
    assert arena.allocate(2000) % LINE == 0


def test_garbage_collection_during_allocation(segment):
    """An array in a cycle may be freed at any moment, also while the free list is being changed."""
    arena = Arena(segment, 0)

    class Cycle:
        def __init__(self):
            self.me, self.array = self, arena.empty((100,), np.dtype(np.float64))

    fallocate_to = arena._fallocate_to

    def collect(end):
        gc.collect()
        fallocate_to(end)

    arena._fallocate_to = collect
    Cycle()
    thread = threading.Thread(target=lambda: arena.free(arena.allocate(64)), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert arena._free == [(HEAP_AT, HEAP_BYTES)]


def test_smallest_arena_holds_all_group_slots():
    segment = SharedSegment(3, arena_bytes=1)
    num_groups = segment.map.max_groups
    assert segment.arena_bytes >= num_groups * 2 * SLOT_BYTES
    for rank in range(3):
        arena = Arena(segment, rank)
        offsets = [offset for group in range(num_groups) for offset in arena.reserve_slots(group)]
        assert offsets == list(range(0, num_groups * 2 * SLOT_BYTES, SLOT_BYTES))
        arena.allocate(1)
    segment.close_fd()


# --- descriptors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("disabled", ["", "memfd"])
def test_nothing_is_left_open(monkeypatch, disabled):
    monkeypatch.setenv("SIMPARALLEL_DISABLE", disabled)
    SharedSegment(1, arena_bytes=ARENA_BYTES).close_fd()
    before = count_fds()
    for _ in range(50):
        segment = SharedSegment(2, arena_bytes=ARENA_BYTES)
        Arena(segment, 1).empty((10,), np.dtype(np.float64))[...] = 1
        segment.close_fd()
        segment.close_fd()
    del segment
    assert count_fds() == before
    for _ in range(5):
        SharedSegment(2, arena_bytes=ARENA_BYTES)  # dropped, not closed
    assert count_fds() == before


def test_impossible_size_is_refused():
    """A size beyond the address space raises with the numbers, and leaves no descriptor open."""
    before = count_fds()
    with refused(SharedMemoryError) as caught:
        SharedSegment(1, arena_bytes=1 << 61)
    assert caught.value.needed_bytes > 1 << 61
    assert count_fds() == before


def test_threads_outside_of_a_run_leave_nothing_open():
    before = count_fds()
    for _ in range(3):
        thread = threading.Thread(target=lambda: sp.all_reduce(np.ones(2)))
        thread.start()
        thread.join()
    del thread
    assert count_fds() == before


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
@pytest.mark.parametrize("disabled", ["memfd", "memfd,futex"])
def test_works_without_memfd_and_futex(monkeypatch, transport, disabled):
    monkeypatch.setenv("SIMPARALLEL_DISABLE", disabled)

    def program():
        small, large = np.ones(5), np.full(30_000, sp.get_rank() + 1.0)
        sp.all_reduce(small)
        return small.tolist(), set(sp.all_reduce(large).tolist())

    with sp.Cluster(2, transport=transport, echo=False) as cluster:
        for _ in range(2):
            assert list(cluster.run(program)) == [([2.0] * 5, {3.0})] * 2
