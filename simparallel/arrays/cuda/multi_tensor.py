"""Kernels that compute the arrays of many tensors at once, such as all parameters of an optimizer.

`for_each` calls an elementwise function on the arrays of each tensor; `sums` adds up its results over each tensor. One
kernel starts for about a hundred tensors, whose addresses it gets as an argument. PyTorch's optimizers with
`foreach` and `fused` do the same.

The function is one of NumPy's arrays, see `kernel_source`, which writes its CUDA source.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from simparallel.arrays.cuda.kernel_source import TYPES, KernelSource, Number, compiled, itself
from simparallel.arrays.host.arrays import Call
from simparallel.backend import Array, get_namespace, gpu_of, is_on_gpu, kernel_name_of, to_device_like

_THREADS = 512
# Elements of a block: few enough to occupy all multiprocessors with some 100,000 elements.
_CHUNK = 8 * _THREADS
# CUDA's limit for the arguments of a kernel.
_ARGUMENTS_BYTES = 4096
_KERNEL = """\
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


def for_each(compute: Callable[..., None], calls: Sequence[Call], **settings: Any) -> None:
    """Call `compute(xp, *arrays, *numbers, **settings)` for each of the tensors, see `HostArrays.for_each`.

    One kernel starts for all calls with the same dtypes and numbers, if no two of them change the same memory. The
    arrays of a call have the same shape. One that is not contiguous is copied; if it changes, its call gets a kernel
    of its own, and it is copied back.
    """
    alike: dict[Any, list[Call]] = {}
    for arrays, numbers in calls:
        dtypes = tuple([None if array is None else array.dtype for array in arrays])
        # Numbers of NumPy may be neither floats nor hashable.
        plain = [number if is_on_gpu(number) else float(number) for number in numbers]
        kinds = tuple([number if isinstance(number, float) else number.dtype for number in plain])
        alike.setdefault((gpu_of(arrays[0]), dtypes, kinds), []).append((arrays, plain))
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


class MultiTensorKernel:
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
        self._xp, source = xp, KernelSource()
        arguments: list[Any] = []
        names: dict[str, int] = {}  # of the first variable of each array -> its place among the arguments
        parameters: list[str] = []
        pointers: list[str] = []
        for place, kind in enumerate((*dtypes, *kinds)):
            if kind is None:
                arguments.append(None)
            elif kind is True:
                arguments.append(Number(f"n{place}"))
                parameters.append(f", const double n{place}")
            else:
                c_type, index = TYPES[kind.name], "i" if place < len(dtypes) else "0"
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
        num_arrays, name = len(names), kernel_name_of(settings.get("update", compute).__name__)
        words_bytes, others_bytes = 8 * (num_arrays + 2), 8 * (len(parameters) + 1)
        self.capacity = (_ARGUMENTS_BYTES - others_bytes) // words_bytes
        code = _KERNEL.format(
            num_arrays=num_arrays, capacity=self.capacity, name=name, parameters="".join(parameters), chunk=_CHUNK,
            pointers="\n    ".join(pointers), statements="\n        ".join([*source.statements, *stores]), end=end,
        )  # fmt: skip
        words = ("addresses", "u8", (num_arrays, self.capacity)), ("sizes", "u8", self.capacity)
        self._table_type = np.dtype([*words, ("ends", "u8", self.capacity)])
        self.source, self._start = compiled(xp, name, code)

    def update(self, calls: Sequence[Call]) -> None:
        """Change the arrays of calls with the same dtypes and numbers."""
        rows, apart = [], []
        for arrays, numbers in calls:
            if arrays[0].size == 0:
                continue
            row = [x for x in (*arrays, *numbers) if not (x is None or isinstance(x, float))]
            own = [x if x.flags.c_contiguous else self._xp.ascontiguousarray(x) for x in row]
            changed = [(row[i], own[i]) for i in self._changed_rows if row[i] is not own[i]]
            if changed:
                apart.append((own, changed))
            else:
                rows.append(own)
        numbers = [number for number in calls[0][1] if isinstance(number, float)]
        step = 1 if self._overlap(rows) else self.capacity
        for start in range(0, len(rows), step):
            self.launch(rows[start : start + step], numbers)
        for row, changed in apart:
            self.launch([row], numbers)
            for array, copy in changed:
                array[...] = copy

    def _overlap(self, rows: Sequence[Sequence[Array]]) -> bool:
        """Return whether two changed arrays share memory."""
        spans = sorted((row[i].data.ptr, row[i].nbytes) for row in rows for i in self._changed_rows)
        return any(start + size > after for (start, size), (after, _) in pairwise(spans))

    def sums(self, arrays: Sequence[Array]) -> Array:
        """Return the sum over each of the arrays."""
        arrays = [self._xp.ascontiguousarray(array) for array in arrays]
        ends = np.cumsum([_num_blocks(array.size) for array in arrays]).tolist()
        starts = [0, *ends[:-1]]
        totals = self._xp.empty(ends[-1], "float64")
        for i in range(0, len(arrays), self.capacity):
            self.launch([[array] for array in arrays[i : i + self.capacity]], [totals[starts[i] :]])
        if len(totals) == len(arrays):
            return totals
        # The sums of blocks are the arrays of the next round, until each tensor has one block.
        again = _kernel(self._xp, itself, (totals.dtype,), (), is_sum=True)
        return again.sums([totals[start:end] for start, end in zip(starts, ends, strict=True)])

    def launch(self, rows: Sequence[Sequence[Array]], others: Sequence[Any]) -> None:
        """Start the kernel for tensors with these arrays, a row for each; `others` are its further arguments."""
        num, table, sizes = len(rows), np.zeros((), self._table_type), [row[0].size for row in rows]
        table["addresses"][:, :num] = np.array([[array.data.ptr for array in row] for row in rows], "u8").T
        table["sizes"][:num] = sizes
        table["ends"][:num] = ends = np.cumsum([_num_blocks(size) for size in sizes])
        self._start((int(ends[-1]),), (_THREADS,), (table, np.int32(num), *others))


_kernel = cache(MultiTensorKernel)


def _num_blocks(size: int) -> int:
    return max(1, -(-size // _CHUNK))
