"""Leak checks: compare a process's resources before and after a block.

Without /proc, only threads and temporary files are compared.
Processes are found in two ways: as descendants of this one, and by a mark in the environment that everything started
from here inherits, so that orphans are found, too.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from threadpoolctl import ThreadpoolController

from simparallel.base.system import KILL, process_fields, usable_cores

MARK = "SIMPARALLEL_TEST_MARK"


def _names(folder: str) -> list[str]:
    """Return the names in a folder of the system; none where there is no such folder."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _stat(pid: int) -> tuple[int, str] | None:
    """Return (parent, start time) of a process; None if it has ended."""
    fields = process_fields(pid)
    return (int(fields[1]), fields[19]) if fields else None


def marked(mark: str) -> set[int]:
    """Return the processes started with this mark in their environment; zombies have no environment."""
    found = set()
    for pid in (int(name) for name in _names("/proc") if name.isdigit()):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def descendants(ancestor: int) -> set[int]:
    """Return children of a process, their children, and so on; zombies too."""
    parents = {int(name): _stat(int(name)) for name in _names("/proc") if name.isdigit()}
    found: set[int] = set()
    while True:
        more = {pid for pid, stat in parents.items() if stat and stat[0] in {ancestor, *found}} - found
        if not more:
            return found
        found |= more


def belongings() -> dict[str, set[str]]:
    """Return this process's resources, by kind, as texts that can be compared and read."""
    mark = os.environ.setdefault(MARK, uuid.uuid4().hex)
    processes = set()
    for pid in (descendants(os.getpid()) | marked(mark)) - {os.getpid()}:
        stat = _stat(pid)
        if stat is not None:
            processes.add(f"pid {pid} started at {stat[1]}")
    descriptors = set()
    for fd in _names("/proc/self/fd"):
        with suppress(OSError):  # the descriptor that lists the directory
            descriptors.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
    return {
        "processes": processes,
        "descriptors": descriptors,
        "threads": {f"{thread.name} {thread.ident}" for thread in threading.enumerate()},
        # Their number only: BLAS ends its threads when the process forks, and starts new ones later.
        "native threads": {f"number {i}" for i in range(len(_names("/proc/self/task")))},
        "shared memory": {name for name in _names("/dev/shm") if name.startswith(("simparallel", "sem.mp"))},
        "temporary files": {path.name for path in Path(tempfile.gettempdir()).glob("simparallel-*")},
    }


def new_belongings(before: dict[str, set[str]], limit_s: float = 3.0) -> dict[str, set[str]]:
    """Return the resources that did not exist before, of the kinds in `before`.

    Waits up to `limit_s` for them to go, so that a slow shutdown does not count as a leak.
    """
    deadline = time.monotonic() + limit_s
    while True:
        now = belongings()
        new = {kind: now[kind] - before[kind] for kind in before if now[kind] - before[kind]}
        if not new or time.monotonic() > deadline:
            return new
        gc.collect()  # objects held only by a reference cycle are no leak; takes 0.3 s late in the suite
        time.sleep(0.02)


def start_blas_threads() -> None:
    """Start all threads of BLAS, which ends them when the process forks, and later restarts as many as its limit."""
    for library in ThreadpoolController().lib_controllers:
        limit = library.num_threads
        library.set_num_threads(max(limit, usable_cores()))
        library.set_num_threads(limit)


@contextmanager
def no_leaks(limit_s: float = 3.0) -> Iterator[None]:
    """Check that a block leaves nothing behind: processes, descriptors, threads, shared memory, temporary files.

    Processes that are left are killed, so that they do not disturb the next block.

    Args:
        limit_s: seconds that resources may take to go.

    Raises:
        AssertionError: names the resources.

    Example:
        >>> with sp.testing.no_leaks():
        ...     results = sp.launch(sp.get_rank, world_size=2)
    """
    start_blas_threads()
    before = belongings()
    yield
    left = new_belongings(before, limit_s)
    for process in left.get("processes", ()):
        with suppress(ProcessLookupError):
            os.kill(int(process.split()[1]), KILL)
    text = "; ".join(f"{kind}: {', '.join(sorted(texts))}" for kind, texts in left.items())
    assert not left, f"left behind: {text}"
