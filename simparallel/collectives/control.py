"""Barriers, groups, objects, shared arrays and logged metrics under their public names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simparallel.backend import Array
from simparallel.clock.recorder import current_recorder
from simparallel.comm import Group, current


def barrier(group: Group | None = None) -> None:
    """Wait until every rank of the group (by default: all ranks) has called this. Collective: yes.

    Cost: no data, ceil(log2(P)) latencies.

    Raises:
        CollectiveMismatchError: ranks made different calls.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    current().barrier(group)


def monitored_barrier(group: Group | None = None, timeout_s: float | None = None) -> None:
    """Wait as `barrier`, and name the ranks that do not arrive in time. Collective: yes.

    Args:
        group: from `new_group`; by default all ranks.
        timeout_s: how long to wait for them [s]; None for the run's own limit.

    Raises:
        DeadlineError: lists all ranks that have not arrived, their last calls and call sites; each waiting rank
            raises it.
        InputError: timeout_s is not above 0.
        CollectiveMismatchError, RankFailedError, DeadlockError: as `barrier`.
    """
    current().monitored_barrier(group, timeout_s)


def new_group(ranks: Sequence[int], use_local_synchronization: bool = False) -> Group:
    """Create a group of these ranks in this order, which is the order of its chunks. Collective: over all ranks.

    Every rank makes the same call, non-members too; a non-member gets a group that it must not use.

    Args:
        ranks: distinct ranks, at least one.
        use_local_synchronization: only the members make the call. Such groups are few: each of P ranks has room
            for 1 + 16 // P of them.

    Raises:
        InputError: no ranks, duplicate ranks, or a rank that does not exist.
        CollectiveMismatchError: ranks name different members.
        RankFailedError, DeadlineError, DeadlockError: it cannot be finished.
    """
    return current().new_group(ranks, use_local_synchronization)


def all_gather_object(value: Any, group: Group | None = None) -> list[Any]:
    """Return every rank's value, in the order of the group. Collective: yes.

    A value is any object that can be pickled; over MPI, which does not pickle, only None, numbers, text, bytes, arrays,
    and lists, tuples, sets and dicts of them. Cost: as `all_gather(uneven=True)` of the pickled bytes. Memory besides
    the values: all ranks' pickled bytes, which are freed one by one as they are decoded, and 2 MiB.
    """
    return current().all_gather_object(value, group)


def broadcast_object(value: Any = None, src: int = 0, group: Group | None = None) -> Any:
    """Return the value of rank `src` (as in `all_gather_object`) on every rank. Collective: yes."""
    return current().broadcast_object(value, src, group)


def gather_object(value: Any, dst: int = 0, group: Group | None = None) -> list[Any] | None:
    """Return every rank's value (as in `all_gather_object`) on rank `dst`, None elsewhere. Collective: yes."""
    return current().gather_object(value, dst, group)


def empty(shape: int | tuple[int, ...], dtype: Any = np.float32, shared: bool = False) -> Array:
    """Return a new uninitialised array. `shared=True`: in the arena, so that collectives do not copy it.

    Args:
        shape: size of each dim.
        dtype: dtype of the elements.
        shared: use this rank's shared memory, where other ranks can read it.

    Collective: no.

    Raises:
        SharedMemoryError: the arena is full.
        DTypeError: with `shared`: dtype is no dtype, or one of Python objects.
    """
    return current().empty(shape, dtype) if shared else np.empty(shape, dtype)


def log(**values: Any) -> None:
    """Log metrics of the current step: `sp.log(loss=loss, accuracy=0.9)`. Collective: no.

    The result of `launch` has them as `.metrics`: rank -> [(step, name, value), ...]. `simparallel run` writes
    "metrics": {name: [[step, mean over the ranks], ...]} to `metrics.json`, and plots those named `loss` in
    `loss.png`. Outside of a run nothing is logged.

    Args:
        values: one number each: a float, or a Tensor or array with one element.
    """
    recorder = current_recorder()
    if recorder is not None:
        recorder.log(**values)
