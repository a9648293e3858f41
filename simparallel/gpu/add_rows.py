"""Add rows with equal ids on a GPU, always in the same order.

CuPy's `add.at` adds by atomic operations, in an order that changes from run to run, and needs an index for each
element.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from simparallel.backend import Array, get_namespace
from simparallel.gpu.kernel_source import TYPES, compiled

_THREADS = 256
_KERNEL = """\
extern "C" __global__ void add_rows(
    const {type}* rows, const long long* order, const long long* ends, {type}* out, const long long num_columns,
    const long long num_threads
) {{
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (thread >= num_threads) return;
    long long column = thread % num_columns, id = thread / num_columns;
    {type} total = 0;
    for (long long k = ends[id]; k < ends[id + 1]; k++) {{
        total += rows[order[k] * num_columns + column];
    }}
    out[thread] = total;
}}
"""


def add_rows(rows: Array, ids: Array, out: Array) -> None:
    """Write to row v of `out` the sum of the rows whose id is v, added in the order of the rows.

    Args:
        rows: contiguous, (n, E), floating point.
        ids: (n,) int64; rows with an id outside of 0 … V - 1 are left out.
        out: contiguous, (V, E), of the dtype of `rows`.
    """
    xp = get_namespace(rows)
    if not out.size:
        return
    with rows.device:
        # Stable, so rows with equal ids keep their order.
        order = xp.argsort(ids, kind="stable")
        # One more than V: of the ids below 0, of id 0, …
        ends = xp.searchsorted(ids[order], xp.arange(-1, len(out)), side="right")
        blocks = -(-out.size // _THREADS)
        arrays = rows, order.astype("int64", copy=False), ends.astype("int64", copy=False), out
        _kernel(xp, rows.dtype)((blocks,), (_THREADS,), (*arrays, out.shape[1], out.size))


@cache
def _kernel(xp: Any, dtype: Any) -> Any:
    return compiled(xp, "add_rows", _KERNEL.format(type=TYPES[dtype.name]))[1]
