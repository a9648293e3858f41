"""Solutions to the exercises of the lesson on slicing tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

import simparallel as sp


def slice_of(
    rank: int, device_matrix: Sequence[int], tensor_map: Sequence[int | tuple[int, ...]], shape: Sequence[int]
) -> list[tuple[int, int]]:
    """Exercise 1: the coordinates of the axes of a dim are the digits of the number of the slice."""
    place = np.unravel_index(rank, device_matrix)
    slices = []
    for size, entry in zip(shape, tensor_map, strict=True):
        count, number = 1, 0
        for axis in entry if isinstance(entry, tuple) else (entry,):
            if axis >= 0:
                from_left = len(device_matrix) - 1 - axis
                count *= device_matrix[from_left]
                number = number * device_matrix[from_left] + int(place[from_left])
        slices.append((size // count * number, size // count * (number + 1)))
    return slices


def row_parallel_linear(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Exercise 2: add the bias after the sum."""
    return np.asarray(sp.all_reduce(x @ w)) + b


def vocabulary_parallel_cross_entropy(logits: np.ndarray, labels: np.ndarray, first: int) -> float:
    """Exercise 3: the maximum of each row first, then the sum of exponentials and the logit of the label together."""
    logits = logits - np.asarray(sp.all_reduce(logits.max(axis=1), "max"))[:, None]
    column = labels - first
    is_own = (column >= 0) & (column < logits.shape[1])
    rows = np.arange(len(labels))
    of_label = np.where(is_own, logits[rows, np.where(is_own, column, 0)], 0.0)
    total, of_label = sp.all_reduce(np.stack([np.exp(logits).sum(axis=1), of_label]))
    return float(np.mean(np.log(total) - of_label))
