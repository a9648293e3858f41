"""`python -m benchmarks zero`: a training step with sharded states on 2 and 4 ranks, beside torch's over gloo.

    ZeRO-3             a group for each Linear                 torch's FSDP2
    ZeRO-1             slices of all parameters as one group   torch's ZeroRedundancyOptimizer
    ZeRO-1 by tensors  our ZeroRedundancyOptimizer             the same

Every rank computes in one BLAS thread, with Adam. All contenders are warm and take turns; a turn trains a new model,
and its time is the slowest rank's. DistributedDataParallel is beside them: what the memory that is saved costs.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import simparallel as sp
from benchmarks.contest import Result, measure, table, tell_bound
from benchmarks.environments import PEERS
from benchmarks.errors import BenchError
from benchmarks.job import Job, started
from benchmarks.peers.exchange import images, timed
from benchmarks.step import LEARNING_RATE, mlp
from simparallel.errors import InputError, RunFailedError

OURS, DDP, TORCH, TURN_S = "simparallel", "DDP", "torch", 0.3
BATCH_SIZE, WIDTH = 32, 784
PEER = replace(PEERS["torch"], label=TORCH, script="gloo_zero.py")


def zero_3(net: sp.nn.Sequential) -> tuple[sp.nn.Module, sp.optim.Optimizer]:
    """Return the MLP with a group for each layer, and its optimizer."""
    for layer in net:
        if isinstance(layer, sp.nn.Linear):
            sp.parallel.fully_shard(layer)
    sp.parallel.fully_shard(net)
    return net, sp.optim.Adam(net.parameters(), LEARNING_RATE)


def zero_1(net: sp.nn.Module) -> tuple[sp.nn.Module, sp.optim.Optimizer]:
    """Return the MLP with one group of whole parameters and sharded states, and its optimizer."""
    net = sp.parallel.fully_shard(net, parameter="R", gradient="P", state="S")
    return net, sp.optim.Adam(net.parameters(), LEARNING_RATE)


def zero_1_by_tensors(net: sp.nn.Module) -> tuple[sp.nn.Module, sp.optim.Optimizer]:
    """Return the MLP with an optimizer that keeps the states of whole parameters on one rank each."""
    net = sp.parallel.DistributedDataParallel(net)
    return net, sp.parallel.ZeroRedundancyOptimizer(net.parameters(), sp.optim.Adam, lr=LEARNING_RATE)


def ddp(net: sp.nn.Module) -> tuple[sp.nn.Module, sp.optim.Optimizer]:
    """Return the MLP with replicated states, and its optimizer."""
    net = sp.parallel.DistributedDataParallel(net)
    return net, sp.optim.Adam(net.parameters(), LEARNING_RATE)


METHODS: dict[str, Callable[[Any], tuple[sp.nn.Module, sp.optim.Optimizer]]] = {
    "ZeRO-3": zero_3,
    "ZeRO-1": zero_1,
    "ZeRO-1 by tensors": zero_1_by_tensors,
}


def main(*, ranks: Sequence[int] = (2, 4), rounds: int = 9, as_json: bool = False) -> list[Result]:
    """Measure, print a table or JSON, return a result for each number of ranks and method.

    Args:
        ranks: numbers of ranks.
        rounds: turns of each contender.
        as_json: print JSON, and everything else to stderr.

    Raises:
        InputError: a number out of range.
        BenchError: our own ranks failed. (A failure of torch is reported and left out.)
    """
    if not ranks or min(*ranks, rounds) < 1:
        raise InputError(f"ranks {list(ranks)}, rounds {rounds}: both must be at least 1.")
    output = sys.stderr if as_json else sys.stdout
    PEER.tell_if_missing(partial(print, file=output))
    tell_bound(output)
    results = []
    for number in ranks:
        with _contenders(number, lambda text: print(text, file=output, flush=True)) as contenders:
            for name in METHODS:
                turns = {label: partial(turn, name) for label, turn in contenders.items()}
                results.append(measure(f"{name}, {number} ranks", turns, rounds=rounds, turn_s=TURN_S))
    if as_json:
        print(json.dumps({"rows": [{"title": each.title, "times_s": each.times_s} for each in results]}, indent=1))
    else:
        print(table(results, OURS))
    return results


Turn = Callable[[str, int], float]  # (method, steps) -> seconds


@contextmanager
def _contenders(ranks: int, tell: Callable[[str], object]) -> Iterator[dict[str, Turn]]:
    with ExitStack() as stack:
        cluster = stack.enter_context(sp.Cluster(ranks, blas_threads=1, record="summary", echo=False))
        contenders: dict[str, Turn] = {OURS: partial(_ours, cluster, False), DDP: partial(_ours, cluster, True)}
        if job := started(PEER, ranks, stack, tell):
            contenders[TORCH] = partial(_theirs, job)
        yield contenders


def _ours(cluster: sp.Cluster, replicated: bool, name: str, count: int) -> float:
    try:
        return max(cluster.run(our_turn, name, replicated, count))
    except RunFailedError as error:
        raise BenchError(f"{OURS}, {name}: {error}", peer=OURS) from error


def our_turn(name: str, replicated: bool, count: int) -> float:
    """Train a new model on one of our ranks; return the seconds of `count` steps."""
    sp.set_seed(0)
    net, optimizer = (ddp if replicated else METHODS[name])(mlp())
    x, labels = map(sp.Tensor, images(BATCH_SIZE, WIDTH, seed=sp.get_rank()))
    loss = sp.Tensor(0.0)

    def step() -> None:
        nonlocal loss
        loss = sp.functions.cross_entropy(net(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    seconds = timed(step, sp.barrier, count)
    if not math.isfinite(loss.item()):
        raise BenchError(f"{OURS}: the loss is not finite.", peer=OURS)
    return seconds


def _theirs(job: Job, name: str, count: int) -> float:
    command: dict[str, Any] = {
        "what": name, "model": "mlp", "batch_size": BATCH_SIZE, "shape": [WIDTH], "lr": LEARNING_RATE, "count": count,
    }  # fmt: skip
    return job.ask(name, command)
