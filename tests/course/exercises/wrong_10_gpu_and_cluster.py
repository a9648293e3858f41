"""Wrong answers to the exercises on GPUs and clusters: exercise -> a part of the told text -> answer."""

from __future__ import annotations


def counted(text, starts_anew=False, skips_comments=True, joins=True):
    """Return the ranks of each host, with one mistake."""
    ranks, total = {}, 0
    for line in text.splitlines():
        words = line.partition("#")[0].split() if skips_comments else line.split()
        if words:
            count = int(words[1].removeprefix("slots="))
            own = list(range(count) if starts_anew else range(total, total + count))
            ranks[words[0]] = ranks.get(words[0], []) + own if joins else own
            total += count
    return ranks


def whole_slices(length, old, new, rank):
    """Read every old slice that the new one meets, whole."""
    first, last, size = rank * length // new, (rank + 1) * length // new, length // old
    return [(each, 0, size) for each in range(old) if each * size < last and first < (each + 1) * size]


def positions_in_tensor(length, old, new, rank):
    """Give positions in the whole tensor."""
    first, last, size = rank * length // new, (rank + 1) * length // new, length // old
    return [
        (each, max(first, each * size), min(last, (each + 1) * size))
        for each in range(old)
        if each * size < last and first < (each + 1) * size
    ]


def environment(rank):
    """Return an answer with this rank of (node, local rank, ranks of a node, nodes)."""

    def answer(flags, local):
        nodes, size, node = (int(flag.partition("=")[2]) for flag in flags)
        values = (rank(node, local, size, nodes), local, node, nodes * size, size)
        return dict(zip(("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), values, strict=True))

    return answer


WRONG = {
    "ranks_of_node": {
        "node0 has the ranks [0, 0, 1], expected [0, 1, 2]": lambda t: counted(t, starts_anew=True),
        "slots=(1,), form='commented'": lambda t: counted(t, skips_comments=False),
        "node0 has the ranks [1, 2], expected [0, 1, 2]": lambda t: counted(t, joins=False),
    },
    "local_rank": {
        "slots=(1, 1): rank 1[0] is 0, expected 1": lambda rank, slots: (0, rank),
        "slots=(1, 3): rank 2[0] is 2, expected 1": lambda rank, slots: divmod(rank, slots[0]),
        "slots=(1,): rank 0[0] is 1, expected 0": lambda rank, slots: (rank // slots[0] + 1, rank % slots[0]),
    },
    "shards_after_resize": {
        "old=1, new=2, length=12: rank 0": whole_slices,
        "old=1, new=2, length=12: rank 1[0, 0] is 1, expected 0": lambda n, old, new, rank: [(rank, 0, n // new)],
        "old=2, new=1, length=12: rank 0[1, 1] is 6, expected 0": positions_in_tensor,
    },
    "run_command": {
        "nproc_per_node=1, nnodes=2: --node-rank=1, process 0[0] is RANK=0": environment(lambda n, i, size, _: i),
        "nproc_per_node=2, nnodes=2": environment(lambda n, i, size, nodes: n + i * nodes),
        "nproc_per_node=2, nnodes=1": environment(lambda n, i, size, nodes: n),
    },
}
