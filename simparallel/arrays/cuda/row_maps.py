"""Functions of the elements of matrices, and of numbers that belong to a column, on a GPU.

CuPy's own kernels divide integers for each element to find its column, which takes longer than to read it. Here each
thread computes some rows of a column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from simparallel.arrays.cuda.kernel_source import TYPES, KernelSource, Number, compiled
from simparallel.backend import Array, get_namespace, kernel_name_of

_THREADS = 256
# Rows of a thread, which shares what depends on the column alone.
_ROWS = 16
_KERNEL = """\
extern "C" __global__ void {name}(
    {parameters}const long long num_rows, const long long num_columns, const long long num_lanes
) {{
    long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    long long column = thread % num_columns, lane = thread / num_columns;
    if (lane >= num_lanes) return;
    #pragma unroll 4
    for (long long row = lane; row < num_rows; row += num_lanes) {{
        long long i = row * num_columns + column;
        {statements}
    }}
}}
"""


def row_map(
    compute: Callable[..., None], arrays: Sequence[Array | None], columns: Sequence[Array | None], *numbers: float
) -> None:
    """Call `compute(xp, *arrays, *columns, *numbers)`, which changes arrays in place, see `kernel_source`.

    Args:
        compute: a module-level function of elements.
        arrays: contiguous, of one shape (M, N) and one dtype; not the first, but others may be None.
        columns: contiguous, of shape (N,) and that dtype, or None.
        numbers: the same for all elements.
    """
    first, given = arrays[0], [x for x in (*arrays, *columns) if x is not None]
    assert first is not None
    (num_rows, num_columns), present = first.shape, tuple(x is not None for x in (*arrays, *columns))
    kernel = _kernel(get_namespace(first), compute, first.dtype, len(arrays), present, len(numbers))
    num_lanes = -(-num_rows // _ROWS)
    if first.size:
        with first.device:
            sizes = num_rows, num_columns, num_lanes
            grid = (-(-num_lanes * num_columns // _THREADS),)
            kernel(grid, (_THREADS,), (*given, *map(float, numbers), *sizes))


@cache
def _kernel(
    xp: Any, compute: Callable[..., None], dtype: Any, num_arrays: int, present: tuple[bool, ...], num_numbers: int
) -> Any:
    source, kind, name = KernelSource(), TYPES[dtype.name], kernel_name_of(compute.__name__)
    variables = [
        source.variable(f"a{k}[{'i' if k < num_arrays else 'column'}]", dtype) if is_present else None
        for k, is_present in enumerate(present)
    ]
    compute(source, *variables, *(Number(f"n{k}") for k in range(num_numbers)))
    named = {f"a{k}": variable.name for k, variable in enumerate(variables) if variable is not None}
    changed = {a: v for a, v in named.items() if v in source.changed}
    parameters = [f"{'' if a in changed else 'const '}{kind}* __restrict__ {a}" for a in named]
    parameters += [f"const double n{k}" for k in range(num_numbers)]
    code = _KERNEL.format(
        name=name, parameters="".join(f"{parameter}, " for parameter in parameters),
        statements="\n        ".join([*source.statements, *(f"{a}[i] = {v};" for a, v in changed.items())]),
    )  # fmt: skip
    return compiled(xp, name, code)[1]
