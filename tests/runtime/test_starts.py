"""Ranks are alike whatever started them: the same share of BLAS threads, and the same random numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import simparallel as sp
from simparallel.base.blas import THREAD_VARIABLES

pytestmark = pytest.mark.process
TESTS = Path(__file__).parent.parent
CORES = 8

HEAD = f"""
import os, random, sys
sys.path.insert(0, {str(TESTS)!r})
import numpy as np
import simparallel as sp
from simparallel.base import blas
blas.usable_cores = lambda: {CORES}

def look():
    from threadpoolctl import threadpool_info
    threads = {{pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"}}
    told = sorted(threads), os.environ["OPENBLAS_NUM_THREADS"], np.random.rand(), random.random()
    os.write(1, (repr(told) + "\\n").encode())
"""
MPI = """
from collections import deque
import fake_mpi
from simparallel.comm.mpi import transport
sys.modules["mpi4py"] = fake_mpi.MODULE

class Comm(fake_mpi.Comm):
    def Dup(self):
        return self

transport.is_available = lambda: True
transport.world = lambda: Comm([{0: deque(), 1: deque()}, {0: deque(), 1: deque()}], 0)
transport.nodes_of = lambda world: [[0, 1]]
"""
STARTS = {
    "launch": "sp.launch(look, world_size=2)",
    "joined": """
pid = os.fork()
os.environ |= {"RANK": str(int(pid == 0)), "WORLD_SIZE": "2", "MASTER_PORT": str(os.getpid() if pid else os.getppid())}
sp.init()
look()
""",
    "mpiexec": MPI + "os.environ |= {'PMI_RANK': '0', 'PMI_SIZE': '2'}\nsp.init()\nlook()\nos._exit(0)\n",
    # The script of `simparallel run --transport mpi`.
    "mpi": MPI
    + """
import json
from dataclasses import asdict
from simparallel.runtime.mpi import rank
rank._keep_log = lambda *_: None
rank.run_script = lambda *_: (look(), os._exit(0))
config = rank.MpiConfig(
    script="", arguments=[], with_local_rank=False, is_module=False, world_size=2, device=None, devices_per_rank=None,
    dtype=None, device_ids=[], environment={}, timeout_s=9.0, record="off", array="numpy", directory="", nodes=[],
    log_links="",
)
rank.main(json.dumps(asdict(config)))
""",
}


def started(start: str, before_init: str = "") -> list[str]:
    """Start ranks in one way; return what they saw."""
    program = HEAD + STARTS[start].replace("sp.init()", before_init + "sp.init()")
    inherited = {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": str(TESTS.parent)}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [line.removeprefix(f"[rank {rank}] ") for rank, line in enumerate(sorted(done.stdout.splitlines()))]


@pytest.mark.parametrize("start", STARTS)
def test_ranks_are_alike(start: str) -> None:
    told = f"([{CORES // 2}], '{CORES // 2}', 0.5488135039273248, 0.8444218515250481)"
    assert set(started(start)) == {told}


@pytest.mark.parametrize("start", ["joined", "mpiexec"])
def test_init_keeps_seeds_of_the_program(start: str) -> None:
    own = "np.random.seed(5); random.seed(5)\n"
    told = f"([{CORES // 2}], '{CORES // 2}', 0.22199317108973948, 0.6229016948897019)"
    assert set(started(start, own)) == {told}


def test_environment_of_a_cluster_limits_blas() -> None:
    def look() -> tuple[int, str]:
        from threadpoolctl import threadpool_info

        return max(pool["num_threads"] for pool in threadpool_info()), os.environ["OMP_NUM_THREADS"]

    assert sp.launch(look, world_size=2, environment={"OMP_NUM_THREADS": "3"}, echo=False) == [(3, "3")] * 2
