"""Matrix products that CuPy refuses, or copies matrices for.

CuPy 14 refuses to call cuBLAS on a stream that is capturing, although cuBLAS can be captured ("CUDA Graphs Support" in
its documentation), and copies stacks of transposed matrices. So for these, and in a capture, `matmul` calls cuBLAS from
here, with CuPy's handle: first `cublasSetStream_v2`, then `cublasGemmStridedBatchedEx`; `einsum` does in a capture. All
other products are CuPy's own.
"""

from __future__ import annotations

import ctypes
from functools import cache
from math import prod
from typing import Any

from simparallel.arrays.captures import running
from simparallel.backend import Array, get_float32_matmul_precision

# dtype -> cudaDataType, cublasComputeType and the C type of the factors; float16 is summed in float32.
_FLOAT32 = 0, 68, ctypes.c_float
_TYPES = {"float32": _FLOAT32, "float64": (1, 70, ctypes.c_double), "float16": (2, 68, ctypes.c_float)}
_TF32 = 77
_PLAIN, _TRANSPOSED, _DEFAULT_ALGORITHM = 0, 1, -1


def matmul(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a @ b, written to `out` if given, inside of a capture and outside."""
    if out is not None and out.ndim > 2 and out.shape[0] == 1:
        # CuPy copies transposed matrices of a stack, also of a stack of one.
        a, b = (x[0] if x.ndim == out.ndim else x for x in (a, b))
        matmul(xp, a, b, out[0])
        return out
    if running.capture is not None or _is_copied(a) or _is_copied(b):
        return product(xp, a, b, out)
    # CuPy's operator starts sooner than its function.
    return a @ b if out is None else xp.matmul(a, b, out=out)


def _is_copied(x: Array) -> bool:
    """Return whether CuPy would copy x before a product: a stack of transposed matrices, which cuBLAS reads."""
    return x.ndim > 2 and x.strides[-2] == x.itemsize < x.strides[-1] and x.dtype.name in _TYPES


def einsum(xp: Any, equation: str, *operands: Array, **settings: Any) -> Array:
    """Return `xp.einsum(equation, *operands, **settings)`; in a capture, operand by operand, by `product`.

    `equation` has an arrow, and no letter twice in a tensor.
    """
    if running.capture is None:
        return xp.einsum(equation, *operands, **settings)
    *tensors, right = equation.replace("->", ",").split(",")
    # Each dim of "..." gets a letter; tensors with fewer of them lack the first ones.
    counts = [x.ndim + 3 - len(tensor) if "..." in tensor else 0 for x, tensor in zip(operands, tensors, strict=True)]
    dims = "".join(chr(0xE000 + i) for i in range(max(counts)))
    letters = [t.replace("...", dims[len(dims) - count :]) for t, count in zip(tensors, counts, strict=True)]
    right = right.replace("...", dims)
    sizes: dict[str, int] = {}
    for x, names in zip(operands, letters, strict=True):
        sizes |= {name: size for name, size in zip(names, x.shape, strict=True) if sizes.get(name, 1) == 1}
    y, done = xp.broadcast_to(operands[0], [sizes[name] for name in letters[0]]), letters[0]
    for i, (x, names) in enumerate(zip(operands[1:], letters[1:], strict=True), 2):
        kept = {*right, *"".join(letters[i:])}
        x, names = _summed(xp.broadcast_to(x, [sizes[name] for name in names]), names, {*done} | kept)
        y, done = _summed(y, done, {*names} | kept)
        batch = [name for name in done if name in names and name in kept]
        summed = [name for name in done if name in names and name not in kept]
        rows, columns = ([name for name in own if name not in other] for own, other in ((done, names), (names, done)))
        y = _grouped(y, done, sizes, batch, rows, summed)
        x = _grouped(x, names, sizes, batch, summed, columns)
        y, done = product(xp, y, x) if summed else y * x, "".join((*batch, *rows, *columns))
        y = y.reshape([sizes[name] for name in done])
    y, done = _summed(y, done, {*right})
    return y.transpose([done.index(name) for name in right])


def _summed(x: Array, names: str, kept: set[str]) -> tuple[Array, str]:
    """Sum x over its dims that are not kept; return their names, too."""
    axes = tuple(i for i, name in enumerate(names) if name not in kept)
    return x.sum(axis=axes) if axes else x, "".join(name for name in names if name in kept)


def _grouped(x: Array, names: str, sizes: dict[str, int], *groups: list[str]) -> Array:
    """Transpose x and reshape it, to one dim for each group of names."""
    x = x.transpose([names.index(name) for group in groups for name in group])
    return x.reshape([prod(sizes[name] for name in group) for group in groups])


def product(xp: Any, a: Array, b: Array, out: Array | None = None) -> Array:
    """Return a @ b by one call of cuBLAS on the current stream.

    a: (..., m, k) or (k,)   b: (..., k, n) or (k,)   out: (..., m, n), without the dims that a and b lack

    Raises:
        NotImplementedError: the dtype of the product is not float16, float32 or float64.
        RuntimeError: cuBLAS failed.
    """
    dtype = xp.result_type(a, b)
    if dtype.name not in _TYPES:
        raise NotImplementedError(f"a stream that is capturing cannot take a product of {dtype}")
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    a_bmk, b_bkn = a if a.ndim > 1 else a[None], b if b.ndim > 1 else b[:, None]
    batch = xp.broadcast_shapes(a_bmk.shape[:-2], b_bkn.shape[:-2])
    m, n, k = a_bmk.shape[-2], b_bkn.shape[-1], a_bmk.shape[-1]
    shape = (*batch, *(m,) * (a.ndim > 1), *(n,) * (b.ndim > 1))
    is_direct = out is not None and out.dtype == dtype and out.flags.c_contiguous
    result: Any = out if is_direct else xp.empty(shape, dtype)
    if result.size and k:
        _call(xp, _as_batch(xp, a_bmk, batch), _as_batch(xp, b_bkn, batch), result, m, n, k)
    elif result.size:
        result[...] = 0
    if out is not None and not is_direct:
        out[...] = result
        return out
    return result


def _as_batch(xp: Any, x: Array, batch: tuple[int, ...]) -> Array:
    """Reshape to (b, rows, columns), or (1, rows, columns) if all products share x; copy unless a dim is contiguous."""
    rows, columns = x.shape[-2:]
    if prod(x.shape[:-2]) == 1:
        x = x.reshape(1, rows, columns)
    else:
        if x.shape[:-2] != batch:
            x = xp.broadcast_to(x, (*batch, rows, columns))
        is_turned = x.strides[-2] < x.strides[-1]
        # A copy, if one is needed, keeps the order of rows and columns.
        x = (
            x.swapaxes(-1, -2).reshape(-1, columns, rows).swapaxes(-1, -2)
            if is_turned
            else x.reshape(-1, rows, columns)
        )
    return x if _leading(x) else xp.ascontiguousarray(x)


def _leading(x: Array) -> tuple[int, int] | None:
    """Return (operation, leading dim) for cuBLAS, which sees rows as columns; None if no dim is contiguous."""
    _, rows, columns = x.shape
    row, column = (stride // x.itemsize for stride in x.strides[1:])
    if (column == 1 or columns == 1) and (row >= columns or rows == 1):
        return _PLAIN, max(row, columns) if rows > 1 else columns
    if (row == 1 or rows == 1) and (column >= rows or columns == 1):
        return _TRANSPOSED, max(column, rows) if columns > 1 else rows
    return None


def _call(xp: Any, a: Array, b: Array, c: Array, m: int, n: int, k: int) -> None:
    kind, compute, number = _TYPES[c.dtype.name]
    count = c.size // (m * n)
    # Like CuPy, which allows TF32 for products of two matrices only.
    if c.dtype == "float32" and count == 1 and get_float32_matmul_precision() == "high":
        compute = _TF32
    (op_a, lead_a), (op_b, lead_b) = _leading(a), _leading(b)  # type: ignore[misc]
    step_a, step_b = (0 if len(x) == 1 else x.strides[0] // x.itemsize for x in (a, b))
    library, handle = _cublas(xp), ctypes.c_void_p(xp.cuda.device.get_cublas_handle())
    _check(library.cublasSetStream_v2(handle, ctypes.c_void_p(xp.cuda.get_current_stream().ptr)))
    # Row-major c = a @ b is column-major c.T = b.T @ a.T, so b comes first.
    _check(
        library.cublasGemmStridedBatchedEx(
            handle, op_b, op_a, n, m, k, ctypes.byref(number(1)),
            ctypes.c_void_p(b.data.ptr), kind, lead_b, ctypes.c_longlong(step_b),
            ctypes.c_void_p(a.data.ptr), kind, lead_a, ctypes.c_longlong(step_a),
            ctypes.byref(number(0)), ctypes.c_void_p(c.data.ptr), kind, n, ctypes.c_longlong(m * n),
            count, compute, _DEFAULT_ALGORITHM,
        )
    )  # fmt: skip


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLAS failed to multiply, with status {status}")


def _cublas(xp: Any) -> Any:
    """Return the library that CuPy has loaded, or a stand-in's."""
    name = f"libcublas.so.{xp.cuda.runtime.runtimeGetVersion() // 1000}"
    return getattr(xp.cuda, "libraries", {}).get(name) or _loaded(name)


@cache
def _loaded(name: str) -> Any:
    return ctypes.CDLL(name)
