"""Kernels that compute the arrays of many tensors at once, such as all parameters of an optimizer.

`for_each` calls an elementwise function on the arrays of each tensor; `sums` adds up its results over each tensor. One
kernel starts for up to a hundred tensors or so, whose addresses it gets as an argument. PyTorch's optimizers with
`foreach` and `fused` do the same.

The function is one of NumPy's arrays: it may contain arithmetic, the functions of `_FUNCTIONS` with `out`, `astype` and
`x[...] = y`. Here it is called once with variables that write the statements of the kernel. Numbers combine with arrays
only. Branches may depend on settings, dtypes, and which arrays are None. The compiler fuses no products with sums, so
the results have NumPy's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import count
from typing import Any

import numpy as np

from simparallel.backend import Array, get_namespace, gpu_of, to_device_like

_THREADS = 512
# Elements of a block: few enough to occupy all multiprocessors with some 100,000 elements.
_CHUNK = 8 * _THREADS
# CUDA's limit for the arguments of a kernel.
_ARGUMENTS_BYTES = 4096
_TYPES = {"float16": "float16", "float32": "float", "float64": "double"}
_FUNCTIONS = {
    "add": "{} + {}", "subtract": "{} - {}", "multiply": "{} * {}", "divide": "{} / {}", "sqrt": "sqrt({})",
    "absolute": "fabs({})", "maximum": "maximum({}, {})", "minimum": "minimum({}, {})",
}  # fmt: skip
_KERNEL = """\
template <class T> __device__ T maximum(T a, T b) {{ return a >= b || a != a ? a : b; }}
template <class T> __device__ T minimum(T a, T b) {{ return a <= b || a != a ? a : b; }}

struct Table {{
    unsigned long long addresses[{num_arrays}][{capacity}], sizes[{capacity}], ends[{capacity}];
}};

extern "C" __global__ void {name}(const Table table, const int num_tensors{parameters}) {{
    // Find the tensor of this block: the first one whose blocks end behind it.
    int t = 0, last = num_tensors - 1;
    while (t < last) {{
        int middle = (t + last) / 2;
        if (blockIdx.x < table.ends[middle]) last = middle; else t = middle + 1;
    }}
    unsigned long long start = (blockIdx.x - (t == 0 ? 0 : table.ends[t - 1])) * {chunk};
    unsigned long long stop = table.sizes[t] < start + {chunk} ? table.sizes[t] : start + {chunk};
    {pointers}
    for (unsigned long long i = start + threadIdx.x; i < stop; i += blockDim.x) {{
        {statements}
    }}
{end}}}
"""
# Sums the threads of a block in a fixed order.
_SUM_OF_BLOCK = """\
    __shared__ double parts[{threads}];
    parts[threadIdx.x] = total;
    for (int width = blockDim.x / 2; width > 0; width /= 2) {{
        __syncthreads();
        if (threadIdx.x < width) parts[threadIdx.x] += parts[threadIdx.x + width];
    }}
    if (threadIdx.x == 0) totals[blockIdx.x] = parts[0];
"""
# Arrays (or None) and numbers of a tensor; a number is a float or a 0-d array.
Call = tuple[Sequence[Any], Sequence[Any]]


def for_each(compute: Callable[..., None], calls: Sequence[Call], **settings: Any) -> None:
    """Call `compute(xp, *arrays, *numbers, **settings)`, which changes arrays in place, for each of the tensors.

    On a GPU one kernel starts for all calls with the same dtypes and numbers, if no two of them change the same memory.
    There the arrays of a call have the same shape; one that is not contiguous is copied before and, if it has changed,
    after.

    Args:
        compute: a module-level function, see the top of this file.
        calls: arrays and numbers of each tensor. No call reads an array that another one changes.
        settings: hashable keyword arguments of `compute`.
    """
    alike: dict[Any, list[Call]] = {}
    for arrays, numbers in calls:
        if isinstance(arrays[0], np.ndarray):
            compute(get_namespace(arrays[0]), *arrays, *numbers, **settings)
            continue
        dtypes = tuple([None if array is None else array.dtype for array in arrays])
        kinds = tuple([number if isinstance(number, float) else number.dtype for number in numbers])
        alike.setdefault((gpu_of(arrays[0]), dtypes, kinds), []).append((arrays, numbers))
    for (_, dtypes, kinds), members in alike.items():
        first = members[0][0][0]
        with first.device:
            xp = get_namespace(first)
            kernel = _kernel(xp, compute, dtypes, tuple([type(kind) is float or kind for kind in kinds]), **settings)
            kernel.update(members)


def sums(compute: Callable[..., Array], arrays: Sequence[Array]) -> Array:
    """Return the sums of the elements of `compute(xp, array)` over each of the arrays of one GPU, without a wait.

    They are added in float64, in an order that depends on sizes only.

    Args:
        compute: as for `for_each`, but it returns an array.
        arrays: one or more, of one or several dtypes.

    Returns:
        A float64 array on the GPU, with an element for each array.
    """
    xp = get_namespace(*arrays)
    by_dtype: dict[Any, list[int]] = {}
    for i, array in enumerate(arrays):
        by_dtype.setdefault(array.dtype, []).append(i)
    with arrays[0].device:
        results = [
            _kernel(xp, compute, (dtype,), (), is_sum=True).sums([arrays[i] for i in places])
            for dtype, places in by_dtype.items()
        ]
        if len(results) == 1:
            return results[0]
        order = np.argsort(np.concatenate(list(by_dtype.values())))
        return xp.concatenate(results)[to_device_like(order, results[0])]


class _Variable:
    """A variable of a kernel. Operators write the statement that computes their result."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, source: _Source, name: str, dtype: np.dtype) -> None:
        self.source, self.name, self.dtype = source, name, dtype

    def astype(self, dtype: Any, copy: bool = True) -> _Variable:
        dtype = np.dtype(dtype)
        if dtype == self.dtype and not copy:
            return self
        return self.source.variable(f"{_TYPES[dtype.name]}({self.name})", dtype)

    def __setitem__(self, key: Any, value: _Variable) -> None:
        if key is not ...:
            raise TypeError(f"a kernel for many tensors writes whole arrays, x[...] = y, not x[{key!r}].")
        self.source.assign(self, value.astype(self.dtype, copy=False).name)


class _Source:
    """The statements of a kernel for one element, written while a function runs on variables. It is also its `xp`."""

    def __init__(self) -> None:
        self.statements: list[str] = []
        self.changed: set[str] = set()
        self._numbers = count()

    def variable(self, expression: str, dtype: np.dtype) -> _Variable:
        name = f"v{next(self._numbers)}"
        self.statements.append(f"{_TYPES[dtype.name]} {name} = {expression};")
        return _Variable(self, name, dtype)

    def assign(self, variable: _Variable, expression: str) -> None:
        self.statements.append(f"{variable.name} = {expression};")
        self.changed.add(variable.name)

    def call(self, template: str, *operands: Any, out: _Variable | None = None) -> _Variable:
        dtype = np.result_type(*(x.dtype for x in operands if isinstance(x, _Variable)))
        # A number gets the dtype of the arrays, as in NumPy.
        terms = [x.name if isinstance(x, _Variable) else f"{_TYPES[dtype.name]}({x})" for x in operands]
        if out is None:
            return self.variable(template.format(*terms), dtype)
        self.assign(out, template.format(*terms))
        return out

    def __getattr__(self, name: str) -> Callable[..., _Variable]:
        if name not in _FUNCTIONS:
            raise AttributeError(f"a kernel for many tensors has no {name!r}, only {', '.join(_FUNCTIONS)}.")
        return partial(self.call, _FUNCTIONS[name])


def _give_operators() -> None:
    for name, function in {"add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide"}.items():
        template = _FUNCTIONS[function]

        def binary(self: _Variable, other: Any, template: str = template) -> _Variable:
            return self.source.call(template, self, other)

        def swapped(self: _Variable, other: Any, template: str = template) -> _Variable:
            return self.source.call(template, other, self)

        def in_place(self: _Variable, other: Any, template: str = template) -> _Variable:
            return self.source.call(template, self, other, out=self)

        for prefix, method in {"": binary, "r": swapped, "i": in_place}.items():
            setattr(_Variable, f"__{prefix}{name}__", method)


_give_operators()


class _Number:
    """A number of a kernel. It has no arithmetic of its own, which C++ would do in another dtype than NumPy."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __str__(self) -> str:
        return self.name


class Kernel:
    """A function as a kernel for many tensors.

    Args:
        xp: cupy or a stand-in.
        compute: the function.
        dtypes: the dtype of each array, None for an absent one.
        kinds: for each number True, or its dtype if it is a 0-d array.
        is_sum: add up the results of the function, which changes no array.
        settings: of the function.

    Attributes:
        source: its CUDA source.
        capacity: number of tensors for which one kernel can start.
    """

    def __init__(
        self, xp: Any, compute: Callable[..., Any], dtypes: Sequence[Any], kinds: Sequence[Any], is_sum: bool = False,
        **settings: Any,
    ) -> None:  # fmt: skip
        self._xp, source = xp, _Source()
        arguments: list[Any] = []
        names: dict[str, int] = {}  # of the first variable of each array -> its place among the arguments
        parameters: list[str] = []
        pointers: list[str] = []
        for place, kind in enumerate((*dtypes, *kinds)):
            if kind is None:
                arguments.append(None)
            elif kind is True:
                arguments.append(_Number(f"n{place}"))
                parameters.append(f", const double n{place}")
            else:
                c_type, index = _TYPES[kind.name], "i" if place < len(dtypes) else "0"
                pointers.append(f"{c_type}* a{place} = ({c_type}*)table.addresses[{len(pointers)}][t];")
                arguments.append(source.variable(f"a{place}[{index}]", kind))
                names[arguments[-1].name] = place
        result = compute(source, *arguments, **settings)
        self._changed_rows = [row for row, name in enumerate(names) if name in source.changed]
        stores = [f"a{place}[i] = {name};" for name, place in names.items() if name in source.changed]
        end = ""
        if is_sum:
            pointers.append("double total = 0;")
            parameters.append(", double* totals")
            stores, end = [f"total += double({result.name});"], _SUM_OF_BLOCK.format(threads=_THREADS)
        num_arrays, name = len(names), settings.get("update", compute).__name__.strip("_")
        words_bytes, others_bytes = 8 * (num_arrays + 2), 8 * (len(parameters) + 1)
        self.capacity = (_ARGUMENTS_BYTES - others_bytes) // words_bytes
        self.source = _KERNEL.format(
            num_arrays=num_arrays, capacity=self.capacity, name=name, parameters="".join(parameters), chunk=_CHUNK,
            pointers="\n    ".join(pointers), statements="\n        ".join([*source.statements, *stores]), end=end,
        )  # fmt: skip
        if "float16" in self.source:
            self.source = "#include <cupy/float16.cuh>\n" + self.source
        words = ("addresses", "u8", (num_arrays, self.capacity)), ("sizes", "u8", self.capacity)
        self._table_type = np.dtype([*words, ("ends", "u8", self.capacity)])
        self._start = xp.RawKernel(self.source, name, options=("--fmad=false",))

    def update(self, calls: Sequence[Call]) -> None:
        """Change the arrays of calls with the same dtypes and numbers."""
        copied: list[tuple[Array, Array]] = []
        rows = []
        for arrays, numbers in calls:
            if arrays[0].size == 0:
                continue
            row = [x for x in (*arrays, *numbers) if not (x is None or isinstance(x, float))]
            if not all(x.flags.c_contiguous for x in row):
                own = [self._xp.ascontiguousarray(x) for x in row]
                copied += [(x, copy) for x, copy in zip(row, own, strict=True) if copy is not x]
                row = own
            rows.append(row)
        if not rows:
            return
        numbers = [number for number in calls[0][1] if isinstance(number, float)]
        addresses, sizes = np.array([[x.data.ptr for x in row] for row in rows], "u8"), [row[0].size for row in rows]
        step = 1 if self._overlap(addresses, rows) else self.capacity
        for start in range(0, len(rows), step):
            self.launch(addresses[start : start + step], sizes[start : start + step], numbers)
        for array, copy in copied:
            array[...] = copy

    def _overlap(self, addresses: np.ndarray, rows: Sequence[Sequence[Array]]) -> bool:
        """Return whether two changed arrays share memory."""
        starts = addresses[:, self._changed_rows].reshape(-1)
        ends = starts + np.array([[row[i].nbytes for i in self._changed_rows] for row in rows], "u8").reshape(-1)
        order = np.argsort(starts)
        return bool((starts[order][1:] < ends[order][:-1]).any())

    def sums(self, arrays: Sequence[Array]) -> Array:
        """Return the sum over each of the arrays."""
        arrays = [self._xp.ascontiguousarray(array) for array in arrays]
        ends = np.cumsum([_num_blocks(array.size) for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        totals = self._xp.empty(ends[-1], "float64")
        for i in range(0, len(arrays), self.capacity):
            part = arrays[i : i + self.capacity]
            addresses = np.array([[x.data.ptr] for x in part], "u8")
            self.launch(addresses, [x.size for x in part], [totals[starts[i] :]])
        if len(totals) == len(arrays):
            return totals
        # The sums of blocks are the arrays of the next round, until each tensor has one block.
        again = _kernel(self._xp, _itself, (totals.dtype,), (), is_sum=True)
        return again.sums([totals[start:end] for start, end in zip(starts, ends, strict=True)])

    def launch(self, addresses: np.ndarray, sizes: list[int], others: Sequence[Any]) -> None:
        """Start the kernel for tensors with these addresses, a row for each; `others` are its further arguments."""
        num, table = len(sizes), np.zeros((), self._table_type)
        table["addresses"][:, :num] = addresses.T
        table["sizes"][:num] = sizes
        table["ends"][:num] = ends = np.cumsum([_num_blocks(size) for size in sizes])
        self._start((int(ends[-1]),), (_THREADS,), (table, np.int32(num), *others))


_kernel = cache(Kernel)


def _num_blocks(size: int) -> int:
    return max(1, -(-size // _CHUNK))


def _itself(xp: Any, x: Any) -> Any:
    return x
