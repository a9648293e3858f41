"""Wrong answers to the exercises on slicing: exercise -> a part of the text about the failing case -> answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import simparallel as sp


def slices(
    order: str = "C", from_left: bool = False, innermost_first: bool = False, cuts_on_none: bool = False
) -> Callable[..., list[tuple[int, int]]]:
    """Return an answer with one of these mistakes."""

    def answer(rank, device_matrix, tensor_map, shape):
        place = np.unravel_index(rank, device_matrix, order)
        found = []
        for size, entry in zip(shape, tensor_map, strict=True):
            axes = entry if isinstance(entry, tuple) else (entry,)
            count, number = 1, 0
            for axis in axes[::-1] if innermost_first else axes:
                if axis >= 0 or cuts_on_none:
                    index = axis if from_left or axis < 0 else len(device_matrix) - 1 - axis
                    count, number = count * device_matrix[index], number * device_matrix[index] + place[index]
            found.append((size * number // count, size * (number + 1) // count))
        return found

    return answer


def gathered(x, w, b):
    """Gather the inputs, and compute everything on every rank."""
    columns = np.concatenate(np.asarray(sp.all_gather(x.T)).reshape(-1, x.shape[1], x.shape[0])).T
    rows = np.asarray(sp.all_gather(w)).reshape(-1, w.shape[1])
    return columns @ rows + b


def on_rank_0(x, w, b):
    y = sp.reduce(x @ w, 0)
    return y + b if sp.get_rank() == 0 else x @ w + b


def cross_entropy(shift=True, whole=True, counts_from_0=False):
    """Return an answer with one of these mistakes."""

    def answer(logits, labels, first):
        if shift:
            top = logits.max(axis=1)
            logits = logits - (np.asarray(sp.all_reduce(top, "max")) if whole else top)[:, None]
        column = labels if counts_from_0 else labels - first
        is_own = (column >= 0) & (column < logits.shape[1])
        of_label = np.where(is_own, logits[np.arange(len(labels)), np.where(is_own, column, 0)], 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            total, of_label = sp.all_reduce(np.stack([np.exp(logits).sum(axis=1), of_label]))
            return np.mean(np.log(total) - of_label)

    return answer


def whole_rows(logits, labels, first):
    """Gather the logits."""
    whole = np.asarray(sp.all_gather(logits.T.copy(), uneven=True)).T
    shifted = whole - whole.max(axis=1, keepdims=True)
    return np.mean(np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels])


WRONG = {
    "slice_of": {
        "cut=((2, 2), (1, 0)), size=1: rank 1[0, 0] is 1, expected 0": slices(order="F"),
        "cut=((2, 2), (1, 0)), size=1: rank 1[0, 0] is 1": slices(from_left=True),
        "cut=((2, 3), ((1, 0),)), size=1: rank 1[0, 0] is 2, expected 1": slices(innermost_first=True),
        "cut=((2,), (-1,)), size=1: rank 0[0, 1] is 0, expected 1": slices(cuts_on_none=True),
    },
    "row_parallel_linear": {
        "ranks=2, rows=1, columns=1, inner=1: rank 0[0, 0]": lambda x, w, b: sp.all_reduce(x @ w + b),
        "rank 1[0, 0]": on_rank_0,
        "are enough": gathered,
        "ranks=1, rows=1, columns=1, inner=1: rank 0[0, 0]": lambda x, w, b: sp.all_reduce(x @ w),
    },
    "vocabulary_parallel_cross_entropy": {
        "ranks=1, rows=1, columns=4, large=1000: rank 0 is inf": cross_entropy(shift=False),
        "ranks=2, rows=1, columns=4, large=0: rank 0 is": cross_entropy(whole=False),
        "ranks=2, rows=1, columns=4, large=0: rank 0": cross_entropy(counts_from_0=True),
        "columns=9, large=0: the ranks send": whole_rows,
    },
}
