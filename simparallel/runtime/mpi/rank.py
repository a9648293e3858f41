"""A process of `simparallel run --transport mpi`: it runs one rank of a script, writes its log and prints it."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.base.files import write_atomically
from simparallel.comm.mpi import transport as mpi
from simparallel.comm.mpi.codec import decode, encode
from simparallel.comm.mpi.medium import MPI_MESSAGES
from simparallel.errors import LaunchError
from simparallel.hardware.cluster import describe
from simparallel.hardware.recording import Recorded, Totals
from simparallel.runtime.environment import variables
from simparallel.runtime.log_folder import link_logs
from simparallel.runtime.logs import Tail
from simparallel.runtime.ranks.rank import RunSettings, flush_output, play_rank
from simparallel.runtime.ranks.script import run_script
from simparallel.runtime.ranks.shutdown import end_with_parent
from simparallel.runtime.reports import Outcome, failure_report

OUTCOMES = ".outcomes.json"
SHOW_S = 0.05


@dataclass
class Config:
    """The configuration of every rank; as JSON it is the argument of the process.

    Attributes:
        script, arguments, with_local_rank, is_module: see `run_script`.
        world_size, device, devices_per_rank, timeout_s: see `Cluster`.
        nodes: the ranks of each node; empty for one node for each machine.
        device_ids, environment: see `environment.variables`.
        log_dir, log_links: see `LogFiles`.
        record, array: see `Cluster`.
    """

    script: str
    arguments: list[str]
    with_local_rank: bool
    is_module: bool
    world_size: int
    nodes: list[list[int]]
    device: str | None
    devices_per_rank: int | None
    device_ids: list[int]
    environment: dict[str, str]
    log_dir: str
    log_links: str
    timeout_s: float
    record: str
    array: str


def main(config_text: str) -> None:
    """Run one rank; the entry point of each process."""
    config = Config(**json.loads(config_text))
    # If mpiexec, or its daemon on this machine, is killed, it cannot end its ranks.
    end_with_parent()
    everyone = mpi.world()
    if everyone.size != config.world_size:
        raise LaunchError(
            f"mpiexec should have started {config.world_size} ranks, but MPI knows of {everyone.size}: mpi4py uses "
            "another MPI library than mpiexec. Install both in one environment: pip install mpi4py mpich."
        )
    # By default a node is a real machine.
    rank, nodes = everyone.rank, config.nodes or mpi.nodes_of(everyone)
    os.environ.update(variables(rank, nodes, config.device_ids, config.environment))
    show = _keep_log(config, rank, nodes)
    # A duplicate, so that our messages and those of a script that uses mpi4py itself cannot meet.
    transport = mpi.MpiTransport(everyone.Dup(), config.timeout_s)
    transport.start()
    call = partial(run_script, config.script, config.arguments, config.with_local_rank, config.is_module)
    spec = describe(config.world_size, config.device, nodes=nodes, devices_per_rank=config.devices_per_rank)
    settings = RunSettings(spec, record=config.record, array=config.array)
    outcome, _ = play_rank(call, transport, settings, medium=MPI_MESSAGES, is_process=True)
    # A script has no return value.
    outcome.value = None
    all_ended = transport.wait_for_the_others()
    if all_ended and outcome.report is None:
        error = transport.unreceived(outcome.kept_letters)
        outcome.report = None if error is None else failure_report(error)
    flush_output()
    show()
    code = outcome.report["exit_code"] if outcome.report else 0
    # A rank is missing, so gathering the outcomes would hang: leave a report, and end the job.
    if not all_ended:
        _write_report(config, outcome)
        transport.abort(code)
    told = _gathered(everyone, {"outcome": fields_of(outcome), "nodes": [list(node) for node in nodes]})
    if told is not None:
        content = {"outcomes": [one["outcome"] for one in told], "nodes": told[0]["nodes"]}
        write_atomically(Path(config.log_dir, OUTCOMES), json.dumps(content).encode())
        for one in told:
            _write_report(config, outcome_of(one["outcome"]))


def _keep_log(config: Config, rank: int, nodes: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Redirect this process's output to its log, from which a thread prints it; return a function that prints the rest.

    The lines have the rank before them, see `Tail`.
    """
    directory = Path(config.log_dir)
    directory.mkdir(parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    log = os.open(directory / f"worker_{rank}.log", flags, 0o600)
    # The original output, kept for printing: mpiexec forwards it to the launcher's console.
    out = open(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")  # noqa: SIM115
    os.dup2(log, 1)
    os.dup2(log, 2)
    link_logs(directory, nodes, config.log_links, only=rank)
    tail, stop = Tail([log], out, first_rank=rank), threading.Event()

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


def _write_report(config: Config, outcome: Outcome) -> None:
    if outcome.report is None:
        return
    report = {key: value for key, value in outcome.report.items() if key != "exception"}
    text = json.dumps({**report, "rank": outcome.rank}, indent=1) + "\n"
    write_atomically(Path(config.log_dir, f"error_rank{outcome.rank}.json"), text.encode())


def _gathered(everyone: Any, value: Any) -> list[Any] | None:
    """Return the values of all ranks on rank 0, None on the others."""
    # Sizes first: the contributions differ in length.
    data = encode(value)
    sizes = np.empty(everyone.size, np.int64)
    everyone.Allgather(np.array([data.size], np.int64), sizes)
    whole = np.empty(int(sizes.sum()), np.uint8)
    everyone.Gatherv(data, [whole, sizes] if everyone.rank == 0 else None)
    if everyone.rank != 0:
        return None
    return [decode(part) for part in np.split(whole, np.cumsum(sizes)[:-1])]


def fields_of(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain data for JSON."""
    report = outcome.report and {key: value for key, value in outcome.report.items() if key != "exception"}
    totals = outcome.recorded.totals
    plain = None if totals is None else {device: tuple(numbers) for device, numbers in totals.items()}
    return {
        "rank": outcome.rank, "report": report, "recorded": [outcome.recorded.rows, plain, *outcome.recorded[2:]],
        "metrics": [list(note) for note in outcome.metrics], "memory": outcome.memory,
    }  # fmt: skip


def outcome_of(fields: Mapping[str, Any]) -> Outcome:
    """Return the outcome that `fields_of` was given, without its value and its exception."""
    report = fields["report"] and {**fields["report"], "exception": None}
    rows, totals, *rest = fields["recorded"]
    # JSON turns tuples into lists, and numbers as keys into texts.
    rows = [tuple(tuple(value) if isinstance(value, list) else value for value in row) for row in rows]
    totals = totals and {int(device): Totals(*numbers) for device, numbers in totals.items()}
    recorded = Recorded(rows, totals, *rest)
    metrics = [(step, name, value) for step, name, value in fields["metrics"]]
    return Outcome(fields["rank"], None, report, recorded, metrics, fields["memory"])


if __name__ == "__main__":
    main(sys.argv[1])
