"""How many threads BLAS uses in this process, as far as we have said so."""

from __future__ import annotations

import os

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip

# BLAS reads its variable once, when NumPy is loaded, which has happened before this file is.
_threads: int | None = 1 if os.environ.get("OPENBLAS_NUM_THREADS") == "1" else None


def is_single_threaded() -> bool:
    """Does BLAS surely keep to the thread that calls it?"""
    return _threads == 1


def limit_threads(count: int) -> None:
    """BLAS uses `count` threads in this process from now on."""
    global _threads
    if _threads != count:
        from threadpoolctl import (
            threadpool_limits,  # takes milliseconds to import, and most devices need it not
        )

        threadpool_limits(count)
        _threads = count
