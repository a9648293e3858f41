"""Adasum on messages: a function for each algorithm. The arithmetic is in `simparallel/base/adasum.py`.

    α latency of a message · β seconds a byte · n bytes · p ranks
    halving_doubling    (2 l + l (l + 1) / 2) α + 2 (p-1)/p n β, l = log2 p     as published
    tree                2 ⌈log2 p⌉ (α + n β)
    naive               2 (p-1) (α + n β)
    ring                2 (p-1) (α + n β); with many equal layers 2 (p-1) (α + n/p β)

Partial results have the dtype of the data, as on the wire of real hardware, and are rounded to it at every step;
products are summed in float64. All ranks get the same bits, because each part of the vector is finished on one rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from simparallel.algorithms.algorithm import Price, depth
from simparallel.algorithms.halving_doubling import HALVING_DOUBLING
from simparallel.algorithms.naive import NAIVE, all_reduce as all_reduce_by_root
from simparallel.algorithms.point_to_point import PointToPoint, Steps
from simparallel.algorithms.ring import RING
from simparallel.algorithms.tree import TREE, all_reduce as all_reduce_by_tree
from simparallel.backend import has_data
from simparallel.base.adasum import QUIET, WIDE, Layers, Moments, Segment, coefficients, moments, segments, whole


def halving_price(p: int, number: int) -> Price:
    """Price halving and doubling, with an all-reduce of a few numbers over 2^(j+1) ranks at level j: latency only."""
    levels = depth(p)
    # The all-reduce at level j takes j + 1 steps: levels * (levels + 1) / 2 in all.
    share = 2 * (p - 1) / p
    return Price(2 * levels + levels * (levels + 1) // 2, share, share)


def _ring_price(p: int, number: int) -> Price:
    """Price a ring that passes one whole layer from rank to rank, twice round."""
    return Price(2 * (p - 1), 2 * (p - 1), 2 * (p - 1) / p)


@HALVING_DOUBLING.collective(halving_price, op="adasum")
def halving_doubling(p2p: PointToPoint, x: np.ndarray, layers: Layers) -> Steps:
    """Halve vectors recursively while doubling distances: the published algorithm, "AdasumRVH".

    level 0:  0 <-> 1   2 <-> 3     halves: 0 and 1 have T(0, 1), 2 and 3 have T(2, 3), half of it each
    level 1:  0 <-----> 2           quarters of T(0, 1, 2, 3)
                  1 <-----> 3
    and the same way back, where quarters become halves and halves the whole.

    At level j both partners know only the products of their halves; the 2^(j+1) ranks that have the other parts of the
    same pair sum them by doubling, in j + 1 steps of 24 bytes a layer. Layers may begin and end anywhere. For powers
    of two only.
    """
    low, high, exchanges = 0, x.size, []
    for level in range(p2p.size.bit_length() - 1):
        partner, middle = p2p.rank ^ 1 << level, (low + high) // 2
        # Both partners call the vector of the lower rank `a`, so they compute the same coefficients.
        is_first = p2p.rank < partner
        lower, upper = slice(low, middle), slice(middle, high)
        keep, give = (lower, upper) if is_first else (upper, lower)
        low, high = keep.start, keep.stop
        exchanges.append((partner, keep, give))
        received = np.empty_like(x[keep])
        for _ in p2p.steps(1):
            yield from p2p.sendrecv(x[give], partner, received, partner)
        a, b = (x[keep], received) if is_first else (received, x[keep])
        parts = list(segments(layers, keep))
        found = _moments(a, b, parts, len(layers))
        # The ranks that have other parts of the same pair of vectors are the 2^(level + 1) ranks around this one.
        for step in p2p.steps(level + 1):
            other, there = np.empty_like(found), p2p.rank ^ 1 << step
            yield from p2p.sendrecv(found, there, other, there)
            # a + b and b + a are the same bits, so all these ranks get equal sums.
            found = found + other
        _join(a, b, parts, found, out=x[keep])
    # Back in reverse order: each exchange returns the half that was given away, now finished.
    for partner, keep, give in reversed(exchanges):
        for _ in p2p.steps(1):
            yield from p2p.sendrecv(x[keep], partner, x[give], partner)


@TREE.collective(TREE.prices["all_reduce"], op="adasum")
def tree(p2p: PointToPoint, x: np.ndarray, layers: Layers) -> Steps:
    """Reduce whole vectors up a binomial tree, in the order of Adasum's tree, and broadcast the result.

    2 ⌈log2 p⌉ steps; 2 (p - 1) messages of n bytes in all.
    """
    yield from all_reduce_by_tree(p2p, x, _PairwiseAdasum(layers))


@NAIVE.collective(NAIVE.prices["all_reduce"], op="adasum")
def naive(p2p: PointToPoint, x: np.ndarray, layers: Layers) -> Steps:
    """Compute the whole tree on position 0, without rounding in between, and send the result to all.

    2 (p - 1) steps; position 0 sends p - 1 messages of n bytes, every other rank one.
    """
    yield from all_reduce_by_root(p2p, x, _PairwiseAdasum(layers))


@RING.collective(_ring_price, op="adasum")
def ring(p2p: PointToPoint, x: np.ndarray, layers: Layers) -> Steps:
    """Fold from left to right, NOT by the tree: the result differs from the other algorithms.

    Layer i starts at rank s = i mod p and goes round; every rank combines it with its own,
    A(… A(A(x_s, x_s+1), x_s+2) …, x_s-1). A second round distributes the results. With many layers all links are
    busy. (Horovod's ring, which was never merged: pull request 1760.)

    2 (p - 1) steps; each rank sends about 2 (p-1)/p n bytes if the layers are equal; a single layer keeps only one
    rank busy at a time.
    """
    # Layers are dealt out by number modulo p, so the p starting points get about equally many.
    bounds = np.cumsum([0, *layers]).tolist()
    pieces = [slice(start, stop) for start, stop in zip(bounds, bounds[1:], strict=False)]
    for step in p2p.steps(p2p.size - 1):
        taken = pieces[(p2p.rank - 1 - step) % p2p.size :: p2p.size]
        received = yield from _pass_on(p2p, x, pieces[(p2p.rank - step) % p2p.size :: p2p.size], taken)
        for piece, a in zip(taken, received, strict=True):
            x[piece] = whole([a, x[piece]], (a.size,))
    for step in p2p.steps(p2p.size - 1):
        taken = pieces[(p2p.rank - step) % p2p.size :: p2p.size]
        received = yield from _pass_on(p2p, x, pieces[(p2p.rank + 1 - step) % p2p.size :: p2p.size], taken)
        for piece, a in zip(taken, received, strict=True):
            x[piece] = a


def _pass_on(
    p2p: PointToPoint, x: np.ndarray, given: list[slice], taken: list[slice]
) -> Generator[Any, None, list[np.ndarray]]:
    """Send some layers to the right as one message; return the layers that come from the left."""
    right, left = (p2p.rank + 1) % p2p.size, (p2p.rank - 1) % p2p.size
    bounds = np.cumsum([0, *(piece.stop - piece.start for piece in taken)]).tolist()
    received = np.empty(bounds[-1], x.dtype)
    sent = np.concatenate([x[piece] for piece in given]) if given else None
    # With fewer layers than ranks, one of the two messages may be empty.
    if sent is not None and taken:
        yield from p2p.sendrecv(sent, right, received, left)
    elif sent is not None:
        yield from p2p.send(sent, right)
    elif taken:
        yield from p2p.recv(received, left)
    return [received[i:j] for i, j in zip(bounds, bounds[1:], strict=False)]


class _PairwiseAdasum:
    """Adasum of two vectors, with the interface of `reduction.Combine`."""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def __call__(self, first: np.ndarray, second: np.ndarray, out: np.ndarray) -> None:
        out[...] = whole([first, second], self._layers)

    def finish(self, total: np.ndarray) -> None:
        """Do nothing: Adasum has no final division."""

    def all_of(self, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
        out[...] = whole(parts, self._layers)


@QUIET
def _moments(a: np.ndarray, b: np.ndarray, parts: list[Segment], num_layers: int) -> np.ndarray:
    """Return a slice's contribution to the `Moments` of each layer: (layers, 3)."""
    found = np.zeros((num_layers, 3))
    for layer, start, stop in parts if has_data(a) else ():
        # In float64 the products of float32 do not overflow, and lose few digits.
        found[layer] = moments(a[start:stop].astype(WIDE), b[start:stop].astype(WIDE))
    return found


@QUIET
def _join(a: np.ndarray, b: np.ndarray, parts: list[Segment], found: np.ndarray, out: np.ndarray) -> None:
    """Compute out = A(a, b) on a slice from the `Moments` of the whole layers. `out` may be a or b."""
    for layer, start, stop in parts if has_data(a) else ():
        first, second = coefficients(Moments(*found[layer].tolist()))
        out[start:stop] = a[start:stop].astype(WIDE) * first + b[start:stop].astype(WIDE) * second
