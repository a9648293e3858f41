"""Communication between ranks: shared memory between processes or threads, messages, groups."""

from simparallel.comm.communicator import Communicator, alone, current, is_running, join_run, use_communicator
from simparallel.comm.group import Group
from simparallel.comm.work import Work

__all__ = [
    "Communicator", "Group", "Work", "alone", "current", "is_running", "join_run", "use_communicator",
]  # fmt: skip
