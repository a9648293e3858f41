"""Columns of a stretch of samples: stacked where the samples have one shape, else a list of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.data.transforms import Transform
from simparallel.errors import InputError, ShapeError

Column = np.ndarray | list[np.ndarray]
Columns = dict[str, Column]
Operation = Callable[..., Any]


def map_columns(
    operations: Sequence[Operation], values: list[Column], index: np.ndarray, epoch: np.ndarray, *,
    is_one_row: bool,
) -> list[Column]:  # fmt: skip
    """What the operations, one after the other, make of some columns.

    Args:
        operations: Transforms, which take one column as a batch; and functions of one row, which give
            an array or a tuple of arrays.
        values: the columns.
        index: number of each sample in its dataset.
        epoch: the epoch of each sample.
        is_one_row: the samples are a batch, which is one row to a function.

    Raises:
        InputError: a Transform of several columns, or rows of different lengths.
    """
    for operation in operations:
        if isinstance(operation, Transform):
            if len(values) != 1:
                name = type(operation).__name__
                raise InputError(f"map: {name} takes one column, not {len(values)}; map them one by one.")
            values = [_transform(operation, values[0], index, epoch)]
        elif is_one_row:
            values = list(_fields(operation(*values)))
        else:
            rows = [_fields(operation(*row)) for row in zip(*values, strict=True)]
            values = columns_of(rows)
    return values


def columns_of(rows: Sequence[tuple[np.ndarray, ...]]) -> list[Column]:
    """Rows of fields as columns.

    Raises:
        InputError: rows with different numbers of fields.
    """
    counts = sorted({len(row) for row in rows})
    if len(counts) > 1:
        raise InputError(f"samples have {counts} fields, need the same number in each.")
    return [_stacked(field) for field in zip(*rows, strict=True)]


def fields_of(sample: Any) -> tuple[np.ndarray, ...]:
    """A sample, a tuple or list of fields or a single one, as arrays. Python floats become float32."""
    return (
        tuple(_array(field) for field in sample) if isinstance(sample, (tuple, list)) else (_array(sample),)
    )


def whole(columns: Columns) -> Columns:
    """All columns stacked, as a batch.

    Raises:
        ShapeError: samples of different shapes or dtypes.
    """
    for name, values in columns.items():
        if isinstance(values, list):
            kinds = [f"{value.shape} {value.dtype}" for value in values]
            other = next(i for i, kind in enumerate(kinds) if kind != kinds[0])
            raise ShapeError(
                f"batch: column {name!r} has {kinds[0]} in sample 0 and {kinds[other]} in sample {other} of a "
                "batch; bring them to one shape before, for example with Resize."
            )
    return columns


def _transform(operation: Transform, values: Column, index: np.ndarray, epoch: np.ndarray) -> Column:
    if isinstance(values, list):
        rows = enumerate(zip(values, epoch.tolist(), strict=True))
        return _stacked([operation(value[None], index[i : i + 1], number)[0] for i, (value, number) in rows])
    first = int(epoch[0])
    if (epoch == first).all():
        return operation(values, index, first)
    # A batch across the end of an epoch: each sample gets the random numbers of its own.
    parts = [
        (rows := epoch == number, operation(values[rows], index[rows], int(number)))
        for number in np.unique(epoch)
    ]
    result = np.empty((len(values), *parts[0][1].shape[1:]), parts[0][1].dtype)
    for rows, part in parts:
        result[rows] = part
    return result


def _fields(result: Any) -> tuple[np.ndarray, ...]:
    return tuple(_array(field) for field in result) if isinstance(result, tuple) else (_array(result),)


def _array(value: Any) -> np.ndarray:
    return value if isinstance(value, np.ndarray) else Tensor(value).numpy()


def _stacked(values: Sequence[np.ndarray]) -> Column:
    same = len({(value.shape, value.dtype) for value in values}) == 1
    return np.stack(values) if same else list(values)
