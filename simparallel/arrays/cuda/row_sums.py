"""Sums over the rows of matrices on a GPU, of elements that a function computes on the way.

CuPy's own sum over rows occupies one multiprocessor for 32 columns. Here each thread sums some rows of a column, and
further rounds sum the results of the threads in the same way, so that errors stay small and the order is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

from simparallel.arrays.cuda.kernel_source import TYPES, KernelSource, Variable, compiled, itself
from simparallel.backend import Array, get_namespace, kernel_name_of

_THREADS = 256
# Rows that a thread sums: few enough to occupy all multiprocessors with some 100,000 elements.
_ROWS = 64
_KERNEL = """\
extern "C" __global__ void {name}(
    {parameters}{type}* totals, const long long num_rows, const long long num_columns, const long long num_lanes,
    const long long num_threads
) {{
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (thread >= num_threads) return;
    long long column = thread % num_columns, lane = thread / num_columns % num_lanes;
    long long matrix = thread / num_columns / num_lanes;
    {totals}
    for (long long row = lane; row < num_rows; row += num_lanes) {{
        long long i = (matrix * num_rows + row) * num_columns + column;
        {statements}
    }}
    {stores}
}}
"""


def row_sums(
    compute: Callable[..., Any], arrays: Sequence[Array], columns: Sequence[Array] = (), out: Array | None = None
) -> Array:
    """Return the sums over the rows of `compute(xp, *arrays, *columns)`, without a wait.

    Args:
        compute: a module-level function of elements, which returns one or several, see `kernel_source`.
        arrays: contiguous, of one shape (..., M, N) and one dtype.
        columns: contiguous, of shape (N,) and that dtype: elements that belong to a column.
        out: receives the sums, (results, ..., N), contiguous and of the same dtype.

    Returns:
        The sums, in `out` or new memory.
    """
    xp, (*stack, num_rows, num_columns), dtype = get_namespace(arrays[0]), arrays[0].shape, arrays[0].dtype
    num_matrices, inputs = prod(stack), [*arrays, *columns]
    kernel = _kernel(xp, compute, dtype, len(arrays), len(columns))
    num_results = kernel.num_results
    assert out is None or out.dtype == dtype
    with arrays[0].device:
        while True:
            num_lanes = max(1, -(-num_rows // _ROWS))
            num_threads = num_matrices * num_lanes * num_columns
            num_matrices *= kernel.num_results
            is_last = num_lanes == 1
            shape = (num_matrices, num_columns) if is_last else (num_matrices, num_lanes, num_columns)
            totals = xp.empty(shape, dtype) if out is None or not is_last else out
            if num_threads:
                sizes = num_rows, num_columns, num_lanes, num_threads
                kernel.start((-(-num_threads // _THREADS),), (_THREADS,), (*inputs, totals, *sizes))
            if is_last:
                return totals.reshape(num_results, *stack, num_columns)
            inputs, num_rows, kernel = [totals], num_lanes, _kernel(xp, itself, dtype, 1, 0)


class RowSumKernel:
    """The kernel of one round.

    Attributes:
        source: its CUDA source.
        num_results: number of results of the function.
        start: a function that starts it.
    """

    def __init__(self, xp: Any, compute: Callable[..., Any], dtype: Any, num_arrays: int, num_columns: int) -> None:
        source, name, kind = KernelSource(), kernel_name_of(compute.__name__), TYPES[dtype.name]
        places = [*["i"] * num_arrays, *["column"] * num_columns]
        variables = [source.variable(f"a{k}[{place}]", dtype) for k, place in enumerate(places)]
        found = compute(source, *variables)
        results = [found] if isinstance(found, Variable) else list(found)
        self.num_results = len(results)
        code = _KERNEL.format(
            name=name, type=kind, parameters="".join(f"const {kind}* a{k}, " for k in range(len(places))),
            totals=" ".join(f"{kind} total{k} = 0;" for k in range(len(results))),
            statements="\n        ".join(
                [*source.statements, *(f"total{k} += {result.name};" for k, result in enumerate(results))]
            ),
            stores=" ".join(f"totals[{k} * num_threads + thread] = total{k};" for k in range(len(results))),
        )  # fmt: skip
        self.source, self.start = compiled(xp, name, code)


_kernel = cache(RowSumKernel)
