"""The stand-in for `cupy.cuda`: it finds races between streams, and has CuPy's names and arguments."""

from __future__ import annotations

import inspect
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simparallel import backend
from simparallel.backend import kernel_name_of
from stand_in import strict, strict_cuda as cuda, strict_nccl as nccl
from stand_in.strict import xp

# --- races -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def other() -> cuda.Stream:
    return cuda.Stream(non_blocking=True)


def order(first: cuda.Stream, then: cuda.Stream) -> None:
    event = cuda.Event(disable_timing=True)
    event.record(first)
    then.wait_event(event)


USES = {
    "read": lambda x: x + 1,
    "write": lambda x: x.fill(2),
    "add": lambda x: x.__iadd__(1),
    "sum": lambda x: x.sum(),
    "set": lambda x: x.__setitem__(..., 3.0),
    "multiply": lambda x: xp.multiply(xp.ones(3), 2.0, out=x),
    "get": lambda x: x.get(),
}
WRITES = {"write", "add", "set", "multiply"}


@pytest.mark.parametrize("first", USES)
@pytest.mark.parametrize("second", USES)
def test_unordered_uses_are_a_race(other: cuda.Stream, first: str, second: str) -> None:
    """Two uses are a race if one of them writes, unless an event orders them."""
    for is_ordered in (False, True):
        x = xp.ones(3)
        order(cuda.Stream.null, other)
        USES[first](x)
        if is_ordered:
            order(cuda.Stream.null, other)
        with other:
            # The host has waited for the stream to read a value.
            if is_ordered or first == "get" or not WRITES & {first, second}:
                USES[second](x)
            else:
                with pytest.raises(cuda.StreamRaceError):
                    USES[second](x)


def test_wait_of_the_host_orders_streams(other: cuda.Stream) -> None:
    x = xp.ones(3)
    cuda.Stream.null.synchronize()
    with other:
        x += 1
    assert not [event for event in [other.record()] if not event.done]
    assert (x + 1).get().tolist() == [3, 3, 3]


def test_views_use_nothing(other: cuda.Stream) -> None:
    x = xp.ones((2, 3))
    with other:
        assert x.reshape(-1)[1:].T.shape == (5,)
        with pytest.raises(cuda.StreamRaceError):
            x[0] + 1


def test_freed_memory_is_forgotten(other: cuda.Stream) -> None:
    known = len(cuda._memories)
    for _ in range(9):
        xp.ones(3) + 1
    assert len(cuda._memories) <= known + 3


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6))
def test_order_is_transitive(orders: list[tuple[int, int]]) -> None:
    """After orders between three streams, a stream may read what the first one has written if a path leads to it."""
    streams = [cuda.Stream(non_blocking=True) for _ in range(3)]
    order(cuda.Stream.null, streams[0])
    with streams[0]:
        x = xp.ones(3)
    knows = {0}
    for first, then in orders:
        order(streams[first], streams[then])
        knows |= {then} if first in knows else set()
    for number, stream in enumerate(streams):
        with stream:
            if number in knows:
                x + 1
            else:
                with pytest.raises(cuda.StreamRaceError):
                    x + 1


# --- memory ----------------------------------------------------------------------------------------------------------


def test_memory_by_address() -> None:
    runtime = cuda.runtime
    address = runtime.malloc(64)
    memory = cuda.UnownedMemory(address, 64, None, 0)
    whole = xp.ndarray((8,), np.dtype("float64"), cuda.MemoryPointer(memory, 0))
    half = xp.ndarray((2, 2), np.dtype("float64"), cuda.MemoryPointer(memory, 32))
    whole[...] = xp.arange(8.0)
    assert half.get().tolist() == [[4, 5], [6, 7]]
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        cuda.bytes_at(address + 60, 8)
    with pytest.raises(RuntimeError, match="cannot open its own"):
        runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(address))
    runtime.free(address)
    with pytest.raises(RuntimeError, match="IllegalAddress"):
        cuda.bytes_at(address, 8)


# --- names and arguments ---------------------------------------------------------------------------------------------


def arguments(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def documented(function: Any) -> list[str]:
    """Return the names in the first line of the docstring of a function in C: f(self, size_t count, int op=0)."""
    inside = re.search(r"\((.*?)\)", function.__doc__.replace("\n", " "))
    assert inside is not None
    names = [part.split("=")[0].split()[-1] for part in inside[1].split(",") if part.strip()]
    return [name for name in names if name != "self"]


@pytest.fixture
def cupy() -> Any:
    found = pytest.importorskip("cupy", reason="CuPy is not installed")
    if backend._usable_cupy() is not None:
        pytest.skip("the calls of this test have no memory behind them: not on a machine with a GPU")
    return found


def test_functions_of_the_runtime_are_cupys(cupy: Any) -> None:
    for name, value in vars(cuda.runtime).items():
        assert hasattr(cupy.cuda.runtime, name), name
        if callable(value) and not isinstance(value, type):
            theirs, ours = documented(getattr(cupy.cuda.runtime, name)), arguments(value)
            assert len(ours) == len(theirs), (name, theirs)
        elif not isinstance(value, type):
            assert value == getattr(cupy.cuda.runtime, name), name


@pytest.mark.parametrize("kind", ["Stream", "Event", "Device", "Graph", "UnownedMemory", "MemoryPointer"])
def test_methods_are_cupys(cupy: Any, kind: str) -> None:
    own = {"begin", "clock", "is_foreign", "waits_for", "graph", "recorded_s", "is_timed", "add", "failure"}
    names = {name for name in vars(getattr(cuda, kind)) if not name.startswith("_")} - own
    assert names <= set(dir(getattr(cupy.cuda, kind)))


def test_functions_of_nccl_are_cupys(cupy: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "_usable_cupy", lambda: cupy)
        theirs = backend.gpu_nccl()
    assert theirs.__name__ == "cupy.cuda.nccl"
    if not theirs.available:
        pytest.skip("CuPy finds no NCCL library")
    for name in dir(nccl.NcclCommunicator):
        if not name.startswith("_") and name not in ("device_id", "rank_id", "size"):
            found = getattr(theirs.NcclCommunicator, name)
            assert documented(found) == arguments(getattr(nccl.NcclCommunicator, name)), name
    for name in vars(nccl):
        if name.startswith(("NCCL_", "get_", "group")) or name == "NcclError":
            assert hasattr(theirs, name), name
    assert len(theirs.get_unique_id()) == len(nccl.get_unique_id())


def test_pointer_of_an_array_is_cupys(cupy: Any) -> None:
    memory = cupy.cuda.UnownedMemory(4096, 64, None, 0)
    array = cupy.ndarray((2, 2), np.dtype("float32"), cupy.cuda.MemoryPointer(memory, 16))
    assert array.data.ptr == 4112
    assert strict.xp.ones(3).data.ptr % 8 == 0


@pytest.mark.parametrize("name", ["double", "<lambda>", "2x", "total", ""])
def test_names_that_no_kernel_can_have(name: str) -> None:
    """A compiler would refuse them; a function with this name gives its kernel another one."""
    loop = "    for (long long i = 0; i < num_lanes; i++) {{\n        total = 1;\n    }}\n"
    code = f"void {{}}() {{{{\n    double total = 0;\n{loop}}}}}"
    with pytest.raises(RuntimeError, match="expected an identifier|already been declared"):
        xp.RawKernel(code.format(name), name)
    xp.RawKernel(code.format(kernel_name_of(name)), kernel_name_of(name))
    xp.fuse(kernel_name=kernel_name_of(name))
    if name != "total":
        with pytest.raises(RuntimeError, match="expected an identifier"):
            xp.fuse(kernel_name=name)
