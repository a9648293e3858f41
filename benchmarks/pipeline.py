"""`python -m benchmarks pipeline`: a training step of an MLP in four stages, beside torch's pipelines over gloo.

Four ranks with one stage and one BLAS thread each. Each schedule and torch's of the same name are warm and take turns.
A second table has the simulated bubbles of all schedules, beside their closed forms.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

import simparallel as sp
from benchmarks.contest import Result, aligned, measure, table, tell_bound
from benchmarks.environments import PEERS
from benchmarks.errors import BenchError
from benchmarks.job import Job, started
from benchmarks.peers.exchange import images, timed
from simparallel.errors import InputError, RunFailedError
from simparallel.parallel.pipeline.rules import RULES

RANKS, MICROBATCHES, WIDTH, SAMPLES = 4, 8, 256, 64
SCHEDULES = "gpipe", "1f1b"
OURS, TORCH = "simparallel", "torch pipelining"
TURN_S, LEARNING_RATE = 0.3, 1e-3
PEER = replace(PEERS["torch"], label=TORCH, script="gloo_pipeline.py")


def main(*, rounds: int = 7, as_json: bool = False) -> list[Result]:
    """Measure, print tables or JSON, return a result for each schedule.

    Raises:
        InputError: no rounds.
        BenchError: our own ranks failed. (A failure of torch is reported and left out.)
    """
    if rounds < 1:
        raise InputError(f"rounds {rounds}: must be at least 1.")
    output = sys.stderr if as_json else sys.stdout
    PEER.tell_if_missing(partial(print, file=output))
    tell_bound(output)
    results = []
    with _contenders(lambda text: print(text, file=output, flush=True)) as contenders:
        for name in SCHEDULES:
            turns = {label: partial(turn, name) for label, turn in contenders.items()}
            results.append(measure(name, turns, rounds=rounds, turn_s=TURN_S))
    if as_json:
        rows = [{"schedule": each.title, "times_s": each.times_s} for each in results]
        print(
            json.dumps({"rows": rows, "bubbles": [dict(zip(HEADS, row, strict=True)) for row in bubbles()]}, indent=1)
        )
    else:
        print(table(results, OURS))
        print()
        print(aligned([list(HEADS), *bubbles()]))
    return results


Turn = Callable[[str, int], float]  # (schedule, steps) -> seconds


@contextmanager
def _contenders(tell: Callable[[str], object]) -> Iterator[dict[str, Turn]]:
    with ExitStack() as stack:
        cluster = stack.enter_context(sp.Cluster(RANKS, blas_threads=1, record="summary", echo=False))
        contenders: dict[str, Turn] = {OURS: partial(_ours, cluster)}
        if job := started(PEER, RANKS, stack, tell):
            contenders[TORCH] = partial(_theirs, job)
        yield contenders


def _ours(cluster: sp.Cluster, schedule: str, count: int) -> float:
    try:
        return max(cluster.run(our_turn, schedule, count))
    except RunFailedError as error:
        raise BenchError(f"{OURS}, {schedule}: {error}", peer=OURS) from error


def our_turn(schedule: str, count: int) -> float:
    """Train a new model on one of our ranks; return the seconds of `count` steps."""
    sp.set_seed(0)
    layers = [sp.nn.Sequential(sp.nn.Linear(WIDTH, WIDTH), sp.nn.ReLU()) for _ in range(RANKS)]
    stages = [[str(number)] for number in range(RANKS)]
    loss_fn = sp.nn.CrossEntropyLoss()
    pipeline = sp.parallel.Pipeline(sp.nn.Sequential(*layers), loss_fn, MICROBATCHES, schedule, stages)
    optimizer = sp.optim.SGD(pipeline.parameters(), LEARNING_RATE)
    x, labels = images(SAMPLES, WIDTH, seed=0)

    def step() -> None:
        optimizer.zero_grad()
        loss = pipeline.step(x, labels)
        if not np.isfinite(loss.item()):
            raise BenchError(f"{OURS}: the loss is not finite.", peer=OURS)
        optimizer.step()

    return timed(step, sp.barrier, count)


def _theirs(job: Job, schedule: str, count: int) -> float:
    command: dict[str, Any] = {
        "schedule": schedule, "microbatches": MICROBATCHES, "width": WIDTH, "samples": SAMPLES, "lr": LEARNING_RATE,
        "count": count,
    }  # fmt: skip
    return job.ask(schedule, command)


HEADS = "schedule", "bubble", "closed form", "span bubble", "live", "messages"


def bubbles() -> list[list[str]]:
    """Return a row for each schedule: bubble, closed form, span bubble, live activations, messages."""
    rows = []
    for name, rule in RULES.items():
        schedule = sp.pipeline_schedule(name, RANKS, MICROBATCHES)
        cost = schedule.cost()
        form = "-" if rule.bubble is None else str(rule.bubble(RANKS, MICROBATCHES))
        live = f"{max(cost.peak_live_at_weight_gradient) / schedule.chunks:g}"
        rows.append([name, str(cost.bubble), form, str(cost.span_bubble), live, str(cost.messages)])
    return rows
