"""Recursive halving and doubling: few steps like a tree, few bytes like a ring.

In each step a rank exchanges data with a partner, half as much (or twice as much) as in the step before.
That needs a power of two of ranks, the core of q = 2^⌊log2 p⌋. The r = p - q surplus ranks are folded first:
each of them sends its data to its neighbour, which represents both, and gets the result at the end.

    ranks  0   1   2   3   4        p = 5: q = 4, r = 1
            \\  |   |   |   |
    core       0   1   2   3        1 represents 0 as well

    α latency of a message · β seconds a byte · γ seconds of arithmetic a byte · n bytes · p ranks
    reduce_scatter    log2 p α + (p-1)/p n (β + γ)
    all_gather        log2 p α + (p-1)/p n β
    all_reduce        2 log2 p α + 2 (p-1)/p n β + (p-1)/p n γ
    all_reduce, p not a power of 2:    the same for q instead of p, + 2 α + 2 n β + n γ

Source: Thakur, Rabenseifner, Gropp 2005, "Optimization of collective communication operations in
MPICH" (Rabenseifner's algorithm); Chan et al. 2007.
"""

from __future__ import annotations

import numpy as np

from simparallel.algorithms.algorithm import CollectiveAlgorithm, Price, depth
from simparallel.algorithms.point_to_point import PointToPoint, Steps, split
from simparallel.algorithms.reduction import Combine

HALVING_DOUBLING = CollectiveAlgorithm("halving_doubling", number=4)


class _Core:
    """The core of a group, from the view of one rank.

    Attributes:
        size, depth: q and its logarithm.
        extra: r; of the first 2 r ranks the odd ones represent the even ones before them.
        number: this rank's number in the core; None if folded.
        is_proxy, is_folded: whether this rank represents another one; whether another represents it.
    """

    def __init__(self, p2p: PointToPoint) -> None:
        self.depth = p2p.size.bit_length() - 1
        self.size = 2**self.depth
        self.extra = p2p.size - self.size
        paired = p2p.rank < 2 * self.extra
        self.is_proxy = paired and p2p.rank % 2 == 1
        self.is_folded = paired and not self.is_proxy
        self.number = None if self.is_folded else p2p.rank // 2 if paired else p2p.rank - self.extra

    def position(self, number: int) -> int:
        """Return the position in the group of a number of the core."""
        return 2 * number + 1 if number < self.extra else number + self.extra

    def bounds(self, x: np.ndarray) -> list[int]:
        """Return the boundaries of the core's parts in x, if each rank of the group, also a folded one, has a part."""
        ranks = self.size + self.extra
        # A number below r stands for two ranks of the group, so it has two parts.
        return [x.size * (number + min(number, self.extra)) // ranks for number in range(self.size + 1)]


def _core(p: int) -> tuple[int, int]:
    """Return q, the largest power of two <= p, and p - q: q ranks halve and double, the others are folded into them."""
    core = 2 ** (p.bit_length() - 1)
    return core, p - core


def _core_all_reduce(p: int, number: int) -> Price:
    # The first 2 * extra ranks form pairs. The even rank of a pair sends its vector to the odd one, sits out, and
    # receives the result at the end: one step of a whole vector before, and one after.
    core, extra = _core(p)
    share, folds, pairs = 2 * (core - 1) / core, int(extra > 0), number < 2 * extra
    sent = 1.0 if pairs and number % 2 == 0 else share + pairs
    return Price(2 * depth(core) + 2 * folds, share + 2 * folds, sent)


def _core_exchange(p: int) -> Price:
    """Return steps and share of a reduce_scatter or all_gather; the first `extra` ranks of the core have two parts."""
    core, extra = _core(p)
    folds = int(extra > 0)
    # A block of 2^i ranks in the core holds 2^i parts, and one more for each folded rank among them.
    parts = sum(2**i + min(2**i, extra) for i in range(depth(core)))
    return Price(depth(core) + 2 * folds, (parts + folds * (p + 1)) / p, 0.0)


def _halving(p: int, number: int) -> Price:
    is_folded = number < 2 * _core(p)[1] and number % 2 == 0
    return _core_exchange(p)._replace(sent=1.0 if is_folded else (p - 1) / p)


def _doubling(p: int, number: int) -> Price:
    core, extra = _core(p)
    pairs = number < 2 * extra
    if pairs and number % 2 == 0:
        return _core_exchange(p)._replace(sent=1 / p)
    # Position in the core; in step i the rank sends the block of 2^i positions that it has collected.
    own = number // 2 if pairs else number - extra
    blocks = [(own >> i << i, (own >> i << i) + 2**i) for i in range(depth(core))]
    parts = sum(end + min(end, extra) - start - min(start, extra) for start, end in blocks)
    return _core_exchange(p)._replace(sent=parts / p + pairs)


@HALVING_DOUBLING.collective(_halving)
def reduce_scatter(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Reduce by halving; afterwards part `rank` of x is the reduction, the rest is scratch.

    log2 p steps; each rank sends (p-1)/p n bytes. If ranks are folded: one step of n bytes before, and one of
    n/p bytes after.
    Order: as `all_reduce`.
    """
    core, parts = _Core(p2p), split(x, p2p.size)
    yield from _fold(p2p, core, x, combine)
    yield from _halve(p2p, core, x, core.bounds(x), combine)
    yield from _unfold(p2p, core, parts[p2p.rank - core.is_proxy])


@HALVING_DOUBLING.collective(_doubling)
def all_gather(p2p: PointToPoint, x: np.ndarray) -> Steps:
    """Gather by doubling: part i of x receives part i of rank i.

    log2 p steps; each rank sends (p-1)/p n bytes. If ranks are folded: one step of n/p bytes before, and one of
    n bytes after.
    """
    core, parts = _Core(p2p), split(x, p2p.size)
    yield from _fold(p2p, core, parts[p2p.rank - core.is_proxy], None)
    yield from _double(p2p, core, x, core.bounds(x))
    yield from _unfold(p2p, core, x)


@HALVING_DOUBLING.collective(_core_all_reduce)
def all_reduce(p2p: PointToPoint, x: np.ndarray, combine: Combine) -> Steps:
    """Reduce by halving, then gather by doubling; the vector is cut into q parts.

    2 log2 q steps; each rank in the core sends 2 (q-1)/q n bytes. If ranks are folded: one step of n bytes before,
    and one of n bytes after.
    Order: farthest partners first, ((x0 + x4) + (x2 + x6)) + ((x1 + x5) + (x3 + x7)), after folding x(0) + x(1);
    each part is summed on one rank, so all ranks get the same bits.
    """
    core = _Core(p2p)
    bounds = [x.size * number // core.size for number in range(core.size + 1)]
    yield from _fold(p2p, core, x, combine)
    yield from _halve(p2p, core, x, bounds, combine)
    yield from _double(p2p, core, x, bounds)
    yield from _unfold(p2p, core, x)


def _halve(p2p: PointToPoint, core: _Core, x: np.ndarray, bounds: list[int], combine: Combine) -> Steps:
    """Keep one half of the current range, and send the other half to the partner that keeps it.

    step 0:  0 <------> 2        halves: parts 01 | 23
                 1 <------> 3
    step 1:  0 <-> 1  2 <-> 3    quarters
    """
    low, high = 0, core.size
    for _ in p2p.steps(core.depth):
        # Folded ranks take the step, too, without traffic: steps are lines of the ledger, equal on all ranks.
        if core.number is None:
            continue
        middle = (low + high) // 2
        lower, upper = x[bounds[low] : bounds[middle]], x[bounds[middle] : bounds[high]]
        if core.number < middle:
            partner, keep, give, high = core.number + (middle - low), lower, upper, middle
        else:
            partner, keep, give, low = core.number - (middle - low), upper, lower, middle
        received, there = np.empty_like(keep), core.position(partner)
        yield from p2p.sendrecv(give, there, received, there)
        # The lower number first, as on the partner, so both halves follow the documented order.
        first, second = (keep, received) if core.number < partner else (received, keep)
        combine(first, second, out=keep)
    if core.number is not None:
        # A mean is divided once, where the sum of a part is complete.
        combine.finish(x[bounds[low] : bounds[high]])


def _double(p2p: PointToPoint, core: _Core, x: np.ndarray, bounds: list[int]) -> Steps:
    """Exchange all gathered parts with the partner.

    step 0:  0 <-> 1  2 <-> 3
    step 1:  0 <------> 2
                 1 <------> 3
    """
    for step in p2p.steps(core.depth):
        if core.number is None:
            continue
        count = 2**step
        own = core.number // count * count
        # Own parts begin at a multiple of their number; the partner's are those with the next bit flipped.
        other = own ^ count
        there = core.position(core.number ^ count)
        give, take = (x[bounds[i] : bounds[i + count]] for i in (own, other))
        yield from p2p.sendrecv(give, there, take, there)


def _fold(p2p: PointToPoint, core: _Core, x: np.ndarray, combine: Combine | None) -> Steps:
    """Send x of surplus ranks to the ranks that represent them, which add it to theirs or keep it."""
    for _ in p2p.steps(1 if core.extra else 0):
        if core.is_folded:
            yield from p2p.send(x, p2p.rank + 1)
        elif core.is_proxy:
            # Without a reduction (all_gather) the part replaces what is there, in place.
            received = x if combine is None else np.empty_like(x)
            yield from p2p.recv(received, p2p.rank - 1)
            if combine is not None:
                combine(received, x, out=x)


def _unfold(p2p: PointToPoint, core: _Core, x: np.ndarray) -> Steps:
    """Send the result to the folded ranks."""
    for _ in p2p.steps(1 if core.extra else 0):
        if core.is_proxy:
            yield from p2p.send(x, p2p.rank - 1)
        elif core.is_folded:
            yield from p2p.recv(x, p2p.rank + 1)
