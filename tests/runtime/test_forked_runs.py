"""Runs in forked processes: none sees what an earlier one changed, and each begins where the launcher is."""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import simparallel as sp
from simparallel.base.blas import default_threads
from simparallel.errors import RunFailedError

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def forked() -> Iterator[sp.Cluster]:
    with sp.Cluster(2, echo=False, timeout_s=20.0) as cluster:
        cluster.forks = True
        yield cluster


def look() -> dict[str, Any]:
    from threadpoolctl import threadpool_info

    os.umask(mask := os.umask(0))
    return {
        "variables": dict(os.environ),
        "directory": os.getcwd(),
        "path": list(sys.path),
        "umask": mask,
        "handlers": [repr(signal.getsignal(number))[:20] for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM)],
        "errors": np.geterr(),
        "filters": [filter_[:1] + filter_[2:] for filter_ in warnings.filters],
        "level": logging.getLogger().level,
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "blas": [pool["num_threads"] for pool in threadpool_info()],
        "generator": type(np.random.get_bit_generator()).__name__,
        "all_reduce": sp.all_reduce.__module__,
        "sum": float(sp.all_reduce(np.ones(1))[0]),
        "drawn": (random.random(), np.random.rand()),  # noqa: NPY002
        "module": getattr(sp.nn, "of_a_test", None),
    }


def change(folder: str) -> int:
    from threadpoolctl import threadpool_limits

    os.environ["OF_A_TEST"] = "1"
    os.chdir(folder)
    os.umask(0o077)
    for number in (signal.SIGINT, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    np.seterr(all="raise")
    warnings.simplefilter("error")
    logging.getLogger().setLevel(logging.CRITICAL)
    sys.path.insert(0, "/of/a/test")
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    threadpool_limits(7)
    np.random.set_bit_generator(np.random.PCG64(5))  # type: ignore[attr-defined]
    sp.all_reduce = sp.nn.of_a_test = min
    return os.getpid()


def test_no_run_sees_what_an_earlier_one_changed(forked: sp.Cluster, tmp_path: Path) -> None:
    clean = forked.run(look)
    pids = {*forked.run(change, str(tmp_path)), *forked.run(change, str(tmp_path))}
    assert len(pids) == 4
    assert forked.run(look) == clean


def test_warm_processes_keep_what_a_run_changes() -> None:
    """The red control of the test above."""

    def run() -> bool:
        is_there = "OF_A_TEST" in os.environ
        os.environ["OF_A_TEST"] = "1"
        return is_there

    with sp.Cluster(2, echo=False) as warm:
        assert warm.run(run) + warm.run(run) == [False, False, True, True]


def test_runs_begin_where_the_launcher_is(forked: sp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def where() -> tuple[str | None, str, bool, str]:
        return os.environ.get("OF_A_TEST"), os.getcwd(), str(tmp_path) in sys.path, os.environ["RANK"]

    outside = forked.run(where)
    with monkeypatch.context() as patch:
        patch.setenv("OF_A_TEST", "2")
        patch.chdir(tmp_path)
        patch.syspath_prepend(str(tmp_path))
        assert forked.run(where) == [("2", str(tmp_path), True, rank) for rank in "01"]
    assert forked.run(where) == outside == [(None, os.getcwd(), False, rank) for rank in "01"]


def test_modules_stay_imported(forked: sp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the user are imported with the function, on its rank; what they hold does not change."""
    file = tmp_path / "of_a_user.py"
    file.write_text("import os, simparallel as sp\nrank, pid, seen = sp.get_rank(), os.getpid(), []\n")
    os.utime(file, (0, 0))
    monkeypatch.syspath_prepend(str(tmp_path))
    module = __import__("of_a_user")

    def run() -> tuple[int, int, list[int], bool]:
        is_there = "numpy.f2py" in sys.modules
        import numpy.f2py  # noqa: F401

        module.seen.append(module.rank)
        return module.rank, module.pid, module.seen, is_there

    first, second = forked.run(run), forked.run(run)
    assert [found[:3] for found in first] == [found[:3] for found in second]
    assert [(rank, seen) for rank, _, seen, _ in first] == [(0, [0]), (1, [1])]
    assert [found[3] for found in (*first, *second)] == [False, False, True, True]


def test_imported_libraries_have_a_ranks_threads(
    forked: sp.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module is imported before the fork; an OpenMP library reads its number of threads just then."""
    file = tmp_path / "with_openmp.py"
    file.write_text("import os\nthreads = os.environ.get('OMP_NUM_THREADS')\n")
    os.utime(file, (0, 0))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    module = __import__("with_openmp")
    assert forked.run(lambda: (module.threads, os.environ["OMP_NUM_THREADS"])) == [(str(default_threads(2)),) * 2] * 2


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("os._exit(0)", "process ended with exit code 0"), ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("os.kill(os.getpid(), 11)", "killed by SIGSEGV"),
    ],
)  # fmt: skip
def test_ends_are_reported(forked: sp.Cluster, end: str, told: str) -> None:
    """As those of warm processes; the next run has new ones."""

    def run() -> None:
        if sp.get_rank() == 1:
            exec(end, {"os": os})
        sp.barrier()

    with pytest.raises(RunFailedError) as info:
        forked.run(run)
    assert str(info.value).startswith(f"rank 1 of 2 failed: {told}")
    assert info.value.facts["rank"] == 1
    assert forked.run(sp.get_world_size) == [2, 2]


def test_interrupt_ends_a_forked_run() -> None:
    def run() -> None:
        if sp.get_rank() == 0:
            os.kill(launcher, signal.SIGINT)
        while True:
            pass

    launcher = os.getpid()
    with sp.Cluster(2, echo=False) as cluster:
        cluster.forks = True
        with pytest.raises(KeyboardInterrupt):
            cluster.run(run)
        assert cluster.run(sp.get_rank) == [0, 1]
