"""Wrong answers to the exercises on data parallelism: exercise -> a part of the text about the case -> answer."""

from __future__ import annotations

import numpy as np

import simparallel as sp


def accumulating(scale=lambda part, samples, size: part / samples, clears=False, drops_last=False):
    def answer(model, loss_fn, x, y, size):
        """Add up the gradients of micro-batches, with a mistake."""
        for first in range(0, len(x), size):
            part = x[first : first + size]
            if drops_last and len(part) < size:
                break
            if clears:
                model.zero_grad()
            (loss_fn(model(part), y[first : first + size]) * scale(len(part), len(x), size)).backward()

    return answer


def at_once(model, loss_fn, x, y, size):
    """Use the whole batch."""
    loss_fn(model(x), y).backward()


def with_steps(model, loss_fn, x, y, size):
    """Make a step after each micro-batch."""
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    accumulating()(model, loss_fn, x, y, size)
    optimizer.step()


def own_mean(gradients, samples):
    """Divide by the own number of samples, which differs by rank."""
    return [sp.all_reduce(gradient * samples) / (samples * sp.get_world_size()) for gradient in gradients]


def indices(order=lambda size, rank, epoch: np.random.default_rng(epoch).permutation(size), pads=True, blocks=False):
    def answer(size, ranks, rank, epoch):
        """Share the samples among the ranks, with a mistake."""
        all_of_them = list(order(size, rank, epoch))
        if pads == "once":
            all_of_them += all_of_them[: -size % ranks]
        elif pads:
            all_of_them = all_of_them * ranks
            all_of_them = all_of_them[: -(-size // ranks) * ranks]
        return np.array_split(all_of_them, ranks)[rank] if blocks else all_of_them[rank::ranks]

    return answer


def normalised(mean, variance):
    return lambda x: (x - mean(x)) / np.sqrt(variance(x) + 1e-5)


def over_ranks(x, ddof=0):
    """Return the right mean and variance."""
    count = sp.all_reduce(np.array([float(len(x))]))[0]
    mean = sp.all_reduce(x.sum(axis=0)) / count
    return mean, sp.all_reduce(((x - mean) ** 2).sum(axis=0)) / max(count - ddof, 1)


WRONG = {
    "accumulate": {
        "samples=3, size=2": accumulating(lambda part, samples, size: 1 / -(-samples // size)),
        "samples=1, size=2": accumulating(lambda part, samples, size: size / samples),
        "samples=2, size=1": accumulating(lambda part, samples, size: 1.0),
        "samples=2, size=1: gradient": accumulating(clears=True),
        "samples=1, size=2: gradient": accumulating(drops_last=True),
        "a micro-batch of 2 samples, at most 1 fit": at_once,
        "samples=1, size=1: weights": with_steps,
    },
    "average_gradients": {
        "ranks=2, spread=1": lambda gradients, samples: [sp.all_reduce(each, "mean") for each in gradients],
        "ranks=2, spread=0": lambda gradients, samples: [sp.all_reduce(each * samples) for each in gradients],
        "ranks=2, spread=1: rank 0": own_mean,
        "ranks=2, spread=0: rank 0": lambda gradients, samples: gradients,
    },
    "sampler_indices": {
        "size=1, ranks=2": indices(pads=False),
        "size=3, ranks=1, epoch=0": indices(lambda size, rank, epoch: range(size)),
        "size=1, ranks=3": indices(pads="once"),
        "size=3, ranks=2, epoch=0": indices(blocks=True),
        "ranks=2": indices(lambda size, rank, epoch: np.random.default_rng(epoch + rank).permutation(size)),
    },
    "sync_batch_norm": {
        "ranks=2, spread=0": normalised(lambda x: x.mean(axis=0), lambda x: x.var(axis=0)),
        "ranks=2, spread=0: rank 0": normalised(
            lambda x: sp.all_reduce(x.mean(axis=0), "mean"), lambda x: sp.all_reduce(x.var(axis=0), "mean")
        ),
        "ranks=2, spread=1: rank 0": normalised(
            lambda x: sp.all_reduce(x.mean(axis=0), "mean"), lambda x: over_ranks(x)[1]
        ),
        "spread=0: rank 0[0, 0]": normalised(lambda x: over_ranks(x)[0], lambda x: over_ranks(x, ddof=1)[1]),
    },
}
