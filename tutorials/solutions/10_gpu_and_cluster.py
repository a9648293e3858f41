"""Solutions to the exercises of the lesson on GPUs and clusters."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_of_node(text: str) -> dict[str, list[int]]:
    """Exercise 1: ranks are counted through the lines; a host that comes again gets more of them."""
    ranks: dict[str, list[int]] = {}
    total = 0
    for line in text.splitlines():
        words = line.partition("#")[0].split()
        if words:
            count = int(words[1].removeprefix("slots="))
            ranks.setdefault(words[0], []).extend(range(total, total + count))
            total += count
    return ranks


def local_rank(rank: int, slots: Sequence[int]) -> tuple[int, int]:
    """Exercise 2: leave out the ranks of one node after the other."""
    node = 0
    while rank >= slots[node]:
        rank -= slots[node]
        node += 1
    return node, rank


def shards_after_resize(length: int, old: int, new: int, rank: int) -> list[tuple[int, int, int]]:
    """Exercise 3: intersect the new slice with each old one, and count from the start of the old one."""
    first, last = rank * length // new, (rank + 1) * length // new
    size, parts = length // old, []
    for each in range(old):
        start, stop = max(first - each * size, 0), min(last - each * size, size)
        if start < stop:
            parts.append((each, start, stop))
    return parts


def run_command(flags: Sequence[str], local_rank: int) -> dict[str, str]:
    """Exercise 4: ranks are counted node by node."""
    given = dict(flag.removeprefix("--").split("=") for flag in flags)
    nodes, size, node = (int(given[name]) for name in ("nnodes", "nproc-per-node", "node-rank"))
    return {
        "RANK": str(node * size + local_rank),
        "LOCAL_RANK": str(local_rank),
        "NODE_RANK": str(node),
        "WORLD_SIZE": str(nodes * size),
        "LOCAL_WORLD_SIZE": str(size),
    }
