"""Being a rank in a process that was started by itself: `python train.py` eight times, `pytest` eight times, torchrun.

The processes find each other (`rendezvous`) and then talk through the same shared memory, by the same code, as those that
`simparallel run` starts. What the host and the launcher do for those, each process does here for itself: it watches
the ends of the others while it waits, and at its own end it tells how that is, and waits for theirs.
"""

from __future__ import annotations

import fcntl
import logging
import math
import os
import select
import struct
import sys
from collections.abc import Callable, Iterable
from typing import Any

from simparallel import blas
from simparallel.cluster import describe
from simparallel.comm import Communicator, join_run
from simparallel.comm.faults import VARIABLE, faults_of, parse
from simparallel.comm.leaving import Leaving
from simparallel.comm.progress import unreceived
from simparallel.comm.segment import DONE, IDLE, RUNNING
from simparallel.comm.shm import ShmTransport
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, UNSEEN_END, Condition
from simparallel.errors import InputError
from simparallel.events import Recorder, set_recorder
from simparallel.runtime.environment import variables
from simparallel.runtime.identity import Identity, identify
from simparallel.runtime.rendezvous import Meeting, meet, tell
from simparallel.runtime.title import set_name

MEET_LIMIT_S = 300.0  # for processes that are started by hand, in one terminal after the other
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11  # since Linux 6.13
_INFO_EXIT = 1 << 3  # since Linux 6.15


class JoinedTransport(ShmTransport):
    """One rank that is a process without a host.

    Args:
        meeting: of the ranks.
        rank: which one it is.
        timeout_s: how long it waits for another one.
        settings: those of `AbstractTransport`.
    """

    unknown_end = UNSEEN_END

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float, **settings: Any) -> None:
        super().__init__(meeting.segment, rank, timeout_s, **settings)
        self._rank_of = {fd: other for other, fd in meeting.lives.items()}
        self._ends = select.poll()
        for fd in self._rank_of:
            self._ends.register(fd, select.POLLIN)

    def check_health(self, needed: Condition, describe: Callable[[], str]) -> None:
        self._note_ends()
        super().check_health(needed, describe)

    def _note_ends(self) -> None:
        """Write down which processes have ended without a word, as a host does.

        Several ranks may write the same words here: each writes what the kernel told it, and the kernel tells all the
        same.
        """
        for fd, _ in self._ends.poll(0):
            rank = self._rank_of[fd]
            self._ends.unregister(fd)
            if self.state_of(rank) not in (IDLE, RUNNING):  # asked after its end: this is its last word
                continue
            control, status = self.segment.map, exit_status(self.words[self.segment.map.pid(rank)], fd)
            if status is None:
                self.words[control.lost()] = rank + 1
            else:
                code = os.waitstatus_to_exitcode(status)
                self.words[control.exit_of(rank)] = code if code < 0 else code + 1

    # --- the end ---------------------------------------------------------------------------------------

    def say_done(self, last_words: str) -> None:
        if last_words:
            self.write_last_words(last_words)
        self.set_state(DONE)

    def wait_for_the_others(self) -> bool:
        """Wait, as long as it takes, until all ranks have ended.

        Raises:
            RankFailedError: one of them failed.
        """
        others = tuple(rank for rank in range(self.world_size) if rank != self.rank)
        ended = Condition(tuple(map(self.segment.map.state, others)), others, DONE)
        self.timeout_s = math.inf
        self.wait([ended], _wait_for_ends)
        self.check_health(ended, _wait_for_ends)
        return True

    def unreceived(self, kept: Iterable[tuple[int, str]]) -> Exception | None:
        """The error for messages to this rank that it never received. Only when all ranks have ended."""
        return unreceived(self.segment, {self.rank: list(kept)}).get(self.rank)

    def stop(self, code: int) -> None:
        """The others see that this rank has failed, and stop by themselves."""

    def abort(self, code: int) -> None:
        """End this process, whose exit code nothing else could change any more."""
        children = sys.modules.get("multiprocessing.util")
        if children is not None:
            children._exit_function()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(code)


def _wait_for_ends() -> str:
    return "its wait for the end of the other ranks"


def exit_status(pid: int, pidfd: int) -> int | None:
    """How a process ended that is no child of ours, as `os.wait` would say it; None if the kernel does not tell.

    It tells either of a process whose parent has taken note of its end, or of one whose parent has not.
    """
    for ask in (_status_of_reaped, _status_of_zombie, _status_of_reaped):  # it may be reaped meanwhile
        status = ask(pid, pidfd)
        if status is not None:
            return status
    return None


def _status_of_reaped(pid: int, pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:  # an older kernel, or a pipe in the place of a pidfd
        return None
    known: int = struct.unpack_from("Q", info, 0)[0]
    status: int = struct.unpack_from("i", info, 60)[0]
    return status if known & _INFO_EXIT else None


def _status_of_zombie(pid: int, pidfd: int) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[49]) if fields[0] == "Z" else None


def join(timeout_s: float | None = None, start_timeout_s: float | None = None) -> bool:
    """Make this process the rank that its environment describes, until it ends; False if it is the only one.

    Args:
        timeout_s: how long a rank waits for another one; None for 60 s.
        start_timeout_s: how long the processes wait until all have come; None for 300 s.

    Collective: over all processes of the job.

    Raises:
        LaunchError: see `identify` and `meet`.
        InputError: SIMPARALLEL_FAULT has a wrong field.
    """
    for name, value in (("timeout_s", timeout_s), ("start_timeout_s", start_timeout_s)):
        if value is not None and not value > 0:
            raise InputError(f"init: {name}={value!r} must be a number of seconds above 0.")
    identity = identify(os.environ)
    for note in identity.notes if identity.rank == 0 else ():  # all have the same
        tell(f"note: {note}")
    if identity.world_size == 1:
        return False
    faults = parse(os.environ.get(VARIABLE, ""), identity.world_size)
    blas.limit_threads(blas.fair_threads(identity.world_size))
    meeting = meet(identity, start_timeout_s or MEET_LIMIT_S, tell)
    settle(identity, meeting)
    settings = {"faults": faults_of(faults, identity.rank)}
    transport = JoinedTransport(meeting, identity.rank, timeout_s or DEFAULT_TIMEOUT_S, **settings)
    recorder = Recorder(identity.rank, describe(identity.world_size, nodes=meeting.nodes))
    communicator = Communicator(transport, recorder)
    transport.start()
    set_recorder(recorder)
    join_run(communicator)
    Leaving(communicator, transport)
    set_name(identity.rank, sys.argv[0])
    return True


def settle(identity: Identity, meeting: Meeting) -> None:
    """Give this process the variables of its rank, under the names of all launchers."""
    masters = {name: identity.given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in identity.given}
    os.environ.update(variables(identity.rank, meeting.nodes, meeting.device_ids, masters))
