"""Deadlocks, unequal numbers of calls and unreceived messages are reported in full, without false alarms."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from typing import Any

import cloudpickle
import numpy as np
import pytest
from oracles import TRANSPORTS, World
from refusals import check_refusal, refused

import simparallel as sp
from simparallel.comm import current
from simparallel.comm.memory.segment import WAIT_BYTES, SharedSegment
from simparallel.comm.shm import deadlock
from simparallel.comm.shm.deadlock import DeadlockDetector
from simparallel.comm.transport import Condition
from simparallel.errors import (
    CollectiveMismatchError,
    CommError,
    DeadlineError,
    DeadlockError,
    InputError,
    RankFailedError,
    RunFailedError,
)
from simparallel.runtime.launcher import run

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def failure(world: World, size: int, fn: Any, *args: Any) -> RunFailedError:
    with refused(RunFailedError) as caught:
        world.run(size, fn, *args)
    return caught.value


# --- ranks that wait for each other -----------------------------------------------------------------


def crossed_groups() -> None:
    first, second = sp.new_group([0, 1, 2]), sp.new_group([2, 1])
    order = (first, second) if sp.get_rank() == 1 else (second, first)
    for group in order:
        if group.rank is not None:
            sp.barrier(group=group)


def ring_of_receives() -> None:
    me, size = sp.get_rank(), sp.get_world_size()
    sp.recv(np.ones(1), (me + 1) % size)


def message_against_collective() -> None:
    if sp.get_rank() == 0:
        sp.recv(np.ones(1), 1)
    sp.barrier()
    if sp.get_rank() == 1:
        sp.send(np.ones(1), 0)


def own_message() -> None:
    if sp.get_rank() == 0:
        sp.recv(np.ones(1), 0)
    sp.barrier()


def asynchronous() -> None:
    """Each rank also waits for a second thing that cannot arrive either."""
    me = sp.get_rank()
    works = []
    for tag in range(3):
        works.append(sp.irecv(np.ones(1), 1 - me, tag=tag))
    group = sp.new_group([0, 1])
    if me == 0:
        sp.all_reduce(np.ones(3), group=group, async_op=True)
        works[0].wait()
    sp.barrier()
    for work in works:
        work.wait()


def much_at_once() -> None:
    """One rank has started many works that no other rank starts: collectives of many groups, messages with all."""
    me, size = sp.get_rank(), sp.get_world_size()
    groups = [sp.new_group(range(size)) for _ in range(60)]
    if me == 0:
        works = []
        for group in groups:
            works.append(sp.all_reduce(np.ones(3), group=group, async_op=True))
        works += [sp.irecv(np.ones(1), rank) for rank in range(size)]
        works += [sp.isend(np.ones(1), rank, tag=1) for rank in range(1, size) for _ in range(17)]
        works[0].wait()
    sp.recv(np.ones(1), (me + 1) % size)


@pytest.mark.parametrize(
    ("program", "size"),
    [
        (much_at_once, 3),
        (crossed_groups, 3),
        (ring_of_receives, 3),
        (message_against_collective, 3),
        (own_message, 2),
        (asynchronous, 2),
    ],
)
def test_cycles_are_found_on_every_rank(world: World, program: Any, size: int) -> None:
    start = time.monotonic()
    error = failure(world, size, program)
    assert time.monotonic() - start < 10  # of a timeout of 20 s
    assert isinstance(error.__cause__, DeadlockError)
    waiting = error.__cause__.waiting
    assert set(error.reports) == set(range(size))
    for rank, report in error.reports.items():
        if rank in waiting:
            assert "DeadlockError" in report["summary"]
        for other in waiting:
            told = rf"rank {other} waits in .* at .*test_deadlock\.py:\d+ in {program.__name__}"
            assert re.search(told, report["summary"])


@pytest.mark.process
def test_partial_cycle_is_found_while_a_rank_works(monkeypatch: pytest.MonkeyPatch) -> None:
    # The third one never communicates: only a signal ends it, and other tests use the long delay before it.
    monkeypatch.setattr(run, "ESCALATION", ((0.5, signal.SIGINT),))

    def program() -> None:
        me = sp.get_rank()
        if me == 2:
            while True:
                time.sleep(0.01)
        sp.recv(np.ones(1), 1 - me)

    with refused(RunFailedError) as caught:
        sp.launch(program, world_size=3, echo=False)
    assert isinstance(caught.value.__cause__, DeadlockError)
    assert set(caught.value.__cause__.waiting) == {0, 1}


@pytest.mark.process
def test_cycles_are_found_without_timeout() -> None:
    with refused(RunFailedError) as caught:
        sp.launch(ring_of_receives, world_size=2, timeout_s=float("inf"), echo=False)
    assert isinstance(caught.value.__cause__, DeadlockError)


@pytest.mark.process
def test_slow_ranks_are_no_deadlock() -> None:
    def program() -> float:
        me, total = sp.get_rank(), 0.0
        for turn in range(3):
            if me == turn:
                time.sleep(0.3)  # the others sleep, publish, and look
            sent = sp.isend(np.ones(1), (me + 1) % 3)
            total += sp.recv(np.ones(1), (me - 1) % 3)[0] + sp.all_reduce(np.ones(1))[0]
            sent.wait()
        return total

    assert sp.launch(program, world_size=3, echo=False) == [12.0] * 3


@pytest.mark.process
def test_wait_record_ends_with_the_wait() -> None:
    """A rank's wait record is withdrawn when it continues."""

    def program() -> list[int]:
        transport = current().transport
        words, control = transport.words, transport.segment.map
        if sp.get_rank() == 1:
            while not words[control.wait_epoch(0)] & 1:
                os.sched_yield()
        sp.barrier()
        return [words[control.wait_epoch(sp.get_rank())] & 1]

    assert sp.launch(program, world_size=2, echo=False)[0] == [0]


def test_deadlock_search() -> None:
    """Find the stuck ranks from the published wait records."""
    segment = SharedSegment(4, arena_bytes=1 << 20)
    detectors = [DeadlockDetector(segment, rank) for rank in range(4)]
    words = [segment.map.sent(rank, 0) for rank in range(4)]  # any word that the rank writes

    def wait(rank: int, *conditions: tuple[int, ...]) -> None:
        needed = [Condition(tuple(words[r] for r in ranks), ranks, 1) for ranks in conditions]
        detectors[rank].end()
        detectors[rank]._publish(needed, f"place {rank}")

    wait(0, (1,))
    assert detectors[0]._stuck() == {}  # rank 1 does not wait
    wait(1, (2,), (0,))
    assert detectors[1]._stuck() == {}  # rank 2 may still arrive
    wait(2, (1,))
    assert set(detectors[0]._stuck()) == {0, 1, 2}
    wait(3, (0, 1))
    assert set(detectors[3]._stuck()) == {0, 1, 2, 3}  # waits for ranks that wait for each other
    segment.words[words[0]] = 1
    assert detectors[0]._stuck() == {}  # rank 1 can continue
    segment.words[words[0]] = 0
    detectors[1].end()
    assert detectors[3]._stuck() == {}
    wait(1, (2,))
    assert set(detectors[1]._stuck()) == {0, 1, 2, 3}
    assert segment.read_wait(1) == "place 1, for rank 2"
    detectors[0]._next_look = 0
    detectors[0].look([], str)  # the first look that finds the cycle
    detectors[0]._next_look = 0
    with refused(DeadlockError):
        detectors[0].look([], str)
    segment.close_fd()


def test_record_changed_while_read_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SharedSegment(2, arena_bytes=1 << 20)
    detector, word = DeadlockDetector(segment, 1), segment.map.sent(0, 1)
    detector._publish([Condition((word,), (0,), 1)], "place")
    assert DeadlockDetector(segment, 0)._read(1) == [Condition((word,), (0,), 1)]
    epoch = segment.map.wait_epoch(1)

    def another_wait() -> None:
        segment.words[epoch] += 2

    monkeypatch.setattr(deadlock, "fence", another_wait)
    assert DeadlockDetector(segment, 0)._read(1) == []
    segment.close_fd()


def test_long_place_keeps_its_end() -> None:
    segment = SharedSegment(1, arena_bytes=1 << 20)
    segment.write_wait(0, "begin " + "ä" * WAIT_BYTES + " train.py:31 in step")
    text = segment.read_wait(0)
    assert len(text.encode()) <= WAIT_BYTES
    assert text.startswith("begin ")
    assert text.endswith(" train.py:31 in step")
    segment.close_fd()


# --- numbers of calls -------------------------------------------------------------------------------


def steps(counts: tuple[int, ...]) -> None:
    for _ in range(counts[sp.get_rank()]):
        sp.all_reduce(np.ones(3))


@pytest.mark.parametrize("counts", [(5, 4), (4, 5), (3, 3, 2), (0, 1)])
def test_counts_that_differ_at_the_end(world: World, counts: tuple[int, ...]) -> None:
    error = failure(world, len(counts), steps, counts)
    assert isinstance(error.__cause__, RankFailedError)
    short = counts.index(min(counts))
    assert set(error.reports) == {rank for rank, count in enumerate(counts) if count > min(counts)}
    for rank, report in error.reports.items():
        done, plural = counts[rank], "s" * (counts[rank] != 1)
        told = f"rank {rank} has made {done} collective call{plural} in world, rank {short} has made {counts[short]}"
        assert told in report["summary"]
        last = rf"the last of rank {short} is #{counts[short]} all_reduce\(sum\) float64 \(3,\) at .*:\d+ in steps"
        assert bool(re.search(last, report["summary"])) == (counts[short] > 0)
        assert re.search(r"waits in world, collective #\d all_reduce.* at .*:\d+ in steps", report["summary"])


# --- unreceived messages ----------------------------------------------------------------------------


def forgotten(how: str) -> None:
    if sp.get_rank() == 0:
        sp.send(np.ones(3), 1, tag=4)
        sp.send(np.ones((2, 2), "i4"), 1, tag=5)
    elif how == "other tag":
        sp.recv(np.ones((2, 2), "i4"), 0, tag=5)


@pytest.mark.parametrize("how", ["never asked", "other tag"])
def test_unreceived_messages(world: World, how: str) -> None:
    error = failure(world, 2, forgotten, how)
    assert (error.rank, set(error.reports)) == (1, {1})
    assert isinstance(error.__cause__, CommError)
    assert error.__cause__.senders == [0]
    text = str(error)
    assert f"rank 1 ended without receiving {'1 message' if how == 'other tag' else '2 messages'}" in text
    assert re.search(r"rank 0 sent float64 \(3,\) with tag 4 at .*test_deadlock\.py:\d+ in forgotten", text)
    asked = r"the last one asked for was recv\(int32 \(2, 2\), src=0, tag=5\) at .*:\d+ in forgotten"
    assert bool(re.search(asked, text)) == (how == "other tag")
    assert ("with tag 5 at" in text) == (how == "never asked")
    assert list(world.run(2, sp.get_rank)) == [0, 1]


def other_tag(how: str) -> None:
    """Rank 1 requests a tag that no rank sends; four messages with other tags arrive."""
    if sp.get_rank() == 0:
        for tag in (1, 3, 4, 5):
            sp.isend(np.ones(2, "i4"), 1, tag=tag)
        if how == "waits":
            sp.barrier()
        if how == "works":
            while True:
                time.sleep(0.001)
    else:
        sp.recv(np.ones(2, "i4"), 0, tag=2)


@pytest.mark.parametrize("how", ["leaves", "waits", "works"])
def test_receive_reports_other_messages(world: World, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "works":
        if world.transport != "shm":
            pytest.skip("inline, a rank that works makes nobody wait; over MPI, nobody ends its loop")
        monkeypatch.setattr(run, "ESCALATION", ((0.3, signal.SIGINT), *run.ESCALATION[1:]))
    with refused(RunFailedError) as caught:
        world.run(2, other_tag, how, timeout_s=0.5 if how == "works" else 20.0)
    kind = {"leaves": RankFailedError, "waits": DeadlockError, "works": DeadlineError}[how]
    if how == "works":  # where rank 0 is just then, is chance
        assert isinstance(caught.value.__cause__, kind)
    else:
        check_refusal(caught.value.__cause__, kind)


def test_failure_precedes_unreceived_messages(world: World) -> None:
    def program() -> None:
        if sp.get_rank() == 0:
            sp.send(np.ones(3), 1)
            raise KeyError("first")

    assert isinstance(failure(world, 2, program).__cause__, KeyError)


# --- levels of the check ----------------------------------------------------------------------------


def differ(what: str) -> Any:
    first = sp.get_rank() == 0
    if what == "root":
        return sp.broadcast(np.full(3, sp.get_rank()), src=0 if first else 1).tolist()
    return (sp.barrier if first else lambda: sp.all_reduce(np.ones(3)))()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("check", "found"), [("full", {"root", "op"}), ("light", {"op"}), ("off", set())])
def test_check_levels(transport: str, check: str, found: set[str]) -> None:
    with sp.Cluster(2, transport=transport, check=check, echo=False) as cluster:
        for what in ("root", "op"):
            if what in found:
                with refused(RunFailedError) as caught:
                    cluster.run(differ, what)
                assert isinstance(caught.value.__cause__, CollectiveMismatchError)
            else:
                cluster.run(differ, what)
        assert cluster.run(lambda: sp.all_reduce(np.ones(2)).tolist()) == [[2.0, 2.0]] * 2


def test_without_the_check_there_are_no_places() -> None:
    with refused(RunFailedError):
        sp.launch(steps, ((1, 0),), world_size=2, transport="inline", check="off")


def test_unknown_level_is_refused() -> None:
    with refused(InputError):
        sp.Cluster(2, check="some")


@pytest.mark.parametrize("num_groups", [1, 2])
def test_swapped_equal_calls(num_groups: int) -> None:
    """They are one call, unless each has a group of its own, as docs/when_it_fails.md says."""

    def swapped() -> list[object]:
        groups = [sp.new_group([0, 1]) for _ in range(num_groups)] * 2
        order = (0, 1) if sp.get_rank() == 0 else (1, 0)
        return [sp.all_gather_object(call, group=groups[call]) for call in order]

    if num_groups == 1:
        assert list(sp.launch(swapped, world_size=2, transport="inline")) == [[[0, 1], [1, 0]]] * 2
        return
    with pytest.raises(RunFailedError) as caught:
        sp.launch(swapped, world_size=2, transport="inline")
    assert isinstance(caught.value.__cause__, DeadlockError)
