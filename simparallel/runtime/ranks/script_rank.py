"""A process that runs one rank of a script without a host: it waits for the other ranks, and writes how it ended.

Its launcher, mpiexec or the command of a node, starts it with a `Config`, and reads its outcome from a file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from simparallel.base.files import write_atomically
from simparallel.clock.breakdown import Totals
from simparallel.clock.recording import Recorded
from simparallel.comm.group import Medium
from simparallel.comm.shm.medium import SHARED_MEMORY
from simparallel.errors import CommError
from simparallel.machine.cluster import describe
from simparallel.runtime.environment import variables
from simparallel.runtime.ranks.rank import RunSettings, play_rank
from simparallel.runtime.reports import Outcome, check_received, failure_report, plain_report

OUTCOME = ".outcome_{rank}.json"


@dataclass
class Config:
    """The configuration of a rank; as JSON it is the argument of its process.

    Attributes:
        script, arguments, with_local_rank, is_module: see `run_script`.
        world_size, device, devices_per_rank, dtype, timeout_s, record, array: see `Cluster`.
        device_ids, environment: see `environment.variables`.
        directory: of the run's files on the machine, or the node, of the rank.
    """

    script: str
    arguments: list[str]
    with_local_rank: bool
    is_module: bool
    world_size: int
    device: str | None
    devices_per_rank: int | None
    dtype: str | None
    device_ids: list[int]
    environment: dict[str, str]
    timeout_s: float
    record: str
    array: str
    directory: str


def run_rank(
    config: Config,
    transport: Any,
    nodes: Sequence[Sequence[int]],
    device_ids: Sequence[int],
    program: Callable[..., None],
    medium: Medium = SHARED_MEMORY,
) -> tuple[Outcome, bool]:
    """Run the script as a rank, and wait for the end of the others.

    Args:
        config: the configuration.
        transport: of the rank; with the methods of `leaving.EndingTransport`.
        nodes: the ranks of each node.
        device_ids: see `environment.variables`.
        program: `run_script`, or `run_program`.
        medium: how the payloads of collectives travel.

    Returns:
        The outcome, without a value; and whether all ranks have ended.
    """
    os.environ.update(variables(transport.rank, nodes, device_ids, config.environment))
    transport.start()
    call = partial(program, config.script, config.arguments, config.with_local_rank, config.is_module)
    spec = describe(
        config.world_size, config.device, nodes=nodes, devices_per_rank=config.devices_per_rank, dtype=config.dtype
    )
    settings = RunSettings(spec, config.record, config.timeout_s, array=config.array)
    outcome, _ = play_rank(call, transport, settings, medium=medium, is_process=True)
    # A script has no return value.
    outcome.value, have_ended = None, False
    try:
        have_ended = transport.wait_for_the_others()
        if have_ended:
            check_received(transport.segment, transport.rank, outcome.kept_messages)
    except (CommError, KeyboardInterrupt) as error:
        outcome.report = outcome.report or failure_report(error)
    return outcome, have_ended


def write_outcome(directory: str, fields: Mapping[str, Any]) -> None:
    """Write the fields of an outcome to the file that the launcher reads."""
    write_atomically(Path(directory, OUTCOME.format(rank=fields["rank"])), json.dumps(fields).encode())


def fields_of(outcome: Outcome, nodes: Sequence[Sequence[int]] = ()) -> dict[str, Any]:
    """Return an outcome, and the ranks of each node if they are known, as plain data for JSON."""
    report = outcome.report and plain_report(outcome.report)
    totals = outcome.recorded.totals
    plain = None if totals is None else {device: tuple(numbers) for device, numbers in totals.items()}
    return {
        "rank": outcome.rank, "report": report, "recorded": [outcome.recorded.rows, plain, *outcome.recorded[2:]],
        "metrics": [list(note) for note in outcome.metrics], "memory": outcome.memory,
        "nodes": [list(node) for node in nodes],
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
