"""Devices that are new interpreters, as on macOS: the same runs, logs, errors and ends as with forked ones."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)
from refusals import refused

import simparallel as sp
from simparallel.errors import RunFailedError

pytestmark = pytest.mark.process
AS_ON_MACOS = "memfd,futex,pidfd,fork"


@pytest.fixture(autouse=True)
def _spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPARALLEL_DISABLE", AS_ON_MACOS)


def collectives() -> list[object]:
    rank, size = sp.get_rank(), sp.get_world_size()
    found: list[object] = []
    for count in (0, 1, 5, 70_000):
        x = np.arange(count, dtype=np.float64) + rank
        for algorithm in ("direct", "ring", "tree"):
            found.append(sp.all_reduce(x.copy(), algorithm=algorithm).sum().item())
        found.append(sp.all_gather(x[: rank + 1]).sum().item() if size == 1 else sp.all_gather(x).sum().item())
    for src in range(size - 1):
        if rank == src:
            sp.send(np.full(30_000, rank), src + 1)
        if rank == src + 1:
            found.append(sp.recv(np.empty(30_000, int), src).sum().item())
    group = sp.new_group(range(0, size, 2))
    if rank in group.ranks:
        found.append(sp.all_reduce(np.ones(3), group=group).tolist())
    return found


@pytest.mark.parametrize("size", [1, 5])
def test_results_are_those_of_threads(size: int) -> None:
    """On one rank, and on more ranks than cores."""
    assert sp.launch(collectives, world_size=size, echo=False) == sp.launch(
        collectives, world_size=size, transport="inline"
    )


def test_devices_stay_warm_and_are_new_interpreters() -> None:
    def look() -> tuple[int, int, str, bool]:
        host = "simparallel.runtime.ranks.host" in sys.modules
        return os.getpid(), os.getppid(), multiprocessing.current_process().name, host

    with sp.Cluster(2, echo=False) as cluster:
        first, second = cluster.run(look), cluster.run(look)
    assert first == second
    assert [name for _, _, name, _ in first] == ["rank 0", "rank 1"]
    assert len({pid for pid, *_ in first}) == 2
    assert len({parent for _, parent, *_ in first}) == 1
    assert not any(host for *_, host in first)  # a fork would have the host's modules


def test_records_are_merged(tmp_path: Path) -> None:
    """Each in one piece, from a killed rank too; a program's own settings hold, as with forked devices."""

    def work() -> None:
        log = logging.getLogger("mine")
        for number in range(50):
            log.info("%d.%d %s", sp.get_rank(), number, "x" * 5000)
        log.warning("warned")
        sp.barrier()
        if sp.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        sp.barrier()

    with refused(RunFailedError, rank=2):
        sp.launch(work, world_size=3, log_dir=tmp_path, echo=False)
    lines = (tmp_path / "scheduler.log").read_text().splitlines()
    for rank in range(3):
        mine = [line.partition("INFO mine: ")[2] for line in lines if f"[rank {rank}] INFO mine:" in line]
        assert mine == [f"{rank}.{number} {'x' * 5000}" for number in range(50)]
        assert (tmp_path / f"worker_{rank}.log").read_text() == "WARNING mine: warned\n"
    assert sum("ended with -9" in line for line in lines) == 1


def test_runs_apart_from_each_other() -> None:
    """Where a fork is not safe, each run has new processes."""

    def count() -> int:
        sys.runs = getattr(sys, "runs", 0) + 1  # type: ignore[attr-defined]
        return sys.runs

    with sp.Cluster(2, echo=False) as cluster:
        assert [list(cluster.run(count)) for _ in range(2)] == [[1, 1], [2, 2]]
        cluster.forks = True
        assert [list(cluster.run(count)) for _ in range(2)] == [[3, 3], [1, 1]]


def test_ctrl_c(tmp_path: Path) -> None:
    text = """
import sys, time
from pathlib import Path
import simparallel as sp
def work():
    try:
        Path(f"started{sp.get_rank()}").touch()
        sp.barrier() if sp.get_rank() else time.sleep(60)
    finally:
        Path(f"finally{sp.get_rank()}").touch()
if __name__ == "__main__":
    sp.launch(work, world_size=2)
"""
    script = start_script(tmp_path, text)
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("started?"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(script.pid, signal.SIGINT)
    finish(script)
    assert script.returncode == -signal.SIGINT
    assert len(list(tmp_path.glob("finally?"))) == 2
