"""Functions of the elements of matrices and of numbers of their columns on a GPU, and sums of these over the rows.

CuPy's own sum over rows occupies one multiprocessor for 32 columns, and its elementwise kernels divide integers for
each element to find its column, which takes longer than to read it. Here each thread computes some rows of a column.
Further rounds sum the results of the threads in the same way, so that errors stay small and the order is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from math import prod
from typing import Any

from simparallel.arrays.cuda.kernel_source import TYPES, KernelSource, Number, Variable, compiled, itself
from simparallel.backend import Array, get_namespace, kernel_name_of

_THREADS = 256
# Rows that a thread sums: few enough to occupy all multiprocessors with some 100,000 elements.
_ROWS = 64
# Rows of a map, in which a thread also computes what depends on the column alone.
_MAPPED_ROWS = 16
_KERNEL = """\
extern "C" __global__ void {name}(
    {parameters}const long long num_rows, const long long num_columns, const long long num_lanes,
    const long long num_threads
) {{
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (thread >= num_threads) return;
    long long column = thread % num_columns, lane = thread / num_columns % num_lanes;
    long long matrix = thread / num_columns / num_lanes;
    {totals}
    #pragma unroll 4
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
    kernel = _kernel(xp, compute, dtype, len(arrays), (True,) * len(inputs))
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
            kernel.start([*inputs, totals], num_rows, num_columns, num_lanes, num_threads)
            if is_last:
                return totals.reshape(num_results, *stack, num_columns)
            inputs, num_rows, kernel = [totals], num_lanes, _kernel(xp, itself, dtype, 1, (True,))


def row_map(compute: Callable[..., None], arrays: Sequence[Any], columns: Sequence[Any], *numbers: float) -> None:
    """Call `compute(xp, *arrays, *columns, *numbers)`, which changes arrays in place.

    Args:
        compute: a module-level function of elements, see `kernel_source`.
        arrays: contiguous, of one shape (M, N) and one dtype; any but the first may be None. What changes
            shares no memory with the others.
        columns: contiguous, of shape (N,) and that dtype, or None.
        numbers: the same for all elements.
    """
    first, (num_rows, num_columns) = arrays[0], arrays[0].shape
    present = tuple(x is not None for x in (*arrays, *columns))
    kernel = _kernel(get_namespace(first), compute, first.dtype, len(arrays), present, len(numbers))
    given = [*(x for x in (*arrays, *columns) if x is not None), *map(float, numbers)]
    num_lanes = max(1, -(-num_rows // _MAPPED_ROWS))
    with first.device:
        kernel.start(given, num_rows, num_columns, num_lanes, num_lanes * num_columns)


class RowKernel:
    """The kernel of a map, or of one round of sums.

    Args:
        xp: cupy or a stand-in.
        compute: the function.
        dtype: of all arrays.
        num_arrays: number of arrays; columns follow them.
        present: whether each array and each column is there.
        num_numbers: number of numbers after them.

    Attributes:
        source: its CUDA source.
        num_results: number of results of the function, which are summed.
    """

    def __init__(
        self, xp: Any, compute: Callable[..., Any], dtype: Any, num_arrays: int, present: Sequence[bool],
        num_numbers: int = 0,
    ) -> None:  # fmt: skip
        source, name, kind = KernelSource(), kernel_name_of(compute.__name__), TYPES[dtype.name]
        variables = {
            f"a{k}": source.variable(f"a{k}[{'i' if k < num_arrays else 'column'}]", dtype) if is_present else None
            for k, is_present in enumerate(present)
        }
        numbers = [f"n{k}" for k in range(num_numbers)]
        found = compute(source, *variables.values(), *map(Number, numbers))
        results = [found] if isinstance(found, Variable) else list(found or ())
        self.num_results = len(results)
        changed = {a: v.name for a, v in variables.items() if v is not None and v.name in source.changed}
        pointers = [f"{'' if a in changed else 'const '}{kind}* __restrict__ {a}" for a, v in variables.items() if v]
        parameters = [*pointers, *(f"const double {n}" for n in numbers), *[f"{kind}* totals"] * bool(results)]
        adds = [f"total{k} += {result.name};" for k, result in enumerate(results)]
        writes = [f"{a}[i] = {v};" for a, v in changed.items()]
        code = _KERNEL.format(
            name=name, parameters="".join(f"{parameter}, " for parameter in parameters),
            totals=" ".join(f"{kind} total{k} = 0;" for k in range(len(results))),
            statements="\n        ".join([*source.statements, *writes, *adds]),
            stores=" ".join(f"totals[{k} * num_threads + thread] = total{k};" for k in range(len(results))),
        )  # fmt: skip
        self.source, self._start = compiled(xp, name, code)

    def start(self, given: Sequence[Any], num_rows: int, num_columns: int, num_lanes: int, num_threads: int) -> None:
        """Start it with arrays and numbers, unless there are no elements."""
        if num_threads:
            grid, sizes = (-(-num_threads // _THREADS),), (num_rows, num_columns, num_lanes, num_threads)
            self._start(grid, (_THREADS,), (*given, *sizes))


_kernel = cache(RowKernel)
