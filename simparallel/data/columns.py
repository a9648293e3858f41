"""Columns of several samples: stacked if all samples have one shape, else a list of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tensor import as_array
from simparallel.backend import to_host
from simparallel.base.units import format_type_of
from simparallel.data.transforms import Transform
from simparallel.errors import InputError, ShapeError

Column = np.ndarray | list[np.ndarray]
Columns = dict[str, Column]
Operation = Callable[..., Any]


def map_columns(
    operations: Sequence[Operation],
    values: list[Column],
    index: np.ndarray,
    epoch: np.ndarray,
    *,
    is_one_row: bool,
    names: Sequence[str],
) -> list[Column]:
    """Apply operations, one after the other, to some columns.

    Args:
        operations: Transforms, which take one column as a batch; and functions of one row, which return
            an array or a tuple of arrays.
        values: the columns.
        index: number of each sample in its dataset.
        epoch: the epoch of each sample.
        is_one_row: the samples form a batch, so a function gets them as one row.
        names: column names, for messages.

    Raises:
        InputError: a Transform of several columns, rows of different lengths, or a function that returns something
            other than arrays.
    """
    for operation in operations:
        if isinstance(operation, Transform):
            if len(values) != 1:
                name = type(operation).__name__
                raise InputError(f"map: {name} takes one column, not {len(values)}; map each column separately.")
            values = [_transform(operation, values[0], index, epoch)]
            continue
        called = getattr(operation, "__name__", type(operation).__name__)
        who = f"map: what {called} returns for column {', '.join(names)}"
        if is_one_row:
            values = list(_fields(operation(*values), who))
        else:
            rows = [_fields(operation(*row), who) for row in zip(*values, strict=True)]
            values = columns_of(rows)
    return values


def columns_of(rows: Sequence[tuple[np.ndarray, ...]]) -> list[Column]:
    """Turn rows of fields into columns.

    Raises:
        InputError: rows have different numbers of fields.
    """
    counts = sorted({len(row) for row in rows})
    if len(counts) > 1:
        raise InputError(f"samples have {counts} fields, all must have the same number.")
    return [_stacked(field) for field in zip(*rows, strict=True)]


def fields_of(sample: Any, who: str) -> tuple[np.ndarray, ...]:
    """Convert a sample (a tuple or list of fields, or a single one) to arrays. Python floats become float32.

    Raises:
        InputError: (its text begins with `who`) a field is neither an array nor a number.
    """
    return _fields(tuple(sample) if isinstance(sample, list) else sample, who)


def whole(columns: Columns) -> Columns:
    """Return the columns if all are stacked, as a batch needs.

    Raises:
        ShapeError: samples have different shapes or dtypes.
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
    if isinstance(values, list) or operation.is_ragged:
        # Shapes differ by sample: call the transform with batches of one.
        rows = enumerate(zip(values, epoch.tolist(), strict=True))
        return _stacked([operation(value[None], index[i : i + 1], number)[0] for i, (value, number) in rows])
    first = int(epoch[0])
    if (epoch == first).all():
        return operation(values, index, first)
    # The batch spans two epochs: transform each epoch's samples with that epoch's random numbers.
    parts = [
        (rows := epoch == number, operation(values[rows], index[rows], int(number))) for number in np.unique(epoch)
    ]
    result = np.empty((len(values), *parts[0][1].shape[1:]), parts[0][1].dtype)
    for rows, part in parts:
        result[rows] = part
    return result


def _fields(result: Any, who: str) -> tuple[np.ndarray, ...]:
    if isinstance(result, tuple):
        return tuple(_array(field, who, i) for i, field in enumerate(result))
    return (_array(result, who),)


def _array(value: Any, who: str, i: int | None = None) -> np.ndarray:
    if isinstance(value, np.ndarray):
        if value.dtype.kind != "O":
            return value
    else:
        try:
            # Not through a Tensor, which would be on the GPU of a rank that has one.
            return value.numpy() if isinstance(value, Tensor) else to_host(as_array(value))
        except ValueError:
            # Python objects, or a list of lists of different lengths.
            pass
    which = "" if i is None else f", field {i},"
    missing = " Its `return` may be missing." if value is None else ""
    raise InputError(
        f"{who}{which} is {format_type_of(value)}; expected an array, a number, or a tuple of these.{missing}"
    )


def _stacked(values: Sequence[np.ndarray]) -> Column:
    """Stack the samples of a column, always into new arrays, so that a function may work in place."""
    same = len({(value.shape, value.dtype) for value in values}) == 1
    return np.stack(values) if same else [value.copy() for value in values]
