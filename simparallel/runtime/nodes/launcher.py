"""One of several nodes, each started by its own command: `simparallel run --nnodes 2 --node_rank 0`, then 1.

The commands of all nodes run on this machine, in any order. Each starts one process per rank of its node; the
processes of all nodes find each other (`rendezvous`). A command reports on its own ranks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from simparallel.base.system import python_command
from simparallel.errors import LaunchError
from simparallel.machine.ranktable import RankTable
from simparallel.runtime.environment import MASTER_ADDR, MASTER_PORT
from simparallel.runtime.joined.identity import JOB_VARIABLES, check_address, check_servers
from simparallel.runtime.joined.sockets import check_system
from simparallel.runtime.launcher.run import ESCALATION, POLL_S
from simparallel.runtime.launcher.script_job import ScriptJob
from simparallel.runtime.logs import LogFiles, Tail, console
from simparallel.runtime.nodes import rank as node_rank
from simparallel.runtime.reports import death_report


class NodeJob(ScriptJob):
    """The ranks of one node of a script's run.

    Args:
        world_size: number of ranks, on all nodes.
        node: number of this node.
        echo: see `Cluster`.
        start_timeout_s: seconds to wait for the other nodes.
        settings: see `ScriptJob`.

    Raises:
        ClusterError: no such device, or nodes that do not fit.
        LaunchError: MASTER_ADDR or a server of the rank table is another machine, or this is not Linux.
    """

    def __init__(
        self,
        world_size: int,
        node: int,
        *,
        rank_table: RankTable | None = None,
        echo: bool | Collection[int] = True,
        start_timeout_s: float,
        **settings: Any,
    ) -> None:
        check_system()
        super().__init__(world_size, node, rank_table=rank_table, **settings)
        environment = self._settings["environment"]
        check_address(environment.get("MASTER_ADDR", MASTER_ADDR))
        if rank_table is not None:
            check_servers(rank_table)
        self._echo = echo
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._settings |= {
            "node": node, "port": int(environment.get("MASTER_PORT", MASTER_PORT)),
            "rank_table": os.path.abspath(rank_table.path) if rank_table else "",
            "job": [os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)],
            "given": {"LOCAL_WORLD_SIZE": str(len(self.ranks))}, "command": _command(),
            "start_timeout_s": start_timeout_s, "launcher": os.getpid(),
        }  # fmt: skip

    def _start(self, config: dict[str, Any], logs: LogFiles) -> None:
        tail = Tail(logs.rank_fds, console(), echo=self._echo)
        processes = self._processes = {}
        try:
            for rank, fd in logs.rank_fds.items():
                processes[rank] = _start_rank(node_rank.NodeConfig(rank=rank, **config), fd)
            pids = ", ".join(f"rank {rank} (pid {process.pid})" for rank, process in processes.items())
            os.write(logs.host_fd, f"started {pids}\n".encode())
            _wait(processes, tail)
        except BaseException:
            # As after Ctrl-C, with time to clean up before harder signals.
            _wait(processes, tail, failed_at=time.monotonic() - ESCALATION[0][0])
            raise
        finally:
            tail.show(final=True)

    def _report_of_missing(self, rank: int) -> dict[str, Any]:
        # It died before it could write its outcome.
        process = self._processes[rank]
        return death_report(process.pid, process.returncode)


def _start_rank(config: node_rank.NodeConfig, log_fd: int) -> subprocess.Popen[bytes]:
    try:
        # In a process group of its own: Ctrl-C reaches this process alone, which then stops the ranks.
        return subprocess.Popen(
            python_command(node_rank.__name__, json.dumps(asdict(config))),
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            process_group=0,
            stdin=subprocess.DEVNULL,
            stdout=log_fd,
            stderr=log_fd,
        )
    except OSError as error:
        raise LaunchError(f"rank {config.rank} cannot be started: {error}.") from error


def _wait(processes: Mapping[int, subprocess.Popen[bytes]], tail: Tail, failed_at: float | None = None) -> None:
    """Wait until all have ended; after the first failure signal the processes that do not end by themselves."""
    asked = 0
    while running := [process for process in processes.values() if process.poll() is None]:
        tail.show()
        # As in `Run`: the others stop in their next collective by themselves, but may have none.
        if failed_at is None and any(process.returncode for process in processes.values()):
            failed_at = time.monotonic()
        while failed_at is not None and asked < len(ESCALATION):
            delay_s, number = ESCALATION[asked]
            if time.monotonic() < failed_at + delay_s:
                break
            for process in running:
                process.send_signal(number)
            asked += 1
        time.sleep(POLL_S)


def _command() -> str:
    """Return this command line with "{node}" in place of the node's number."""
    # For messages that name the command of a node that is missing.
    words = shlex.join(["simparallel", *sys.argv[1:]])
    return re.sub(r"(--node[-_]rank[= ])\d+", r"\g<1>{node}", words)
