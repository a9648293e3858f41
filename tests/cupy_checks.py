"""Show every call of the stand-in to CuPy itself, without a GPU: CuPy looks at the arguments before it asks for one.

The arrays of these calls have shape, dtype and strides, and no memory behind them, so a machine with a GPU must not
run them. Of a fused function CuPy writes the kernel, whose dtypes are compared with the stand-in's. NVIDIA's compiler
NVRTC translates it, and kernels for many tensors, for an H100, where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from typing import Any

import numpy as np
from stand_in import strict
from stand_in.strict import StrictArray

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul and or xor iadd isub imul itruediv
    eq ne lt le gt ge neg abs invert getitem setitem
"""
ARCHITECTURE = "--gpu-architecture=sm_90"
# Codes of the kinds of arguments of `_ArgInfo`.
_NDARRAY, _INDEXER, _SCALAR = 1, 2, 3
# A local variable of a kernel, but not a constant.
_VARIABLE = re.compile(r"(?<!const )\b(\w+|long long) v\d+(?:_\d+)?;")
# An address range that is large enough for every array, also for one with negative strides.
_BYTES, _MIDDLE = 1 << 40, 1 << 39


class _Stream:
    """The default stream."""

    ptr = 0


def kernel_of(function: Any, kernel_name: str, args: Any) -> Any:
    """Return the kernel that CuPy makes of a function of `backend.fused`.

    Raises:
        TypeError: CuPy cannot compute it in one kernel.
    """
    import cupy

    compute = partial(function.func, cupy, *function.args[1:], **function.keywords)
    fusion = cupy.fuse(kernel_name=kernel_name)(compute)
    with suppress(cupy.cuda.runtime.CUDARuntimeError):  # it asks for the GPU when the kernel is made
        fusion(*args)
    # For other functions CuPy falls back to a second implementation, which may start several kernels.
    if fusion.new_fusion is not None or len(fusion._memo) != 1:
        raise TypeError("CuPy does not compute it in one elementwise kernel")
    ((kernel, _),) = fusion._memo.values()
    return kernel


def check_dtypes(kernel: Any, arrays: list[Any], results: list[Any], settings: Any) -> None:
    """Raise TypeError unless the kernel returns the stand-in's dtypes, and computes only in dtypes of its arrays."""
    import cupy

    found, expected = [p.dtype for p in kernel.out_params], [array.dtype for array in results]
    if found != expected:
        raise TypeError(f"CuPy returns {found} instead of {expected}")
    known = [*expected, *(array.dtype for array in arrays), *(v for v in settings if isinstance(v, np.dtype))]
    # Wider integers compare as narrow ones.
    names = {"bool", "long long", *(cupy._core._scalar.get_typename(dtype) for dtype in known)}
    if wider := set(_VARIABLE.findall(kernel.operation)) - names:
        raise TypeError(f"CuPy computes in {sorted(wider)}, but the arguments and results are {sorted(names)}")


def source_of(kernel: Any, args: Any) -> str:
    """Return the CUDA source of a kernel for contiguous arrays."""
    import cupy
    from cupy._core import _carray, _kernel, _scalar, core

    def info(param: Any, value: Any) -> Any:
        if param.name == "_ind":
            return _kernel._ArgInfo(_INDEXER, _carray.Indexer, None, 1, True, True)
        if isinstance(value, (int, float)):
            return _kernel._ArgInfo(_SCALAR, _scalar.CScalar, param.dtype, 0, True, True)
        return _kernel._ArgInfo(_NDARRAY, cupy.ndarray, param.dtype, 1, True, True)

    given = [arg for arg in args if arg is not None]
    values = [*given, *[None] * (len(kernel.params) - len(given))]
    infos = tuple(map(info, kernel.params, values))
    parts = kernel.params, kernel.operation, kernel.name, kernel.preamble
    headers = "".join(f"#include <{name}>\n" for name in core._cupy_header_list)
    return headers + str(_kernel._get_elementwise_kernel_code(infos, _kernel._TypeMap(()), *parts))


@cache
def why_no_compiler() -> str:
    """Return why no kernel can be compiled; "" if NVRTC is there."""
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:
        return f"NVRTC is not installed: {error}"
    return ""


@cache
def compiled(source: str) -> int:
    """Compile CUDA source, and return the size of the binary in bytes; 0 without a compiler.

    Raises:
        TypeError: the compiler's errors.
    """
    if why_no_compiler():
        return 0
    from cupy._core import core
    from cupy_backends.cuda.libs import nvrtc

    program = nvrtc.createProgram(source, "fused.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*core.assemble_cupy_compiler_options(()), ARCHITECTURE))
    except nvrtc.NVRTCError:
        raise TypeError(nvrtc.getProgramLog(program)) from None
    return len(nvrtc.getCUBIN(program))


@contextmanager
def shown_to_cupy(kernels: set[str] | None = None) -> Iterator[list[str]]:
    """Yield a list to which each call that NumPy accepted and CuPy refused is added.

    Args:
        kernels: gets the names of the fused functions, and compiles them.
    """
    import cupy

    memory = cupy.cuda.UnownedMemory(_BYTES, _BYTES, None, 0)
    refused: list[str] = []
    made: set[Any] = set()

    def without_memory(value: Any) -> Any:
        if isinstance(value, StrictArray):
            array, pointer = value._data, cupy.cuda.MemoryPointer(memory, _MIDDLE)
            return cupy.ndarray(array.shape, array.dtype, memptr=pointer, strides=array.strides)
        if isinstance(value, (tuple, list)):
            return type(value)(map(without_memory, value))
        return value

    def show(name: str, owner: Any, args: Any, kwargs: Any) -> None:
        try:
            function = owner
            for part in name.split("."):
                function = getattr(function, part)
            function(*without_memory(args), **{key: without_memory(value) for key, value in kwargs.items()})
        except (cupy.cuda.runtime.CUDARuntimeError, ImportError):
            return  # it asked for the GPU, or for a library of CUDA: the arguments were fine
        except Exception as error:
            refused.append(f"{name}: {type(error).__name__}: {error}")

    def guarded(function: Callable[..., Any], name: str, *settings: Any, **named: Any) -> Callable[..., Any]:
        call = old["_guarded"](function, name, *settings, **named)
        module = getattr(function, "__module__", None) or ""
        home = cupy.linalg if module == "numpy.linalg" else cupy.lib.stride_tricks if "stride" in module else cupy
        bound = getattr(function, "__self__", None)

        def both(*args: Any, **kwargs: Any) -> Any:
            owner = without_memory(StrictArray(bound)) if isinstance(bound, np.ndarray) else home
            result = call(*args, **kwargs)
            if not strict._fusing.is_on:
                show(name, owner, args, kwargs)
            return result

        return both

    def run_fused(function: Any, kernel_name: str, args: Any) -> Any:
        result = old["_run_fused"](function, kernel_name, args)
        results = result if isinstance(result, tuple) else () if result is None else (result,)
        kinds = tuple((arg.dtype, arg.ndim) if isinstance(arg, StrictArray) else type(arg) for arg in args)
        if (function, kinds) in made:
            return result
        made.add((function, kinds))
        try:
            kernel = kernel_of(function, kernel_name, without_memory(args))
            arrays = [arg for arg in args if isinstance(arg, StrictArray)]
            check_dtypes(kernel, arrays, list(results), function.keywords.values())
            if kernels is not None:
                kernels.add(function.func.__name__.strip("_"))
                compiled(source_of(kernel, args))
        except Exception as error:
            refused.append(f"{kernel_name}: {type(error).__name__}: {error}")
        return result

    def operator(name: str) -> Callable[..., Any]:
        def both(self: StrictArray, *args: Any) -> Any:
            owner = without_memory(self)
            result = old[name](self, *args)
            if result is not NotImplemented and not strict._fusing.is_on:
                show(name, owner, args, {})
            return result

        return both

    def start_kernel(kernel: Any, grid: Any, block: Any, args: Any) -> None:
        old["_start_kernel"](kernel, grid, block, args)
        try:
            launch = cupy.cuda.function.Function.__new__(cupy.cuda.function.Function)
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # it asks for the GPU when it has read the arguments
                launch(grid, block, without_memory(args), 0, _Stream)
            if kernels is not None:
                kernels.add(kernel.name)
                compiled(kernel.code)
        except Exception as error:
            refused.append(f"{kernel.name}: {type(error).__name__}: {error}")

    names = [f"__{name}__" for name in _OPERATORS.split()]
    functions = {"_guarded": guarded, "_run_fused": run_fused, "_start_kernel": start_kernel}
    old: dict[str, Any] = {name: getattr(strict, name) for name in functions}
    old |= {name: getattr(StrictArray, name) for name in names}
    for name, function in functions.items():
        setattr(strict, name, function)
    for name in names:
        setattr(StrictArray, name, operator(name))
    try:
        yield refused
    finally:
        for name in functions:
            setattr(strict, name, old[name])
        for name in names:
            setattr(StrictArray, name, old[name])
