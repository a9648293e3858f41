"""The contract's tests on MPI: `mpiexec -n 4 python -m mpi4py tests/worlds_mpi.py [FOLDER] [pytest's arguments]`.

Every process runs the same tests in step. Where a test runs something on ranks, each process plays its rank, and
then all processes get the outcomes of all ranks, so that they check the same and continue together.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.comm.mpi.medium import MPI_MESSAGES
from simparallel.errors import CommError
from simparallel.machine.cluster import describe
from simparallel.rank_local import begin_run
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.ranks.rank import RunSettings, play_rank
from simparallel.runtime.reports import check_received, failure_report, raise_failure

FILES = (
    "test_collectives.py",
    "test_collectives_out.py",
    "test_mismatch.py",
    "test_algorithms.py",
    "test_distributed.py",
    "test_differentiable_collectives.py",
    "test_messages.py",
    "test_uneven.py",
)
CHOSEN = "mpi and not cluster_has_a_default"  # clusters do not have this transport


def wait(request: Any) -> None:
    """Wait asleep: MPI's blocking calls would keep the cores from the ranks that work."""
    while not request.Test():
        time.sleep(0.0002)


def gathered(everyone: Any, mine: Any) -> list[Any]:
    """Return the object of every process, in their order."""
    part = np.frombuffer(pickle.dumps(mine, pickle.HIGHEST_PROTOCOL), np.uint8)  # older ones lose byte orders
    sizes = np.empty(everyone.size, np.int64)
    wait(everyone.Iallgather(np.array([part.size]), sizes))
    parts = np.empty(sizes.sum(), np.uint8)
    wait(everyone.Iallgatherv(part, [parts, sizes]))
    return [pickle.loads(each) for each in np.split(parts, np.cumsum(sizes)[:-1])]


def run_on_mpi(size: int, fn: Callable[..., Any], args: tuple[Any, ...], timeout_s: float) -> Results:
    """Run like `Cluster.run`, on the first `size` processes."""
    from mpi4py import MPI

    from simparallel.comm.mpi.transport import MpiTransport

    outcome, settings = None, RunSettings(describe(size), seed=0)
    everyone = MPI.COMM_WORLD
    wait(everyone.Ibarrier())
    members = everyone.Split(int(everyone.rank >= size), everyone.rank)
    if everyone.rank < size:
        transport = MpiTransport(members, timeout_s)
        transport.start()
        begin_run()  # this thread plays one rank after another
        outcome, _ = play_rank(partial(fn, *args), transport, settings, medium=MPI_MESSAGES)
        assert transport.wait_for_the_others(), "a rank went on after another one had failed"
        try:
            check_received(transport.segment, transport.rank, outcome.kept_messages)
        except CommError as error:
            outcome.report = outcome.report or failure_report(error)
        transport.segment.close_fd()
    outcomes = gathered(everyone, outcome)[:size]
    members.Free()
    results = Results(outcomes, settings.cluster)
    raise_failure(outcomes)
    return results


def main(folder: str, *arguments: str) -> int:
    """Run the tests; the first process prints, the others write to `FOLDER/rank_N.txt`."""
    import pytest
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank:
        sys.stdout = sys.stderr = open(Path(folder, f"rank_{MPI.COMM_WORLD.rank}.txt"), "w")  # noqa: SIM115
    os.environ["SIMPARALLEL_TEST_MPI"] = "1"
    tests = Path(__file__).parent
    files = [str(next(tests.rglob(file))) for file in FILES]
    print(MPI.Get_library_version().splitlines()[0])
    # The plugin that comes with the package would have pytest rewrite its asserts.
    quiet = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    return int(pytest.main(["-q", "-n", "0", "-p", "no:cacheprovider", *quiet, "-k", CHOSEN, *files, *arguments]))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
