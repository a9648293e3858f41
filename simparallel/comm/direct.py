"""The collectives on shared memory: the algorithm called `direct`.

A body computes this rank's result from the payloads of all members, where they lie. It runs after
all have arrived and were found to make the same call, and it may write nothing but its own result.
A body that has to wait in between is a generator of conditions over its `Call`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from simparallel.comm import adasum, header as h
from simparallel.comm.call import Body, BodySteps, Call
from simparallel.comm.large import LargeAllReduce
from simparallel.comm.reduction import Reduction, reduce_arrays, reduce_into, reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES
from simparallel.comm.staging import Payloads, Staging
from simparallel.comm.work import Steps

# Measured with two ranks on two cores; with more ranks than cores pieces do not pay, each of their waits is a turn.
PAIR_BYTES = 1 << 20  # up to this, two ranks both reduce everything
PIECE_BYTES = 2 << 20


class _SmallAllReduce:
    """Everybody reduces everything."""

    def __init__(self, rule: Reduction) -> None:
        self.rule = rule

    def __call__(self, payloads: Payloads, x: np.ndarray) -> np.ndarray:
        reduce_stack(self.rule, payloads, x)
        return x


class _PairAllReduce:
    """Two ranks: both reduce everything, which takes one wait less than to share the work."""

    copied = True

    def __init__(self, rule: Reduction, position: int) -> None:
        self.rule = rule
        self.position = position

    def __call__(self, payloads: Payloads, x: np.ndarray) -> np.ndarray:
        out = x.reshape(-1)  # a copy where there are gaps
        sources = list(payloads.flat)
        sources[self.position] = out  # less to read than what was exposed of it
        reduce_into(self.rule, sources, out)
        if not x.flags.c_contiguous:
            x[...] = out.reshape(x.shape)
        return x


class Direct:
    """The bodies, for a position in a group."""

    size: int
    rank: int | None
    staging: Staging

    def all_reduce(self, x: np.ndarray, op: str) -> Any:
        rule = reduction(op, x.dtype)
        if x.nbytes <= SLOT_BYTES:
            return _SmallAllReduce(rule)
        if self.size == 2 and x.nbytes <= PAIR_BYTES:
            return _PairAllReduce(rule, self.rank or 0)
        return LargeAllReduce(rule, x, self.size, self.staging, PIECE_BYTES if self.size == 2 else None)

    def adasum(self, x: np.ndarray, layers: adasum.Layers) -> Body | BodySteps:
        return adasum.small(layers) if x.nbytes <= SLOT_BYTES else adasum.large(layers)

    def reduce(self, x: np.ndarray, root: int, op: str) -> Body:
        rule = reduction(op, x.dtype)

        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            if x.nbytes <= SLOT_BYTES:
                reduce_stack(rule, payloads, x)
            elif x.flags.c_contiguous:
                reduce_into(rule, payloads.flat, x.reshape(-1))
            else:
                x[...] = reduce_arrays(rule, payloads.arrays, x.dtype)
            return x

        return body if self.rank == root else _unchanged

    def broadcast(self, root: int) -> Body:
        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            x[...] = payloads.one(root)
            return x

        return _unchanged if self.rank == root else body

    def all_gather(self, dim: int) -> Body:
        return lambda payloads, x: np.concatenate(payloads.arrays, axis=dim)

    def reduce_scatter(self, x: np.ndarray, dim: int, op: str) -> Body:
        rule, piece = reduction(op, x.dtype), self._piece(x, dim)

        def body(payloads: Payloads, x: np.ndarray) -> np.ndarray:
            parts = [array[piece] for array in payloads.arrays]
            if dim == 0:
                out = np.empty(parts[0].shape, x.dtype)
                reduce_into(rule, [part.reshape(-1) for part in parts], out.reshape(-1))
                return out
            return reduce_arrays(rule, parts, x.dtype)

        return body

    def all_to_all(self, x: np.ndarray, split_dim: int, concat_dim: int) -> Body:
        piece = self._piece(x, split_dim)
        return lambda payloads, x: np.concatenate(
            [array[piece] for array in payloads.arrays], axis=concat_dim
        )

    def gather(self, root: int) -> Body:
        if self.rank != root:
            return _nothing
        return lambda payloads, x: [array.copy() for array in payloads.arrays]

    def scatter(self, root: int) -> BodySteps:
        def steps(call: Call) -> Steps:
            yield from ()  # the shape is not known before, so it takes the long way
            shape, dtype = h.decode_given(call.words_of(root))
            return call.peer(root, (self.size, *shape), dtype)[self.rank or 0, ...].copy()

        return steps

    def nothing(self) -> Body:
        return _nothing

    def bounds(self, size: int, position: int) -> slice:
        """The part of a vector that this position of the group reduces."""
        return slice(size * position // self.size, size * (position + 1) // self.size)

    def _piece(self, x: np.ndarray, dim: int) -> tuple[slice, ...]:
        """This rank's equal part along a dim."""
        return (slice(None),) * dim + (self.bounds(x.shape[dim], self.rank or 0),)


def _unchanged(payloads: Payloads, x: np.ndarray) -> np.ndarray:
    return x


def _nothing(payloads: Payloads, x: Any) -> None:
    return None
