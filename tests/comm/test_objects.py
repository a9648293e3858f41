"""Objects of any size travel block by block, and take little more memory than themselves."""

from __future__ import annotations

import os
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import simparallel as sp
from simparallel.comm import current
from simparallel.comm.blocks import BLOCK_BYTES
from simparallel.comm.communicator import SHARED_MEMORY
from simparallel.comm.memory.segment import SLOT_BYTES


@st.composite
def cases(draw: Any, max_size: int) -> Any:
    """Draw (members, bytes of each member's object, root)"""
    size = draw(st.integers(1, max_size))
    members = tuple(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    near = st.sampled_from((0, SLOT_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES))
    sizes = st.builds(lambda at, more: max(0, at + more), near, st.integers(-200, 200))
    return members, [draw(sizes) for _ in members], draw(st.sampled_from(members))


def exchange(case: Any) -> Any:
    members, sizes, root = case
    group = sp.new_group(members)
    if group.rank is None:
        return None
    value = bytes([group.rank]) * sizes[group.rank]
    return [
        [
            sp.all_gather_object(value, group),
            sp.gather_object(value, root, group),
            sp.broadcast_object(value, root, group),
        ]
        for _ in range(2)  # the same places again
    ]


def test_objects_arrive_on_every_rank(world):
    def body(case):
        members, sizes, root = case
        given = [bytes([i]) * size for i, size in enumerate(sizes)]
        for rank, got in enumerate(world.run(max(members) + 1, exchange, case)):
            right = [given, given if rank == root else None, given[members.index(root)]]
            assert got == ([right, right] if rank in members else None)

    world.check(cases(world.max_size), body)


def test_large_objects_take_little_memory():
    """A gather on both of two ranks needs both ranks' bytes and one object more."""
    n = 8 * BLOCK_BYTES

    def program() -> int:
        value = np.full(n, sp.get_rank(), np.uint8)
        sp.barrier()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert [x[-1] for x in sp.all_gather_object(value)] == [0, 1]
        sp.barrier()
        shared_bytes = os.fstat(current().transport.segment.fd).st_blocks * 512
        assert shared_bytes < 3 * n
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        peaks = sp.launch(program, world_size=2, transport="inline")
    finally:
        tracemalloc.stop()
    assert max(peaks) < 2 * 3.3 * n


class Broken:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_unpicklable_object_fails_at_its_receiver(world):
    def program() -> Any:
        if sp.get_rank() == 0:
            sp.broadcast_object(Broken())
        else:
            with pytest.raises(ValueError, match="no number"):
                sp.broadcast_object()
        return sp.all_gather_object(sp.get_rank())

    assert list(world.run(2, program)) == [[0, 1]] * 2


def test_price_counts_all_bytes():
    def program() -> None:
        sp.all_gather_object(b"x" * 1000 * sp.get_rank())

    with sp.Cluster(2, transport="inline") as cluster:
        (event,) = {(e.name, e.size_bytes) for e in cluster.run(program).trace.events if e.kind == "collective"}
    packed = [SHARED_MEMORY.pack(b"x" * 1000 * rank).size for rank in range(2)]
    assert event == ("all_gather", sum(packed))
