"""The BLAS behind NumPy: its number of threads, and the processor that its kernels are made for."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy  # noqa: F401 (threadpoolctl finds only a loaded BLAS)

from simparallel.base.system import usable_cores

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
CORE_VARIABLE = "OPENBLAS_CORETYPE"
# OpenBLAS's names of processors with AVX-512.
_SMALL_KERNELS = ("SkylakeX", "Cooperlake", "SapphireRapids")

# Current limit of threads. A host process starts with 1, from its variables; None is BLAS's own default.
_threads: int | None = 1 if all(os.environ.get(name) == "1" for name in THREAD_VARIABLES) else None


def is_single_threaded() -> bool:
    """Return whether every kind of BLAS is limited to the calling thread."""
    return _threads == 1


def limit_threads(count: int) -> None:
    """Make BLAS use `count` threads in this process from now on, also in libraries and processes that it starts."""
    global _threads
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(count)))
    if _threads != count:
        _set_threads(count)


def default_threads(world_size: int, environment: Mapping[str, str] = os.environ) -> int:
    """Return the BLAS threads of each rank: from the environment, else an equal share of the cores, at least 1."""
    for variable in THREAD_VARIABLES:
        if environment.get(variable, "").isdigit():
            return max(1, int(environment[variable]))
    return max(1, usable_cores() // world_size)


# The limits of all open blocks, in any thread.
_limits: list[int] = []
# State before the first block: the object that restores BLAS's own limits, and `_threads`.
_before: tuple[Any, int | None] | None = None
_limits_lock = threading.Lock()


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Make BLAS use `count` threads inside the block: the number of threads changes the last bits of products.

    BLAS has one limit for the whole process: if blocks of several threads overlap, the smallest limit applies.
    """
    global _before, _threads
    with _limits_lock:
        if not _limits:
            # None changes no limit; the returned object restores the present ones.
            _before = _libraries(len(sys.modules)).limit(limits=None), _threads
        _limits.append(count)
        _set_threads(min(_limits))
    try:
        yield
    finally:
        with _limits_lock:
            _limits.remove(count)
            if _limits:
                _set_threads(min(_limits))
            elif _before is not None:
                (libraries, _threads), _before = _before, None
                _take_control()
                libraries.restore_original_limits()


def _set_threads(count: int) -> None:
    global _threads
    _take_control()
    _libraries(len(sys.modules)).limit(limits=count)
    _threads = count


def _take_control() -> None:
    """Let this thread set limits: threadpoolctl 3.8 silently ignores every thread but the first that set one."""
    from threadpoolctl import OpenBLASController

    if hasattr(OpenBLASController, "clear_controlling_thread"):
        OpenBLASController.clear_controlling_thread(force=True)


@lru_cache(maxsize=1)
def _libraries(num_modules: int) -> Any:
    """Return the thread pools of all libraries; search again (0.3 ms) if modules were imported since."""
    from threadpoolctl import ThreadpoolController  # takes milliseconds, and most processes do not need it

    return ThreadpoolController()


@lru_cache(maxsize=1)
def core() -> tuple[str, str]:
    """Return NumPy's BLAS and the processor of its kernels: ("openblas 0.3.31", "SkylakeX"), "" for unknown.

    Cost: 5 ms at the first call.
    """
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    # SciPy and others bring a BLAS of their own.
    ours = [pool for pool in pools if "numpy" in pool["filepath"]] or pools
    if not ours:
        return "", ""
    return f"{ours[0]['internal_api']} {ours[0]['version']}", ours[0].get("architecture") or ""


@lru_cache(maxsize=1)
def has_small_kernel() -> bool:
    """Return whether BLAS multiplies small matrices, up to 100 ** 3 multiplications, without copying them first."""
    name, processor = core()
    return name.startswith("openblas") and processor in _SMALL_KERNELS


def kernel_override() -> str:
    """Return a note if an environment variable chooses OpenBLAS's kernels; "" otherwise."""
    chosen = os.environ.get(CORE_VARIABLE)
    if not chosen:
        return ""
    return (
        f"{CORE_VARIABLE}={chosen} makes NumPy's OpenBLAS use its kernels for that processor; PyTorch, which has "
        f"a BLAS of its own, ignores it. To let OpenBLAS choose: env -u {CORE_VARIABLE}"
    )
