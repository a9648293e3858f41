"""Wrong answers to the exercises on sharded states: exercise -> a part of the text about the case -> answer."""

from __future__ import annotations

import math

import numpy as np

import simparallel as sp


def rows(stop, chunk=lambda rows, ranks: math.ceil(rows / ranks)):
    """Return an answer with chunks of this size, which end at `stop(end, rows)`."""

    def answer(size, ranks, rank):
        each = chunk(size, ranks)
        return stop(rank * each, size), stop((rank + 1) * each, size)

    return answer


def balanced(size, ranks, rank):
    """Cut into chunks that differ by at most one row."""
    sizes = [len(part) for part in np.array_split(np.arange(size), ranks)]
    return sum(sizes[:rank]), sum(sizes[: rank + 1])


def stepping(op="mean", shares=True, decays=True, gathers_momentum=False):
    def answer(weights, gradient, momentum, lr, beta):
        """Make the step, with a mistake."""
        rank, ranks = sp.get_rank(), sp.get_world_size()
        if gathers_momentum:
            return weights - lr * (beta * sp.all_gather(momentum) + sp.all_reduce(gradient, "mean"))
        own = sp.reduce_scatter(gradient, op=op) if shares else np.split(gradient, ranks)[rank]
        momentum = beta * momentum + own if decays else momentum + own
        return sp.all_gather(np.split(weights, ranks)[rank] - lr * momentum)

    return answer


def bytes_of(sizes=(4, 4, 8), sharded="S"):
    """Return an answer with these bytes for each parameter, and these letters in slices."""
    return lambda letters, count, ranks: [
        size * count // (ranks if letter in sharded else 1) for size, letter in zip(sizes, letters, strict=True)
    ]


WRONG = {
    "rows_of_rank": {
        "size=1, ranks=2: rank 1[1] is 2, expected 1": rows(lambda end, rows: end),
        "size=3, ranks=2: rank 0[1] is 1, expected 2": rows(min, lambda rows, ranks: max(rows // ranks, 1)),
        "size=4, ranks=3: rank 1[1] is 3, expected 4": balanced,
        "rank 0[1] is 0, expected 1": lambda size, ranks, rank: (rank * size // ranks, (rank + 1) * size // ranks),
    },
    "sharded_step": {
        "bytes, and": stepping(gathers_momentum=True),
        "ranks=2, chunk=1": stepping(op="sum"),
        "ranks=2, chunk=1: rank 0": stepping(shares=False),
        "ranks=1, chunk=1: rank 0": stepping(decays=False),
        "ranks=2, chunk=1: rank 0 has shape (1,), expected (2,)": lambda weights, gradient, momentum, lr, beta: (
            np.split(weights, sp.get_world_size())[sp.get_rank()]
            - lr * (beta * momentum + sp.reduce_scatter(gradient, op="mean"))
        ),
    },
    "bytes_of_states": {
        "bytes[1] is 16, expected 32": bytes_of(sharded="SP"),
        "bytes[2] is 32, expected 64": bytes_of((4, 4, 4)),
        "bytes[0] is 64, expected 32": bytes_of((8, 8, 16)),
        "bytes[2] is 64, expected 32": bytes_of(sharded=""),
        "bytes has shape (), expected (3,)": lambda letters, count, ranks: sum(bytes_of()(letters, count, ranks)),
    },
}
