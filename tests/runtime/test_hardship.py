"""Two failures at once, a stopped host, few cores, little memory, busy launchers."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)
from test_failures import failure, works

import simparallel as sp
from simparallel.errors import LaunchError, RunFailedError

pytestmark = pytest.mark.process


def test_host_and_a_rank_die_at_once() -> None:
    def kill_both() -> None:
        sp.barrier()
        if sp.get_rank() == 0:
            os.kill(os.getppid(), signal.SIGKILL)
        if sp.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sp.barrier()

    with sp.Cluster(3, echo=False) as cluster:
        with pytest.raises((LaunchError, RunFailedError), match=r"host process ended|rank [012] of 3 failed"):
            cluster.run(kill_both)
        assert works(cluster)


def test_stopped_host() -> None:
    """Ranks do not need it, but it cannot report how one of them ended."""

    def leave() -> None:
        sp.barrier()
        if sp.get_rank() == 1:
            os._exit(3)
        sp.barrier()

    with sp.Cluster(2, echo=False, timeout_s=30) as cluster:
        os.kill(cluster.run(os.getppid)[0], signal.SIGSTOP)
        assert cluster.run(lambda: sp.all_reduce(np.ones(2)).sum()) == [4.0, 4.0]
        error = failure(cluster.run, leave, limit_s=15)
        assert re.search(
            r"rank 0 was stopped in world, collective #2 barrier at .*test_hardship.py:\d+ in leave: "
            r"rank 1 \(pid \d+\) ended, and the host process does not say how; its last collectives: world #1 barrier",
            error.reports[0]["summary"],
        )
        assert works(cluster)


@pytest.mark.parametrize("second", ["raise", "SIGKILL", "os._exit(0)"])
def test_second_failure_during_the_first_report(second: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever rank is reported as the cause, all remaining ranks raise and name it."""
    first = "rank=0;seq=2;phase=reduce;action=raise"
    monkeypatch.setenv("SIMPARALLEL_FAULT", f"{first}|rank=2;seq=2;phase=leave;action={second}")

    def sums() -> None:
        for _ in range(3):
            sp.all_reduce(np.ones(5000))

    with pytest.raises(sp.errors.RunFailedError) as caught:
        sp.launch(sums, world_size=4, echo=False)
    error = caught.value
    assert error.rank in (0, 2)
    for rank in (1, 3):
        assert re.search(r"rank [02] (failed with|\(pid \d+\))", error.reports[rank]["summary"])


def test_ranks_stopped_and_continued_repeatedly() -> None:
    def sums() -> list[float]:
        x = np.ones(30_000)
        return [float(sp.all_reduce(x.copy())[7] + sp.all_reduce(np.ones(3))[0]) for _ in range(100)]

    stopped = []
    with sp.Cluster(3, echo=False, timeout_s=60) as cluster:
        pids, done = cluster.run(os.getpid), threading.Event()

        def storm() -> None:
            for number in itertools.count():
                pid = pids[number % 3]
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)
                done.wait(0.01)
                os.kill(pid, signal.SIGCONT)
                if done.is_set():
                    return

        helper = threading.Thread(target=storm)
        helper.start()
        try:
            while len(stopped) < 12:
                assert cluster.run(sums) == [[6.0] * 100] * 3
        finally:
            done.set()
            helper.join()


def test_many_ranks_on_one_core(tmp_path: Path) -> None:
    text = """
import os
import numpy as np
import simparallel as sp
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.nice(5)
def sums():
    return float(sum(sp.all_reduce(np.full(n, sp.get_rank()))[0] for n in (1, 5000) * 20))
print(set(sp.launch(sums, world_size=8, echo=False)))
"""
    out, err = finish(start_script(tmp_path, text))
    assert (out, err) == ("{1120.0}\n", "")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_launchers_with_threads_and_start_method(tmp_path: Path, method: str) -> None:
    text = f"""
import multiprocessing, threading
import numpy as np
import simparallel as sp
if __name__ == "__main__":
    multiprocessing.set_start_method({method!r})
    end = threading.Event()
    threads = [threading.Thread(target=end.wait) for _ in range(50)]
    for thread in threads: thread.start()
    print(sp.launch(lambda: float(sp.all_reduce(np.ones(1))[0]), world_size=2, echo=False))
    print(multiprocessing.get_start_method())
    end.set()
"""
    out, err = finish(start_script(tmp_path, text))
    assert (out, err) == ("[2.0, 2.0]\n{method}\n".replace("{method}", method), "")


def test_little_address_space(tmp_path: Path) -> None:
    """It works with smaller arenas, or reports the bytes that it needs; never a signal."""
    text = """
import resource
import numpy as np
import simparallel as sp
def sums():
    return float(sp.all_reduce(np.ones(100_000))[0])
for gib in (0.5, 2, 40):
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30), resource.RLIM_INFINITY))
    try:
        print(sp.launch(sums, world_size=2, echo=False))
    except (sp.errors.SharedMemoryError, sp.errors.LaunchError) as error:
        print(type(error).__name__)
"""
    out, err = finish(start_script(tmp_path, text))
    assert err == ""
    assert out.splitlines()[-1] == "[2.0, 2.0]"
    assert set(out.splitlines()) <= {"[2.0, 2.0]", "SharedMemoryError", "LaunchError"}
