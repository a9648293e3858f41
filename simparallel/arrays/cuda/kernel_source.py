"""CUDA source of a function of elements, written by calling it.

The function is one of NumPy's arrays: it may contain arithmetic, the functions of `_FUNCTIONS` with `out`, `astype` and
`x[...] = y`. Here it is called once, with variables that write the statements of a kernel. Numbers combine with arrays
only. Branches may depend on settings, dtypes, and which arrays are None. The compiler fuses no products with sums, so
the elements have NumPy's bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np

TYPES = {"float16": "float16", "float32": "float", "float64": "double"}
_FUNCTIONS = {
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}", "sqrt": "sqrt({})",
    "absolute": "fabs({})", "maximum": "maximum({}, {})", "minimum": "minimum({}, {})",
    "clip": "minimum(maximum({}, {}), {})",
}  # fmt: skip
_PREAMBLE = """\
template <class T> __device__ T maximum(T a, T b) { return a >= b || a != a ? a : b; }
template <class T> __device__ T minimum(T a, T b) { return a <= b || a != a ? a : b; }

"""


class Variable:
    """A variable of a kernel. Operators write the statement that computes their result."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, source: KernelSource, name: str, dtype: np.dtype) -> None:
        self.source, self.name, self.dtype = source, name, dtype

    def astype(self, dtype: Any, copy: bool = True) -> Variable:
        dtype = np.dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        return self.source.variable(f"{TYPES[dtype.name]}({self.name})", dtype)

    def __setitem__(self, key: Any, value: Variable) -> None:
        if key is not ...:
            raise TypeError(f"a kernel writes whole arrays, x[...] = y, not x[{key!r}].")
        self.source.assign(self, value.astype(self.dtype, copy=False).name)


class KernelSource:
    """The statements of a kernel for one element, written while a function runs on variables. It is also its `xp`."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.changed: set[str] = set()
        self._numbers = count()

    def variable(self, expression: str, dtype: np.dtype) -> Variable:
        name = f"v{next(self._numbers)}"
        self.statements.append(f"{TYPES[dtype.name]} {name} = {expression};")
        return Variable(self, name, dtype)

    def assign(self, variable: Variable, expression: str) -> None:
        self.statements.append(f"{variable.name} = {expression};")
        self.changed.add(variable.name)

    def call(self, template: str, *operands: Any, out: Variable | None = None) -> Variable:
        dtype = np.result_type(*(x.dtype for x in operands if isinstance(x, Variable)))
        # A number gets the dtype of the arrays, as in NumPy.
        terms = [x.name if isinstance(x, Variable) else f"{TYPES[dtype.name]}({x})" for x in operands]
        if out is None:
            return self.variable(template.format(*terms), dtype)
        self.assign(out, template.format(*terms))
        return out

    def __getattr__(self, name: str) -> Callable[..., Variable]:
        if name not in _FUNCTIONS:
            raise AttributeError(f"a kernel has no {name!r}, only {', '.join(_FUNCTIONS)}.")
        return partial(self.call, _FUNCTIONS[name])


def _give_operators() -> None:
    for name, function in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}.items():
        template = _FUNCTIONS[function]

        def binary(self: Variable, other: Any, template: str = template) -> Variable:
            return self.source.call(template, self, other)

        def swapped(self: Variable, other: Any, template: str = template) -> Variable:
            return self.source.call(template, other, self)

        def in_place(self: Variable, other: Any, template: str = template) -> Variable:
            return self.source.call(template, self, other, out=self)

        for prefix, method in {"": binary, "r": swapped, "i": in_place}.items():
            setattr(Variable, f"__{prefix}{name}__", method)


_give_operators()


class Number:
    """A number of a kernel. It has no arithmetic of its own, which C++ would do in another dtype than NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


def itself(xp: Any, x: Any) -> Any:
    """Return x, to sum it as it is."""
    return x


def compiled(xp: Any, name: str, code: str) -> tuple[str, Any]:
    """Return the whole source of a kernel, and a function that starts it: (grid, block, arguments)."""
    header = "#include <cupy/float16.cuh>\n" if "float16" in code else ""
    source = header + _PREAMBLE + code
    return source, xp.RawKernel(source, name, options=("--fmad=false",))
