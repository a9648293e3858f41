"""The array libraries: NumPy on the host, CuPy on a GPU. The only file that names `cupy`.

It also has the random numbers. They are counter-based (Philox, Salmon et al. 2011, "Parallel random
numbers: as easy as 1, 2, 3"): element i of stream s is a pure function of (seed, s, i). Initial
weights, data order and masks therefore depend neither on the number of ranks nor on how a tensor
is cut: any rank can compute any slice.
"""

from __future__ import annotations

import math
import os
import re
import sys
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from simparallel.errors import InputError
from simparallel.rank_local import RankLocal, per_rank

# numpy.ndarray or cupy.ndarray.
Array = Any
# The names of the libraries, for the setting `array` of a run.
ARRAYS = "numpy", "cupy"
# Environment variable that names the module of a stand-in, for programs that import none.
STAND_IN = "SIMPARALLEL_STAND_IN"
T = TypeVar("T")


def get_namespace(*arrays: Any) -> ModuleType:
    """Return `cupy` if any argument is a CuPy array, else `numpy`, without importing CuPy.

    For arrays of a registered type, return the namespace registered with it.
    """
    # A program that has CuPy arrays has imported CuPy.
    cupy = sys.modules.get("cupy")
    if cupy is not None and any(isinstance(array, cupy.ndarray) for array in arrays):
        return cupy
    if _namespaces:
        for array in arrays:
            if type(array) in _namespaces:
                return _namespaces[type(array)]
    return np


# Type of an array, or of the scalars that its reductions give -> namespace.
_namespaces: dict[type, ModuleType] = {}
_array_types: set[type] = set()
# Types of arrays without data, and of their scalars. Hot code asks this set, all other code `has_data`.
DRY_TYPES: set[type] = set()
_dry_namespaces: list[Any] = []


def register_namespace(array_type: type, namespace: Any, scalar_type: type | None = None, is_dry: bool = False) -> None:
    """Register a further array type and the namespace that computes with it, like CuPy's.

    Args:
        array_type: the type; it is derived from NumPy's, or has a method `get()` that returns a NumPy copy, and an
            attribute `device`, a context manager.
        namespace: the functions.
        scalar_type: the type of the results of full reductions, if they are not arrays.
        is_dry: the arrays have no data.
    """
    _array_types.add(array_type)
    for known in (array_type, scalar_type)[: 1 + (scalar_type is not None)]:
        assert known is not None
        _namespaces[known] = namespace
        if is_dry:
            DRY_TYPES.add(known)
    if is_dry:
        _dry_namespaces.append(namespace)


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy, CuPy or a registered type."""
    if isinstance(value, np.ndarray):
        return True
    cupy = sys.modules.get("cupy")
    return type(value) in _array_types or (cupy is not None and isinstance(value, cupy.ndarray))


def is_on_gpu(value: Any) -> bool:
    """Return whether a value is an array on a GPU: one of CuPy, or of a stand-in."""
    return not isinstance(value, np.ndarray) and is_array(value)


def has_data(array: Array) -> bool:
    """Return whether an array has elements; arrays of a dry run have none."""
    return type(array) not in DRY_TYPES


def each(pieces: Sequence[T], array: Array) -> Sequence[T]:
    """Return the pieces of an array that have to be computed: all, or the first one of an array without data."""
    return pieces[:1] if type(array) in DRY_TYPES else pieces


def filled(shape: tuple[int, ...], dtype: Any, like: Array, make: Callable[[], Array]) -> Array:
    """Return `make()`, an array of this shape and dtype; or, if `like` has no data, an array without data."""
    return make() if has_data(like) else get_namespace(like).empty(shape, dtype)


def assign(array: Array, key: Any, value: Array) -> Array:
    """Set `array[key] = value`, and return the array; without data, in a dry run, only return a view without data."""
    if has_data(value):
        array[key] = value
        return array
    return without_data(array)


def views_of(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """Return the parts of a flat array, one after another, in these shapes: no copies."""
    starts = pairwise([0, *accumulate(math.prod(shape) for shape in shapes)])
    return [flat[start:stop].reshape(shape) for (start, stop), shape in zip(starts, shapes, strict=True)]


def without_data(array: Array) -> Array:
    """Return a view without data of an array, into which a dry run has written unknown values."""
    return _dry_namespaces[-1].without_data(array)


def to_host(array: Array) -> np.ndarray:
    """Return the array in host memory; a NumPy array is returned itself, without a copy."""
    if isinstance(array, np.ndarray):
        return array
    if is_array(array):
        _reader.gate()
        run_checks()
        return array.get()
    return np.asarray(array)


class _DeviceCopies(RankLocal):
    """This rank's functions for copies from and to its GPU; by default CuPy's own.

    Attributes:
        gate: called before the host reads a value.
        upload: copies a host array to the GPU; None for CuPy's copy.
        checks: flags on a GPU, and what to do if they are true.
    """

    gate: Callable[[], None] = staticmethod(lambda: None)
    upload: Callable[[np.ndarray], Array] | None = None
    checks: list[tuple[Array, Callable[[], None]]] = per_rank(list)


_reader = _DeviceCopies()
# At this many checks the host reads their flags, so that their arrays do not fill the memory.
_MOST_CHECKS = 64


def set_reader_gate(gate: Callable[[], None]) -> Callable[[], None]:
    """Call `gate` before the host reads an array of a GPU, in this thread; return the previous gate.

    CuPy's own wait has no limit: a rank that waits for a collective of a dead peer would never return.
    """
    before, _reader.gate = _reader.gate, gate
    return before


def check_when_read(is_bad: Any, refuse: Callable[[], None]) -> None:
    """Call `refuse`, which raises an error, if `is_bad`, a bool or a 0-d array, is true.

    For an array on a GPU this happens before the host next reads a value, such as the loss, so that the host does not
    wait for the GPU twice.
    """
    if not is_on_gpu(is_bad):
        if is_bad:
            refuse()
        return
    _reader.checks.append((is_bad, refuse))
    if len(_reader.checks) >= _MOST_CHECKS:
        finish_checks()


def run_checks() -> None:
    """Read the flags of this thread's checks, after a wait for the GPU, and raise the error of the first true one."""
    checks, _reader.checks = _reader.checks, []
    for is_bad, (_, refuse) in zip(_numbers([flag for flag, _ in checks]), checks, strict=True):
        if is_bad:
            refuse()


def finish_checks() -> None:
    """Wait for the GPU, and run the checks of this thread that no read has run; without any, do nothing."""
    if _reader.checks:
        _reader.gate()
        run_checks()


def number_on(xp: Any, value: Any, dtype: Any) -> Array:
    """Return a number as a 0-d array. On a GPU a kernel writes it, which is faster than a copy from the host.

    Raises:
        OverflowError: the dtype cannot hold it.
    """
    if hasattr(xp, "cuda"):
        host = np.asarray(value, dtype=dtype)
        return xp.full((), host.item(), host.dtype)
    return xp.asarray(value, dtype=dtype)


def set_upload(upload: Callable[[np.ndarray], Array] | None) -> Callable[[np.ndarray], Array] | None:
    """Copy this thread's host arrays to its GPU by `upload` (None: CuPy's copy); return the previous function.

    A captured copy of CuPy's would read CuPy's staging buffer at each launch, when it holds other data.
    """
    before, _reader.upload = _reader.upload, upload
    return before


def to_device_like(host: np.ndarray, like: Array) -> Array:
    """Return `host` as an array of the type and on the device of `like` (no copy for NumPy)."""
    if isinstance(like, np.ndarray):
        return host
    with like.device:
        return (_reader.upload or get_namespace(like).asarray)(host)


@cache
def fused(xp: Any, compute: Callable[..., T], kernel_name: str = "", **settings: Any) -> Callable[..., T]:
    """Return `compute(xp, …, **settings)` as a function that is one kernel on a GPU, and runs as it is in NumPy.

    It takes arrays, then Python numbers; None stands for an absent array. It changes arrays in place, or returns new
    ones of their broadcast shape. A kernel may contain only: operators and ufuncs, with `out`; `where` and `clip`;
    `astype` and `copy`; `x[...] = y`. Numbers combine with arrays, not with each other: CuPy would compute that in
    float64. Branches may depend only on `settings`, dtypes, and which arrays are None; each case is its own kernel.
    With `out=None`, an intermediate result takes no GPU memory. New arrays have the memory order of all arrays of their
    shape, or C order where these differ, as in NumPy.

    Args:
        xp: numpy, cupy or a registered namespace.
        compute: a module-level function.
        kernel_name: the name of the kernel in profiles, see `kernel_name_of`; by default the name of `compute`.
        settings: hashable keyword arguments of `compute`.
    """
    bound = partial(compute, xp, **settings)
    fuse = getattr(xp, "fuse", None)
    if fuse is None:
        return bound
    return partial(in_memory_order, fuse(kernel_name=kernel_name_of(kernel_name or compute.__name__))(bound))


def kernel_name_of(name: str) -> str:
    """Return the name of the kernel of a function, such as "kernel_scale": an identifier in C++, also for "double".

    No keyword of C++ begins like this, nor any other name in the source of a kernel.
    """
    return "kernel_" + re.sub(r"\W", "_", name.strip("_"), flags=re.ASCII)


def in_memory_order(compute: Callable[..., Any], *args: Any) -> Any:
    """Call an elementwise function with views of its arrays in which memory is in C order.

    CuPy's kernels visit elements in C order, whatever the order of memory, and so they give new arrays.

    Args:
        compute: returns new arrays of the broadcast shape, or None, or an array that it has changed.
        args: arrays and numbers. The largest arrays without a stride of 0 say the order; where they differ, C order
            wins, as in NumPy.
    """
    arrays = [arg for arg in args if is_array(arg)]
    num_dims, size = max((x.ndim, x.size) for x in arrays)
    whole = [x for x in arrays if x.ndim == num_dims and x.size == size and 0 not in x.strides]
    if not whole or any(x.flags.c_contiguous for x in whole):
        return compute(*args)
    axes = sorted(range(num_dims), key=lambda axis: -whole[0].strides[axis])

    def moved(arg: Any) -> Any:
        if not is_array(arg) or arg.ndim == 0:
            return arg
        return arg[(None,) * (num_dims - arg.ndim)].transpose(axes)

    result, back = compute(*map(moved, args)), [axes.index(axis) for axis in range(num_dims)]
    if isinstance(result, tuple):
        return tuple(array.transpose(back) for array in result)
    return None if result is None else result.transpose(back)


def read_numbers(values: Iterable[Any]) -> list[Any]:
    """Return numbers and 0-d arrays as Python numbers. One copy brings all from one GPU: the host waits once."""
    found = list(values)
    if any(map(is_on_gpu, found)):
        _reader.gate()
        run_checks()
    return _numbers(found)


def _numbers(found: list[Any]) -> list[Any]:
    """Return numbers and 0-d arrays as Python numbers, after a wait for the GPU."""
    on_gpu: dict[int | None, list[int]] = {}
    for i, value in enumerate(found):
        if is_array(value) and not isinstance(value, np.ndarray):
            on_gpu.setdefault(gpu_of(value), []).append(i)
        elif hasattr(value, "item"):
            found[i] = value.item()
    for places in on_gpu.values():
        first = found[places[0]]
        with first.device:
            joined = first if len(places) == 1 else get_namespace(first).stack([found[i] for i in places])
            numbers = joined.get().reshape(-1).tolist()
        for i, number in zip(places, numbers, strict=True):
            found[i] = number
    return found


def gpu_of(array: Array) -> int | None:
    """Return the number of the array's GPU; None for host memory."""
    # Before NumPy 2.1 its scalars have no device.
    return None if isinstance(array, (np.ndarray, np.generic)) else int(getattr(array.device, "id", 0))


def place(array: Array, gpu: int | None) -> Array:
    """Return the array on a GPU, or in host memory for None; the array itself if it is already there.

    Raises:
        InputError: CuPy or the GPU is not available.
    """
    if gpu_of(array) == gpu:
        return array
    if gpu is None:
        return to_host(array)
    xp = gpu_namespace()
    count = 0 if xp is None else xp.cuda.runtime.getDeviceCount()
    if not 0 <= gpu < count:
        found = device_count()
        raise InputError(
            f"cuda:{gpu} does not exist: CuPy finds {found} GPUs here. The simulated devices are sim:0, sim:1, …"
        )
    with xp.cuda.Device(gpu):
        return (_reader.upload or xp.asarray)(array)


def gpu_namespace() -> Any:
    """Return the library of arrays on GPUs: CuPy if it can use one, else a registered stand-in, else None."""
    cupy = _usable_cupy()
    if cupy is not None:
        return cupy
    return next(iter(_stand_ins()), None)


def check_gpu_library() -> None:
    """Raise InputError unless arrays can be on a GPU. Starts no CUDA context, so that ranks may be forked later."""
    why = "" if _stand_ins() else why_no_gpu()
    if why:
        raise InputError(
            f"array='cupy' needs CuPy and a GPU, and {why}. CuPy's wheel has to fit the driver's CUDA version: "
            'pip install "simparallel[cuda12]" or "simparallel[cuda13]". array=\'numpy\' needs neither.'
        )


def why_no_gpu() -> str:
    """Return why CuPy cannot use a GPU here; "" if it can. Starts no CUDA context."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    if _usable_cupy() is not None:
        return ""
    runtime = cupy.cuda.runtime
    try:
        if not runtime.driverGetVersion():
            return "there is no NVIDIA driver"
        runtime.getDeviceCount()
        return "the NVIDIA driver finds no GPU"
    except Exception as error:  # CuPy's own errors, of an old driver for example
        return f"CuPy {cupy.__version__} cannot use the NVIDIA driver: {error}"


def gpu_nccl() -> Any:
    """Return the NCCL module of `gpu_namespace()`; its `available` says whether the library exists."""
    xp = gpu_namespace()
    if xp is not sys.modules.get("cupy"):
        return xp.cuda.nccl
    # CuPy loads the library only with this import, and warns where there is none.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("cupy.cuda.nccl")


# PyTorch's name -> CuPy's compute type of float32 products.
_PRECISIONS = {"highest": "COMPUTE_TYPE_DEFAULT", "high": "COMPUTE_TYPE_TF32"}
# CuPy reads the variable at its first product.
_matmul_precision = "high" if os.environ.get("CUPY_TF32", "0") not in ("", "0") else "highest"


def get_float32_matmul_precision() -> str:
    """Return how a GPU multiplies float32 matrices, see `set_float32_matmul_precision`."""
    return _matmul_precision


def set_float32_matmul_precision(precision: str) -> None:
    """Choose how a GPU multiplies float32 matrices, by the names of `torch.set_float32_matmul_precision`.

    "highest", the default, multiplies in float32. "high" lets cuBLAS use TF32, which rounds the factors to 10
    mantissa bits, on NVIDIA's A100 and newer; CuPy 14 does so for products of two matrices, but not for stacks of
    them. In host memory nothing changes: NumPy has no TF32. The setting belongs to the process; a run starts with that
    of its launcher. Simulated time does not depend on it.

    Args:
        precision: "highest" or "high".

    Raises:
        InputError: another precision.
    """
    global _matmul_precision
    if precision not in _PRECISIONS:
        raise InputError(
            f"set_float32_matmul_precision: precision={precision!r}, choose from {', '.join(_PRECISIONS)}."
        )
    # Without CuPy or a GPU there is nothing to set, and CuPy starts with float32.
    cupy = _usable_cupy() if precision != "highest" or "cupy" in sys.modules else None
    if cupy is not None:
        products = cupy._core._routines_linalg
        products.set_compute_type(np.float32, getattr(products, _PRECISIONS[precision]))
    _matmul_precision = precision


def _stand_ins() -> list[ModuleType]:
    """Return the registered stand-ins for CuPy. SIMPARALLEL_STAND_IN names a module that registers one."""
    if module := os.environ.get(STAND_IN):
        import_module(module)
    return [namespace for kind, namespace in _namespaces.items() if kind not in DRY_TYPES]


def device_count() -> int:
    """Return the number of GPUs that CuPy can use; 0 without CuPy or without a driver."""
    cupy = _usable_cupy()
    return 0 if cupy is None else cupy.cuda.runtime.getDeviceCount()


def _usable_cupy() -> Any:
    """Return CuPy if it can use a GPU, else None. Tests with a stand-in replace it, to hide the machine's GPUs."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy if cupy.cuda.is_available() else None


def _keep_freed_pages() -> None:
    """Make the C library cache up to 64 MB of freed memory instead of returning it to the system at once.

    A training step frees its temporaries, and mapping fresh pages in the next step costs as much as
    the arithmetic (LeNet-5: 9.2 ms a step, 5.7 ms with this cache). glibc raises its threshold when a
    large block is freed, up to 32 MB (mallopt(3), M_MMAP_THRESHOLD). This block is freed without being
    touched, so it costs no memory.
    """
    np.empty(31 << 20, np.uint8)


_keep_freed_pages()


# --- counter-based random numbers ---------------------------------------------------------------

# One counter of Philox-4x64 gives four 64-bit words.
_WORDS_PER_BLOCK = 4
# The 53 bits of a float64's significand, as a fraction.
_TO_UNIT = 2.0**-53


def random_bits(seed: int, stream: str, start: int, count: int) -> np.ndarray:
    """Return words `start … start+count-1` of a stream, uint64, shape (count,)."""
    # Seed and stream are the key, the position in the stream is the counter.
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, zlib.crc32(stream.encode())], dtype=np.uint64)
    first_block, skip = divmod(start, _WORDS_PER_BLOCK)
    generator = np.random.Philox(key=key, counter=[first_block, len(stream), 0, 0])
    return generator.random_raw(skip + count)[skip:]


def random_uniform(seed: int, stream: str, start: int, count: int) -> np.ndarray:
    """Return elements `start … start+count-1` of a stream, uniform in [0, 1), float64, shape (count,)."""
    return (random_bits(seed, stream, start, count) >> np.uint64(11)) * _TO_UNIT


def random_normal(seed: int, stream: str, start: int, count: int) -> np.ndarray:
    """Return elements `start … start+count-1` of a stream, standard normal, float64, shape (count,).

    Box and Muller (1958): element i uses words 2i and 2i+1, so that it does not depend on
    the start of a slice.
    """
    words = random_uniform(seed, stream, 2 * start, 2 * count)
    radius = np.sqrt(-2.0 * np.log1p(-words[0::2]))
    # The sine would give a second number from the same words, but then element i would not have words of its own.
    return radius * np.cos(2.0 * math.pi * words[1::2])


def random_permutation(seed: int, stream: str, size: int) -> np.ndarray:
    """Return a permutation of 0 … size-1, int64: the order of `size` random words (ties by index)."""
    return np.argsort(random_bits(seed, stream, 0, size), kind="stable")


_STATE = ("seed", "drawn", "masks", "calls")
# Integers or fractions.
Part = tuple[Any, Any]


class RandomState(RankLocal):
    """The seed of this rank and the number of streams drawn so far.

    Attributes:
        seed: the seed.
        drawn: number of streams drawn.
        masks: number of layers that draw masks.
        calls: stream -> number of calls, see `next_call`.
        given_part: value of `part`, such as in a forward pass of DistributedDataParallel; None for the default.
        sharded_part: value of `part` for sharded tensors: the whole batch, except for the micro-batches of a pipeline.
        usual_part: returns the default of `part`; None stands for the whole batch.
    """

    seed = 0
    drawn = 0
    masks = 0
    calls: dict[str, int] = per_rank(dict)
    usual_part: Callable[[], Part] | None = None
    given_part: Part | None = None
    sharded_part: Part = (0, 1)

    @property
    def part(self) -> Part:
        """(offset of this rank's part of a batch, size of the whole batch), in units of that part.

        For ranks with equal parts these are the rank's position and the number of ranks.
        """
        if self.given_part is not None:
            return self.given_part
        return (0, 1) if self.usual_part is None else self.usual_part()

    def next_stream(self, purpose: str) -> str:
        """Return a name for the next stream; equal programs get equal names."""
        self.drawn += 1
        return f"{purpose}/{self.drawn}"

    def next_mask(self) -> str:
        """Return a name for the masks of the next layer that draws some, such as dropout.

        Masks have a counter of their own, so that such a layer does not change the initial weights of later layers.
        """
        self.masks += 1
        return f"mask/{self.masks}"

    def next_call(self, stream: str) -> int:
        """Return the number of earlier calls for `stream`, and count this one."""
        call = self.calls.get(stream, 0)
        self.calls[stream] = call + 1
        return call

    def snapshot(self) -> tuple[int, int, int, dict[str, int]]:
        """Return the whole state as plain data."""
        return self.seed, self.drawn, self.masks, dict(self.calls)

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state as a dict of plain data, for checkpoints."""
        return dict(zip(_STATE, self.snapshot(), strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            InputError: not a state of `state_dict`.
        """
        if set(state_dict) != set(_STATE) or not isinstance(state_dict["calls"], dict):
            raise InputError(f"random state: the state has {sorted(state_dict)}, expected {sorted(_STATE)}.")
        counts = {**state_dict["calls"], **{name: state_dict[name] for name in _STATE if name != "calls"}}
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise InputError(f"random state: {name}={count!r} must be an integer of 0 or more.")
        self.restore((state_dict["seed"], state_dict["drawn"], state_dict["masks"], state_dict["calls"]))

    def restore(self, snapshot: tuple[int, int, int, dict[str, int]]) -> None:
        """Go back to a state of `snapshot`; later draws repeat."""
        self.seed, self.drawn, self.masks, calls = snapshot
        self.calls = dict(calls)


random_state = RandomState()


def manual_seed(seed: int) -> None:
    """Reset the random numbers of this rank, for initial weights and masks, and set their seed.

    Call it with the same seed on every rank, or once before `launch`: a run starts with the seed of the thread that
    launches it, by default 0.

    Args:
        seed: an integer of 0 or more.

    Raises:
        InputError: not such an integer.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"manual_seed: seed={seed!r} must be an integer of 0 or more.")
    random_state.seed = int(seed)
    random_state.drawn = 0
    random_state.masks = 0
    random_state.calls = {}
