"""Ranks as threads of one process: they end after any failure, and give the same bits as processes."""
# ruff: noqa: NPY002 (NumPy's global numbers are what is tested)

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)
from oracles import World
from refusals import refused
from threadpoolctl import threadpool_info

import simparallel as sp
from simparallel.errors import DeadlineError, LaunchError, RunFailedError
from simparallel.runtime.ranks import threads


@pytest.mark.parametrize("world_size", [1, 2])
def test_ctrl_c_stops_a_computing_rank(tmp_path: Path, world_size: int) -> None:
    """It ends as after any exception, and the launch returns when all ranks have ended.

    The main thread blocks the signal, which therefore does not interrupt its wait: the rank's thread receives it.
    """
    text = f"""
import os, signal, threading, time
import simparallel as sp
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
def work():
    if sp.get_rank() < {world_size} - 1:
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    try:
        os.kill(os.getpid(), signal.SIGINT)
        while True:
            pass
    finally:
        time.sleep(0.1)
        print("cleaned up")
try:
    sp.launch(work, world_size={world_size}, transport="inline")
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
"""
    assert finish(start_script(tmp_path, text)) == ("cleaned up\ninterrupted 1\n", "")


def test_second_ctrl_c_leaves_a_call_behind(tmp_path: Path) -> None:
    text = """
import os, signal, sys, threading
import simparallel as sp
from simparallel.runtime.ranks import threads
threads.GIVE_UP_S = 0.1
lock = threading.Lock()
lock.acquire()
class Told:
    def write(self, text):
        if "cannot interrupt" in text:
            os.kill(os.getpid(), signal.SIGINT)
    def flush(self):
        pass
sys.stderr = Told()
def work():
    os.kill(os.getpid(), signal.SIGINT)
    lock.acquire()
try:
    sp.launch(work, world_size=2, transport="inline")
except KeyboardInterrupt:
    print("interrupted", threading.active_count())
    lock.release()
    rank = next(t for t in threading.enumerate() if t.name == "rank 0")
    rank.join(20)
    print(sp.launch(sp.get_rank, world_size=2, transport="inline"))
"""
    assert finish(start_script(tmp_path, text)) == ("interrupted 2\n[0, 1]\n", "")


@pytest.mark.parametrize("what", ["computes", "communicates", "is in a call", "runs dry"])
def test_signal_handler_that_raises_ends_a_run(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A time limit is such a handler, as that of pytest-timeout."""
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.1 if what == "is in a call" else 20.0)
    lock = threading.Lock()
    lock.acquire()

    def stop(*_: object) -> None:
        raise TimeoutError("on purpose")

    def endless() -> None:
        if sp.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
            if what == "is in a call":
                lock.acquire()
        while True:
            if what == "communicates":
                sp.barrier()

    run: Any = sp.dry_run if what == "runs dry" else partial(sp.launch, transport="inline")
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(TimeoutError, match="on purpose"):
            run(endless, world_size=2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    left = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    assert len(left) == (what == "is in a call")
    lock.release()
    for thread in left:
        thread.join(20)


@pytest.mark.parametrize("what", ["computes", "is in a call"])
def test_rank_that_keeps_its_turn_is_reported(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.01)
    monkeypatch.setattr(threads, "GIVE_UP_S", 0.1 if what == "is in a call" else 20.0)
    lock, left = threading.Lock(), []
    lock.acquire()

    def hold_up() -> None:
        if sp.get_rank() == 1:
            left.append(threading.current_thread())
            if what == "is in a call":
                lock.acquire()
            while True:
                pass
        sp.barrier()

    with refused(RunFailedError) as caught:
        sp.launch(hold_up, world_size=3, transport="inline", timeout_s=0.2)
    lock.release()
    for thread in left:
        thread.join(20)
        assert not thread.is_alive()
    assert isinstance(caught.value.__cause__, DeadlineError)
    assert caught.value.__cause__.facts["missing"] == [1]
    reports = caught.value.facts["reports"]
    assert [reports[rank]["secondary"] for rank in range(3)] == [True, False, True]


def test_endless_ranks_end_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last rank has no time limit of its own, but a run that has failed ends."""
    monkeypatch.setattr(threads, "LOOK_S", 0.01)

    def never_end() -> None:
        while True:
            pass

    with refused(RunFailedError, rank=0) as caught:
        sp.launch(never_end, world_size=3, transport="inline", timeout_s=0.1)
    assert all("DeadlineError" in report["summary"] for report in caught.value.facts["reports"].values())


def test_debugged_rank_has_no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LOOK_S", 0.01)
    looks = []
    look = threads._Call.is_debugged
    monkeypatch.setattr(threads._Call, "is_debugged", lambda call: looks.append(look(call)) or looks[-1])

    def stop_at_a_breakpoint() -> None:
        sys._getframe().f_trace = lambda *_: None
        while len(looks) < 5:
            pass

    sp.launch(stop_at_a_breakpoint, world_size=2, transport="inline", timeout_s=0.05)
    assert all(looks)


# --- the same bits as processes ---------------------------------------------------------------------

DRAWS = {
    "random": lambda: random.random(),
    "gauss": lambda: random.gauss(0, 1),  # keeps a second number in reserve
    "rand": lambda: np.random.rand(),
    "randn": lambda: np.random.randn(),  # the same here
    "seed": lambda: np.random.seed(3),
}  # fmt: skip


@pytest.mark.process
def test_same_bits_as_processes() -> None:
    """Matrix products depend on BLAS threads, random numbers on the stream that a rank finds at its turn."""
    with sp.testing.Ranks("shm") as processes, World("inline") as inline:

        @settings(max_examples=8)
        @given(
            turns=st.lists(st.tuples(*[st.lists(st.sampled_from(sorted(DRAWS)), max_size=3)] * 2), max_size=4),
            width=st.integers(1, 70),
        )
        def check(turns: list[tuple[list[str], ...]], width: int) -> None:
            before = callers_state()
            assert inline.run(2, train, turns, width) == processes.run(2, train, turns, width)
            np.testing.assert_equal(callers_state(), before)

        check()


def train(turns: list[tuple[list[str], ...]], width: int) -> list[Any]:
    """Train steps of a small network, with random draws of this rank before each; return all results."""
    sp.set_seed(1)
    net = sp.nn.Sequential(sp.nn.Linear(784, width), sp.nn.ReLU(), sp.nn.Linear(width, 10))
    ddp = sp.parallel.DistributedDataParallel(net)
    optimizer = sp.optim.SGD(ddp.parameters(), lr=0.1)
    images = np.random.default_rng(sp.get_rank()).normal(size=(64, 784)).astype(np.float32)
    drawn = []
    for names in turns:
        drawn += [DRAWS[name]() for name in names[sp.get_rank()]]
        loss = (ddp(sp.Tensor(images)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [drawn, random.random(), np.random.randn(), [p.numpy().tobytes() for p in net.parameters()]]


def callers_state() -> list[Any]:
    """Return the state that ranks share with their caller."""
    pools = [pool["num_threads"] for pool in threadpool_info()]
    return [pools, random.getstate(), np.random.get_state(legacy=False)]


def test_foreign_generator_state_is_restored() -> None:
    """NumPy's global functions may use a generator that cannot be seeded like the default one."""
    before = np.random.get_bit_generator()
    mine = np.random.PCG64(5)
    np.random.set_bit_generator(mine)
    try:
        seen = sp.launch(lambda: np.random.rand(), world_size=2, transport="inline")
        assert np.random.get_bit_generator() is mine
        assert np.random.rand() == np.random.Generator(np.random.PCG64(5)).random()
    finally:
        np.random.set_bit_generator(before)
    assert seen == [np.random.RandomState(0).rand()] * 2


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
@pytest.mark.parametrize("how", [KeyboardInterrupt, SystemExit])
def test_exception_that_refuses_to_be_pickled(transport: str, how: type[BaseException]) -> None:
    class Evil(Exception):
        def __reduce__(self) -> Any:
            raise how

    def fail() -> None:
        if sp.get_rank() == 1:
            raise Evil("the original text")
        sp.barrier()

    with refused(RunFailedError):
        sp.launch(fail, world_size=2, transport=transport, echo=False)


@pytest.mark.process
def test_result_that_refuses_to_be_pickled() -> None:
    class Evil:
        def __reduce__(self) -> Any:
            raise KeyboardInterrupt

    with pytest.raises(RunFailedError) as caught:
        sp.launch(Evil, world_size=2, echo=False)
    assert isinstance(caught.value.__cause__, LaunchError)


def test_other_ranks_continue_after_any_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    play_rank = threads.play_rank

    def play(call: Any, transport: Any, *arguments: Any, **settings: Any) -> Any:
        if transport.rank == 1:
            raise KeyboardInterrupt
        return play_rank(call, transport, *arguments, **settings)

    monkeypatch.setattr(threads, "play_rank", play)
    with refused(RunFailedError) as caught:
        sp.launch(lambda: sp.all_reduce(np.ones(1)), world_size=3, transport="inline")
    assert "Stopped because of it: ranks 0, 2." in str(caught.value)


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_profiler_works_after_a_run(tmp_path: Path, late: bool) -> None:
    """Python 3.11 hangs under a profiler while a request to look for exceptions of other threads is pending."""
    text = f"""
import sys, time
import simparallel as sp
def work():
    while {late} and sp.get_rank() == 1: pass
    sp.barrier()
try:
    sp.launch(work, world_size=2, transport="inline", timeout_s=0.2)
except sp.errors.RunFailedError as error:
    assert isinstance(error.__cause__, sp.errors.DeadlineError), error
calls = []
def one(): return two()
def two(): return 2
sys.setprofile(lambda frame, event, argument: calls.append(event))
for _ in range(100): one()
sys.setprofile(None)
print(calls.count("call"))
"""
    out, error = finish(start_script(tmp_path, text))
    assert (out, error) == ("200\n", "")
