"""The stand-in for `cupy.RawKernel`: it runs the CUDA source of this package's kernels with NumPy.

It reads the statements of a kernel's loop, which are also Python's once their types are left out, and computes them for
many elements at once. What a kernel does around its loop is done here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from simparallel.arrays.cuda.kernel_source import TYPES
from simparallel.arrays.host import scores
from simparallel.arrays.host.arrays import HostArrays
from stand_in import strict_cuda

# C++ type -> NumPy's.
_TYPES = {kind: np.dtype(name).type for name, kind in TYPES.items()}
_POINTER = re.compile(r"(\w+)\* (a\d+) = \(\1\*\)table\.addresses\[(\d+)\]\[t\];")
_LOOP = re.compile(r"    for \((?:unsigned )?long long \w+ = [^{]*\{\n(.*?)\n    \}", re.DOTALL)
_PARAMETERS = re.compile(r"const double (n\d+)")
_DECLARATION = re.compile(r"^\s*(?:(?:float|double|float16|long long) )?(.*);$", re.MULTILINE)
_OPERATION = re.compile(r"v\d+ = .*?(\b(?:sqrt|fabs|maximum|minimum)\b| [-+*/] )")
_HOST = HostArrays(np)
# Of C++ and CUDA: names that no kernel can have.
_KEYWORDS = """
alignas alignof and asm auto bool break case catch char class compl const constexpr continue decltype default
delete do double else enum explicit export extern false float float16 for friend goto half if inline int long
mutable namespace new noexcept not nullptr operator or private protected public register return short signed
sizeof static struct switch template this throw true try typedef typeid typename union unsigned using virtual
void volatile while xor
"""
_CHUNK = re.compile(r"table\.ends\[t - 1\]\)\) \* (\d+);")


def check_name(name: str, code: str = "") -> None:
    """Refuse the name of a kernel that a C++ compiler would refuse: a keyword, or another name of the source."""
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) or name in _KEYWORDS.split():
        raise RuntimeError(f"{name!r}: expected an identifier.")
    if len(re.findall(rf"\b{name}\b", re.sub(r"//.*", "", code))) > 1:
        raise RuntimeError(f"{name!r} has already been declared in the source.")


def _cast(kind: Any, value: Any) -> Any:
    return np.asarray(value, kind)[()]


_FUNCTIONS = {
    "sqrt": np.sqrt, "fabs": np.abs, "maximum": np.maximum, "minimum": np.minimum,
    **{name: partial(_cast, kind) for name, kind in _TYPES.items()},
}  # fmt: skip


class RawKernel:
    """A kernel with a loop over elements.

    Attributes:
        code: its CUDA source.
        name: the name of its function.
        loop: the statements of its loop.
        operations: its operators and functions, without conversions.
    """

    def __init__(self, code: str, name: str) -> None:
        check_name(name, code)
        loop = _LOOP.search(code)
        assert loop is not None
        self.code, self.name, self.loop = code, name.removeprefix("kernel_"), loop[1]
        lines = _DECLARATION.sub(r"\1", loop[1])
        self.operations = _OPERATION.findall(lines)
        self._statements = compile(lines, name, "exec")

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> None:
        run = self.prepared(grid, block, args)
        strict_cuda.catch_up()
        graph = strict_cuda.captured_graph()
        run() if graph is None else graph.add(run)

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        """Return a function that computes the kernel for these arguments."""
        raise NotImplementedError

    def memory(self, args: Sequence[Any]) -> list[np.ndarray]:
        """Return the arrays that the kernel reads or writes, for these arguments."""
        return [x._data for x in args if hasattr(x, "_data")]

    def _execute(self, names: dict[str, Any]) -> dict[str, Any]:
        # A GPU raises no floating-point errors.
        with np.errstate(all="ignore"):
            exec(self._statements, {**_FUNCTIONS, **names}, names)
        return names


def raw_kernel(code: str, name: str) -> RawKernel:
    """Return the stand-in for a kernel."""
    if name == "add_rows":
        return AddRows(code, name)
    if "T lanes(" in code:
        return ColumnSoftmax(code, name)
    if "num_lanes" in code:
        return (RowSums if "totals" in code else RowMap)(code, name)
    return MultiTensor(code, name)


class AddRows(RawKernel):
    """The kernel of `arrays.cuda.add_rows`."""

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        rows, ids, order, out = self.memory(args)
        assert grid[0] * block[0] >= rows.size
        assert (*rows.shape, len(out)) == args[-3:]
        assert all(array.flags.c_contiguous for array in (rows, ids, order, out))

        def run() -> None:
            for array in (rows, ids, order) if strict_cuda.is_watching() else ():
                strict_cuda.use(array, is_written=False)
            if strict_cuda.is_watching():
                strict_cuda.use(out, is_written=True)
            inside = order[(ids[order] >= 0) & (ids[order] < len(out))]
            np.add.at(out, ids[inside], rows[inside])

        return run


class ColumnSoftmax(RawKernel):
    """A kernel of `arrays.cuda.column_softmax`, with the bits of host memory."""

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        x, *others = self.memory(args)
        num_rows, num_columns, num_all = args[-3:]
        assert grid[0] * 32 >= num_all == x.size // num_rows
        assert block == (1024,)
        assert x.shape[-2:] == (num_rows, num_columns)
        assert all(array.flags.c_contiguous and array.dtype == x.dtype for array in (x, *others))

        def run() -> None:
            for array in others if strict_cuda.is_watching() else ():
                strict_cuda.use(array, is_written=False)
            if strict_cuda.is_watching():
                strict_cuda.use(x, is_written=True)
            with np.errstate(all="ignore"):
                if others:
                    scores.gradient(_HOST, x, *others)
                    return
                shift, lowest = args[1:3]
                seen = np.arange(num_rows)[:, None] <= np.arange(shift, shift + num_columns)
                np.copyto(x, -np.inf, where=~seen)
                scores.softmax(_HOST, x, None, lowest > -np.inf)

        return run


class RowMap(RawKernel):
    """A map of `arrays.cuda.row_sums`."""

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        arrays = dict(zip(re.findall(r"__restrict__ (a\d+)", self.code), self.memory(args), strict=True))
        numbers = dict(zip(_PARAMETERS.findall(self.code), args[len(arrays) :], strict=False))
        num_rows, num_columns, num_lanes, num_threads = args[-4:]
        assert grid[0] * block[0] >= num_threads == num_lanes * num_columns
        assert all(
            array.flags.c_contiguous and array.size in (num_columns, num_rows * num_columns)
            for array in arrays.values()
        )
        names = {
            "matrix": 0, "num_rows": num_rows, "row": np.arange(num_rows)[:, None],
            "column": np.arange(num_columns), "num_columns": num_columns,
            **{name: array.reshape(-1) for name, array in arrays.items()}, **numbers,
        }  # fmt: skip

        def run() -> None:
            for name, array in arrays.items() if strict_cuda.is_watching() else ():
                strict_cuda.use(array, is_written=f"{name}[i] = " in self.loop)
            self._execute(dict(names))

        return run


class RowSums(RawKernel):
    """A kernel of `arrays.cuda.row_sums`."""

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        *arrays, totals = self.memory(args)
        num_rows, num_columns, num_lanes, num_threads = args[-4:]
        num_matrices = num_threads // num_lanes // num_columns
        assert grid[0] * block[0] >= num_threads
        assert all(array.flags.c_contiguous and array.dtype == totals.dtype for array in (*arrays, totals))
        results = re.findall(r"(total\d+) \+=", self.loop)
        shape = num_matrices, num_rows, num_columns
        names = {
            "matrix": np.arange(num_matrices)[:, None, None], "row": np.arange(num_rows)[:, None],
            "column": np.arange(num_columns), "num_rows": num_rows, "num_columns": num_columns,
            **{f"a{k}": array.reshape(-1) for k, array in enumerate(arrays)},
        }  # fmt: skip

        def run() -> None:
            for array in arrays if strict_cuda.is_watching() else ():
                strict_cuda.use(array, is_written=False)
            found = self._execute({**names, **dict.fromkeys(results, totals.dtype.type(0))})
            parts = totals.reshape(len(results), num_matrices, num_lanes, num_columns)
            for k, result in enumerate(results):
                rows = np.broadcast_to(found[result], shape)
                for lane in range(num_lanes):
                    # NumPy adds one row after another, as a thread does.
                    parts[k, :, lane] = rows[:, lane::num_lanes].sum(axis=1)
            if strict_cuda.is_watching():
                strict_cuda.use(totals, is_written=True)

        return run


class MultiTensor(RawKernel):
    """A kernel of `arrays.cuda.multi_tensor`, run block by block."""

    def __init__(self, code: str, name: str) -> None:
        super().__init__(code, name)
        chunk = _CHUNK.search(code)
        assert chunk is not None
        self._chunk, self._is_sum = int(chunk[1]), "double* totals" in code
        # Name, type, row of addresses, and whether it is a single number.
        self._pointers = [
            (match[2], np.dtype(_TYPES[match[1]]), int(match[3]), f"{match[2]}[0]" in self.loop)
            for match in _POINTER.finditer(code)
        ]
        self._numbers = _PARAMETERS.findall(code)
        self._changed = [name for name, *_ in self._pointers if f"{name}[i] = " in self.loop]

    def _arrays(self, args: Sequence[Any]) -> list[dict[str, np.ndarray]]:
        """Return the arrays of each tensor by their names in the source."""
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

    def memory(self, args: Sequence[Any]) -> list[np.ndarray]:
        return [array for arrays in self._arrays(args) for array in arrays.values()] + super().memory(args)

    def prepared(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any]) -> Callable[[], None]:
        table, num_tensors, *others = args
        # As in CUDA, whose limit is for all arguments together.
        assert table.nbytes + 8 * (1 + len(others)) <= 4096
        assert table.shape == ()
        ends, sizes = table["ends"][:num_tensors].tolist(), table["sizes"][:num_tensors].tolist()
        assert grid == (ends[-1],)
        tensors, totals = self._arrays(args), others[-1]._data if self._is_sum else None
        numbers = dict(zip(self._numbers, others, strict=False))

        def run() -> None:
            for arrays, first, end, size in zip(tensors, [0, *ends], ends, sizes, strict=False):
                for name, array in arrays.items() if strict_cuda.is_watching() else ():
                    strict_cuda.use(array, is_written=name in self._changed)
                for number in range(first, end):
                    start = (number - first) * self._chunk
                    names = {**numbers, **arrays, "i": slice(start, min(start + self._chunk, size)), "total": 0.0}
                    found = self._execute(names)
                    if totals is not None:
                        totals[number] = np.sum(found["total"])
            if totals is not None and strict_cuda.is_watching():
                strict_cuda.use(totals, is_written=True)

        return run
