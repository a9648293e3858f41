"""`direct`: the prices of collectives that send no messages, because ranks read each other's memory.

It is priced with the bytes of a ring; of a chain for broadcast and reduce, of one message per rank for gather and
scatter, of the published algorithms for scans and Adasum. Where libraries have the collective, its time is that of
their best algorithm (`machine/library_times.py`).
"""

from __future__ import annotations

from simparallel.algorithms.adasum import halving_price
from simparallel.algorithms.algorithm import (
    DIRECT,
    CollectiveAlgorithm,
    Price,
    depth,
    one_by_one_gather,
    one_by_one_scatter,
    one_round,
    then,
)


def _barrier(p: int, number: int) -> Price:
    """Price a dissemination barrier: the latency of ceil(log2 p) steps."""
    return Price(depth(p), 0.0, 0.0)


def _pipelined_broadcast(p: int, number: int) -> Price:
    """Price a pipelined chain in the limit of many chunks: latency of all hops, and one passage of the vector."""
    return Price(p - 1, 1.0, 1.0 if number < p - 1 else 0.0)


def _pipelined_reduce(p: int, number: int) -> Price:
    return Price(p - 1, 1.0, 1.0 if number else 0.0)


def _scan(p: int, number: int) -> Price:
    """Price a scan: in step i, rank r sends its partial result to rank r + 2^i (Hillis and Steele 1986)."""
    return Price(depth(p), depth(p), sum(number + 2**i < p for i in range(depth(p))))


CollectiveAlgorithm(
    DIRECT,
    number=0,
    prices={
        "all_reduce": then(one_round, one_round), "reduce_scatter": one_round, "all_gather": one_round,
        "all_to_all": one_round, "gather": one_by_one_gather, "scatter": one_by_one_scatter,
        "broadcast": _pipelined_broadcast, "reduce": _pipelined_reduce, "barrier": _barrier, "new_group": _barrier,
        "adasum": halving_price, "scan": _scan, "exscan": _scan,
    },
)  # fmt: skip
