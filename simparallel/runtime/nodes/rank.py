"""A process of one of several nodes: it finds the other ranks, runs its own, and writes its outcome to a file."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from simparallel.base.files import write_atomically
from simparallel.comm.faults.spec import VARIABLE, faults_of, parse
from simparallel.errors import CommError, SimParallelError
from simparallel.hardware.cluster import describe
from simparallel.hardware.ranktable import load
from simparallel.runtime.environment import variables
from simparallel.runtime.joined.identity import Identity
from simparallel.runtime.joined.join import JoinedTransport
from simparallel.runtime.joined.rendezvous import meet, tell
from simparallel.runtime.mpi.rank import fields_of
from simparallel.runtime.ranks.rank import RunSettings, flush_output, play_rank
from simparallel.runtime.ranks.shutdown import end_with_parent, run_program, write_out
from simparallel.runtime.reports import Outcome, failure_report
from simparallel.runtime.title import set_program

OUTCOME = ".outcome_{rank}.json"


@dataclass
class Config:
    """The configuration of a rank; as JSON it is the argument of its process.

    Attributes:
        script, arguments, with_local_rank, is_module: see `run_script`.
        rank, world_size, node, device_id, port, job, given, command: see `Identity`.
        rank_table: path of the table, or "".
        environment: see `environment.variables`.
        device, devices_per_rank, timeout_s, record, array: see `Cluster`.
        start_timeout_s: seconds to wait for the other nodes.
        directory: directory of this node's files.
        launcher: pid of the launcher.
    """

    script: str
    arguments: list[str]
    with_local_rank: bool
    is_module: bool
    rank: int
    world_size: int
    node: int
    device_id: int | None
    port: int
    rank_table: str
    job: list[str]
    given: dict[str, str]
    command: str
    environment: dict[str, str]
    device: str
    devices_per_rank: int | None
    timeout_s: float
    record: str
    array: str
    start_timeout_s: float
    directory: str
    launcher: int


def main(config_text: str) -> None:
    """Run one rank; the entry point of the process. Never returns."""
    config = Config(**json.loads(config_text))
    _die_with_the_launcher(config.launcher)
    set_program(config.rank, config.world_size, " ".join([config.script, *config.arguments]))
    faulthandler.enable(file=sys.stderr)
    try:
        outcome = _play(config)
    except (SimParallelError, KeyboardInterrupt) as error:
        # Raised before the rank began: the ranks did not meet.
        outcome = Outcome(config.rank, report=failure_report(error))
    fields = json.dumps(fields_of(outcome))
    write_atomically(Path(config.directory, OUTCOME.format(rank=config.rank)), fields.encode())
    # `run_program` has already waited for the script's threads: leave without waiting again.
    write_out()
    flush_output()
    os._exit(outcome.report["exit_code"] if outcome.report else 0)


def _die_with_the_launcher(pid: int) -> None:
    end_with_parent()
    # The launcher may have died before the kernel took note.
    if os.getppid() != pid:
        os._exit(1)


def _play(config: Config) -> Outcome:
    table = load(config.rank_table) if config.rank_table else None
    identity = Identity(
        config.rank,
        config.world_size,
        config.node,
        config.device_id,
        config.port,
        table,
        tuple(config.job),
        config.given,
        command=config.command,
    )
    faults = parse(os.environ.get(VARIABLE, ""), config.world_size)
    meeting = meet(identity, config.start_timeout_s, tell)
    os.environ.update(variables(config.rank, meeting.nodes, meeting.device_ids, config.environment))
    transport = JoinedTransport(meeting, config.rank, config.timeout_s, faults=faults_of(faults, config.rank))
    transport.start()
    call = partial(run_program, config.script, config.arguments, config.with_local_rank, config.is_module)
    spec = describe(config.world_size, config.device, nodes=meeting.nodes, devices_per_rank=config.devices_per_rank)
    settings = RunSettings(spec, record=config.record, array=config.array)
    outcome, _ = play_rank(call, transport, settings, is_process=True)
    # A script has no return value.
    outcome.value = None
    if outcome.report is None:
        error: BaseException | None
        try:
            transport.wait_for_the_others()
            error = transport.unreceived(outcome.kept_letters)
        except (CommError, KeyboardInterrupt) as raised:
            error = raised
        outcome.report = None if error is None else failure_report(error)
    return outcome


if __name__ == "__main__":
    main(sys.argv[1])
