"""The stand-in for cuBLAS: the functions that `arrays.cuda.products` calls, for memory of the stand-in's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from stand_in import strict_cuda

_DTYPES = {0: np.float32, 1: np.float64, 2: np.float16}
_streams: dict[int, int] = {}


def cublasSetStream_v2(handle: Any, stream: Any) -> int:
    _streams[handle.value] = stream.value
    return 0


def cublasGemmStridedBatchedEx(
    handle: Any, op_a: int, op_b: int, m: int, n: int, k: int, alpha: Any,
    a: Any, kind_a: int, lead_a: int, step_a: Any, b: Any, kind_b: int, lead_b: int, step_b: Any,
    beta: Any, c: Any, kind_c: int, lead_c: int, step_c: Any, count: int, compute: int, algorithm: int,
) -> int:  # fmt: skip
    """Compute c = op(a) @ op(b) for column-major matrices, `count` times, with steps between them."""
    assert alpha._obj.value == 1
    assert beta._obj.value == 0
    # A leading dim is at least the number of rows of a column-major matrix.
    assert lead_a >= (k if op_a else m)
    assert lead_b >= (n if op_b else k)
    assert lead_c >= m
    x = _matrices(a, kind_a, (k, m) if op_a else (m, k), lead_a, step_a, count)
    y = _matrices(b, kind_b, (n, k) if op_b else (k, n), lead_b, step_b, count)
    out = _matrices(c, kind_c, (m, n), lead_c, step_c, count)
    x, y = (x.swapaxes(1, 2) if op_a else x), (y.swapaxes(1, 2) if op_b else y)
    # NumPy's own row-major product of the transposed matrices has the bits of its eager product.
    left, right, result = (matrix.swapaxes(1, 2) for matrix in (y, x, out))
    if count == 1:
        left, right, result = left[0], right[0], result[0]

    def multiply() -> None:
        for array in (left, right):
            strict_cuda.use(array, is_written=False)
        strict_cuda.use(result, is_written=True)
        result[...] = np.matmul(left, right)

    graph = strict_cuda.stream_at(_streams[handle.value]).graph
    if graph is not None:
        graph.add(multiply)
        return 0
    strict_cuda.catch_up()
    multiply()
    strict_cuda.note_work()
    for note in strict_cuda.launch_listeners:
        note("matmul")
    return 0


def _matrices(address: Any, kind: int, shape: tuple[int, int], lead: int, step: Any, count: int) -> np.ndarray:
    array, size = strict_cuda.array_at(address.value), np.dtype(_DTYPES[kind]).itemsize
    assert array.dtype == _DTYPES[kind]
    return as_strided(array, (count, *shape), (step.value * size, size, lead * size))
