"""The launcher of a script's ranks that have no host: what mpiexec and the command of a node have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from simparallel.clock.recording import check_record
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.machine.cluster import describe
from simparallel.machine.ranktable import RankTable
from simparallel.runtime.environment import places
from simparallel.runtime.launcher import settings as checked
from simparallel.runtime.launcher.launch import Results
from simparallel.runtime.log_folder import RANK_LINKS
from simparallel.runtime.logs import LogFiles
from simparallel.runtime.ranks.script_rank import OUTCOME, outcome_of
from simparallel.runtime.reports import Outcome, raise_failure
from simparallel.trace import Trace


class ScriptJob:
    """A script on ranks that are started by mpiexec, or by one command for each node.

    Args:
        world_size: number of ranks, on all nodes.
        node: number of the node whose ranks are started; None for all.
        device, devices_per_rank, dtype, nodes, rank_table, environment, log_links, log_files, timeout_s, record, array:
            see `Cluster`.
        log_dir: directory for the files of the run; those of one node go to `node0`, `node1`, … in it.

    Attributes:
        ranks: the ranks that are started.
        directory: directory of their files.
        trace: their events, once they have run.
        ranks_log_here: see `LogFiles`.

    Raises:
        ClusterError: no such device, or nodes that do not fit.
    """

    ranks_log_here = True

    def __init__(
        self,
        world_size: int,
        node: int | None = None,
        *,
        device: str | None = None,
        devices_per_rank: int | None = None,
        dtype: str | None = None,
        nodes: int = 1,
        rank_table: RankTable | None = None,
        environment: Mapping[str, str] | None = None,
        log_dir: Path,
        log_links: str = RANK_LINKS,
        log_files: Sequence[str] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
        record: str = "summary",
        array: str = "numpy",
    ) -> None:
        where = places(world_size, nodes, rank_table, environment)
        self._describe = partial(describe, world_size, device, devices_per_rank=devices_per_rank, dtype=dtype)
        self._spec = self._describe(nodes=where.nodes)
        self.trace = Trace([], self._spec)
        self._nodes = self._spec.nodes if node is None else (self._spec.nodes[node],)
        self.ranks = [rank for ranks in self._nodes for rank in ranks]
        self.directory = log_dir if node is None else log_dir / f"node{node}"
        self._links, self._files = log_links, log_files
        # The fields of `script_rank.Config` that are the same in every run.
        self._settings: dict[str, Any] = {
            "world_size": world_size, "device": device, "devices_per_rank": devices_per_rank, "dtype": dtype,
            "device_ids": where.device_ids, "environment": where.environment, "timeout_s": timeout_s,
            "record": check_record(record), "array": checked.array(array), "directory": str(self.directory),
        }  # fmt: skip

    def run(
        self, script: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False
    ) -> Results[None]:
        """Run the script; return when all ranks, on all nodes, have ended. For the arguments see `run_script`.

        Raises:
            InputError: the directory cannot be used, see `LogFiles`.
            RunFailedError: a rank failed; the root cause comes first.
            LaunchError: a process cannot be started.
            KeyboardInterrupt: after the ranks were stopped.
        """
        program = {"script": script, "arguments": arguments, "with_local_rank": with_local_rank, "is_module": is_module}
        with closing(LogFiles(self.directory, self._nodes, self._links, self._files, self.ranks_log_here)) as logs:
            for rank in self.ranks:
                # The file of an earlier run that was killed would be taken for this run's.
                self._outcome_file(rank).unlink(missing_ok=True)
            self._start({**program, **self._settings}, logs)
        outcomes, spec = [Outcome(rank) for rank in range(self._spec.world_size)], self._spec
        for rank in self.ranks:
            file = self._outcome_file(rank)
            if not file.exists():
                outcomes[rank].report = self._report_of_missing(rank)
                continue
            fields = json.loads(file.read_text())
            file.unlink()
            outcomes[rank] = outcome_of(fields)
            # Over MPI only the ranks know the machines.
            if fields["nodes"]:
                spec = self._describe(nodes=fields["nodes"])
        results: Results[None] = Results(outcomes, spec)
        self.trace = results.trace
        raise_failure(outcomes, self.directory)
        return results

    def _outcome_file(self, rank: int) -> Path:
        return self.directory / OUTCOME.format(rank=rank)

    def _start(self, config: dict[str, Any], logs: LogFiles) -> None:
        """Start the ranks, and wait for their end. `config`: the fields of `script_rank.Config`."""
        raise NotImplementedError

    def _report_of_missing(self, rank: int) -> dict[str, Any] | None:
        """Return the report on a rank that left no outcome; None if its end is unknown."""
        raise NotImplementedError
