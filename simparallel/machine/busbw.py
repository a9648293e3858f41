"""Bus bandwidth: the rate that a collective should reach on a described cluster, in the convention of nccl-tests.

Algorithm bandwidth is size / time. Bus bandwidth is that times a factor that depends on the number of ranks, so that it
equals the bandwidth of the links where these are the bottleneck. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md. HCCL's
hccl_test prints algorithm bandwidth alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simparallel.algorithms import DIRECT
from simparallel.errors import InputError
from simparallel.machine.device import PS_PER_S
from simparallel.machine.spec import ClusterSpec

# op -> (factor for n ranks as text, the buffer whose size is meant)
CONVENTION = {
    "all_reduce": ("2(n-1)/n", "the array of each rank"),
    "all_gather": ("(n-1)/n", "the gathered array"),
    "reduce_scatter": ("(n-1)/n", "the array of each rank, before it is scattered"),
    "all_to_all": ("(n-1)/n", "the array of each rank"),
    "broadcast": ("1", "the array"),
    "reduce": ("1", "the array of each rank"),
    "gather": ("(n-1)/n", "the gathered array"),
    "scatter": ("(n-1)/n", "the array, before it is scattered"),
}


class Expected(NamedTuple):
    """The result for one size; bandwidths are in bytes/s, 0 for one rank, which has no peers."""

    size_bytes: int
    time_ps: int
    algorithm: str
    algorithm_bandwidth: float
    bus_bandwidth: float


def bus_factor(op: str, num_ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth.

    Raises:
        InputError: `op` has no such convention.
    """
    if op not in CONVENTION:
        raise InputError(f"op={op!r} has no bus bandwidth; choose from {', '.join(CONVENTION)}.")
    text, n = CONVENTION[op][0], num_ranks
    return 1.0 if text == "1" else (2 if text.startswith("2") else 1) * (n - 1) / n


def expected_busbw(
    cluster: ClusterSpec, op: str, sizes: Sequence[int], ranks: Sequence[int] | None = None, algorithm: str = DIRECT
) -> list[Expected]:
    """Return the time and the bandwidths that a collective of `ranks` should reach at each size [bytes].

    Args:
        cluster: the described hardware.
        op: name of a collective, such as "all_reduce".
        sizes: sizes of the payload, in bytes.
        ranks: the ranks of the group; None for all.
        algorithm: see `ClusterSpec.collective`.

    Raises:
        InputError: `op` has no such convention.
        ClusterError: a rank that does not exist, a group that the cluster's rules refuse, or no such algorithm for it.
    """
    group = tuple(range(cluster.world_size)) if ranks is None else tuple(ranks)
    factor, rows = bus_factor(op, len(group)), []
    for size in sizes:
        cost = cluster.collective(op, size, group, algorithm=algorithm)
        rate = size * PS_PER_S / cost.time_ps if cost.time_ps else 0.0
        rows.append(Expected(size, cost.time_ps, cost.algorithm, rate, rate * factor))
    return rows
