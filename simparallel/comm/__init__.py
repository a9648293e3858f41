"""Communication between ranks: shared memory between processes or threads, messages, groups.

A rank's communicator is passed to the code that needs it; `current()` finds the communicator of the rank that runs
in the calling thread. Other threads of a rank's process can read its rank and size, but must not communicate.
"""

from simparallel.comm.communicator import Communicator, alone, current, is_running, join_run, use_communicator
from simparallel.comm.group import Group
from simparallel.comm.work import Work

__all__ = [
    "Communicator", "Group", "Work", "alone", "current", "is_running", "join_run", "use_communicator",
]  # fmt: skip
