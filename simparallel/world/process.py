"""A process that is a rank: its share of BLAS threads, and global random numbers that start alike on all ranks."""
# ruff: noqa: NPY002 (NumPy's global state is the point)

from __future__ import annotations

import os
import random

import numpy as np

from simparallel.base import blas

# State of `random` that the program has not touched: since the package was imported, or this process was forked.
_untouched = random.getstate()


def _after_fork() -> None:
    # Python seeds `random` anew in a forked process.
    global _untouched
    _untouched = random.getstate()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def seed_globals(*, keep_own: bool = False) -> None:
    """Seed `random` and `np.random` for a new rank, the same on every rank.

    `keep_own`: the program is running already; what it has seeded since it imported the package keeps its state, and
    `random` also if it was drawn from.
    """
    if not keep_own or random.getstate() == _untouched:
        random.seed(0)
    if not keep_own or _has_first_seed():
        np.random.seed(0)


def _has_first_seed() -> bool:
    """Return whether `np.random` has its seed from the system: `np.random.seed` forgets the source of the first one."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]  # numpy exports it at run time
    return isinstance(generator, np.random.MT19937) and generator.seed_seq is not None


def become_rank(world_size: int, blas_threads: int | None = None, *, keep_own: bool = False) -> None:
    """Give this process what every rank has, whatever started it.

    Args:
        world_size: number of ranks.
        blas_threads: BLAS threads of this rank; None for those of `blas.default_threads`.
        keep_own: see `seed_globals`.
    """
    blas.limit_threads(blas_threads or blas.default_threads(world_size))
    seed_globals(keep_own=keep_own)
