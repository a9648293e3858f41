"""The stand-in's captures behave like CUDA's: they compute nothing; launches repeat operations on the same memory."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from simparallel.arrays.captures import running
from simparallel.arrays.cuda.products import product
from simparallel.arrays.seam import kernels_of
from simparallel.base.attributes import setting
from stand_in import strict_cuda as cuda
from stand_in.strict import StrictArray, launches, xp
from stand_in.strict_cuda import Event, Graph, Stream, StreamRaceError

KERNELS = kernels_of[xp]


def on_device(*shape: int) -> StrictArray:
    size = int(np.prod(shape))
    return xp.asarray(np.arange(1.0, size + 1, dtype=np.float32).reshape(shape) / size)


def captured(stream: Stream, step: Callable[[], Any]) -> tuple[Any, Graph]:
    with stream, setting(running, capture=stream):
        stream.begin_capture()
        result = step()
        return result, stream.end_capture()


@pytest.fixture
def stream() -> Stream:
    return Stream(non_blocking=True)


OPERATIONS: dict[str, Callable[[StrictArray], Any]] = {
    "operator": lambda x: x * 2 - x,
    "from_a_number": lambda x: 1 - x,
    "unary": lambda x: -x,
    "function": lambda x: xp.exp(x),
    "reduction": lambda x: x.sum(axis=0),
    "to_a_number": lambda x: x.max(),
    "index": lambda x: x[xp.arange(2), xp.arange(2)],
    "view": lambda x: x.T[1:] + 1,
    "integers": lambda x: xp.argsort(x, axis=1) + 1,
    "join": lambda x: xp.concatenate([x, x]),
    "filled": lambda x: xp.zeros(3) + xp.full((), 2.0),
    "product": lambda x: KERNELS.matmul(x, x.T),
}
WRITES: dict[str, Callable[[StrictArray], Any]] = {
    "in_place": lambda x: operator.iadd(x, 1),
    "setitem": lambda x: operator.setitem(x, (slice(None), 0), 7.0),
    "out": lambda x: xp.add(x, x, out=x),
    "fill": lambda x: x.fill(3.0),
    "sort": lambda x: x.sort(axis=0),
    "copyto": lambda x: xp.copyto(x, 2.0),
    "add_at": lambda x: xp.add.at(x, (xp.zeros(2, int), xp.zeros(2, int)), 1.0),
    "product": lambda x: KERNELS.matmul(x, x + 1, out=x),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_result_exists_after_the_launch(name: str, stream: Stream) -> None:
    with stream:
        x = on_device(3, 3)
    y, graph = captured(stream, lambda: OPERATIONS[name](x))
    before = y.get()
    for factor in (1.0, -2.0):
        with stream:
            x *= factor
        graph.launch(stream)
        with stream:
            expected = OPERATIONS[name](x).get()
            assert y.dtype == expected.dtype
            np.testing.assert_array_equal(y.get(), expected)
    assert not np.array_equal(before, expected)


@pytest.mark.parametrize("name", WRITES)
def test_capture_writes_nothing(name: str, stream: Stream) -> None:
    with stream:
        x, twin = on_device(3, 3), on_device(3, 3)
        start = x.get()
    _, graph = captured(stream, lambda: WRITES[name](x))
    with stream:
        np.testing.assert_array_equal(x.get(), start)
        for _ in range(2):
            graph.launch()
            WRITES[name](twin)
            np.testing.assert_array_equal(x.get(), twin.get())


def test_launch_is_one_operation(stream: Stream) -> None:
    with stream:
        x = on_device(3)
    with launches() as names:
        _, graph = captured(stream, lambda: xp.exp(x) + x)
        graph.launch(stream)
    assert names == ["graph"]


WAITS: dict[str, Callable[[StrictArray], Any]] = {
    "get": lambda x: x.get(),
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: xp.nonzero(x),
    "asarray": lambda x: xp.asarray(np.ones(3)),
    "number": lambda x: xp.asarray(1.0),
    "stream": lambda x: cuda.get_current_stream().synchronize(),
    "query": lambda x: cuda.get_current_stream().done,
    "device": lambda x: cuda.Device(0).synchronize(),
    "event": lambda x: cuda.get_current_stream().record().synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_invalidate_a_capture(name: str, stream: Stream) -> None:
    with stream:
        x = on_device(3)
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureUnsupported"):
            WAITS[name](x)
        with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureInvalidated"):
            stream.end_capture()
        assert not stream.is_capturing()
        assert (x + 1).get().tolist() == (x.get() + 1).tolist()


def test_default_stream_is_not_captured() -> None:
    with pytest.raises(RuntimeError, match="default"):
        Stream.null.begin_capture()
    with pytest.raises(RuntimeError, match="IllegalState"):
        Stream(non_blocking=True).end_capture()


def test_other_streams_join_and_are_joined(stream: Stream) -> None:
    other = Stream(non_blocking=True)
    with stream:
        x = on_device(3)
        stream.begin_capture()
        other.wait_event(stream.record())
        with other:
            y = x + 1
        with pytest.raises(RuntimeError, match="Unjoined"):
            stream.end_capture()
        stream.begin_capture()
        other.wait_event(stream.record())
        with other:
            y = x + 1
        stream.wait_event(other.record())
        stream.end_capture().launch()
        assert y.get().tolist() == (x.get() + 1).tolist()


def test_events_from_outside_are_refused(stream: Stream) -> None:
    event = Event()
    event.record(Stream(non_blocking=True))
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="cudaErrorStreamCaptureIsolation"):
            stream.wait_event(event)


def test_launch_takes_part_in_races(stream: Stream) -> None:
    """Another stream may read the results of a launch only after an event."""
    with stream:
        x = on_device(3)
    y, graph = captured(stream, lambda: x + 1)
    other = Stream(non_blocking=True)
    graph.launch(stream)
    with other, pytest.raises(StreamRaceError):
        y + 1
    other.wait_event(stream.record())
    with other:
        y + 1


# --- products ------------------------------------------------------------------------------------------------


@st.composite
def operands(draw: st.DrawFn) -> tuple[StrictArray, StrictArray]:
    """Draw two operands of a product, of all kinds of layouts and leading dims."""
    size = st.integers(1, 4)
    m, k, n = draw(size), draw(size), draw(size)
    leading = draw(
        st.sampled_from([((), ()), ((3,), (3,)), ((2, 3), (2, 3)), ((3,), ()), ((2, 1), (1, 3)), ((), (2, 3))])
    )
    dtype = draw(st.sampled_from(["float32", "float64", "float16"]))

    def operand(batch: tuple[int, ...], rows: int, columns: int) -> StrictArray:
        layout = draw(st.sampled_from(["rows", "columns", "cut", "steps", "outer"]))
        grown = {"cut": (rows + 1, columns + 2), "steps": (2 * rows, 2 * columns)}.get(layout, (rows, columns))
        if layout == "columns":
            grown = grown[::-1]
        shape = (*grown, *batch) if layout == "outer" else (*batch, *grown)
        # Small integers: sums are exact in any order.
        x = xp.asarray(np.random.default_rng(0).integers(-3, 4, shape).astype(dtype))
        if layout == "columns":
            return x.swapaxes(-1, -2)
        if layout == "outer":
            return xp.moveaxis(x, (0, 1), (-2, -1))
        return x[..., :rows, :columns] if layout == "cut" else x[..., ::2, ::2] if layout == "steps" else x

    a, b = operand(leading[0], m, k), operand(leading[1], k, n)
    a = a[..., 0, :] if a.ndim == 2 and draw(st.booleans()) else a
    return a, b[..., 0] if b.ndim == 2 and draw(st.booleans()) else b


@given(data=st.data(), pair=operands())
def test_captured_product_equals_numpys(data: st.DataObject, pair: tuple[StrictArray, StrictArray]) -> None:
    a, b = pair
    plain = np.matmul(a.get(), b.get())
    out: Any = None
    if plain.ndim and data.draw(st.booleans()):
        out = (
            xp.zeros(plain.shape[::-1], plain.dtype).T
            if data.draw(st.booleans())
            else xp.zeros(plain.shape, plain.dtype)
        )
    stream = Stream(non_blocking=True)
    stream.wait_event(Stream.null.record())
    y, graph = captured(stream, lambda: KERNELS.matmul(a, b, out=out))
    graph.launch(stream)
    with stream:
        np.testing.assert_array_equal(y.get(), plain, strict=True)


EQUATIONS = (
    "ij,jk->ik", "ij,jk->k", "...i,...i->...", "bij,bjk->bik", "ij,kl->jl", "i,j,k->kji", "ij,jk,kl->li", "ij->j",
    "...ij,jk->...ik", "a...,...a->...a", "ijk,kj->i", "...,...->...", "ij,j,...->...i",
)  # fmt: skip


@given(st.sampled_from(EQUATIONS), st.data())
def test_captured_einsum_equals_numpys(equation: str, data: st.DataObject) -> None:
    sizes = {name: data.draw(st.integers(1, 3)) for name in "abijkl"}
    lead = data.draw(st.lists(st.integers(1, 3), max_size=2))
    arrays = []
    for tensor in equation.split("->")[0].split(","):
        dots = [data.draw(st.sampled_from([1, size])) for size in lead[data.draw(st.integers(0, len(lead))) :]]
        before, _, after = tensor.partition("...")
        shape = [sizes[x] for x in before] + (dots if "..." in tensor else []) + [sizes[x] for x in after]
        arrays.append(np.random.default_rng(len(arrays)).integers(-3, 4, shape).astype(np.float32))
    stream = Stream(non_blocking=True)
    with stream:
        operands = list(map(xp.asarray, arrays))
    y, graph = captured(stream, lambda: KERNELS.einsum(equation, *operands))
    graph.launch(stream)
    with stream:
        np.testing.assert_array_equal(y.get(), np.einsum(equation, *arrays))


@pytest.mark.parametrize("name", ["matmul", "operator", "einsum"])
def test_librarys_own_products_are_refused(name: str, stream: Stream) -> None:
    products = {"matmul": xp.matmul, "operator": operator.matmul, "einsum": lambda a, b: xp.einsum("ij,jk->ik", a, b)}
    with stream:
        x = on_device(2, 2)
    with pytest.raises(NotImplementedError, match="cuBLAS"):
        captured(stream, lambda: products[name](x, x))


def test_products_of_integers_are_refused(stream: Stream) -> None:
    x = xp.asarray(np.ones((2, 2), int))
    with pytest.raises(NotImplementedError):
        product(xp, x, x)


def test_empty_products(stream: Stream) -> None:
    with stream:
        x, y = xp.zeros((2, 0)), xp.zeros((0, 3))
    (none, zeros), graph = captured(stream, lambda: (KERNELS.matmul(y, x[:0].T), KERNELS.matmul(x, y)))
    graph.launch(stream)
    with stream:
        assert none.shape == (0, 0)
        assert zeros.get().tolist() == [[0.0] * 3] * 2


# --- CuPy itself ---------------------------------------------------------------------------------------------


def parameters(function: Any) -> list[str]:
    """Return the names of the arguments of a function; for compiled ones, those in their docstring."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        head = (function.__doc__ or "").split(")")[0].split("(")[1]
        names = [part.split("=")[0].split(" ")[-1].strip() for part in head.split(",")]
    return [name for name in names if name not in ("", "self")]


@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.filterwarnings("default:::cupy.*")
def test_names_are_cupys() -> None:
    """CuPy's captures, pools and products have the names and arguments that the package uses, without a GPU."""
    import cupy

    for kind, names in (("Stream", ("begin_capture", "end_capture", "is_capturing")), ("Graph", ("launch", "upload"))):
        for name in names:
            ours, theirs = (getattr(getattr(module, kind), name) for module in (cuda, cupy.cuda))
            assert parameters(ours) == parameters(theirs), name
    assert callable(cupy.cuda.MemoryPool.malloc)
    assert parameters(cuda.using_allocator) == parameters(cupy.cuda.using_allocator)
    assert callable(cupy.cuda.device.get_cublas_handle)
    assert callable(cupy.cuda.runtime.runtimeGetVersion)
    for name in ("matmul", "broadcast_shapes", "broadcast_to", "ascontiguousarray", "result_type", "full", "empty"):
        assert callable(getattr(cupy, name)), name


@pytest.mark.skipif(not (find_spec("nvidia") and find_spec("nvidia.cublas")), reason="cuBLAS is not installed")
def test_cublas_has_the_functions() -> None:
    import ctypes
    from pathlib import Path

    import nvidia.cublas

    (path,) = (Path(folder) / "lib" / "libcublas.so.12" for folder in nvidia.cublas.__path__)
    library = ctypes.CDLL(str(path))
    assert library.cublasSetStream_v2
    assert library.cublasGemmStridedBatchedEx
