"""HCCL's rules: groups of cards of Ascend 910 servers, and its algorithms between servers of Atlas A2.

Sources: MindSpore r0.2, tutorial of distributed training; cann-hccl, coll_alg_operator.cc (yzh1703456/cann-hccl
@9aeddc0).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simparallel.algorithms.algorithm import depth
from simparallel.base.units import format_numbers
from simparallel.machine import library_times
from simparallel.machine.library_times import Spread

# The cards 0–3 and 4–7 of a server are two rings.
SIZES, RING, SERVER = (1, 2, 4, 8), 4, 8


def broken_rule(cards: Sequence[int], is_several: bool) -> str:
    """Return the rule that a group breaks with these cards of a server, and a way out; "" if it breaks none.

    Args:
        cards: numbers of the cards on their server.
        is_several: whether the group is a cluster of several servers.
    """
    if is_several and len(cards) != SERVER:
        return f"a cluster of several servers needs all {SERVER} cards of each; choose a multiple of 8 ranks"
    if len(cards) not in SIZES:
        return "a group has 1, 2, 4 or 8 cards of a server; choose another number of ranks"
    if len(cards) < SERVER and len({card // RING for card in cards}) > 1:
        return "cards 0–3 and 4–7 are two rings, and a group of 2 or 4 must be inside one; choose cards of one"
    return ""


def flaw_of(servers: Iterable[tuple[object, Iterable[int]]]) -> str:
    """Return a sentence about the first server that breaks a rule; "" if none does.

    Args:
        servers: (name, numbers of its cards) of each server of a cluster.
    """
    found = [(name, sorted(cards)) for name, cards in servers]
    for name, cards in found:
        if rule := broken_rule(cards, len(found) > 1):
            return f"server {name} has cards {format_numbers(cards)}. HCCL: {rule}"
    return ""


# The latency with which HCCL compares algorithms between servers.
STEP_S = 60e-6
# op -> (phases inside servers, passages between them, bytes of a rank's slice from which both overlap)
_PHASES = {
    "all_reduce": (("reduce_scatter", "all_gather"), 2, 1 << 20),
    "reduce_scatter": (("reduce_scatter",), 1, 1 << 15),
    "all_gather": (("all_gather",), 1, 1 << 15),
    "broadcast": (("scatter", "all_gather"), 2, 0),
    "reduce": (("reduce_scatter", "gather"), 2, 0),
}


def best_time(op: str, size_bytes: float, at: Spread) -> tuple[float, str]:
    """Return (seconds, algorithm) of what HCCL chooses; see `library_times.best_time`, which prices all inside servers.

    Between k servers a ring takes k - 1 steps, and NHR, the nonuniform hierarchical ring, ceil(log2 k) for the same
    bytes; halving and doubling is never better. A ring is chosen where both are equal.
    """
    parts = at.split(sum(level.in_node for level in at.levels)) if op in _PHASES and at.nodes < at.ranks else None
    if at.nodes == 1 or op not in _PHASES or (parts is None and at.nodes < at.ranks):
        return library_times.best_time(op, size_bytes, at)
    phases, passages, overlapped = _PHASES[op]
    inside, rails = parts or (Spread(1, ()), at)
    k, threshold = at.nodes, overlapped * at.ranks
    steps, name = min((k - 1, "ring"), (depth(k), "NHR"), key=lambda choice: choice[0])

    def time_s(size: float) -> float:
        within = sum(library_times.best_time(phase, size, inside)[0] for phase in phases)
        part = size / inside.ranks
        between = passages * (steps * STEP_S + rails.of_size(part).passing_s(part * (k - 1) / k))
        return max(within, between) if overlapped and size >= threshold else within + between

    # A vector takes no more time than a larger one.
    return min(time_s(size_bytes), time_s(max(size_bytes, threshold))), name
