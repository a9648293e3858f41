"""Solutions to the exercises of the lesson on collectives."""

from __future__ import annotations

import numpy as np

import simparallel as sp


def ring_all_reduce(x: np.ndarray) -> np.ndarray:
    """Exercise 1: first every chunk goes round and is added up, then the sums go round."""
    rank, ranks = sp.get_rank(), sp.get_world_size()
    total = x.copy()
    chunks = np.array_split(total, ranks)
    for gathers in (False, True):
        for turn in range(ranks - 1):
            sent, received = (chunks[(rank - turn - i + gathers) % ranks] for i in (0, 1))
            buffer = np.empty_like(received)
            sending = sp.isend(sent.copy(), (rank + 1) % ranks)
            sp.recv(buffer, (rank - 1) % ranks)
            sending.wait()
            received[...] = buffer if gathers else received + buffer
    return total


def tree_broadcast(x: np.ndarray, root: int) -> np.ndarray:
    """Exercise 2: in each round, the number of ranks that have the data doubles."""
    ranks = sp.get_world_size()
    number = (sp.get_rank() - root) % ranks  # the root is number 0
    distance = 1
    while distance < ranks:
        if number < distance and number + distance < ranks:
            sp.send(x, (root + number + distance) % ranks)
        elif distance <= number < 2 * distance:
            sp.recv(x, (root + number - distance) % ranks)
        distance *= 2
    return x


def all_to_all_by_messages(x: np.ndarray) -> np.ndarray:
    """Exercise 3: start all messages, then receive all."""
    rank, ranks = sp.get_rank(), sp.get_world_size()
    result = x.copy()
    gives, takes = np.split(x, ranks), np.split(result, ranks)
    others = [other for other in range(ranks) if other != rank]
    started = [sp.isend(gives[other], other) for other in others]
    for other in others:
        sp.recv(takes[other], other)
    for work in started:
        work.wait()
    return result


def fastest_algorithm(ranks: int, size_bytes: int, latency_s: float, bandwidth_bytes_per_s: float) -> str:
    """Exercise 4: the table of the lesson."""
    depth = (ranks - 1).bit_length()
    core = 2 ** (ranks.bit_length() - 1)
    folds = 2 * (ranks > core)
    turns_and_shares = {
        "ring": (2 * (ranks - 1), 2 * (ranks - 1) / ranks),
        "tree": (2 * depth, 2 * depth),
        "halving_doubling": (2 * (core.bit_length() - 1) + folds, 2 * (core - 1) / core + folds),
    }
    times = {
        name: turns * latency_s + share * size_bytes / bandwidth_bytes_per_s
        for name, (turns, share) in turns_and_shares.items()
    }
    return min(times, key=lambda name: times[name])
