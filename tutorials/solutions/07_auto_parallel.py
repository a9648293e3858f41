"""Solutions to the exercises of the lesson on automatic parallelism."""

from __future__ import annotations

from collections.abc import Sequence


def legal_cuts(sizes: Sequence[int], devices: int) -> list[tuple[int, ...]]:
    """Exercise 1: cut the first dim, and the other dims on the devices that are left."""
    if not sizes:
        return [()]
    size, *rest = sizes
    cuts = [cut for cut in range(1, devices + 1) if devices % cut == 0 and size % cut == 0]
    return [(cut, *others) for cut in cuts for others in legal_cuts(rest, devices // cut)]


def chain_dp(nodes: Sequence[Sequence[int]], edges: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Exercise 2: go on from the cheapest way to each strategy of the op before."""
    ways = [(price, [s]) for s, price in enumerate(nodes[0])]
    for prices, table in zip(nodes[1:], edges, strict=True):
        ways = [
            min((total + table[s][t] + price, [*choice, t]) for s, (total, choice) in enumerate(ways))
            for t, price in enumerate(prices)
        ]
    return min(ways)[1]


def pareto(plans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Exercise 3: from fast to slow, a plan must need less memory than all before it."""
    front: list[tuple[int, int]] = []
    for time, memory in sorted(plans):
        if not front or memory < front[-1][1]:
            front.append((time, memory))
    return front
