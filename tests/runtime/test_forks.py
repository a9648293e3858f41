"""Processes forked by a rank or a launcher hold copies of everything, and must not act in their place."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from leaks import finish, no_leaks, start_script  # noqa: F401 (a fixture)

import simparallel as sp
from simparallel.errors import CommError

TRANSPORTS = ["inline", pytest.param("shm", marks=pytest.mark.process)]


def said_by_child(function: Callable[[], Any]) -> str:
    """Return the text of the error that `function` raises, or of its result, in a process forked here."""
    out, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = repr(function())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(to_parent, text.encode())
            os._exit(0)
    os.close(to_parent)
    with open(out, "rb") as end:
        text = end.read().decode()
    os.waitpid(child, 0)
    return text


# --- a forked process ends with the rank's function -----------------------------------------------------


def returns() -> None:
    print("a child returns")


def exits() -> NoReturn:
    sys.exit(3)


def exits_with_words() -> NoReturn:
    sys.exit("a child exits with words")


def raises() -> NoReturn:
    raise ValueError("a child raises")


ENDS = [
    (returns, 0, "a child returns"), (exits, 3, ""), (exits_with_words, 1, "a child exits with words"),
    (raises, 1, "ValueError: a child raises"),
]  # fmt: skip


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rank_continues_after_a_forked_process(transport: str, capfd: pytest.CaptureFixture[str]) -> None:
    def fork(function: Callable[[], None]) -> int | None:
        pid = os.fork() if sp.get_rank() == 0 else 1
        if pid == 0:
            function()
            return None
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if pid > 1 else None

    with sp.Cluster(2, transport=transport) as cluster:
        for function, code, words in ENDS:
            assert cluster.run(fork, function) == [code, None]
            # The child's output is not read as an answer to this run.
            assert cluster.run(lambda: sp.all_reduce(np.ones(1)).tolist()) == [[2.0], [2.0]]
            told = capfd.readouterr()
            assert words in told.out + told.err


@pytest.mark.process
def test_script_that_forks(tmp_path: Path) -> None:
    """The child also reaches the end of the script; the rank's threads and processes are not its own."""
    text = """
import os, multiprocessing, time
import simparallel as sp
sp.init()
worker = multiprocessing.Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
pid = os.fork()
if pid:
    assert os.waitpid(pid, 0)[1] == 0
    assert worker.is_alive()
    sp.barrier()
    print("whole", flush=True)
"""
    (tmp_path / "forks.py").write_text(text)
    arguments = ["run", "-n", "2", "--log-dir", str(tmp_path / "log"), str(tmp_path / "forks.py")]
    call = f"import sys\nfrom simparallel.cli.main import main\nsys.exit(main({arguments!r}))\n"
    script = start_script(tmp_path, call)
    out, err = finish(script)
    assert (script.returncode, out.count("whole")) == (0, 2), err


# --- a forked process does not communicate --------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_collectives_of_a_forked_process_are_refused(transport: str) -> None:
    """They do not disturb the ranks."""

    def sums() -> tuple[list[str], list[float]]:
        group = sp.new_group([1, 0])
        said = [
            said_by_child(call)
            for call in (
                lambda: sp.all_reduce(np.full(4, 100.0)),
                lambda: sp.all_gather(np.full(40_000, 100.0), group=group),
                lambda: sp.isend(np.ones(2), 0),
                lambda: sp.new_group([0]),
                lambda: sp.empty(4, shared=True),
                lambda: (sp.get_rank(), sp.get_world_size()),
            )
        ]
        return said, [float(sp.all_reduce(np.full(4, 1.0 + sp.get_rank() + i))[0]) for i in range(4)]

    results = sp.launch(sums, world_size=2, transport=transport)
    for rank, (said, totals) in enumerate(results):
        assert totals == [3.0, 5.0, 7.0, 9.0]
        for name, text in zip(("all_reduce", "all_gather", "send", "new_group", "empty"), said, strict=False):
            assert text.startswith(f"CommError: {name}: this process (pid "), text
            assert f"was forked from rank {rank} (pid " in text
        assert said[-1] == f"({rank}, 2)"


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_pending_work_survives_a_fork(transport: str) -> None:
    """A work that the rank began completes in the rank; the forked process is refused."""

    def sums() -> tuple[list[str], list[float]]:
        if sp.get_rank() == 1:
            sp.recv(np.ones(1), 0)  # until then no work can finish
        x = np.full(40_000, 1.0 + sp.get_rank())
        work = sp.all_reduce(x, async_op=True)
        said = []
        if sp.get_rank() == 0:
            said = [said_by_child(work.wait), said_by_child(work.is_completed)]
            sp.send(np.ones(1), 1)
        return said, [float(work.wait()[-1]), float(sp.all_reduce(np.ones(1))[0])]

    (said, totals), (_, others) = sp.launch(sums, world_size=2, transport=transport)
    assert totals == others == [3.0, 2.0]
    for text in said:
        assert text.startswith("CommError: this process (pid "), text


def test_world_of_one_works_in_a_forked_process() -> None:
    assert said_by_child(lambda: sp.all_reduce(np.full(2, 3.0)).tolist()) == "[3.0, 3.0]"


def square_and_rank(x: int) -> tuple[int, int]:
    return x * x, sp.get_rank()


@pytest.mark.process
def test_pools_of_processes_work_in_a_rank() -> None:
    def pooled() -> tuple[list[tuple[int, int]], float, bool]:
        from test_forks import square_and_rank  # pools find it by its name

        with multiprocessing.Pool(2) as pool:
            squares = pool.map(square_and_rank, [1, 2, 3])
            try:
                pool.apply(sp.barrier)
                refused = False
            except CommError:
                refused = True
        return squares, float(sp.all_reduce(np.ones(1))[0]), refused

    expected = [([(1, rank), (4, rank), (9, rank)], 2.0, True) for rank in range(2)]
    assert sp.launch(pooled, world_size=2) == expected


# --- the launcher ---------------------------------------------------------------------------------------


@pytest.mark.process
def test_cluster_belongs_to_its_process(tmp_path: Path) -> None:
    """Only the process that started a cluster's devices may run on them."""
    with sp.Cluster(2, echo=False, log_dir=tmp_path) as cluster:
        pids = list(cluster.run(os.getpid))
        (tmp_path / "error_rank0.json").write_text("{}")  # of the parent's run: the child must not delete it
        told = said_by_child(lambda: cluster.run(lambda: 7))
        assert told.startswith(f"LaunchError: this Cluster's devices belong to process {os.getpid()}, and process ")
        assert "Create a new Cluster here." in told
        assert (tmp_path / "error_rank0.json").exists()
        assert said_by_child(lambda: list(sp.launch(sp.get_rank, world_size=2, echo=False))) == "[0, 1]"
        assert cluster.run(os.getpid) == pids
