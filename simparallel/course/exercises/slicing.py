"""Exercises of lesson 4: slicing tensors."""

from __future__ import annotations

from math import prod

import numpy as np

from simparallel.course.exercises.exercise import Case, by_rank, call_case, exercise, frugal_case, integers
from simparallel.layout.layout import Layout

# (device matrix, tensor map), the smallest first.
CUTS: tuple[tuple[tuple[int, ...], tuple[int | tuple[int, ...], ...]], ...] = (
    ((1,), (-1,)),
    ((2,), (0,)),
    ((2,), (-1,)),
    ((3,), (-1, 0)),
    ((2, 2), (1, 0)),
    ((2, 2), (0, 1)),
    ((2, 3), (0, -1)),
    ((2, 3), (1, 0)),
    ((2, 3), ((1, 0),)),
    ((2, 3), ((0, 1), -1)),
    ((2, 4, 1), (2, 1)),
    ((2, 2, 2), (0, (1, 2))),
    ((2, 3, 2), ((0, 2, 1), -1)),
)


@exercise(lesson=4, cut=CUTS, size=(1, 3))
def slice_of(cut: tuple[tuple[int, ...], tuple[int | tuple[int, ...], ...]], size: int) -> Case:
    """Return (start, stop) of each dim of a rank's slice, from a device matrix and a tensor map."""
    device_matrix, tensor_map = cut
    # Axis i is called "i", counted from the right as in the tensor map.
    names = tuple(str(i) for i in reversed(range(len(device_matrix))))
    axes = [entry if isinstance(entry, tuple) else (entry,) for entry in tensor_map]
    layout = Layout(device_matrix, names)(*(tuple(str(axis) for axis in dim if axis >= 0) or "None" for dim in axes))
    shape = tuple(size * count for count in layout.cuts)
    ranks = range(prod(device_matrix))
    slices = [[(part.start, part.stop) for part in layout.slices(rank, shape)] for rank in ranks]
    given = {"device matrix": device_matrix, "tensor map": [str(entry) for entry in tensor_map], "shape": shape}
    calls = [(rank, device_matrix, tensor_map, shape) for rank in ranks]
    return call_case(given, by_rank(slices), calls=calls, form=list)


@exercise(lesson=4, ranks=range(1, 5), rows=range(1, 4), columns=range(1, 3), inner=(1, 3))
def row_parallel_linear(ranks: int, rows: int, columns: int, inner: int) -> Case:
    """Return the sum of x @ w over all ranks, plus b once, on every rank."""
    x, w, b = integers(rows, ranks * inner), integers(ranks * inner, columns), integers(columns) + 10
    parts = list(zip(np.split(x, ranks, axis=1), np.split(w, ranks), strict=True))
    given = {"b": b}
    for rank, (x_part, w_part) in enumerate(parts):
        given |= {f"x of rank {rank}": x_part, f"w of rank {rank}": w_part}
    inputs = [(x_part, w_part, b) for x_part, w_part in parts]
    return frugal_case(given, [x @ w + b] * ranks, inputs, count=rows * columns)


@exercise(lesson=4, ranks=range(1, 5), rows=range(1, 4), columns=(4, 9), large=(0, 1000))
def vocabulary_parallel_cross_entropy(ranks: int, rows: int, columns: int, large: int) -> Case:
    """Return the mean cross-entropy of rows whose columns are cut over the ranks, on every rank."""
    logits = integers(rows, columns) / 4 + large
    labels = np.arange(rows) * 5 % columns
    shifted = logits - logits.max(axis=1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(rows), labels]
    parts = np.array_split(np.arange(columns), ranks)
    given = {"labels": labels} | {f"columns from {part[0]}": logits[:, part] for part in parts}
    inputs = [(logits[:, part], labels, int(part[0])) for part in parts]
    return frugal_case(given, [losses.mean()] * ranks, inputs, count=3 * rows)
