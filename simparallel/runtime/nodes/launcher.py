"""One of several nodes, each started by its own command: `simparallel run --nnodes 2 --node_rank 0`, then 1.

The commands of all nodes run on this machine, in any order. Each starts one process per rank of its node; the
processes of all nodes find each other (`rendezvous`). A command reports on its own ranks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from simparallel.base.callsite import PACKAGE
from simparallel.base.files import write_atomically
from simparallel.clock.recording import check_record
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.errors import LaunchError
from simparallel.machine.cluster import DEFAULT_DEVICE, describe
from simparallel.machine.ranktable import RankTable
from simparallel.runtime.environment import MASTER_ADDR, MASTER_PORT, places
from simparallel.runtime.joined.identity import JOB_VARIABLES, check_address, check_servers
from simparallel.runtime.launcher import settings as checked
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.launcher.run import LADDER, POLL_S
from simparallel.runtime.log_folder import RANK_LINKS, SCHEDULER_LOG, check_log_dir, forget_former_run, head, link_logs
from simparallel.runtime.logs import Tail, console
from simparallel.runtime.mpi.rank import outcome_of
from simparallel.runtime.nodes import rank as node_rank
from simparallel.runtime.reports import Outcome, death_report, run_failed
from simparallel.trace import Trace


class NodeJob:
    """The ranks of one node of a script's run.

    Args:
        world_size: number of ranks, on all nodes.
        node: number of this node.
        nodes, rank_table, environment, device, devices_per_rank, log_links, log_files, timeout_s, record, array,
            echo: see `Cluster`.
        log_dir: directory for all nodes; this node's files go to `node0`, `node1`, … in it.
        start_timeout_s: seconds to wait for the other nodes.

    Attributes:
        ranks: the ranks of this node.
        directory: directory of this node's files.
        trace: the events of its ranks, once it has run.

    Raises:
        ClusterError: no such device, or nodes that do not fit.
        LaunchError: MASTER_ADDR or a server of the rank table is another machine.
        InputError: the directory cannot be used, see `check_log_dir`.
    """

    def __init__(
        self,
        world_size: int,
        node: int,
        *,
        nodes: int,
        rank_table: RankTable | None = None,
        environment: Mapping[str, str] | None = None,
        device: str = DEFAULT_DEVICE,
        devices_per_rank: int | None = None,
        log_dir: Path,
        log_links: str = RANK_LINKS,
        log_files: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        record: str = "summary",
        array: str = "numpy",
        echo: bool | Collection[int] = True,
        start_timeout_s: float,
    ) -> None:
        where = places(world_size, nodes, rank_table, environment)
        check_address(where.environment.get("MASTER_ADDR", MASTER_ADDR))
        if rank_table is not None:
            check_servers(rank_table)
        self._spec = describe(world_size, device, nodes=where.nodes, devices_per_rank=devices_per_rank)
        self.trace = Trace([], self._spec)
        self.ranks = self._spec.nodes[node]
        self.directory = log_dir / f"node{node}"
        self._links, self._head, self._echo = log_links, head(log_files), echo
        check_log_dir(self.directory, [self.ranks], log_links, log_files)
        self._settings = {
            "world_size": world_size, "node": node, "port": int(where.environment.get("MASTER_PORT", MASTER_PORT)),
            "rank_table": os.path.abspath(rank_table.path) if rank_table else "",
            "job": [os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)],
            "given": {"LOCAL_WORLD_SIZE": str(len(self.ranks))},
            "command": _command(), "environment": where.environment, "device": device,
            "devices_per_rank": devices_per_rank,
            "timeout_s": timeout_s, "record": check_record(record), "array": checked.array(array),
            "start_timeout_s": start_timeout_s, "directory": str(self.directory), "launcher": os.getpid(),
        }  # fmt: skip
        self._device_ids = where.device_ids

    def run(self, script: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False) -> Results:
        """Run the script on the ranks of this node; return when all ranks, on all nodes, have ended.

        For the arguments see `run_script`.

        Raises:
            RunFailedError: a rank of this node failed; the root cause comes first.
            LaunchError: a process cannot be started.
            KeyboardInterrupt: after the ranks of this node were stopped.
        """
        forget_former_run(self.directory)
        for rank in self.ranks:
            # The file of an earlier run that was killed would be taken for this run's.
            (self.directory / node_rank.OUTCOME.format(rank=rank)).unlink(missing_ok=True)
        logs = {rank: self._open_log(rank) for rank in self.ranks}
        shown = [Tail([fd], console(), first_rank=rank, echo=self._echo) for rank, fd in logs.items()]
        processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            link_logs(self.directory, [self.ranks], self._links)
            for rank, fd in logs.items():
                config = node_rank.Config(
                    script,
                    arguments,
                    with_local_rank,
                    is_module,
                    rank=rank,
                    device_id=self._device_ids[rank] if self._device_ids else None,
                    **self._settings,  # type: ignore[arg-type]
                )
                processes[rank] = self._start(config, fd)
            pids = ", ".join(f"rank {rank} (pid {process.pid})" for rank, process in processes.items())
            write_atomically(self.directory / SCHEDULER_LOG, f"{self._head}started {pids}\n".encode())
            self._wait(processes, shown)
        finally:
            _end(processes)
            for tail in shown:
                tail.show(final=True)
            for fd in logs.values():
                os.close(fd)
        return self._results(processes)

    def _open_log(self, rank: int) -> int:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        return os.open(self.directory / f"worker_{rank}.log", flags, 0o600)

    def _start(self, config: node_rank.Config, log_fd: int) -> subprocess.Popen[bytes]:
        home = str(PACKAGE.parent)
        code = f"import sys; sys.path.insert(0, {home!r}); from {node_rank.__name__} import main; main(sys.argv[1])"
        try:
            # In a process group of its own: Ctrl-C reaches this process alone, which then stops the ranks, see `_end`.
            return subprocess.Popen(
                [sys.executable, "-P", "-c", code, json.dumps(asdict(config))],
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=log_fd,
                stderr=log_fd,
            )
        except OSError as error:
            raise LaunchError(f"rank {config.rank} cannot be started: {error}.") from error

    def _wait(self, processes: Mapping[int, subprocess.Popen[bytes]], shown: Sequence[Tail]) -> None:
        """Wait until all have ended; after the first failure signal the processes that do not end by themselves."""
        failed_at: float | None = None
        asked = 0
        while running := [process for process in processes.values() if process.poll() is None]:
            for tail in shown:
                tail.show()
            # As in `Run`: the others stop in their next collective by themselves, but may have none.
            if failed_at is None and any(process.returncode for process in processes.values()):
                failed_at = time.monotonic()
            while failed_at is not None and asked < len(LADDER):
                delay_s, number = LADDER[asked]
                if time.monotonic() < failed_at + delay_s:
                    break
                for process in running:
                    process.send_signal(number)
                asked += 1
            time.sleep(POLL_S)

    def _results(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> Results:
        outcomes = [Outcome(rank) for rank in range(self._spec.world_size)]
        for rank, process in processes.items():
            told = self.directory / node_rank.OUTCOME.format(rank=rank)
            if told.exists():
                outcomes[rank] = outcome_of(json.loads(told.read_text()))
                told.unlink()
            else:
                # It died before it could write its outcome.
                outcomes[rank].report = death_report(process.pid, process.returncode)
        results = Results(outcomes, self._spec)
        self.trace = results.trace
        if any(outcome.report is not None for outcome in outcomes):
            error, _ = run_failed(outcomes, str(self.directory))
            for rank, report in error.facts["reports"].items():
                text = json.dumps(report, indent=1) + "\n"
                write_atomically(self.directory / f"error_rank{rank}.json", text.encode())
            raise error
        return results


def _command() -> str:
    """Return this command line with "{node}" in place of the node's number."""
    # For messages that name the command of a node that is missing.
    words = shlex.join(["simparallel", *sys.argv[1:]])
    return re.sub(r"(--node[-_]rank[= ])\d+", r"\g<1>{node}", words)


def _end(processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
    """Stop the processes that still run, as after Ctrl-C, with time to clean up before harder signals."""
    began = time.monotonic()
    for delay_s, number in ((0.0, signal.SIGINT), *LADDER[1:]):
        running = [process for process in processes.values() if process.poll() is None]
        while running and time.monotonic() < began + delay_s:
            time.sleep(POLL_S)
            running = [process for process in running if process.poll() is None]
        for process in running:
            process.send_signal(number)
    for process in processes.values():
        process.wait()
