"""A CuPy stand-in that needs no GPU: NumPy with CuPy's restrictions.

    x = strict.xp.asarray(np.ones(3))      # a StrictArray, "on the device"
    x + x, strict.xp.exp(x)                # StrictArrays
    x + np.ones(3), np.exp(x)              # TypeError: host and device arrays do not mix
    strict.xp.errstate                     # AttributeError: CuPy has none

Differences from NumPy, as in CuPy ("Differences between CuPy and NumPy" in its user guide): 0-d results stay arrays,
ufuncs accept no lists, only `get()` converts to NumPy. CuPy wraps indices around; here they are errors, except while
`backend.check_when_read` has a check of them. Names, keywords and dtypes that CuPy lacks are refused, see
`cupy_lacks`. An assignment that writes one element twice, undefined in CuPy, is an error here. `xp.fuse` runs a
function as it is, and refuses operations that one kernel of CuPy cannot do.

Importing this file registers the type, so that Tensors and ops accept it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import prod
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from simparallel.backend import _reader, register_namespace
from stand_in import cupy_lacks, strict_cublas, strict_cuda, strict_kernels, strict_nccl
from stand_in.strict_indices import in_range, parts, refuse_repeats, wrapped
from stand_in.strict_memory import array_in, memory_of_array

# Functions whose results have a size that depends on values.
_SIZED_BY_VALUES = frozenset(("argwhere", "compress", "flatnonzero", "nonzero", "unique"))
# Functions that reserve memory and write nothing; functions and methods that write into their first array.
_NOT_FILLED = frozenset(("empty", "empty_like"))
# Functions that copy array by array, unless there are many small ones.
_JOINING = frozenset(("concatenate", "stack", "hstack", "vstack"))
_IN_PLACE = frozenset(("copyto", "fill", "partition", "put", "sort"))
# Functions that CuPy computes by cuBLAS, which it refuses in a capture; einsum calls `cupy.matmul`.
_PRODUCTS = frozenset(("matmul", "einsum", "dot", "inner", "tensordot", "vdot"))
# Functions that copy host arrays to the device.
_FROM_HOST = frozenset(("array", "asarray", "asanyarray", "ascontiguousarray"))


# Functions and methods of a fused function, besides operators and ufuncs; operators that CuPy lacks there.
_FUSIBLE = frozenset(("where", "clip", "copy"))
_FUSIBLE_METHODS = frozenset(("astype", "copy", "dtype", "ndim"))
_NOT_FUSIBLE = frozenset(("matmul", "abs", "pos"))


def has_checks() -> bool:
    """Return whether checks of this thread wait for a read."""
    return bool(_reader.checks)


class _Fusing(threading.local):
    """Whether this thread is inside a fused function."""

    is_on = False


_fusing = _Fusing()


# A function for each open block of `host_waits` and of `launches`.
_Listeners = list[Callable[[str], None]]
_wait_listeners: _Listeners = []
_launch_listeners = strict_cuda.launch_listeners
_operation_listeners: _Listeners = []


def host_waits() -> AbstractContextManager[list[str]]:
    """List the operations inside the block for which the host waits for a GPU, because it needs a value.

    A second read without an operation in between waits for nothing.
    They are named get, item, tolist, bool, int, float; mask, because the size of `x[mask]` depends on values;
    nonzero and other functions whose results have such a size.
    """
    return _listing(_wait_listeners)


def ranges() -> AbstractContextManager[list[str]]:
    """List the NVTX ranges of all threads inside the block: "name" where one begins, "" where one ends."""
    return _listing(strict_cuda.range_listeners)


def launches() -> AbstractContextManager[list[str]]:
    """List the operations inside the block for which CuPy starts a kernel, or a copy to the GPU; some start more.

    They have the names of the functions and operators: matmul, add, iadd, setitem. A view of memory starts nothing. A
    product of broadcast stacks of matrices, for example, is listed once, and starts about ten small kernels. A fused
    function has its own name, and starts one kernel, like CUDA source. The launch of a graph is listed as graph.
    """
    return _listing(_launch_listeners)


def operations() -> AbstractContextManager[list[str]]:
    """List operations as `launches` does, but list each operation of a fused function."""
    return _listing(_operation_listeners)


@contextmanager
def _listing(listeners: _Listeners) -> Iterator[list[str]]:
    names: list[str] = []
    listeners.append(names.append)
    try:
        yield names
    finally:
        listeners.remove(names.append)


def _note_wait(name: str) -> None:
    strict_cuda.refuse_in_capture(name)
    if _wait_listeners and not strict_cuda.has_waited():
        for note in _wait_listeners:
            note(name)


def _note_launch(name: str, result: Any, *sources: Any, reads: Sequence[Any] = ()) -> None:
    """Note an operation, unless its result is no array, is empty, or shares the memory of a source.

    It reads the sources, and `reads`, which may share memory with the result.
    """
    listeners = [*_operation_listeners, *(() if _fusing.is_on else _launch_listeners)]
    is_watching = strict_cuda.is_watching()
    if not (listeners or is_watching or _wait_listeners):
        return
    results = result if isinstance(result, (tuple, list)) else (result,)
    for array in results:
        is_filled = isinstance(array, (np.ndarray, np.generic)) and array.size > 0
        if is_filled and not _shares(array, sources):
            strict_cuda.note_work()
            for note in listeners:
                note(name)
            if is_watching:
                _note_use(array, (*sources, *reads))
            return


def _note_use(result: Any, sources: Sequence[Any]) -> None:
    for source in sources:
        if isinstance(source, np.ndarray):
            strict_cuda.use(source, is_written=False)
        elif isinstance(source, (tuple, list)):
            _note_use(None, source)
    if isinstance(result, np.ndarray):
        strict_cuda.use(result, is_written=True)


def _capture(
    graph: strict_cuda.Graph, name: str, compute: Callable[[], Any], target: Any, sources: Sequence[Any]
) -> Any:
    """Add an operation to a graph, and return its result, whose values are arbitrary until the graph is launched.

    A new result lies in memory of the capture's pool, which earlier results may have had.

    Args:
        graph: the graph.
        name: name of the operation.
        compute: computes it with NumPy.
        target: the array that it writes to; None for a new one.
        sources: arrays that it reads.
    """
    if name in _PRODUCTS:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")
    if target is not None:

        def write() -> None:
            if strict_cuda.is_watching():
                _note_use(target, sources)
            compute()

        graph.add(write)
        return target
    # Compute once, with arbitrary values, to find the shape and dtype of the result.
    with np.errstate(all="ignore"):
        found = compute()
    results = [np.asarray(x) if isinstance(x, np.generic) else x for x in (found if type(found) is tuple else (found,))]

    def is_new(array: Any) -> bool:
        return isinstance(array, np.ndarray) and array.size > 0 and not _shares(array, sources)

    wrapped = [_allocated(array) if is_new(array) else array for array in results]
    new = [x._data if isinstance(x, StrictArray) and name not in _NOT_FILLED else None for x in wrapped]

    def repeat() -> None:
        values = compute()
        for array, value in zip(new, values if type(values) is tuple else (values,), strict=True):
            if array is not None:
                if strict_cuda.is_watching():
                    _note_use(array, sources)
                array[...] = value

    if any(array is not None for array in new):
        graph.add(repeat)
    for array in new:
        if array is not None:
            array.fill(np.nan if array.dtype.kind == "f" else 0)
    return tuple(wrapped) if type(found) is tuple else wrapped[0]


def _allocated(array: np.ndarray) -> StrictArray:
    """Return a device array like a new one of NumPy, in memory of this thread's pool if it has one."""
    memory = memory_of_array(array.nbytes)
    return StrictArray(array) if memory is None else StrictArray(array_in(memory, array), memory=memory)


def _shares(array: np.ndarray, sources: Sequence[Any]) -> bool:
    return any(isinstance(source, np.ndarray) and np.may_share_memory(array, source) for source in sources)


# The device array of each NumPy array; an array lives at least as long as its device array, so no id is used twice.
_owners: WeakValueDictionary[int, StrictArray] = WeakValueDictionary()


class StrictArray:
    """An array "on the device": a NumPy array that does not mix with others."""

    # A memory account holds arrays by weak references.
    __slots__ = ("__weakref__", "_data", "_memory", "base")
    # Makes NumPy defer np_array + x to x, which refuses it.
    __array_ufunc__ = None

    def __init__(self, data: Any, dtype: Any = None, memptr: Any = None, *, memory: Any = None) -> None:
        if memptr is not None:
            size = prod(data) * np.dtype(dtype).itemsize
            data = strict_cuda.bytes_at(memptr.ptr, size).view(dtype).reshape(data)
        if data.dtype.char not in cupy_lacks.DTYPES:
            raise ValueError(f"CuPy has no arrays of dtype {data.dtype}.")
        self._data = data
        # As in NumPy and CuPy, a view keeps the array that owns its memory.
        self.base: StrictArray | None = None
        if isinstance(data.base, np.ndarray):
            owner = _owners.get(id(data.base))
            self.base = StrictArray(data.base) if owner is None else owner
        # An array that an operation has written into comes back as its result.
        same = _owners.get(id(data))
        if memory is None and same is None and self.base is None and type(data) is np.ndarray:
            memory = memory_of_array(data.nbytes)
        self._memory: Any = memory if same is None else same._memory
        _owners[id(data)] = self

    def __reduce__(self) -> Any:
        # Without its memory: the receiver allocates its own.
        return StrictArray, (self._data,)

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None) -> np.ndarray:
        """Return a copy on the host, or `out` filled with it."""
        self._wait("get")
        if out is None:
            return self._data.copy(order)
        if not out.flags.c_contiguous or (out.shape, out.dtype) != (self._data.shape, self._data.dtype):
            raise ValueError("get: out must be contiguous, with the shape and dtype of the array.")
        out[...] = self._data
        return out

    def _wait(self, name: str) -> None:
        """Note that the host waits for the current stream, to read this array."""
        _note_wait(name)
        strict_cuda.catch_up()
        if strict_cuda.is_watching():
            strict_cuda.use(self._data, is_written=False)
            strict_cuda.get_current_stream().synchronize()

    @property
    def device(self) -> strict_cuda.Device:
        return strict_cuda.current_device()

    @property
    def data(self) -> Any:
        """The array's memory, with the address `ptr`."""
        return strict_cuda.MemoryPointer(strict_cuda.UnownedMemory(strict_cuda.address_of(self._data), 0, self), 0)

    @property
    def flags(self) -> _Flags:
        return _Flags(self._data.flags)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("a device array is not implicitly converted to NumPy; use get().")

    def __array_function__(self, function: Any, *args: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} was called with a device array; use ctx.xp.")

    def __getattr__(self, name: str) -> Any:
        # All else is NumPy's, with device arrays going in and out. Private names are protocols that NumPy probes for.
        if name.startswith("_") or name in cupy_lacks.METHODS:
            raise AttributeError(f"a CuPy array has no attribute {name!r}")
        _refuse_in_kernel(name, name in _FUSIBLE_METHODS)
        value = getattr(self._data, name)
        # Shapes, dtypes and views need no values.
        if not callable(value):
            return _wrap(value)
        strict_cuda.catch_up()
        call = _guarded(value, name, cupy_lacks.KEYWORDS_OF_METHODS.get(name, frozenset()))
        return call if name != "view" else lambda *args: _aligned(call(*args))

    def item(self) -> Any:
        self._wait("item")
        return self._data.item()

    def tolist(self) -> Any:
        self._wait("tolist")
        return self._data.tolist()

    def __getitem__(self, key: Any) -> StrictArray:
        _refuse_in_kernel("x[…]")
        plain = _unwrap(key)
        if any(isinstance(part, np.ndarray) and part.dtype == bool for part in parts(plain)):
            _note_wait("mask")
        if (graph := strict_cuda.captured_graph()) is not None:
            read = lambda: self._data[wrapped(self._data, plain)]  # noqa: E731
            return _wrap(_capture(graph, "getitem", read, None, (self._data, plain)))
        result = _unwrap(self)[wrapped(self._data, plain) if _reader.checks else plain]
        _note_launch("getitem", result, self._data)
        return _wrap(result)

    def __setitem__(self, key: Any, value: Any) -> None:
        _refuse_in_kernel("x[…] = y", key is Ellipsis)
        plain, plain_value = _unwrap(key), _unwrap(value)

        def write(key: Any) -> None:
            refuse_repeats(self._data, key)
            self._data[key] = plain_value

        if (graph := strict_cuda.captured_graph()) is not None:
            launch = lambda: write(wrapped(self._data, plain))  # noqa: E731
            _capture(graph, "setitem", launch, self._data, (plain, plain_value))
            return
        if _reader.checks:
            plain = wrapped(self._data, plain)
        # x[...] += y ends with x[...] = x[...], for which CuPy starts nothing.
        part = self._data[plain]
        if not (isinstance(plain_value, np.ndarray) and _is_same(part, plain_value)):
            _note_launch("setitem", part, reads=(plain_value,))
        write(plain)

    def __len__(self) -> int:
        _refuse_in_kernel("len(x)")
        return len(self._data)

    def __bool__(self) -> bool:
        _refuse_in_kernel("bool(x)")
        self._wait("bool")
        return bool(self._data)

    def __int__(self) -> int:
        _refuse_in_kernel("int(x)")
        self._wait("int")
        return int(self._data)

    def __float__(self) -> float:
        _refuse_in_kernel("float(x)")
        self._wait("float")
        return float(self._data)

    def __repr__(self) -> str:
        return f"StrictArray({self._data!r})"

    # Unhashable, like any array: == compares elements.
    __hash__ = None  # type: ignore[assignment]


class _KernelNumber:
    """A number inside a fused function: it has no value yet, so it combines with arrays only."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __bool__(self) -> bool:
        raise TypeError("a fused function cannot branch on a number; make it a setting.")

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise TypeError("a fused function cannot compare a number; make it a setting.")


def _refuse_in_kernel(name: str, is_fusible: bool = False) -> None:
    if _fusing.is_on and not is_fusible:
        raise TypeError(f"cupy.fuse cannot compute {name} in one kernel; compute it before or after.")


def _check_fusible(function: Any, name: str, args: Any, kwargs: Any) -> None:
    """Refuse a call that CuPy cannot compute inside of a fused function, or computes in another dtype than NumPy."""
    owner = getattr(function, "__self__", None)
    is_method, is_ufunc = isinstance(owner, np.ndarray), isinstance(function, np.ufunc)
    known = _FUSIBLE_METHODS if is_method else _FUSIBLE
    keywords = {"copy"} if name == "astype" else {"out"} if is_ufunc or name == "clip" else set()
    is_known = (is_ufunc or name in known) and name not in _NOT_FUSIBLE
    _refuse_in_kernel(name, is_known and kwargs.keys() <= keywords)
    if not is_method and not any(isinstance(arg, StrictArray) for arg in args):
        raise TypeError(f"{name} of numbers alone is float64 inside of a fused function; compute it before.")
    if any(isinstance(arg, np.generic) for arg in args):
        raise TypeError(f"{name} got a NumPy number inside of a fused function; use float(…).")


def _run_fused(function: Callable[..., Any], kernel_name: str, args: tuple[Any, ...]) -> Any:
    """Call `function` as CuPy's `fuse` does: arrays, numbers and None in, one kernel, new arrays or nothing out."""
    for arg in args:
        # CuPy takes NumPy's numbers, too, but their dtype would change the arithmetic.
        if type(arg) not in (StrictArray, int, float, type(None)):
            raise TypeError(f"{kernel_name}: a fused function takes arrays and Python numbers, got {arg!r}.")
    shape = np.broadcast_shapes(*(arg._data.shape for arg in args if isinstance(arg, StrictArray)))
    _fusing.is_on = True
    try:
        result = function(*(_KernelNumber(arg) if isinstance(arg, (int, float)) else arg for arg in args))
        for array in result if isinstance(result, tuple) else () if result is None else (result,):
            # CuPy would copy an argument, and repeat the elements of a smaller array.
            if type(array) is not StrictArray or any(array is arg for arg in args) or array._data.shape != shape:
                raise TypeError(f"{kernel_name}: a fused function returns new arrays of shape {shape}.")
            # The order of CuPy's new arrays.
            if not array._data.flags.c_contiguous:
                in_order = partial(np.array, array._data, order="C")
                array._data = _operated("copy", in_order, array._data)._data
    finally:
        _fusing.is_on = False
    for note in _launch_listeners if prod(shape) else ():
        note(kernel_name)
    return result


def _start_kernel(kernel: strict_kernels.RawKernel, *args: Any) -> None:
    kernel(*args)
    strict_cuda.note_work()
    for note in _launch_listeners:
        note(kernel.name)
    for note in _operation_listeners:
        for operation in kernel.operations:
            note(operation)


def _wrap(value: Any) -> Any:
    """Convert NumPy arrays and scalars to device arrays; leave everything else unchanged."""
    # NumPy returns a scalar for a 0-d result, CuPy an array.
    if isinstance(value, (np.ndarray, np.generic)):
        known = _owners.get(id(value))
        return StrictArray(np.asarray(value)) if known is None or known._data is not value else known
    if isinstance(value, (tuple, list)):
        return tuple(_wrap(item) for item in value)
    return value


def _unwrap(value: Any) -> Any:
    """Convert device arrays to NumPy; refuse NumPy arrays, accept numbers and NumPy scalars."""
    if isinstance(value, StrictArray):
        strict_cuda.catch_up()
        return value._data
    if isinstance(value, _KernelNumber):
        return value.value
    if isinstance(value, np.ndarray):
        raise TypeError(f"a NumPy array of shape {value.shape} was mixed with device arrays; move it with xp.asarray.")
    if isinstance(value, (tuple, list)):
        return type(value)(_unwrap(item) for item in value)
    return value


def _num_copies(arrays: Sequence[np.ndarray]) -> int:
    """Return the number of kernels by which CuPy 14 joins arrays: one for more than 8 of less than 2 MiB on average."""
    is_one_dtype = len({array.dtype for array in arrays}) == 1
    if len(arrays) > 8 and is_one_dtype and sum(array.nbytes for array in arrays) < len(arrays) << 21:
        return 1
    return len(arrays)


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are the same elements of memory, in the same order."""
    return a.__array_interface__ == b.__array_interface__


def _aligned(view: StrictArray) -> StrictArray:
    """Refuse words at addresses where NumPy reads them, but no GPU does."""
    address, size = view._data.ctypes.data, view._data.itemsize
    if view._data.size and address % size:
        raise RuntimeError(f"cudaErrorMisalignedAddress: words of {size} bytes at {address:#x}")
    return view


class _Flags:
    """The flags of an array: CuPy's have no `writeable`."""

    def __init__(self, flags: Any) -> None:
        self._flags = flags

    def __getattr__(self, name: str) -> bool:
        if name not in cupy_lacks.FLAGS:
            raise AttributeError(f"the flags of a CuPy array have no {name!r}")
        return bool(getattr(self._flags, name))


def _guarded(
    function: Callable[..., Any], name: str, lacks: frozenset[str], *, from_host: bool = False
) -> Callable[..., Any]:
    """Wrap `function` to take and return device arrays, and to refuse the keywords `lacks`."""
    plain = partial(_in_c_order, function) if isinstance(function, np.ufunc) or function is np.where else function

    def call(*args: Any, **kwargs: Any) -> Any:
        if unknown := sorted(lacks & kwargs.keys()):
            raise TypeError(f"CuPy's {name}() takes no {', '.join(unknown)}.")
        if _fusing.is_on:
            _check_fusible(function, name, args, kwargs)
        if name in _SIZED_BY_VALUES:
            _note_wait(name)
        if not from_host:
            args, kwargs = _unwrap(args), {key: _unwrap(value) for key, value in kwargs.items()}
        # `xp.asarray` and the other functions of _FROM_HOST accept both sides; NumPy arrays are copied, as to a GPU.
        elif isinstance(args[0], StrictArray):
            args = (args[0]._data, *args[1:])
        elif (graph := strict_cuda.captured_graph()) is not None:
            raise graph.failure("Unsupported", f"{name} copies from the host, but a launch would not")
        elif isinstance(args[0], np.ndarray):
            args = (args[0].copy(), *args[1:])
            _note_launch(name, args[0])
        if _reader.checks:
            args, kwargs = in_range(name, args, kwargs)
        owner = getattr(function, "__self__", None)  # of a method of an array: the array
        if (graph := strict_cuda.captured_graph()) is not None:
            target = kwargs.get("out")
            if name in _IN_PLACE or name.endswith(".at"):
                target = owner if isinstance(owner, np.ndarray) else args[0]
            compute = partial(plain, *args, **kwargs)
            result = _capture(graph, name, compute, target, (*args, *kwargs.values(), owner))
            return _wrap(result) if target is None or kwargs.get("out") is target else None
        result = plain(*args, **kwargs)
        if kwargs.get("out") is not None:
            _note_launch(name, kwargs["out"], reads=args)
        elif name in _IN_PLACE or name.endswith(".at"):
            _note_launch(name, owner if isinstance(owner, np.ndarray) else args[0], reads=args)
        elif name not in _NOT_FILLED:
            for _ in range(_num_copies(args[0]) if name in _JOINING else 1):
                _note_launch(name, result, *args, owner)
        return _wrap(result)

    return call


class _Ufunc:
    """A ufunc that refuses lists; only some have `at`, `reduce`, `accumulate` and `reduceat`, as in CuPy."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self._ufunc.__name__
        for arg in args:
            if isinstance(arg, (list, tuple)):
                raise TypeError(f"cupy.{name} takes arrays and numbers, got {arg!r}.")
        lacks = cupy_lacks.KEYWORDS_OF_MATMUL if name == "matmul" else cupy_lacks.KEYWORDS_OF_UFUNCS
        return _guarded(self._ufunc, name, lacks)(*args, **kwargs)

    def __getattr__(self, method: str) -> Any:
        name = self._ufunc.__name__
        if name not in cupy_lacks.UFUNC_METHODS.get(method, {name}):
            raise NotImplementedError(f"CuPy 14 has no {name}.{method}.")
        function = _guarded(getattr(self._ufunc, method), f"{name}.{method}", frozenset(("initial", "where")))
        return self._checked_at(function) if method == "at" else function

    def _checked_at(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = self._ufunc.__name__

        def at(array: Any, *args: Any) -> None:
            if array.dtype.name not in cupy_lacks.DTYPES_OF_AT[name]:
                raise TypeError(f"cupy.{name}.at does not support {array.dtype}.")
            function(array, *args)

        return at


class StrictNamespace:
    """`numpy` with the names of `cupy`; likewise `xp.linalg` and other submodules."""

    def __reduce__(self) -> str:
        return "xp"  # as modules are: by its name

    def __init__(self, module: ModuleType, missing: frozenset[str], keywords: Mapping[str, frozenset[str]]) -> None:
        self._module, self._missing, self._keywords = module, missing, keywords

    def fuse(self, *, kernel_name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        strict_kernels.check_name(kernel_name)
        name = kernel_name.removeprefix("kernel_")
        return lambda function: lambda *args: _run_fused(function, name, args)

    def RawKernel(self, code: str, name: str, options: tuple[str, ...] = ()) -> Callable[..., None]:
        kernel = strict_kernels.raw_kernel(code, name)
        return lambda *args: _start_kernel(kernel, *args)

    def __getattr__(self, name: str) -> Any:
        if name == "cuda" and self._module is np:
            return strict_cuda
        if name == "__version__":
            return "stand-in"
        if name in self._missing:
            raise AttributeError(f"CuPy 14 has no {name!r}; find another way to compute it.")
        value = getattr(self._module, name)
        if name == "ndarray":
            return StrictArray
        if isinstance(value, np.ufunc):
            return _Ufunc(value)
        if isinstance(value, ModuleType):
            if name == "linalg":
                return StrictNamespace(value, cupy_lacks.NAMES_IN_LINALG, cupy_lacks.KEYWORDS_IN_LINALG)
            return StrictNamespace(value, frozenset(), {})
        # Types (dtypes, scalars) are host objects in CuPy, too.
        if callable(value) and not isinstance(value, type):
            return _guarded(value, name, self._keywords.get(name, frozenset()), from_host=name in _FROM_HOST)
        return value


def _in_c_order(compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return a new array of a ufunc in C order, whatever the order of its inputs, as CuPy does."""
    result = compute(*args, **kwargs)
    is_new = kwargs.get("out") is None and isinstance(result, np.ndarray)
    return result.copy("C") if is_new and not result.flags.c_contiguous else result


def _operated(name: str, compute: Callable[[], Any], *reads: Any) -> Any:
    """Return the result of an operator, a new array."""
    compute = partial(_in_c_order, compute)
    if (graph := strict_cuda.captured_graph()) is not None:
        return _wrap(_capture(graph, name, compute, None, reads))
    result = compute()
    _note_launch(name, result, reads=reads)
    return _wrap(result)


_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"


def _give_operators() -> None:
    """Add Python's operators: both operands on the device, or one of them a number."""

    def binary(name: str, swapped: bool) -> Callable[..., Any]:
        function = getattr(operator, f"__{name}__")

        def method(self: StrictArray, other: Any) -> Any:
            if isinstance(other, (list, tuple)):
                raise TypeError(f"a device array was mixed with {other!r}; use xp.asarray.")
            if not isinstance(other, (StrictArray, _KernelNumber, np.ndarray, np.generic, int, float, complex)):
                return NotImplemented
            _refuse_in_kernel(name, name not in _NOT_FUSIBLE and not isinstance(other, np.generic))
            plain, own = _unwrap(other), _unwrap(self)
            compute = partial(function, plain, own) if swapped else partial(function, own, plain)
            return _operated(function.__name__, compute, plain, own)

        return method

    def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: StrictArray, other: Any) -> StrictArray:
            plain = _unwrap(other)
            if (graph := strict_cuda.captured_graph()) is not None:
                _capture(graph, function.__name__, partial(function, self._data, plain), self._data, (plain,))
                return self
            self._data = function(_unwrap(self), plain)
            _note_launch(function.__name__, self._data, reads=(plain,))
            return self

        return method

    def unary(name: str) -> Callable[..., Any]:
        function = getattr(operator, f"__{name}__")

        def method(self: StrictArray) -> StrictArray:
            _refuse_in_kernel(f"{name}(x)", name not in _NOT_FUSIBLE)
            return _operated(function.__name__, partial(function, _unwrap(self)), self._data)

        return method

    for name in _ARITHMETIC.split():
        setattr(StrictArray, f"__{name}__", binary(name, swapped=False))
        setattr(StrictArray, f"__r{name}__", binary(name, swapped=True))
        # CuPy has no @=.
        if name != "matmul":
            setattr(StrictArray, f"__i{name}__", in_place(getattr(operator, f"__i{name}__")))
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(StrictArray, f"__{name}__", binary(name, swapped=False))
    for name in ("neg", "pos", "abs", "invert"):
        setattr(StrictArray, f"__{name}__", unary(name))


_give_operators()
# `cupy.cuda.nccl`
strict_cuda.nccl = strict_nccl  # type: ignore[attr-defined]
xp: Any = StrictNamespace(np, cupy_lacks.NAMES, cupy_lacks.KEYWORDS)
register_namespace(StrictArray, xp)
strict_cuda.libraries["libcublas.so.12"] = strict_cublas
