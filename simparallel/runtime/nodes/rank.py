"""A process of one of several nodes: it finds the other ranks, runs its own, and writes its outcome to a file."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from dataclasses import dataclass

from simparallel.comm.fault_spec import VARIABLE, faults_of, parse
from simparallel.errors import SimParallelError
from simparallel.machine.ranktable import load
from simparallel.runtime.joined.identity import RankIdentity
from simparallel.runtime.joined.join import JoinedTransport
from simparallel.runtime.joined.rendezvous import meet, tell
from simparallel.runtime.ranks.rank import flush_output
from simparallel.runtime.ranks.script_rank import Config, fields_of, run_rank, write_outcome
from simparallel.runtime.ranks.shutdown import end_with_parent, run_program, write_out
from simparallel.runtime.reports import Outcome, failure_report
from simparallel.runtime.title import set_program


@dataclass
class NodeConfig(Config):
    """The configuration of a rank.

    Attributes:
        rank, node, port, job, given, command: see `RankIdentity`.
        rank_table: path of the table, or "".
        start_timeout_s: seconds to wait for the other nodes.
        launcher: pid of the launcher.
    """

    rank: int
    node: int
    port: int
    rank_table: str
    job: list[str]
    given: dict[str, str]
    command: str
    start_timeout_s: float
    launcher: int


def main(config_text: str) -> None:
    """Run one rank; the entry point of the process. Never returns."""
    config = NodeConfig(**json.loads(config_text))
    _die_with_the_launcher(config.launcher)
    set_program(config.rank, config.world_size, " ".join([config.script, *config.arguments]))
    faulthandler.enable(file=sys.stderr)
    try:
        outcome = _run(config)
    except (SimParallelError, KeyboardInterrupt) as error:
        # Raised before the rank began: the ranks did not meet.
        outcome = Outcome(config.rank, report=failure_report(error))
    write_outcome(config.directory, fields_of(outcome))
    # `run_program` has already waited for the script's threads: leave without waiting again.
    write_out()
    flush_output()
    os._exit(outcome.report["exit_code"] if outcome.report else 0)


def _die_with_the_launcher(pid: int) -> None:
    end_with_parent()
    # The launcher may have died before the kernel took note.
    if os.getppid() != pid:
        os._exit(1)


def _run(config: NodeConfig) -> Outcome:
    table = load(config.rank_table) if config.rank_table else None
    device_id, job = config.device_ids[config.rank] if config.device_ids else None, tuple(config.job)
    place = config.rank, config.world_size, config.node, device_id, config.port
    identity = RankIdentity(*place, table, job, config.given, command=config.command)
    faults = parse(os.environ.get(VARIABLE, ""), config.world_size)
    meeting = meet(identity, config.start_timeout_s, tell)
    transport = JoinedTransport(meeting, config.rank, config.timeout_s, faults=faults_of(faults, config.rank))
    outcome, _ = run_rank(config, transport, meeting.nodes, meeting.device_ids, run_program)
    return outcome


if __name__ == "__main__":
    main(sys.argv[1])
