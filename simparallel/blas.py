"""How many threads BLAS uses in this process, as far as we have said so."""

from __future__ import annotations

import os

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip

# As a host process is started. None: whatever BLAS took when NumPy was loaded.
_threads: int | None = 1 if all(os.environ.get(name) == "1" for name in THREAD_VARIABLES) else None


def is_single_threaded() -> bool:
    """Were all kinds of BLAS told to keep to the thread that calls them?"""
    return _threads == 1


def limit_threads(count: int) -> None:
    """BLAS uses `count` threads in this process from now on."""
    global _threads
    if _threads != count:
        # Takes milliseconds to import, and most devices need it not.
        from threadpoolctl import threadpool_limits

        threadpool_limits(count)
        _threads = count
