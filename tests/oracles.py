"""Oracles of the collectives, one NumPy line each, and the worlds in which the tests run them.

An oracle takes the inputs of a group's ranks, in the order of the group, and returns their outputs.
`root` is a position in the group.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from simparallel.runtime.launcher import run
from simparallel.testing import Ranks

UFUNCS = {
    "sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum,
    "and": np.bitwise_and, "or": np.bitwise_or,
}  # fmt: skip
OPS = tuple(UFUNCS)


def reduced(xs: list[np.ndarray], op: str) -> np.ndarray:
    """Fold in order; float16 in float32, rounded once."""
    wide = np.float32 if xs[0].dtype == np.float16 and op in ("sum", "mean", "prod") else xs[0].dtype
    total = xs[0].astype(wide)
    for x in xs[1:]:
        total = UFUNCS[op](total, x)
    return np.asarray(total / len(xs) if op == "mean" else total, dtype=xs[0].dtype)


def all_reduce(xs, op="sum"):
    return [reduced(xs, op) for _ in xs]


def broadcast(xs, root):
    return [xs[root] for _ in xs]


def reduce(xs, root, op="sum"):
    return [reduced(xs, op) if i == root else x for i, x in enumerate(xs)]


def all_gather(xs, dim=0):
    return [np.concatenate(xs, dim) for _ in xs]


def reduce_scatter(xs, dim=0, op="sum"):
    return np.split(reduced(xs, op), len(xs), dim)


def all_to_all(xs, split_dim=0, concat_dim=0):
    return [np.concatenate([np.split(x, len(xs), split_dim)[i] for x in xs], concat_dim) for i in range(len(xs))]


def gather(xs, root):
    return [xs if i == root else None for i in range(len(xs))]


def scatter(lists, root):
    return list(lists[root])


# --- worlds -----------------------------------------------------------------------------------------

TRANSPORTS = ("inline", pytest.param("shm", marks=pytest.mark.process))
if "SIMPARALLEL_TEST_MPI" in os.environ:  # see worlds_mpi.py
    TRANSPORTS = ("mpi",)


# Ranks learn of a failure from one another. On a busy machine the launcher's signals, which are for ranks that do not
# communicate, could be faster; with this delay they do not hide a fault.
_ESCALATION = run.ESCALATION
_LATE_ESCALATION = tuple((20 + i, number) for i, (_, number) in enumerate(_ESCALATION))
# Processes of all worlds: starting those of a size takes half a second.
_processes = Ranks("shm")


class World(Ranks):
    """Warm ranks that the tests of this project use: also under mpiexec, and with messages in place of shared memory.

    Up to `max_size` processes stay warm until the session ends.

    Attributes:
        max_size: largest number of ranks that tests should ask for.
        examples: how many examples a property gets.
    """

    def __init__(self, transport: str) -> None:
        super().__init__(transport)
        self.max_size, self.examples = (5, 20) if transport == "inline" else (4, 6)

    def run(self, size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 20.0) -> Any:
        if self.transport == "mpi":
            from worlds_mpi import run_on_mpi

            return run_on_mpi(size, fn, args, timeout_s)
        if self.transport == "messages":
            from fake_mpi import run_on_messages

            return run_on_messages(size, fn, args, timeout_s)
        ranks = _processes if self.transport == "shm" and size <= self.max_size else self
        before = run.ESCALATION
        if before is _ESCALATION:  # else the test has its own
            run.ESCALATION = _LATE_ESCALATION
        try:
            return ranks.cluster(size, timeout_s=timeout_s).run(fn, *args)
        finally:
            run.ESCALATION = before

    def check(self, strategy: Any, body: Callable[[Any], None], parts: int = 1) -> None:
        """Check the property `body` on examples of `strategy`, fewer where ranks are processes.

        `parts` tests share the examples of one.
        """
        scale = max(1, settings.default.max_examples // 20)

        in_step = {"derandomize": True, "database": None} if self.transport == "mpi" else {}

        @settings(max_examples=max(4, self.examples // parts) * scale, deadline=None, **in_step)
        @given(strategy)
        def run(case: Any) -> None:
            body(case)

        run()


def close_processes() -> None:
    """End the processes of all worlds."""
    _processes.close()
