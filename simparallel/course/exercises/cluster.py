"""Exercises of lesson 10: the same script on a GPU and on a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from simparallel.course.exercises.exercise import Case, Values, by_rank, call_case, exercise
from simparallel.course.exercises.remarks import Remark

_SLOTS = ((1,), (2,), (1, 1), (2, 2), (1, 3), (3, 1, 2), (4, 4, 4))


@exercise(lesson=10, slots=_SLOTS, form=("plain", "commented", "repeated"))
def ranks_of_node(slots: tuple[int, ...], form: str) -> Case:
    """Return host -> its ranks, from the text of a host file."""
    lines = [f"node{number} slots={count}" for number, count in enumerate(slots)]
    hosts = {f"node{number}": list(range(last - slots[number], last)) for number, last in enumerate(accumulate(slots))}
    if form == "commented":
        lines = ["# our nodes", "", *(f"{line}  # idle at night" for line in lines)]
    elif form == "repeated":
        lines.append("node0 slots=2")
        hosts["node0"] = [*hosts["node0"], sum(slots), sum(slots) + 1]

    def judge(expected: Values, found: Values) -> str | None:
        for host in (*expected, *found):
            if found.get(host) != expected.get(host):
                return Remark("{} has the ranks {}, expected {}", host, found.get(host), expected.get(host))
        return None

    text = "\n".join(lines) + "\n"
    return call_case(
        {"lines": lines},
        hosts,
        judge,
        calls=[(text,)],
        form=lambda found: {h: list(ranks) for h, ranks in found.items()},
    )


@exercise(lesson=10, slots=_SLOTS)
def local_rank(slots: tuple[int, ...]) -> Case:
    """Return (node, local rank) of a rank, if node i has slots[i] ranks."""
    places = [(node, local) for node, count in enumerate(slots) for local in range(count)]
    calls = [(rank, list(slots)) for rank in range(len(places))]
    return call_case({"slots": list(slots)}, by_rank(map(list, places)), calls=calls, form=list)


@exercise(lesson=10, old=(1, 2, 3, 4), new=(1, 2, 3, 6), length=(12, 24))
def shards_after_resize(old: int, new: int, length: int) -> Case:
    """Return the parts of saved slices that a new rank reads: [(old rank, first, last + 1), ...]."""
    was, now = ([count * length // ranks for count in range(ranks + 1)] for ranks in (old, new))
    expected = {}
    for rank, (first, last) in enumerate(pairwise(now)):
        parts = ((each, max(first, a) - a, min(last, b) - a) for each, (a, b) in enumerate(pairwise(was)))
        expected[f"rank {rank}"] = [part for part in parts if part[1] < part[2]]

    given = {"length": length, "old ranks": old, "new ranks": new}
    calls = [(length, old, new, rank) for rank in range(new)]
    return call_case(given, expected, calls=calls, form=lambda parts: list(map(tuple, parts)))


@exercise(lesson=10, nproc_per_node=(1, 2, 3), nnodes=(1, 2, 3))
def run_command(nproc_per_node: int, nnodes: int) -> Case:
    """Return the environment of a process that `torchrun --nnodes N --nproc-per-node P --node-rank R` starts."""
    names = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    flags = [f"--nnodes={nnodes}", f"--nproc-per-node={nproc_per_node}"]
    places = [(node, local) for node in range(nnodes) for local in range(nproc_per_node)]

    def shown(variables: Mapping[str, Any]) -> list[str]:
        return [f"{name}={variables.get(name, '?')}" for name in names]

    expected = {}
    for node, local in places:
        values = (node * nproc_per_node + local, local, node, len(places), nproc_per_node)
        expected[f"--node-rank={node}, process {local}"] = shown(dict(zip(names, values, strict=True)))
    calls = [([*flags, f"--node-rank={node}"], local) for node, local in places]
    return call_case({"flags": flags}, expected, calls=calls, form=shown)
