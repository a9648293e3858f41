"""Fault injection: the syntax of the variable, the effect of each action, and no effect without it."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import cloudpickle
import numpy as np
import pytest
from leaks import no_leaks, wait_for  # noqa: F401 (a fixture)
from refusals import check_refusal, refused

import simparallel as sp
from simparallel.comm import current
from simparallel.comm.fault_spec import VARIABLE, Fault, parse
from simparallel.errors import DeadlineError, InputError, RankFailedError, RunFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def warm() -> Iterator[sp.Cluster]:
    with sp.Cluster(2, echo=False, timeout_s=20) as cluster:
        cluster.run(sp.get_rank)  # its processes exist before the first test looks for leaks
        yield cluster


def sums(count: int = 3) -> float:
    return float(sum(sp.all_reduce(np.ones(5))[0] for _ in range(count)))


def test_parse() -> None:
    assert parse("", 2) == []
    assert parse("rank=1;action=raise", 2) == [Fault(1, "raise")]
    assert parse("rank=0;group=*;op=*;seq=*;action=exit3", 1) == [Fault(0, "exit3")]
    assert parse(" rank=1 ; group=world; op=all_reduce; seq=17; phase=copy_out; action=SIGKILL; ", 2) == [
        Fault(1, "SIGKILL", "world", "all_reduce", 17, "copy_out")
    ]
    assert parse("rank=0;action=raise | rank=1;action=sleep(0.5);group=2", 2) == [
        Fault(0, "raise"),
        Fault(1, "sleep(0.5)", "2"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "rank=0;what=3;action=raise",
        "rank=0;rank=1;action=raise",
        "action=raise",
        "rank=2;action=raise",
        "rank=*;action=raise",
        "rank=²;action=raise",
        "rank=0;action=raise;group=tp",
        "rank=0;action=raise;op=allreduce",
        "rank=0;action=raise;seq=0",
        "rank=0;action=raise;seq=-1",
        "rank=0;action=raise;phase=middle",
        "rank=0",
        "rank=0;action=sigkill",
        "rank=0;action=sleep",
        "rank=0;action=sleep(-1)",
        "rank=0;action=hold_gil",
        "rank=0;action=corrupt(16)",
        "rank=0;action=corrupt(x)",
        "rank=0;action=corrupt(1);phase=published",
        "rank=0;action=corrupt(1);op=recv",
    ],
)
def test_bad_text_is_refused_before_the_start(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    for transport in ("shm", "inline"):
        with sp.Cluster(2, transport=transport) as cluster:
            with refused(InputError):
                cluster.run(sums)
            assert cluster._pool is None


@pytest.mark.parametrize("action", ["SIGKILL", "SIGSTOP", "SIGINT", "os._exit(0)"])
def test_threads_of_the_launcher_are_spared(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"rank=0;action={action}")
    with refused(InputError):
        sp.launch(sums, world_size=2, transport="inline")


def test_without_the_variable_calls_are_plain(warm: sp.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def kinds() -> tuple[str, bool]:
        return current().world.medium.call.__name__, current().transport.faults is None

    assert warm.run(kinds) == [("Call", True)] * 2
    monkeypatch.setenv(VARIABLE, "rank=1;action=raise")
    assert warm.run(kinds) == [("Call", True), ("FaultyCall", False)]  # read at every run


@pytest.mark.parametrize("phase", ["copy_in", "copy_out"])
def test_only_messages_of_a_ring_are_copied(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(algorithm: str) -> float:
        return float(sp.all_reduce(np.ones(5), algorithm=algorithm)[0])

    monkeypatch.setenv(VARIABLE, f"rank=0;op=all_reduce;phase={phase};action=raise")
    assert list(sp.launch(program, ("ring",), world_size=2, transport="inline", echo=False)) == [2.0, 2.0]
    with pytest.raises(RunFailedError):
        sp.launch(program, ("direct",), world_size=2, transport="inline", echo=False)


@pytest.mark.parametrize("algorithm", ["direct", "ring"])
def test_finished_call_frees_its_result(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> bool:
        gc.collect()
        gc.disable()
        try:
            work = sp.all_gather(np.ones(3), async_op=True, algorithm=algorithm)
            result = weakref.ref(work.wait())
            del work
            return result() is None
        finally:
            gc.enable()

    monkeypatch.setenv(VARIABLE, "rank=0;seq=9;action=raise")
    assert list(sp.launch(program, world_size=1, transport="inline")) == [True]


@pytest.mark.parametrize("transport", ["inline", pytest.param("shm", marks=pytest.mark.process)])
@pytest.mark.parametrize(
    ("action", "words"),
    [
        ("raise", "InjectedFault: a fault was asked for"),
        ("MemoryError", "MemoryError: a fault was asked for"),
        ("exit3", "sys.exit(3)"),
    ],
)
def test_exceptions(transport: str, action: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"rank=1;op=all_reduce;seq=2;phase=reduce;action={action}")
    with refused(RunFailedError) as caught:
        sp.launch(sums, world_size=2, transport=transport, echo=False)
    assert caught.value.rank == 1
    assert words in caught.value.reports[1]["summary"]
    assert "collective #" in caught.value.reports[0]["summary"]


@pytest.mark.process
@pytest.mark.parametrize(("action", "words"), [
    ("SIGTERM", "killed by SIGTERM"), ("SIGSEGV", "killed by SIGSEGV"), ("SIGINT", "KeyboardInterrupt"),
])  # fmt: skip
def test_signals(action: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, f"rank=1;seq=2;phase=published;action={action}")
    with refused(RunFailedError) as caught:
        sp.launch(sums, world_size=2, echo=False)
    assert str(caught.value).startswith(f"rank 1 of 2 failed: {words}")
    assert "rank 1" in caught.value.reports[0]["summary"]


@pytest.mark.process
def test_exit_0_is_reported_to_waiting_ranks(warm: sp.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rank=1;seq=2;action=exit0")
    with refused(RunFailedError) as caught:
        warm.run(sums)
    check_refusal(caught.value.__cause__, RankFailedError)


@pytest.mark.process
def test_loop_is_called_user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rank=1;seq=2;phase=enter;action=loop")
    with refused(RunFailedError) as caught:
        sp.launch(sums, world_size=2, echo=False, timeout_s=0.5)
    check_refusal(caught.value.__cause__, DeadlineError, missing=[1])


@pytest.mark.process
@pytest.mark.parametrize("action", ["sleep(0.1)", "slow(0.1)", "hold_gil(0.1)"])
@pytest.mark.parametrize("phase", ["copy_in", "published", "leave"])
def test_slowness_changes_nothing(warm: sp.Cluster, action: str, phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def programs() -> list[Any]:
        large = np.full(20_000, sp.get_rank() + 1)
        shared = sp.empty(20_000, np.float64, shared=True)
        shared[...] = sp.get_rank() + 1
        return [sp.all_reduce(x).sum() for x in (np.ones(3), large, shared)]

    right = warm.run(programs)
    monkeypatch.setenv(VARIABLE, f"rank=1;phase={phase};action={action}")
    start = time.monotonic()
    assert warm.run(programs) == right
    assert time.monotonic() - start > 0.25  # three times: the faults really happened


@pytest.mark.process
def test_rank_continued_in_time_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rank=1;seq=2;phase=copy_in;action=SIGSTOP")
    with sp.Cluster(2, echo=False, log_dir=tmp_path, timeout_s=60) as cluster:
        pid = cluster.run(os.getpid)[1]

        def go_on() -> None:
            wait_for(lambda: "fault: rank 1 SIGSTOP" in (tmp_path / "worker_1.log").read_text())
            wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
            time.sleep(0.2)  # long enough for rank 0 to look for a deadlock
            os.kill(pid, signal.SIGCONT)

        helper = Thread(target=go_on)
        helper.start()
        assert cluster.run(sums) == [6.0, 6.0]
        helper.join()


@pytest.mark.process
def test_exit_0_inside_a_call_is_a_normal_end(warm: sp.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def program() -> str:
        sp.barrier()
        return "came back"

    monkeypatch.setenv(VARIABLE, "rank=1;phase=returned;action=exit0")
    assert warm.run(program) == ["came back", None]


@pytest.mark.process
def test_two_ranks_fail_at_once(warm: sp.Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = [f"rank={rank};seq=2;phase=reduce;action=SIGKILL" for rank in (0, 2)]
    monkeypatch.setenv(VARIABLE, "|".join(faults))
    with refused(RunFailedError) as caught:
        sp.launch(sums, world_size=4, echo=False)
    for rank in (1, 3):
        assert re.search(r"rank [02] \(pid \d+\) was killed by SIGKILL", caught.value.reports[rank]["summary"])
