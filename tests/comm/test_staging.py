"""Staging: the place before the last one is free, the last one is not."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import SharedSegment
from simparallel.comm.memory.staging import PAIR_RING_BYTES, Arenas, Payloads, Staging


class Counted:
    """An arena that only returns offsets."""

    def __init__(self, arena_bytes: int) -> None:
        self.segment = SimpleNamespace(arena_bytes=arena_bytes)
        self.end, self.held = 1 << 20, {}

    def reserve_slots(self, group: int) -> tuple[int, int]:
        return 0, 16 << 10

    def allocate(self, size_bytes: int) -> int:
        start, self.end = self.end, self.end + size_bytes
        self.held[start] = size_bytes
        return start

    def free(self, offset: int) -> None:
        del self.held[offset]


sizes = st.integers(0, 24).flatmap(lambda bits: st.integers(1 << bits, 2 << bits))


@given(st.lists(sizes, max_size=200), st.sampled_from([2, 4]), st.sampled_from([1 << 12, 1 << 21, 1 << 34]))
def test_payload_never_overwrites_the_last_one(payloads, ranks, arena_bytes):
    arena = Counted(arena_bytes)
    staging, last = Staging(arena, 0, ranks), (0, 0)
    for size_bytes in payloads:
        start = staging.next(staging.place_bytes(size_bytes), size_bytes)
        stop = start + size_bytes
        assert stop <= last[0] or last[1] <= start
        assert any(at <= start and stop <= at + room for at, room in arena.held.items())
        last = start, stop
    staging.release()
    assert not arena.held


def test_pieces_take_two_places_by_turns():
    staging = Staging(Counted(1 << 34), 0, 2)
    first, second = staging.next_piece(1000)
    assert abs(first - second) >= 1000
    assert [staging.next_piece(1000) for _ in range(3)] == [(second, first), (first, second), (second, first)]
    other = staging.next_piece(500)
    assert not {first, second} & set(other)


def test_large_payloads_use_two_growing_buffers():
    arena = Counted(1 << 34)
    staging = Staging(arena, 0, 2)
    assert staging.place_bytes(PAIR_RING_BYTES // 2) == 0
    rooms = [staging.next(0, PAIR_RING_BYTES) for _ in range(4)]
    assert rooms[:2] == rooms[2:]
    grown = [staging.next(0, 2 * PAIR_RING_BYTES) for _ in range(2)]
    assert not set(grown) & set(rooms)
    assert sorted(arena.held) == sorted(grown)


@pytest.mark.parametrize("dtype", [np.float32, np.complex128, np.dtype("S3"), np.dtype("f4, i8")])
def test_members_show_the_stored_bytes(dtype):
    dtype, segment = np.dtype(dtype), SharedSegment(4, arena_bytes=1 << 24)
    offsets = [5 << 20, 6 << 20, (6 << 20) + 64, (5 << 20) + 640]
    for rank, offset in enumerate(offsets):
        Arena(segment, rank).allocate(1 << 22)
        assert offset + 256 <= segment.arena_bytes
    for ranks in ((0, 1, 2, 3), (3, 1), (2, 0, 3)):
        for places in (offsets, [offsets[0]] * 4):
            for i, rank in enumerate(ranks):
                there = segment.array(rank, places[rank], (3 * dtype.itemsize,), np.dtype(np.uint8))
                there[...] = np.arange(3 * dtype.itemsize) % 50 + i
            shown = Payloads(Arenas(segment, ranks, dtype), [places[rank] for rank in ranks], 3, (3, 1))
            assert len(shown) == len(ranks)
            for i, rank in enumerate(ranks):
                expected = segment.array(rank, places[rank], (3,), dtype)
                assert np.array_equal(shown.flat[i], expected)
                assert np.array_equal(shown.arrays[i], expected.reshape(3, 1))
                assert np.array_equal(shown.one(i), expected.reshape(3, 1))
                if shown.rows is not None:
                    assert np.array_equal(shown.rows[i], expected)
            steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
            evenly = len(steps) == 1 and min(steps) > 0
            is_slice = 64 % dtype.itemsize == 0
            assert (shown.rows is not None) == (evenly and is_slice and places != offsets)
