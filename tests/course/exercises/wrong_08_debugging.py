"""Wrong answers to the exercises on debugging: exercise -> a part of the told text -> answer."""

from __future__ import annotations

import numpy as np

import simparallel as sp


def receive_first(x):
    """Receive before sending, as every rank does."""
    received = np.empty_like(x)
    sp.recv(received, (sp.get_rank() - 1) % sp.get_world_size())
    sp.send(x, (sp.get_rank() + 1) % sp.get_world_size())
    return received


def from_the_next(x):
    """Receive from the rank that the value was sent to."""
    received = np.empty_like(x)
    sending = sp.isend(x, (sp.get_rank() + 1) % sp.get_world_size())
    sp.recv(received, (sp.get_rank() + 1) % sp.get_world_size())
    sending.wait()
    return received


def other_way_round(x):
    """Send to the rank before."""
    received = np.empty_like(x)
    sending = sp.isend(x, (sp.get_rank() - 1) % sp.get_world_size())
    sp.recv(received, (sp.get_rank() + 1) % sp.get_world_size())
    sending.wait()
    return received


def stops(decide):
    """Return an answer that stops when `decide(loss, limit)` says so."""

    def answer(losses, limit):
        count = 0
        for loss in losses:
            count += 1
            if decide(np.array([loss]), limit):
                break
        return count

    return answer


def alone(loss, limit):
    """Make a step with the other ranks, and decide alone."""
    sp.all_reduce(loss.copy(), "mean")
    return loss[0] < limit


WRONG = {
    "pass_around": {
        "DeadlockError": receive_first,
        "ranks=3, size=1: DeadlockError": from_the_next,
        "ranks=3, size=1: rank 0[0] is": other_way_round,
        "ranks=2, size=1: rank 0[0] is": lambda x: x,
    },
    "stop_together": {
        "RankFailedError": stops(alone),
        "seed=2: rank 0 is 1, expected 2": stops(lambda loss, limit: sp.all_reduce(loss, "min")[0] < limit),
        "seed=3: rank 0 is 2, expected 1": stops(lambda loss, limit: sp.all_reduce(loss, "max")[0] < limit),
        "ranks=2, steps=2, seed=3": stops(lambda loss, limit: sp.broadcast(loss, 0)[0] < limit),
    },
    "mean_of_samples": {
        "ranks=2, samples=1: rank 0[0] is": lambda rows: sp.all_reduce(
            rows.mean(axis=0) if len(rows) else np.zeros(2), "mean"
        ),
        "ranks=1, samples=2: rank 0[0] is": lambda rows: sp.all_reduce(rows.sum(axis=0), "mean"),
        "ranks=2, samples=1: rank 0[0] is 0, expected -9": lambda rows: rows.sum(axis=0) / max(len(rows), 1),
    },
}
