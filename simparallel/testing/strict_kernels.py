"""The stand-in for `cupy.RawKernel`: it runs the CUDA source of `gpu.multi_tensor` with NumPy, block by block.

It reads the statements of the source, which are also Python's once their types are left out, and computes the elements
of a block as one array. The search for the tensor of a block, and the sum over its threads, are done here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from simparallel.testing import strict_cuda

_TYPES = {"float16": np.float16, "float": np.float32, "double": np.float64}
_POINTER = re.compile(r"(\w+)\* (a\d+) = \(\1\*\)table\.addresses\[(\d+)\]\[t\];")
_LOOP = re.compile(r"i \+= blockDim\.x\) \{\n(.*?)\n    \}", re.DOTALL)
_PARAMETERS = re.compile(r"const double (n\d+)")
_OPERATION = re.compile(r"= .*?(\b(?:sqrt|fabs|maximum|minimum)\b| [-+*/] )")
_CHUNK = re.compile(r"table\.ends\[t - 1\]\)\) \* (\d+);")


def _cast(kind: Any, value: Any) -> Any:
    return np.asarray(value, kind)[()]


_FUNCTIONS = {
    "sqrt": np.sqrt, "fabs": np.abs, "maximum": np.maximum, "minimum": np.minimum,
    **{name: partial(_cast, kind) for name, kind in _TYPES.items()},
}  # fmt: skip


class RawKernel:
    """A kernel of `gpu.multi_tensor`.

    Attributes:
        code: its CUDA source.
        name: its name.
        operations: its operators and functions, without conversions.
    """

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        self.code, self.name, loop, chunk = code, name, _LOOP.search(code), _CHUNK.search(code)
        assert loop is not None
        assert chunk is not None
        self._chunk, self._is_sum = int(chunk[1]), "double* totals" in code
        # Name, type, row of addresses, and whether it is a single number.
        self._pointers = [
            (match[2], np.dtype(_TYPES[match[1]]), int(match[3]), f"{match[2]}[0]" in loop[1])
            for match in _POINTER.finditer(code)
        ]
        self._numbers = _PARAMETERS.findall(code)
        self._changed = [name for name, *_ in self._pointers if f"{name}[i] = " in loop[1]]
        lines = [re.sub(r"^\s*(?:(?:float|double|float16) )?(.*);$", r"\1", line) for line in loop[1].split("\n")]
        self._statements = compile("\n".join(lines), name, "exec")
        self.operations = [found[1] for line in lines if (found := _OPERATION.search(line))]

    def arrays(self, args: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the arrays of each tensor by their names in the source, for the arguments of a call."""
        table, num_tensors = args[:2]
        return [
            {
                name: strict_cuda.bytes_at(
                    int(table["addresses"][row, t]), dtype.itemsize * (1 if is_number else int(table["sizes"][t]))
                ).view(dtype)
                for name, dtype, row, is_number in self._pointers
            }
            for t in range(num_tensors)
        ]

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        table, num_tensors, *others = args
        # As in CUDA, whose limit is for all arguments together.
        assert table.nbytes + 8 * (1 + len(others)) <= 4096
        assert table.shape == ()
        ends, sizes = table["ends"][:num_tensors].tolist(), table["sizes"][:num_tensors].tolist()
        assert grid == (ends[-1],)
        tensors, totals = self.arrays(args), others[-1]._data if self._is_sum else None
        numbers = {**_FUNCTIONS, **dict(zip(self._numbers, others, strict=False))}

        def run() -> None:
            for arrays, first, end, size in zip(tensors, [0, *ends], ends, sizes, strict=False):
                for name, array in arrays.items() if strict_cuda.is_watching() else ():
                    strict_cuda.use(array, is_written=name in self._changed)
                for number in range(first, end):
                    start = (number - first) * self._chunk
                    names = {**numbers, **arrays, "i": slice(start, min(start + self._chunk, size)), "total": 0.0}
                    with np.errstate(all="ignore"):
                        exec(self._statements, names)
                    if totals is not None:
                        totals[number] = np.sum(names["total"])
            if totals is not None and strict_cuda.is_watching():
                strict_cuda.use(totals, is_written=True)

        strict_cuda.catch_up()
        graph = strict_cuda.captured_graph()
        run() if graph is None else graph.add(run)
