"""Add rows with equal ids on a GPU, always in the same order.

CuPy's `add.at` adds by atomic operations, in an order that changes from run to run.
"""

from __future__ import annotations

from functools import cache, reduce
from math import prod
from operator import add
from typing import Any

from simparallel.arrays.cuda.kernel_source import TYPES, compiled
from simparallel.backend import Array, get_namespace

_THREADS = 256
_KERNEL = """\
extern "C" __global__ void add_rows(
    const {type}* rows, const long long* ids, const long long* order, {type}* out, const long long num_rows,
    const long long num_columns, const long long num_ids
) {{
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    long long first = thread / num_columns, column = thread % num_columns;
    if (first >= num_rows) return;
    // The thread of the first row with an id adds all of them.
    long long id = ids[order[first]];
    if (id < 0 || id >= num_ids || (first > 0 && ids[order[first - 1]] == id)) return;
    {type} total = out[id * num_columns + column];
    for (long long k = first; k < num_rows && ids[order[k]] == id; k++) {{
        total += rows[order[k] * num_columns + column];
    }}
    out[id * num_columns + column] = total;
}}
"""


def add_rows(rows: Array, ids: Array, out: Array) -> None:
    """Add each row to the row of `out` that its id names, in the order of the rows.

    Args:
        rows: contiguous, (n, E), floating point or int64.
        ids: (n,) int64; rows with an id outside of 0 … V - 1 are left out.
        out: contiguous, (V, E), of the dtype of `rows`.
    """
    xp = get_namespace(rows)
    assert rows.dtype == out.dtype
    if not rows.size:
        return
    with rows.device:
        # Stable, so rows with equal ids keep their order.
        order = xp.argsort(ids, kind="stable").astype("int64", copy=False)
        sizes = *rows.shape, len(out)
        _kernel(xp, rows.dtype)((-(-rows.size // _THREADS),), (_THREADS,), (rows, ids, order, out, *sizes))


@cache
def _kernel(xp: Any, dtype: Any) -> Any:
    return compiled(xp, "add_rows", _KERNEL.format(type={**TYPES, "int64": "long long"}[dtype.name]))[1]


def add_at(xp: Any, total: Array, key: tuple[Any, ...], values: Array) -> None:
    """Compute total[key] += values, see `HostArrays.add_at`."""
    assert total.flags.c_contiguous
    positions = xp.broadcast_to(_positions(xp, total.shape, key), values.shape).reshape(-1)
    add_rows(xp.ascontiguousarray(values).reshape(-1, 1), positions, total.reshape(-1, 1))


def _positions(xp: Any, shape: tuple[int, ...], key: tuple[Any, ...]) -> Array:
    """Return the position of each selected element in the flat array, in a shape that broadcasts to the selection's."""
    indexed = [dim for dim, item in enumerate(key) if not isinstance(item, slice)]
    whole = [dim for dim in range(len(shape)) if dim not in indexed]
    steps = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    # As in NumPy, the dims of the indices come where neighbouring dims were, else first.
    is_together = indexed == list(range(indexed[0], indexed[0] + len(indexed)))
    num_before, num_dims = (indexed[0] if is_together else 0), max(key[dim].ndim for dim in indexed)
    parts = []
    for dim in indexed:
        wrapped = key[dim].astype("int64") % max(shape[dim], 1) * steps[dim]
        parts.append(wrapped.reshape((*wrapped.shape, *(1,) * (len(whole) - num_before))))
    for i, dim in enumerate(whole):
        behind = len(whole) - i - 1 + (num_dims if i < num_before else 0)
        parts.append((xp.arange(shape[dim]) * steps[dim]).reshape((-1, *(1,) * behind)))
    return reduce(add, parts)
