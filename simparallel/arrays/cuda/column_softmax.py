"""The softmax of matrices over their rows, and its gradient, on a GPU: one kernel each, in place.

A block has 32 columns, so that its threads read whole lines of memory. It reads its columns several times; from the
second time on they come from the cache of the GPU.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from simparallel.arrays.cuda.kernel_source import TYPES, compiled
from simparallel.backend import Array, get_namespace

_COLUMNS, _LANES = 32, 32
# Each result of `lanes` is that of a column, for all of its threads, in a fixed order.
_HEAD = """\
template <class T> __device__ T lanes(T* parts, T own, const bool is_sum) {{
    __syncthreads();
    parts[threadIdx.x] = own;
    for (int width = {lanes} / 2; width > 0; width /= 2) {{
        __syncthreads();
        if (threadIdx.x < width * {columns}) {{
            T other = parts[threadIdx.x + width * {columns}];
            parts[threadIdx.x] = is_sum ? parts[threadIdx.x] + other : maximum(parts[threadIdx.x], other);
        }}
    }}
    __syncthreads();
    return parts[threadIdx.x % {columns}];
}}

extern "C" __global__ void __launch_bounds__({columns} * {lanes}) {name}(
    {type}* x, {others}const long long num_rows, const long long num_columns, const long long num_all
) {{
    __shared__ {type} parts[{columns} * {lanes}];
    long long all = blockIdx.x * (long long){columns} + threadIdx.x % {columns}, lane = threadIdx.x / {columns};
    long long column = all % num_columns, first = all / num_columns * num_rows * num_columns + column;
    // Threads beyond the last column have no rows, but wait for the others.
    long long stop = all < num_all ? num_rows : 0;
"""
_SOFTMAX = """\
    long long seen = stop < column + 1 + shift ? stop : column + 1 + shift;
    {type} largest = lowest, total = 0;
    for (long long row = lane; row < seen; row += {lanes}) {{
        largest = maximum(largest, x[first + row * num_columns]);
    }}
    largest = lanes(parts, largest, false);
    for (long long row = lane; row < seen; row += {lanes}) {{
        total += exp(x[first + row * num_columns] - largest);
    }}
    total = lanes(parts, total, true);
    {type} factor = 1 / (total == 0 ? 1 : total);
    for (long long row = lane; row < stop; row += {lanes}) {{
        {type}* at = x + first + row * num_columns;
        *at = row < seen ? exp(*at - largest) * factor : 0;
    }}
}}
"""
_GRADIENT = """\
    {type} total = 0;
    for (long long row = lane; row < stop; row += {lanes}) {{
        total += x[first + row * num_columns] * p[first + row * num_columns];
    }}
    total = lanes(parts, total, true);
    for (long long row = lane; row < stop; row += {lanes}) {{
        {type}* at = x + first + row * num_columns;
        *at = (*at - total) * p[first + row * num_columns];
    }}
}}
"""


def softmax(x: Array, first: int | None, lowest: float) -> None:
    """Replace x by its softmax over the rows, see `HostArrays.column_softmax`.

    Args:
        x: contiguous, (..., s, t), float32 or float64.
        first: column i has the rows 0 … first + i, and 0 in the others; None for all rows.
        lowest: the least maximum of a column.
    """
    _start(x, (), "softmax", _SOFTMAX, (x.shape[-2] if first is None else first, lowest))


def gradient(dp: Array, p: Array) -> None:
    """Replace dp by p (dp - d), where d is the sum of dp p over the rows; both contiguous, of one shape and dtype."""
    _start(dp, (p,), "softmax_gradient", _GRADIENT, ())


def _start(x: Array, others: tuple[Array, ...], name: str, body: str, numbers: tuple[float, ...]) -> None:
    num_rows, num_columns = x.shape[-2:]
    if not x.size:
        return
    num_all, kernel = x.size // num_rows, _kernel(get_namespace(x), x.dtype, name, body)
    with x.device:
        sizes = num_rows, num_columns, num_all
        kernel((-(-num_all // _COLUMNS),), (_COLUMNS * _LANES,), (x, *others, *numbers, *sizes))


@cache
def _kernel(xp: Any, dtype: Any, name: str, body: str) -> Any:
    kind = TYPES[dtype.name]
    others = "const long long shift, const double lowest, " if body is _SOFTMAX else f"const {kind}* p, "
    settings = {"type": kind, "name": name, "others": others, "columns": _COLUMNS, "lanes": _LANES}
    return compiled(xp, name, (_HEAD + body).format(**settings))[1]
