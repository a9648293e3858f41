"""A process of `simparallel run --transport mpi`: it runs one rank of a script, writes its log and prints it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.comm.mpi import transport as mpi
from simparallel.comm.mpi.codec import decode, encode
from simparallel.comm.mpi.medium import MPI_MESSAGES
from simparallel.errors import LaunchError
from simparallel.runtime.log_folder import link_logs
from simparallel.runtime.logs import Tail
from simparallel.runtime.ranks.rank import flush_output
from simparallel.runtime.ranks.script import run_script
from simparallel.runtime.ranks.script_rank import Config, fields_of, run_rank, write_outcome
from simparallel.runtime.ranks.shutdown import end_with_parent
from simparallel.runtime.reports import write_report

SHOW_S = 0.05


@dataclass
class MpiConfig(Config):
    """The configuration of every rank.

    Attributes:
        nodes: the ranks of each node; empty for one node for each machine.
        log_links: see `LogFiles`.
    """

    nodes: list[list[int]]
    log_links: str


def main(config_text: str) -> None:
    """Run one rank; the entry point of each process."""
    config = MpiConfig(**json.loads(config_text))
    # If mpiexec, or its daemon on this machine, is killed, it cannot end its ranks.
    end_with_parent()
    everyone = mpi.world()
    if everyone.size != config.world_size:
        raise LaunchError(
            f"mpiexec should have started {config.world_size} ranks, but MPI knows of {everyone.size}: mpi4py uses "
            "another MPI library than mpiexec. Install both in one environment: pip install mpi4py mpich."
        )
    # By default a node is a real machine.
    nodes = config.nodes or mpi.nodes_of(everyone)
    show = _keep_log(config, everyone.rank, nodes)
    # A duplicate, so that our messages and those of a script that uses mpi4py itself cannot meet.
    transport = mpi.MpiTransport(everyone.Dup(), config.timeout_s)
    outcome, have_ended = run_rank(config, transport, nodes, config.device_ids, run_script, MPI_MESSAGES)
    flush_output()
    show()
    fields = fields_of(outcome, nodes)
    # A rank is missing, so gathering the outcomes would hang: leave this one's here, and end the job.
    if not have_ended:
        write_outcome(config.directory, fields)
        if outcome.report is not None:
            write_report(config.directory, outcome.rank, outcome.report)
        transport.abort(outcome.report["exit_code"] if outcome.report else 0)
    for one in _gathered(everyone, fields):
        write_outcome(config.directory, one)


def _keep_log(config: MpiConfig, rank: int, nodes: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Redirect this process's output to its log, from which a thread prints it; return a function that prints the rest.

    The lines have the rank before them, see `Tail`.
    """
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    log = os.open(directory / f"worker_{rank}.log", flags, 0o600)
    # The original output, kept for printing: mpiexec forwards it to the launcher's console.
    out = open(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.dup2(log, 1)
    os.dup2(log, 2)
    link_logs(directory, nodes, config.log_links, only=rank)
    tail, stop = Tail({rank: log}, out), threading.Event()

    def watch() -> None:
        while not stop.wait(SHOW_S):
            tail.show()

    thread = threading.Thread(target=watch, name="log", daemon=True)
    thread.start()

    def finish() -> None:
        stop.set()
        thread.join()
        tail.show(final=True)

    return finish


def _gathered(everyone: Any, value: Any) -> list[Any]:
    """Return the values of all ranks on rank 0, nothing on the others."""
    # Sizes first: the contributions differ in length.
    data = encode(value)
    sizes = np.empty(everyone.size, np.int64)
    everyone.Allgather(np.array([data.size], np.int64), sizes)
    whole = np.empty(int(sizes.sum()), np.uint8)
    everyone.Gatherv(data, [whole, sizes] if everyone.rank == 0 else None)
    if everyone.rank != 0:
        return []
    return [decode(part) for part in np.split(whole, np.cumsum(sizes)[:-1])]


if __name__ == "__main__":
    main(sys.argv[1])
