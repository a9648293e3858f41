"""Show every call of the stand-in to CuPy itself, without a GPU: CuPy looks at the arguments before it asks for one.

The arrays of these calls have shape, dtype and strides, and no memory behind them, so a machine with a GPU must not
run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from simparallel.testing import strict
from simparallel.testing.strict import StrictArray

_OPERATORS = """
    add radd sub rsub mul rmul truediv rtruediv floordiv mod pow matmul and or xor iadd isub imul itruediv
    eq ne lt le gt ge neg abs invert getitem setitem
"""
# An address range that is large enough for every array, also for one with negative strides.
_BYTES, _MIDDLE = 1 << 40, 1 << 39


@contextmanager
def shown_to_cupy() -> Iterator[list[str]]:
    """Yield a list to which each call that NumPy accepted and CuPy refused is added."""
    import cupy

    memory = cupy.cuda.UnownedMemory(_BYTES, _BYTES, None, 0)
    refused: list[str] = []

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
        except cupy.cuda.runtime.CUDARuntimeError:
            return  # it asked for the GPU: the arguments were fine
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
            show(name, owner, args, kwargs)
            return result

        return both

    def operator(name: str) -> Callable[..., Any]:
        def both(self: StrictArray, *args: Any) -> Any:
            owner = without_memory(self)
            result = old[name](self, *args)
            if result is not NotImplemented:
                show(name, owner, args, {})
            return result

        return both

    names = [f"__{name}__" for name in _OPERATORS.split()]
    old: dict[str, Any] = {"_guarded": strict._guarded, **{name: getattr(StrictArray, name) for name in names}}
    strict._guarded = guarded
    for name in names:
        setattr(StrictArray, name, operator(name))
    try:
        yield refused
    finally:
        strict._guarded = old["_guarded"]
        for name in names:
            setattr(StrictArray, name, old[name])
