"""A ring: each rank sends to its right neighbour only, and every link is busy in every step.

Vectors are cut into one chunk for each rank. The bytes that a rank sends hardly depend on the number of ranks, 2 n in
the limit, so the ring is best for large vectors; its many steps cost latency.

    α latency of a message · β seconds a byte · γ seconds of arithmetic a byte · n bytes · p ranks
    reduce_scatter    (p-1) (α + n/p β + n/p γ)
    all_gather        (p-1) (α + n/p β)
    all_reduce        2 (p-1) (α + n/p β) + (p-1) n/p γ
    broadcast         (2p-2) (α + n/p β)      a chain, pipelined in p chunks

Source: Chan, Heimlich, Purkayastha, van de Geijn 2007, "Collective communication: theory, practice,
and experience"; Patarasuk, Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations".
"""

from __future__ import annotations

import numpy as np

from simparallel.algorithms.algorithm import CollectiveAlgorithm, Price, one_round
from simparallel.algorithms.point_to_point import PointToPoint, Steps, split
from simparallel.algorithms.reduction import Combine

RING = CollectiveAlgorithm("ring", number=2)


@RING.collective(one_round)
def reduce_scatter(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Pass partial sums round; afterwards part `rank` of x is the reduction, the rest is scratch.

    Chunks sent to the right in each step (three ranks; the digits name the ranks whose values are summed):

               0 -> 1       1 -> 2       2 -> 0
    step 0:  c2 of 0      c0 of 1      c1 of 2
    step 1:  c1 of 20     c2 of 01     c0 of 12      now 0 has c0 of 120, 1 has c1, 2 has c2

    p - 1 steps; each rank sends one chunk, n/p bytes, in each.
    Order: chunk i is summed round the ring from rank i + 1 to rank i, ((x1 + x2) + x3) + x0 for chunk 0.
    """
    chunks = split(x, p2p.size)
    right, left = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
    for step in p2p.steps(p2p.size - 1):
        give, take = chunks[(p2p.rank - 1 - step) % p2p.size], chunks[(p2p.rank - 2 - step) % p2p.size]
        received = np.empty_like(take)
        yield from p2p.sendrecv(give, right, received, left)
        combine(received, take, out=take)
    # A mean is divided once, where the sum of the chunk is complete.
    combine.finish(chunks[p2p.rank])


@RING.collective(one_round)
def all_gather(p2p: PointToPoint, x: np.ndarray) -> Steps:
    """Pass finished chunks round: part i of x receives part i of rank i.

               0 -> 1    1 -> 2    2 -> 0
    step 0:     c0        c1        c2
    step 1:     c2        c0        c1

    p - 1 steps; each rank sends one chunk, n/p bytes, in each.
    """
    chunks = split(x, p2p.size)
    right, left = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
    for step in p2p.steps(p2p.size - 1):
        give, take = chunks[(p2p.rank - step) % p2p.size], chunks[(p2p.rank - 1 - step) % p2p.size]
        # A chunk is received in its final place: it has no reduction to wait for.
        yield from p2p.sendrecv(give, right, take, left)


@RING.collective(one_round, one_round)
def all_reduce(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Pass partial sums round once, then results once: `reduce_scatter`, then `all_gather`.

    2 (p - 1) steps; each rank sends one chunk in each, 2 (p-1)/p n bytes in all.
    Order: as `reduce_scatter`; each chunk is summed on one rank, so all ranks get the same bits.
    """
    yield from reduce_scatter(p2p, x, combine)
    yield from all_gather(p2p, x)


def _chain_broadcast(p: int, number: int) -> Price:
    """Price a chain that is pipelined with p chunks."""
    return Price(2 * p - 2, (2 * p - 2) / p, 1.0 if number < p - 1 else 0.0)


@RING.collective(_chain_broadcast)
def broadcast(p2p: PointToPoint, x: np.ndarray, root: int) -> Steps:
    """Send along a chain from the root on, chunk by chunk; each step forwards the chunk received in the step before.

              root -> 1    1 -> 2
    step 0:     c0
    step 1:     c1          c0
    step 2:     c2          c1
    step 3:                 c2

    2 p - 2 steps: p chunks, and p - 2 steps until the first chunk reaches the last link. Each rank but the end of
    the chain sends p chunks, n bytes in all.
    """
    chunks, hop = split(x, p2p.size), (p2p.rank - root) % p2p.size
    right, left = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
    for step in p2p.steps(2 * p2p.size - 2):
        # A rank `hop` links from the root is `hop` steps behind it.
        give, take = step - hop, step - hop + 1
        gives = hop < p2p.size - 1 and 0 <= give < p2p.size
        takes = hop > 0 and 0 <= take < p2p.size
        if gives and takes:
            yield from p2p.sendrecv(chunks[give], right, chunks[take], left)
        elif gives:
            yield from p2p.send(chunks[give], right)
        elif takes:
            yield from p2p.recv(chunks[take], left)
