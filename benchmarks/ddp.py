"""`python -m benchmarks ddp`: a data-parallel training step on 1 … n ranks, compared with torch's over gloo.

Every rank computes in one BLAS thread. All contenders are warm and take turns; a turn trains a new model for a
third of a second, and its time is the slowest rank's. Three more contenders are simparallel itself: on one rank, as
a bound for the cores; without recording, for the cost of the trace; and as many independent ranks without any
communication, for the slowdown that they cause each other. So there are two efficiencies: relative to the time that
one rank's time predicts for the cores, and relative to the measured time of as many independent ranks.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.contest import Result, aligned, measure, tell_bound
from benchmarks.environments import PEERS
from benchmarks.errors import BenchError
from benchmarks.job import Job, started
from benchmarks.peers.exchange import images, timed
from benchmarks.step import LEARNING_RATE, TASKS as ALL_TASKS, Task, chosen_tasks, our_step
from simparallel.base import blas
from simparallel.base.units import format_seconds
from simparallel.errors import InputError, RunFailedError

OURS, UNRECORDED, ONE_RANK, APART, TORCH = "simparallel", "not recorded", "one rank", "apart", "torch DDP"
TURN_S = 0.3
PEER = replace(PEERS["torch"], label=TORCH, script="gloo_ddp.py")


# The models that are small enough to show the cost of communication.
TASKS = ALL_TASKS[:3]


@dataclass
class Row:
    """A task on some ranks, and each contender's time per step."""

    task: Task
    ranks: int
    cores: int
    result: Result

    @property
    def speedup(self) -> float | None:
        """torch's time divided by ours."""
        return self.result.ratio(TORCH, OURS) if TORCH in self.result.times_s else None

    @property
    def efficiency(self) -> float:
        """The ideal time divided by ours: n ranks on c cores ideally take max(1, n / c) times one rank's time."""
        return self.result.ratio(ONE_RANK, OURS) * max(1.0, self.ranks / self.cores)

    @property
    def communication(self) -> float:
        """Our time divided by the time of as many ranks without communication."""
        return self.result.ratio(OURS, APART)

    @property
    def recording(self) -> float:
        """Our time divided by the time without recording."""
        return self.result.ratio(OURS, UNRECORDED)

    def document(self) -> dict[str, Any]:
        """Return the row as plain data."""
        return {
            "model": self.task.title,
            "batch_size": self.task.batch_size,
            "ranks": self.ranks,
            "median_s": {label: self.result.median_s(label) for label in self.result.times_s},
            "speedup_over_torch": self.speedup,
            "parallel_efficiency": self.efficiency,
            "ratio_to_ranks_apart": self.communication,
            "recording_ratio": self.recording,
            "times_s": self.result.times_s,
        }


def main(
    *,
    ranks: Sequence[int] = (1, 2, 4, 8),
    names: Sequence[str] | None = None,
    rounds: int = 7,
    turn_s: float = TURN_S,
    as_json: bool = False,
) -> list[Row]:
    """Measure, print a table or JSON, return the rows.

    Args:
        ranks: numbers of ranks.
        names: only tasks with one of these in the title.
        rounds: turns of each contender.
        turn_s: approximate length of a turn [s].
        as_json: print JSON, and everything else to stderr.

    Raises:
        InputError: no such task, or a number out of range.
        BenchError: our own ranks failed, or their parameters differ. (A failure of torch is reported and left out.)
    """
    tasks = chosen_tasks(names, TASKS)
    if not ranks or min(*ranks, rounds) < 1:
        raise InputError(f"ranks {list(ranks)}, rounds {rounds}: both must be at least 1.")
    output = sys.stderr if as_json else sys.stdout
    PEER.tell_if_missing(partial(print, file=output))
    tell_bound(output)
    cores = len(os.sched_getaffinity(0))
    rows: list[Row] = []
    for number in ranks:
        with _contenders(number, lambda text: print(text, file=output, flush=True)) as contenders:
            for task in tasks:
                turns = {label: partial(turn, task) for label, turn in contenders.items()}
                row = Row(task, number, cores, measure(task.title, turns, rounds=rounds, turn_s=turn_s))
                print(table([row]).splitlines()[1] if rows else table([row]), file=output, flush=True)
                rows.append(row)
    if as_json:
        machine = {"cores": cores, "architecture": platform.machine(), "numpy": np.__version__, "blas": blas.core()}
        print(json.dumps({"machine": machine, "rows": [row.document() for row in rows]}, indent=1))
    return rows


Turn = Callable[[Task, int], float]  # (task, steps) -> seconds


@contextmanager
def _contenders(ranks: int, tell: Callable[[str], object]) -> Iterator[dict[str, Turn]]:
    """Start the contenders, yield label -> turn, and end them all afterwards."""
    with ExitStack() as stack:
        clusters = [
            # One BLAS thread for each rank, as for torch: ranks are the only parallelism that is compared.
            stack.enter_context(sp.Cluster(number, blas_threads=1, record=record, echo=False))
            for number, record in ((ranks, "summary"), (ranks, "off"), (1, "summary"))
        ]
        contenders = {
            OURS: _ours(clusters[0]),
            UNRECORDED: _ours(clusters[1]),
            ONE_RANK: _ours(clusters[2]),
            APART: _ours(clusters[0], apart=True),
        }
        if job := started(PEER, ranks, stack, tell):
            contenders[TORCH] = _theirs(job)
        yield contenders


def _ours(cluster: sp.Cluster, apart: bool = False) -> Turn:
    def turn(task: Task, count: int) -> float:
        try:
            results = cluster.run(our_turn, task, count, apart)
        except RunFailedError as error:
            raise BenchError(f"{OURS}, {task.title}: {error}", peer=OURS) from error
        # NaN differs from 0, too.
        if any(difference != 0 for _, difference in results):
            raise BenchError(f"{OURS}, {task.title}: the ranks' parameters differ, or are not finite.", peer=OURS)
        return max(seconds for seconds, _ in results)

    return turn


def our_turn(task: Task, count: int, apart: bool) -> tuple[float, float]:
    """Run a turn on one of our ranks: (seconds, largest difference between ranks, NaN if not finite)."""
    # A new model for every turn, so that all turns begin with the same weights.
    net = task.ours() if apart else sp.parallel.DistributedDataParallel(task.ours())
    # Other data on each rank, so that equal parameters at the end prove the reduction.
    step = our_step(net, images(task.batch_size, *task.shape, seed=sp.get_rank()))
    seconds = timed(step, sp.barrier, count)
    if not all(np.isfinite(parameter.data).all() for parameter in net.parameters()):
        return seconds, math.nan
    return seconds, 0.0 if apart else sp.parallel.max_difference_between_ranks(net)


def _theirs(job: Job) -> Turn:
    def turn(task: Task, count: int) -> float:
        command = {
            "model": task.torch_model, "batch_size": task.batch_size, "shape": task.shape,
            "lr": LEARNING_RATE, "count": count,
        }  # fmt: skip
        return job.ask(task.title, command)

    return turn


def table(rows: Sequence[Row]) -> str:
    """Format a line per row: times of a step, speedup over torch, two efficiencies, and the cost of recording."""
    labels = (OURS, TORCH, ONE_RANK, APART)
    lines = [["", "ranks", *labels, "torch / simparallel", "efficiency", "apart / simparallel", "recording costs"]]
    for row in rows:
        times = row.result.times_s
        lines.append([
            row.task.title, str(row.ranks),
            *(format_seconds(row.result.median_s(label)) if label in times else "-" for label in labels),
            "-" if row.speedup is None else f"{row.speedup:.2f}", f"{row.efficiency:.2f}",
            f"{1 / row.communication:.2f}",
            f"{100 * (row.recording - 1):+.1f} %",
        ])  # fmt: skip
    return aligned(lines, _WIDEST)


# Each line is printed alone, so its columns need fixed widths.
_WIDEST = [max((task.title for task in TASKS), key=len), "", *["99.9 ms"] * 4, *[""] * 4]
