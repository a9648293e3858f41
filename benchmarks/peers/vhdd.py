"""Horovod's Adasum over mpi4py, for float32: vector halving and distance doubling ("VHDD").

As in horovod/common/ops/adasum/adasum.h, `FusedAllreduce` with one tensor: ranks exchange halves, sum the
products of each half in float64 and all-reduce them over the ranks that share a pair, round the combined half
to float32, and finally collect the halves in reverse order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# Smaller squared norms count as zero, as in Horovod.
SMALLEST = float(np.sqrt(np.finfo(np.float64).tiny))


class Vhdd:
    """One rank of the algorithm; the communicators of its levels are made once.

    Args:
        world: communicator of mpi4py, a power of two of ranks.
        sum_op: MPI.SUM.
    """

    def __init__(self, world: Any, sum_op: Any) -> None:
        self._world, self._sum, self._rank = world, sum_op, world.rank
        self._levels = [1 << i for i in range(world.size.bit_length() - 1)]
        self._sharing = [world.Split(self._rank // (2 * level), self._rank) for level in self._levels]

    def __call__(self, x: np.ndarray) -> None:
        """Replace x by the Adasum of the ranks' x, in place."""
        start, stop, halves = 0, x.size, []
        for level, sharing in zip(self._levels, self._sharing, strict=True):
            # Keep one half of the current range, give the other half to the neighbour.
            neighbour, middle = self._rank ^ level, start + (stop - start >> 1)
            is_left = self._rank < neighbour
            keep, give = (slice(start, middle), slice(middle, stop))[:: 1 if is_left else -1]
            received = np.empty(keep.stop - keep.start, x.dtype)
            self._world.Sendrecv(x[give], neighbour, 0, received, neighbour, 0)
            own = x[keep].astype(np.float64)
            other = received.astype(np.float64)
            first, second = (own, other) if is_left else (other, own)
            found = np.array([first.dot(second), first.dot(first), second.dot(second)])
            total = np.empty(3)
            # Each rank has the products of its part only; the group that shares the pair adds them up.
            sharing.Allreduce(found, total, self._sum)
            dot, left, right = total
            # A zero vector leaves the other one unchanged.
            first *= 1 - dot / left * 0.5 if left >= SMALLEST else 1.0
            second *= 1 - dot / right * 0.5 if right >= SMALLEST else 1.0
            x[keep] = np.add(first, second, out=first)
            halves.append((neighbour, keep, give))
            start, stop = keep.start, keep.stop
        for neighbour, keep, give in reversed(halves):
            self._world.Sendrecv(x[keep], neighbour, 0, x[give], neighbour, 0)
