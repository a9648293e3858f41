"""`while not work.is_completed()` lets other ranks progress, and raises what `wait` would."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest
from oracles import World
from refusals import refused

import simparallel as sp
from simparallel.comm import Work, current
from simparallel.comm.memory.segment import ABORT_INTERRUPT, DONE
from simparallel.comm.transport import Condition
from simparallel.errors import CollectiveMismatchError, DeadlineError, DeadlockError, RankFailedError, RunFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

LARGE = 300_000  # elements: its all_reduce has several waits


def poll(work: Work, begin: Callable[[], Any] = lambda: None) -> Any:
    """Return the result of a work after polling it."""
    while not work.is_completed():
        begin()
    return work.wait()


def failure(world: World, size: int, fn: Any, timeout_s: float = 20.0) -> RunFailedError:
    with refused(RunFailedError) as caught:
        world.run(size, fn, timeout_s=timeout_s)
    return caught.value


# --- right programs ---------------------------------------------------------------------------------


def everything() -> list[float]:
    me, size = sp.get_rank(), sp.get_world_size()
    small = poll(sp.all_reduce(np.full(3, me + 1.0), async_op=True))
    large = poll(sp.all_reduce(np.full(LARGE, me + 1.0), async_op=True))
    ring = poll(sp.all_reduce(np.full(5, me + 1.0), async_op=True, algorithm="ring"))
    got = sp.irecv(np.zeros(2), (me - 1) % size)
    sent = [sp.isend(np.full(2, 1.0 * me), (me + 1) % size, tag=tag) for tag in (*range(1, 30), 0)]
    works = [sp.irecv(np.zeros(2), (me - 1) % size, tag=tag) for tag in range(1, 30)]
    return [small[0], large[-1], ring[0], poll(got)[0], *(poll(work)[0] for work in works), *map(poll, sent)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_polled_results_arrive(world: World, size: int) -> None:
    total = size * (size + 1) / 2
    for rank, found in enumerate(world.run(size, everything)):
        assert found == [total] * 3 + [(rank - 1) % size] * 30 + [None] * 30


def one_of_two() -> list[float]:
    """While one rank polls the first work, the other waits for the second."""
    groups = [sp.new_group([0, 1]) for _ in range(2)]
    works = [sp.all_reduce(np.ones(LARGE), group=group, async_op=True) for group in groups]
    if sp.get_rank() == 0:
        return [poll(work)[0] for work in works]
    return [work.wait()[0] for work in reversed(works)]


def test_other_ranks_progress_during_polling(world: World) -> None:
    assert world.run(2, one_of_two) == [[2.0, 2.0]] * 2


def asked_for_a_while() -> float:
    """Nothing arrives while this rank only polls."""
    if sp.get_rank() == 1:
        value = sp.recv(np.zeros(1), 0)
        sp.send(value + 1, 0)
        return value[0]
    work = sp.irecv(np.zeros(1), 1)
    looks = iter(range(3000))

    def something_else() -> None:
        if next(looks, None) == 2000:
            sp.send(np.ones(1), 1)

    return poll(work, something_else)[0]


def test_polling_rank_may_do_other_work(world: World) -> None:
    assert world.run(2, asked_for_a_while) == [2.0, 1.0]


def test_order_of_turns_is_reproducible() -> None:
    turns: list[int] = []

    def program() -> None:
        me = sp.get_rank()
        for round_ in range(4):
            work = sp.all_reduce(np.ones(3), async_op=True)
            poll(work, lambda: turns.append(me))
            if me == round_ % 3:
                sp.send(np.ones(1), (me + 1) % 3)
            if me == (round_ + 1) % 3:
                poll(sp.irecv(np.zeros(1), round_ % 3), lambda: turns.append(me))

    sp.launch(program, world_size=3, transport="inline")
    first, turns = turns, []
    sp.launch(program, world_size=3, transport="inline")
    assert first == turns


def test_rank_may_store_and_leave_between_reads(inline: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank whose last word arrives together with its end has not left anyone waiting."""

    def program() -> list[int | None]:
        if sp.get_rank() == 1:
            return []
        transport, found = current().transport, []
        index = transport.segment.map.sent(1, 0)
        needed = Condition((index,), (1,), 1)

        def state_of(rank: int) -> int:
            transport.words[index] = stored
            return DONE

        monkeypatch.setattr(transport, "state_of", state_of)
        for stored in (0, 1):  # noqa: B007 - read by state_of
            transport.words[index] = 0
            found.append(transport.gone(needed))
        transport.words[index] = 0
        monkeypatch.undo()
        return found

    assert inline.run(2, program)[0] == [1, None]


# --- wrong programs ---------------------------------------------------------------------------------


def other_shape() -> None:
    poll(sp.all_reduce(np.ones(3 + sp.get_rank()), async_op=True))


def one_leaves() -> None:
    if sp.get_rank() == 0:
        poll(sp.all_reduce(np.ones(3), async_op=True))


def one_fails() -> None:
    if sp.get_rank() == 1:
        raise KeyError("first")
    poll(sp.irecv(np.ones(3), 1))


def test_polling_raises_the_errors_of_waiting(world: World) -> None:
    assert isinstance(failure(world, 2, other_shape).__cause__, CollectiveMismatchError)
    error = failure(world, 2, one_leaves)
    assert isinstance(error.__cause__, RankFailedError)
    error = failure(world, 3, one_fails)
    assert isinstance(error.__cause__, KeyError)
    assert set(error.reports) == {0, 1, 2}


def nobody_sends() -> None:
    poll(sp.irecv(np.ones(3), 1 - sp.get_rank(), tag=5))


def others_wait() -> None:
    if sp.get_rank() == 0:
        poll(sp.irecv(np.ones(3), 1))
    sp.recv(np.ones(3), 0)


@pytest.mark.parametrize("program", [nobody_sends, others_wait])
def test_fruitless_polling_ends_at_the_timeout(world: World, program: Any) -> None:
    error = failure(world, 2, program, timeout_s=0.5)
    assert isinstance(error.__cause__, (DeadlineError, DeadlockError))
    assert set(error.reports) == {0, 1}


def test_waiting_rank_is_reported(inline: World) -> None:
    def program() -> None:
        if sp.get_rank() == 1:
            sp.recv(np.ones(1), 0)
        poll(sp.irecv(np.ones(3), 1))  # begins first, so its limit ends first

    text = str(failure(inline, 2, program, timeout_s=2))
    assert "waited 2 s in recv(float64 (3,), src=1, tag=0) at" in text
    assert "Missing: rank 1, which waits in recv(float64 (1,), src=0, tag=0) at" in text


def test_interrupt_ends_polling(inline: World) -> None:
    def program() -> None:
        transport, work = current().transport, sp.irecv(np.ones(1), 0)
        transport.words[transport.segment.map.abort()] = ABORT_INTERRUPT
        with pytest.raises(KeyboardInterrupt):
            poll(work)
        transport.words[transport.segment.map.abort()] = 0
        sp.send(np.ones(1), 0)

    assert inline.run(1, program) == [None]


# --- receives that are dropped ----------------------------------------------------------------------


class Enough(Exception):
    pass


def given_up() -> tuple[float, float, bool]:
    """An exception ends a receive in the middle of its wait; then two messages arrive."""
    communicator, x, y = current(), np.zeros(1), np.zeros(1)
    wait = communicator.transport.wait

    def interrupted(*_: Any) -> None:
        raise Enough

    communicator.transport.wait = interrupted  # type: ignore[method-assign]
    with contextlib.suppress(Enough):
        sp.recv(x, sp.get_rank())
    communicator.transport.wait = wait  # type: ignore[method-assign]
    is_idle = not communicator.lanes
    for value in (1.0, 2.0):
        sp.send(np.full(1, value), sp.get_rank())
    return sp.recv(y, sp.get_rank())[0], sp.recv(y, sp.get_rank())[0], is_idle and x[0] == 0


def test_dropped_receive_takes_no_message(world: World) -> None:
    assert world.run(2, given_up) == [(1.0, 2.0, True)] * 2


@pytest.mark.process
def test_signal_may_end_a_receive() -> None:
    def program() -> list[float]:
        transport = current().transport
        words, control = transport.words, transport.segment.map
        if sp.get_rank() == 1:
            while not words[control.wait_epoch(0)] & 1:
                os.sched_yield()
            os.kill(words[control.pid(0)], signal.SIGUSR1)
            sp.barrier()
            sp.send(np.ones(1), 0)
            return []

        def leave(*_: Any) -> None:
            raise Enough

        signal.signal(signal.SIGUSR1, leave)
        with contextlib.suppress(Enough):
            sp.recv(np.zeros(1), 1)
        sp.barrier()
        return [sp.recv(np.zeros(1), 1)[0]]

    assert sp.launch(program, world_size=2, echo=False) == [[1.0], []]
