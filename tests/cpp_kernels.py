"""Run the CUDA source of this package's kernels as C++ on the host, beside the stand-in.

Threads run one after another; where they wait for each other, each is a thread of the host, or a block
has one thread if it may have any number of them.
"""

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
from stand_in import strict, strict_kernels

COMPILER = shutil.which("g++")
_PRELUDE = """
#include <cmath>
#include <pthread.h>
#include <thread>
#include <vector>
using std::exp; using std::fabs; using std::sqrt;
#define __device__
#define __global__
#define __launch_bounds__(count)
#define __shared__ static
typedef _Float16 float16;
static struct { unsigned x; } blockDim;
static thread_local struct { unsigned x; } blockIdx, threadIdx;
static pthread_barrier_t barrier;
static void __syncthreads() { pthread_barrier_wait(&barrier); }
static void together(unsigned num_blocks, auto run) {
    std::vector<std::thread> threads;
    pthread_barrier_init(&barrier, nullptr, blockDim.x);
    for (unsigned i = 0; i < blockDim.x; i++) threads.emplace_back([=] {
        threadIdx.x = i;
        for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++) { run(); __syncthreads(); }
    });
    for (auto& thread : threads) thread.join();
    pthread_barrier_destroy(&barrier);
}
"""
_SIGNATURE = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\(.*?\) )?(\w+)\((.*?)\)', re.DOTALL)


def compiled(sources: list[str], folder: Path) -> Any:
    """Compile kernels as one library, in which kernel number i is `run<i>(num_blocks, num_threads, arguments)`."""
    text = _PRELUDE
    for i, source in enumerate(sources):
        signature = _SIGNATURE.search(source)
        assert signature is not None
        types = [parameter.rsplit(maxsplit=1)[0].replace("const ", "") for parameter in signature[2].split(",")]
        arguments = ", ".join(f"*({kind}*)arguments[{k}]" for k, kind in enumerate(types))
        body = re.sub(r"#include .*", "", source).replace('extern "C" ', "")
        text += f"""
namespace kernel{i} {{ {body}
extern "C" void run{i}(unsigned num_blocks, unsigned num_threads, void** arguments) {{
    blockDim.x = {"1" if "__syncthreads" in source and "blockDim" in source else "num_threads"};
    auto run = [=] {{ {signature[1]}({arguments}); }};
    if ({int("__syncthreads" in source)}) {{ together(num_blocks, run); return; }}
    for (blockIdx.x = 0; blockIdx.x < num_blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++) run();
}} }}
"""
    (folder / "kernels.cpp").write_text(text)
    # As CuPy compiles them: no product and sum become one operation.
    options = "-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread"
    subprocess.run(
        [str(COMPILER), *options, "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True, capture_output=True
    )
    return ctypes.CDLL(str(folder / "kernels.so"))


def _run(function: Any, grid: Any, block: Any, args: Any) -> None:
    """Call a kernel with pointers to its arguments, as CUDA does; Python's integers are 64 bits long."""
    words = [np.array(x._data.ctypes.data if isinstance(x, strict.StrictArray) else x) for x in args]
    pointers = (ctypes.c_void_p * len(words))(*(word.ctypes.data for word in words))
    function(int(grid[0]), int(block[0]), pointers)


@contextmanager
def listed_sources() -> Iterator[list[str]]:
    """Yield the sources of all kernels that start inside the block, each once."""
    sources: dict[str, None] = {}
    with _started_by(lambda kernel, *_: sources.setdefault(kernel.code)):
        listed: list[str] = []
        yield listed
        listed += sources


@contextmanager
def compared(library: Any, sources: list[str]) -> Iterator[list[str]]:
    """Run each kernel inside the block as C++, too, and yield the names of those whose results differ.

    Sums may differ in their last bits, all other results in none.
    """
    different: list[str] = []

    def compare(kernel: strict_kernels.RawKernel, grid: Any, block: Any, args: Any) -> None:
        memory = kernel.memory(args)
        before = [array.copy() for array in memory]
        _run(getattr(library, f"run{sources.index(kernel.code)}"), grid, block, args)
        found = [array.copy() for array in memory]
        for array, old in zip(memory, before, strict=True):
            array[...] = old
        kernel(grid, block, args)
        # Threads of a block add up in another order than NumPy.
        tolerance = 0 if "__syncthreads" not in kernel.code else 1e-12 if "float " not in kernel.code else 1e-5
        if not all(
            np.allclose(*pair, rtol=tolerance, atol=tolerance, equal_nan=True)
            for pair in zip(found, memory, strict=True)
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
        watch(kernel, grid, block, args)
        start(kernel, grid, block, args)

    strict._start_kernel = both
    try:
        yield
    finally:
        strict._start_kernel = start
