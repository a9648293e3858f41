"""Run the CUDA source of `gpu.multi_tensor` as C++ on the host, one thread a block, beside the stand-in."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.testing import strict, strict_kernels

COMPILER = shutil.which("g++")
_PRELUDE = """
#include <cmath>
using std::fabs; using std::sqrt;
#define __device__
#define __global__
#define __shared__ static
typedef _Float16 float16;
static struct { unsigned x; } blockIdx, threadIdx, blockDim = {1};
static void __syncthreads() {}
"""
_SIGNATURE = re.compile(r"void (\w+)\(const Table table, const int num_tensors(.*?)\)")


def compiled(sources: list[str], folder: Path) -> Any:
    """Compile kernels as one library, in which kernel number i is `run<i>(num_blocks, table, num_tensors, others)`."""
    text = _PRELUDE
    for i, source in enumerate(sources):
        signature = _SIGNATURE.search(source)
        assert signature is not None
        others = [
            f"*(double**)others[{k}]" if "*" in parameter else f"*(double*)others[{k}]"
            for k, parameter in enumerate(signature[2].split(",")[1:])
        ]
        body = re.sub(r"#include .*", "", source).replace('extern "C" ', "")
        arguments = ", ".join(["*(Table*)table", "num_tensors", *others])
        text += f"""
namespace kernel{i} {{ {body}
extern "C" void run{i}(int num_blocks, void* table, int num_tensors, void** others) {{
    for (blockIdx.x = 0; blockIdx.x < (unsigned)num_blocks; blockIdx.x++) {signature[1]}({arguments});
}} }}
"""
    (folder / "kernels.cpp").write_text(text)
    # As CuPy compiles them: no product and sum become one operation.
    options = "-std=c++17", "-O1", "-ffp-contract=off", "-shared", "-fPIC"
    subprocess.run(
        [str(COMPILER), *options, "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True, capture_output=True
    )
    return ctypes.CDLL(str(folder / "kernels.so"))


def _run(function: Any, grid: Any, args: Any) -> None:
    table, num_tensors, *others = args
    words = [np.array(x._data.ctypes.data if isinstance(x, strict.StrictArray) else x) for x in others]
    pointers = (ctypes.c_void_p * max(1, len(words)))(*(word.ctypes.data for word in words))
    function(int(grid[0]), ctypes.c_void_p(table.ctypes.data), int(num_tensors), pointers)


@contextmanager
def listed_sources() -> Iterator[list[str]]:
    """Yield the sources of all kernels that start inside the block, each once."""
    sources: dict[str, None] = {}
    with _started_by(lambda kernel, grid, args: sources.setdefault(kernel.code)):
        listed: list[str] = []
        yield listed
        listed += sources


@contextmanager
def compared(library: Any, sources: list[str]) -> Iterator[list[str]]:
    """Run each kernel inside the block as C++, too, and yield the names of those whose results differ.

    Sums may differ in their last bits, all other results in none.
    """
    different: list[str] = []

    def compare(kernel: strict_kernels.RawKernel, grid: Any, args: Any) -> None:
        memory = [array for arrays in kernel.arrays(args) for array in arrays.values()]
        totals = [x._data for x in args[2:] if isinstance(x, strict.StrictArray)]
        memory += totals
        before = [array.copy() for array in memory]
        _run(getattr(library, f"run{sources.index(kernel.code)}"), grid, args)
        found = [array.copy() for array in memory]
        for array, old in zip(memory, before, strict=True):
            array[...] = old
        kernel(grid, (), args)
        tolerance = 1e-12 if totals else 0
        if not all(
            np.allclose(*pair, rtol=tolerance, atol=0, equal_nan=True) for pair in zip(found, memory, strict=True)
        ):
            different.append(kernel.name)
        for array, old in zip(memory, before, strict=True):
            array[...] = old

    with _started_by(compare):
        yield different


@contextmanager
def _started_by(watch: Any) -> Iterator[None]:
    start = strict._start_kernel

    def both(kernel: Any, grid: Any, block: Any, args: Any) -> None:
        watch(kernel, grid, args)
        start(kernel, grid, block, args)

    strict._start_kernel = both
    try:
        yield
    finally:
        strict._start_kernel = start
