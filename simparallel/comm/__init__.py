"""How ranks talk: the contract, shared memory between processes or threads, messages, groups.

A rank's communicator is handed to whoever needs it; `current()` finds the one of the rank that
the calling thread plays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

from simparallel.comm.communicator import Communicator
from simparallel.comm.contract import AbstractCommunicator
from simparallel.comm.group import Group
from simparallel.comm.inline import InlineTransport, Turns
from simparallel.comm.segment import Segment
from simparallel.comm.work import Work
from simparallel.errors import CommError

__all__ = [
    "AbstractCommunicator", "Communicator", "Group", "Work", "alone", "current", "use_communicator",
]  # fmt: skip

_current = threading.local()
# What writes where the other ranks look, or takes memory that only its owner may give out.
_COMMUNICATION = (
    *(name for name, what in vars(AbstractCommunicator).items() if isinstance(what, FunctionType)),
    "inbox", "outbox", "progress", "finish", "empty",
)  # fmt: skip


def current() -> Communicator:
    """The communicator of this rank; outside of a run, that of a world of one."""
    communicator = getattr(_current, "communicator", None)
    if communicator is None:
        communicator = _current.communicator = alone()
    return communicator


def is_running() -> bool:
    """Does this thread play a rank of a run?"""
    return getattr(_current, "in_run", False)


def alone() -> Communicator:
    """A communicator of a world of one rank, in this thread. A process that is forked from here has its own."""
    segment = Segment(1, arena_bytes=1 << 30, is_private=True)
    return Communicator(InlineTransport(segment, 0, Turns(1)))


def join_run(communicator: Communicator) -> None:
    """Make `communicator` this thread's current one from now on: it plays a rank of a run."""
    _current.communicator, _current.in_run = communicator, True


@contextmanager
def use_communicator(communicator: Communicator) -> Iterator[Communicator]:
    """Make `communicator` this thread's current one inside the block."""
    before = getattr(_current, "communicator", None), is_running()
    _current.communicator, _current.in_run = communicator, True
    try:
        yield communicator
    finally:
        _current.communicator, _current.in_run = before


def _silence(communicator: Communicator, why: str) -> None:
    """From now on its collectives and messages are errors. An earlier reason stays."""
    for name in _COMMUNICATION:
        vars(communicator).setdefault(name, partial(_refuse, f"{name}: {why}"))


def _refuse(text: str, *args: Any, **kwargs: Any) -> None:
    raise CommError(text)


def _after_fork() -> None:
    """A process that a rank has forked shares the rank's memory: what it says there would be taken for the rank's."""
    if is_running():
        rank = current().rank
        _silence(
            current(),
            f"this process (pid {os.getpid()}) was forked from rank {rank} (pid {os.getppid()}) and is none of the "
            f"ranks. Let rank {rank} communicate, and send it the data through a pipe or a queue.",
        )


os.register_at_fork(after_in_child=_after_fork)
