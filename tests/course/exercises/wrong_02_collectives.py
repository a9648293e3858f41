"""Wrong answers to the exercises on collectives: exercise -> a part of the text about the failing case -> answer."""

from __future__ import annotations

import numpy as np

import simparallel as sp


def all_around(x):
    """Send whole arrays around the ring."""
    rank, ranks = sp.get_rank(), sp.get_world_size()
    total, passing = x.copy(), x
    for _ in range(ranks - 1):
        received = np.empty_like(x)
        sending = sp.isend(passing, (rank + 1) % ranks)
        sp.recv(received, (rank - 1) % ranks)
        sending.wait()
        total += received
        passing = received
    return total


def receive_first(x):
    """Wait for the rank before, as every rank does."""
    received = np.empty_like(x)
    sp.recv(received, (sp.get_rank() - 1) % sp.get_world_size())
    sp.send(x, (sp.get_rank() + 1) % sp.get_world_size())
    return x + received


def root_sends_to_all(x, root):
    """Send from the root to every other rank."""
    if sp.get_rank() == root:
        for other in range(sp.get_world_size()):
            if other != root:
                sp.send(x, other)
    else:
        sp.recv(x, root)
    return x


def chain(x, root):
    """Pass x on from rank to rank."""
    rank, ranks = sp.get_rank(), sp.get_world_size()
    number = (rank - root) % ranks
    if number > 0:
        sp.recv(x, (rank - 1) % ranks)
    if number < ranks - 1:
        sp.send(x, (rank + 1) % ranks)
    return x


def tree_from(numbered_from_root):
    def answer(x, root):
        """Double the ranks that have x, without a look at the end of the group or at the root."""
        ranks = sp.get_world_size()
        first = root if numbered_from_root else 0
        number, distance = (sp.get_rank() - first) % ranks, 1
        while distance < ranks:
            partner = number + distance
            if number < distance and (partner < ranks or numbered_from_root):
                sp.send(x, (first + partner) % ranks)
            elif distance <= number < 2 * distance:
                sp.recv(x, (first + number - distance) % ranks)
            distance *= 2
        return x

    return answer


def exchange(order=lambda other: other, receive_first=False):
    def answer(x):
        """Exchange chunks with all other ranks."""
        rank, ranks = sp.get_rank(), sp.get_world_size()
        result = x.copy()
        gives, takes = np.split(x, ranks), np.split(result, ranks)
        others = [other for other in range(ranks) if other != rank]
        if receive_first:
            for other in others:
                sp.recv(takes[other], other)
        started = [sp.isend(gives[order(other)], other) for other in others]
        for other in others:
            sp.recv(takes[other], other)
        for work in started:
            work.wait()
        return result

    return answer


def without_folds(ranks, size_bytes, latency_s, bandwidth_bytes_per_s):
    """Forget that halving and doubling needs two more turns if the number of ranks is no power of two."""
    core = 2 ** (ranks.bit_length() - 1)
    prices = {
        "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks),
        "halving_doubling": (2 * (core.bit_length() - 1), 2 * (core - 1) / core),
    }
    times = {name: a * latency_s + b * size_bytes / bandwidth_bytes_per_s for name, (a, b) in prices.items()}
    return min(times, key=times.get)


WRONG = {
    "ring_all_reduce": {
        "collectives called[0] is all_reduce": lambda x: sp.all_reduce(x),
        "ranks=3, size=1: elements sent is 6, expected 4": all_around,
        "DeadlockError": receive_first,
        "rank 0[0] is -18": lambda x: x * sp.get_world_size(),
    },
    "tree_broadcast": {
        "ranks=4, root=0: it takes 3 rounds, and 2 are enough": root_sends_to_all,
        "ranks=4, root=0: it takes 3": chain,
        "ranks=2, root=1: rank 0[0] is -9": tree_from(False),
        "ranks=3, root=0": tree_from(True),
        "collectives called[0] is broadcast": lambda x, root: sp.broadcast(x, src=root),
    },
    "all_to_all_by_messages": {
        "ranks=1, part=2: rank 0[0] is": lambda x: x[::-1].copy(),
        "ranks=2, part=1: DeadlockError": exchange(receive_first=True),
        "ranks=2, part=1: rank 0[1] is": exchange(order=lambda other: sp.get_rank()),
        "collectives called[0] is all_to_all": lambda x: sp.all_to_all(x),
    },
    "fastest_algorithm": {
        "ranks=3, size_bytes=4, latency_s=1e-06: halving_doubling takes": without_folds,
        "ring takes": lambda p, n, *_: "ring" if n >= 10_000 or p & (p - 1) else "halving_doubling",
        "ranks=2, size_bytes=4, latency_s=1e-06: tree": lambda *_: "tree",
        "'direct' is not one of ring": lambda *_: "direct",
    },
}
