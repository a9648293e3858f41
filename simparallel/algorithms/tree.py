"""A binomial tree: in each step of a broadcast, the number of ranks that have the data doubles.

Few steps, but each moves the whole vector: best for small vectors on many ranks.

    α latency of a message · β seconds a byte · γ seconds of arithmetic a byte · n bytes · p ranks
    broadcast     ⌈log2 p⌉ (α + n β)
    reduce        ⌈log2 p⌉ (α + n β + n γ)
    all_reduce    ⌈log2 p⌉ (2 α + 2 n β + n γ)

Source: Chan, Heimlich, Purkayastha, van de Geijn 2007, "Collective communication: theory, practice,
and experience" (minimum spanning tree broadcast and reduce).

Ranks are numbered from the root on, round the group, so the root is number 0.
"""

from __future__ import annotations

import numpy as np

from simparallel.algorithms.algorithm import CollectiveAlgorithm, Price, depth
from simparallel.algorithms.point_to_point import PointToPoint, Steps
from simparallel.algorithms.reduction import Combine

TREE = CollectiveAlgorithm("tree", number=3)


def _price_of_broadcast(p: int, number: int) -> Price:
    """Price a binomial tree: rank n sends to n + 2^i for each 2^i below the lowest set bit of n, rank 0 for each i."""
    children = [i for i in range(depth(p)) if number % 2 ** (i + 1) == 0 and number + 2**i < p]
    return Price(depth(p), depth(p), len(children))


def _price_of_reduce(p: int, number: int) -> Price:
    return Price(depth(p), depth(p), 1.0 if number else 0.0)


@TREE.collective(_price_of_broadcast)
def broadcast(p2p: PointToPoint, x: np.ndarray, root: int) -> Steps:
    """Send x from each rank that has it to one that does not.

    step 0:  0 ------------> 4
    step 1:  0 ----> 2       4 ----> 6
    step 2:  0 -> 1  2 -> 3  4 -> 5  6 -> 7

    ⌈log2 p⌉ steps; p - 1 messages of n bytes in all, at most ⌈log2 p⌉ from one rank (the root).
    """
    number, depth = (p2p.rank - root) % p2p.size, (p2p.size - 1).bit_length()
    for step in p2p.steps(depth):
        # Far partners first: each later step has twice as many senders, over half the distance.
        distance = 2 ** (depth - 1 - step)
        # In a group that is not a power of two, some partners do not exist.
        if number % (2 * distance) == 0 and number + distance < p2p.size:
            yield from p2p.send(x, (p2p.rank + distance) % p2p.size)
        elif number % (2 * distance) == distance:
            yield from p2p.recv(x, (p2p.rank - distance) % p2p.size)


@TREE.collective(_price_of_reduce)
def reduce(p2p: PointToPoint, x: np.ndarray, root: int, combine: Combine) -> Steps:
    """Reduce along the same tree from its leaves to its root. x of the root is the result; other ranks' x is scratch.

    step 0:  0 <- 1  2 <- 3  4 <- 5  6 <- 7
    step 1:  0 <---- 2       4 <---- 6
    step 2:  0 <------------ 4

    ⌈log2 p⌉ steps; every rank but the root sends one message of n bytes.
    Order: neighbours first, ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7)), from the root on.
    """
    number, received = (p2p.rank - root) % p2p.size, np.empty_like(x)
    for step in p2p.steps((p2p.size - 1).bit_length()):
        distance = 2**step
        if number % (2 * distance) == distance:
            yield from p2p.send(x, (p2p.rank - distance) % p2p.size)
        elif number % (2 * distance) == 0 and number + distance < p2p.size:
            yield from p2p.recv(received, (p2p.rank + distance) % p2p.size)
            # The lower number first, so the order follows the numbers from the root on.
            combine(x, received, out=x)
    if number == 0:
        combine.finish(x)


@TREE.collective(_price_of_reduce, _price_of_broadcast)
def all_reduce(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Reduce up the tree to position 0, then broadcast down again.

    2 ⌈log2 p⌉ steps; 2 (p - 1) messages of n bytes in all.
    Order: as `reduce`; the result is computed on one rank, so all ranks get the same bits.
    """
    yield from reduce(p2p, x, 0, combine)
    yield from broadcast(p2p, x, 0)
