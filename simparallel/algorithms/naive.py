"""One rank does all the work: the straightforward algorithms.

The root exchanges with one rank after the other, so its link carries everything: p ranks take p - 1 times as long as
two. `all_to_all` has no root; there, every rank has another partner in each step.

    α latency of a message · β seconds a byte · n bytes of the whole vector · p ranks
    broadcast, reduce     (p-1) (α + n β)
    all_reduce            2 (p-1) (α + n β)
    gather, scatter       (p-1) (α + n/p β)
    all_to_all            (p-1) (α + n/p β)     pairwise; n: one rank's vector

Arithmetic (γ seconds a byte: p - 1 times n γ at the root) comes on top. Source: Chan, Heimlich,
Purkayastha, van de Geijn 2007, "Collective communication: theory, practice, and experience";
pairwise exchange: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication
operations in MPICH".
"""

from __future__ import annotations

import numpy as np

from simparallel.algorithms.algorithm import (
    CollectiveAlgorithm,
    Price,
    one_by_one_gather,
    one_by_one_scatter,
    one_round,
)
from simparallel.algorithms.point_to_point import PointToPoint, Steps
from simparallel.algorithms.reduction import Combine

NAIVE = CollectiveAlgorithm("naive", number=1)


def _price_of_broadcast(p: int, number: int) -> Price:
    # The root sends the whole vector to one rank after the other.
    return Price(p - 1, p - 1, 0.0 if number else p - 1)


def _price_of_reduce(p: int, number: int) -> Price:
    return Price(p - 1, p - 1, 1.0 if number else 0.0)


@NAIVE.collective(_price_of_broadcast)
def broadcast(p2p: PointToPoint, x: np.ndarray, root: int) -> Steps:
    """Send x from the root to one rank after the other.

    step 0:  root -> a      step 1:  root -> b      step 2:  root -> c

    p - 1 steps; the root sends p - 1 messages of n bytes.
    """
    for _, other in zip(p2p.steps(p2p.size - 1), _others(p2p, root), strict=True):
        if p2p.rank == root:
            yield from p2p.send(x, other)
        elif p2p.rank == other:
            yield from p2p.recv(x, root)


@NAIVE.collective(_price_of_reduce)
def reduce(p2p: PointToPoint, x: np.ndarray, root: int, combine: Combine) -> Steps:
    """Receive from one rank after the other on the root, then reduce: x of the root is the result.

    step 0:  a -> root      step 1:  b -> root      step 2:  c -> root

    p - 1 steps; every rank but the root sends one message of n bytes.
    Order: as in the group, ((x0 + x1) + x2) + x3, the same bits as `direct`.
    """
    # The root receives everything before it adds: adding on arrival would not follow the order of the group.
    parts = [x if i == root or p2p.rank != root else np.empty_like(x) for i in range(p2p.size)]
    for _, other in zip(p2p.steps(p2p.size - 1), _others(p2p, root), strict=True):
        if p2p.rank == root:
            yield from p2p.recv(parts[other], other)
        elif p2p.rank == other:
            yield from p2p.send(x, root)
    if p2p.rank == root:
        combine.all_of(parts, out=x)


@NAIVE.collective(_price_of_reduce, _price_of_broadcast)
def all_reduce(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Reduce to position 0, then broadcast from it.

    2 (p - 1) steps; position 0 sends p - 1 messages of n bytes, every other rank one.
    Order: as in the group, ((x0 + x1) + x2) + x3, the same bits as `direct`.
    """
    yield from reduce(p2p, x, 0, combine)
    yield from broadcast(p2p, x, 0)


@NAIVE.collective(one_by_one_gather)
def gather(p2p: PointToPoint, parts: list[np.ndarray], root: int) -> Steps:
    """Receive from one rank after the other on the root.

    `parts[i]` of the root receives `parts[i]` of rank i. p - 1 steps; every rank but the root sends one message of
    n/p bytes.
    """
    for _, other in zip(p2p.steps(p2p.size - 1), _others(p2p, root), strict=True):
        if p2p.rank == root:
            yield from p2p.recv(parts[other], other)
        elif p2p.rank == other:
            yield from p2p.send(parts[other], root)


@NAIVE.collective(one_by_one_scatter)
def scatter(p2p: PointToPoint, parts: list[np.ndarray], root: int) -> Steps:
    """Send from the root to one rank after the other.

    `parts[i]` of rank i receives `parts[i]` of the root. p - 1 steps; the root sends p - 1 messages
    of n/p bytes.
    """
    for _, other in zip(p2p.steps(p2p.size - 1), _others(p2p, root), strict=True):
        if p2p.rank == root:
            yield from p2p.send(parts[other], other)
        elif p2p.rank == other:
            yield from p2p.recv(parts[other], root)


@NAIVE.collective(one_round)
def all_to_all(p2p: PointToPoint, given: list[np.ndarray], taken: list[np.ndarray]) -> Steps:
    """Exchange pairwise: in step s each rank sends to the rank s + 1 places on and receives from s + 1 places back.

    step 0:  0 -> 1 -> 2 -> 3 -> 0      step 1:  0 <-> 2, 1 <-> 3      step 2:  0 <- 1 <- 2 <- 3 <- 0

    `taken[i]` receives `given[own position]` of rank i. p - 1 steps; each rank sends p - 1 messages of n/p bytes.
    """
    # A rank sends itself nothing.
    taken[p2p.rank][...] = given[p2p.rank]
    for step in p2p.steps(p2p.size - 1):
        dst, src = (p2p.rank + step + 1) % p2p.size, (p2p.rank - step - 1) % p2p.size
        yield from p2p.sendrecv(given[dst], dst, taken[src], src)


def _others(p2p: PointToPoint, root: int) -> list[int]:
    return [position for position in range(p2p.size) if position != root]
