"""Join a world from a process started on its own, such as one of eight `python train.py` or one of torchrun's.

The processes find each other (`rendezvous`) and then use the same shared memory and the same code as the ranks of
`simparallel run`. Each process here does the work of the host and the launcher for itself: it watches for the end of
the others, stops when one has failed, and at its own end it publishes its state and waits for the others.
"""

from __future__ import annotations

import logging
import math
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

from simparallel.base.checks import check_seconds
from simparallel.base.system import process_fields
from simparallel.clock.recorder import Recorder, set_recorder
from simparallel.comm import Communicator, join_run
from simparallel.comm.fault_spec import VARIABLE, faults_of, parse
from simparallel.comm.group import Medium
from simparallel.comm.memory.segment import DONE, IDLE, RUNNING
from simparallel.comm.shm.medium import SHARED_MEMORY
from simparallel.comm.shm.transport import ShmTransport
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, UNSEEN_END, AbstractTransport, Condition
from simparallel.errors import CommError, DeadlockError, LaunchError, RankFailedError
from simparallel.machine.cluster import describe
from simparallel.runtime.environment import variables
from simparallel.runtime.joined.identity import RankIdentity, identify
from simparallel.runtime.joined.rendezvous import Meeting, meet, tell
from simparallel.runtime.ranks.leaving import Leaving
from simparallel.runtime.title import set_name

# Long enough to start processes by hand, in one terminal after another.
MEET_LIMIT_S = 300.0
LOOK_S = 0.2
# Time for a rank that waits in a collective to notice the failure itself.
GRACE_S = 0.3
# The ioctl, since Linux 6.13: read and write, 64 bytes, magic number 0xFF, request 11.
_PIDFD_GET_INFO = (3 << 30) | (64 << 16) | (0xFF << 8) | 11
# Since Linux 6.15.
_INFO_EXIT = 1 << 3


class ExitCodes:
    """Publisher of the exit codes of processes that ended without publishing a state; elsewhere the host does this.

    Several ranks may write the same exit code, but they all have it from the kernel, so the values agree.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._segment = meeting.segment
        self._rank_of = {fd: rank for rank, fd in meeting.lives.items()}
        self._poll = select.poll()
        for fd in self._rank_of:
            self._poll.register(fd, select.POLLIN)

    def publish(self) -> None:
        """Publish how the processes ended that have ended by now. Never waits."""
        words, control = self._segment.words, self._segment.map
        for fd, _ in self._poll.poll(0):
            rank = self._rank_of[fd]
            self._poll.unregister(fd)
            # A final state, published before the process ended.
            if words[control.state(rank)] not in (IDLE, RUNNING):
                continue
            status = exit_status(words[control.pid(rank)], fd)
            if status is None:
                words[control.lost()] = rank + 1
            else:
                # 0 is an empty word, so exit codes are stored plus 1, and signals as negative numbers.
                code = os.waitstatus_to_exitcode(status)
                words[control.exit_of(rank)] = code if code < 0 else code + 1


class JoinedTransport(ShmTransport):
    """The transport of a rank whose process has no host.

    Args:
        meeting: the shared memory and the other processes.
        rank: the rank of this process.
        timeout_s: seconds to wait for another rank.
        settings: the settings of `AbstractTransport`.

    Attributes:
        has_raised: whether this rank has already raised an error about another rank's failure.
    """

    unknown_end = UNSEEN_END

    def __init__(self, meeting: Meeting, rank: int, timeout_s: float, **settings: Any) -> None:
        super().__init__(meeting.segment, rank, timeout_s, **settings)
        self.meeting = meeting
        self._exit_codes = ExitCodes(meeting)
        self.has_raised = False

    def start(self) -> None:
        super().start()
        # Only the main thread may set signal handlers.
        if threading.current_thread() is threading.main_thread():
            _FailureWatch(self, ExitCodes(self.meeting))

    def check_health(self, needed: Condition, describe: Callable[[], str]) -> None:
        self._exit_codes.publish()
        super().check_health(needed, describe)

    def _check(self, needed: Condition, describe: Callable[[], str], since: float) -> None:
        try:
            super()._check(needed, describe, since)
        except (RankFailedError, DeadlockError):
            self.has_raised = True
            raise

    # --- the end ---------------------------------------------------------------------------------------

    def wait_for_the_others(self) -> bool:
        """Wait, as long as it takes, until all ranks have ended; a rank that has failed waits for none.

        Raises:
            RankFailedError: one of them failed.
        """
        if self.state_of(self.rank) != DONE:
            return False
        # Without a limit: another rank may compute for as long as it likes.
        others = tuple(rank for rank in range(self.world_size) if rank != self.rank)
        ended = Condition(tuple(map(self.segment.map.state, others)), others, DONE)
        self.timeout_s = math.inf
        self.wait([ended], _wait_for_ends)
        self.check_health(ended, _wait_for_ends)
        return True

    def stop(self, code: int) -> None:
        """Do nothing: the others see that this rank has failed, and stop by themselves."""

    def abort(self, code: int) -> None:
        """End this process at once: so late, nothing else can change its exit code."""
        # `os._exit` skips these steps of a normal end.
        children = sys.modules.get("multiprocessing.util")
        if children is not None:
            children._exit_function()
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(code)


class _FailureWatch:
    """A watch that stops a rank outside of collectives after another rank's failure: the main thread raises it.

    The exception is raised by a SIGINT handler, since a signal also interrupts blocking calls. Ctrl-C keeps its
    previous handler.
    """

    def __init__(self, transport: JoinedTransport, exit_codes: ExitCodes) -> None:
        self._transport = transport
        self._exit_codes = exit_codes
        self._pid = os.getpid()
        self._error: CommError | None = None
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        threading.Thread(target=self._run, name="watch", daemon=True).start()

    def _is_over(self) -> bool:
        transport = self._transport
        return transport.has_raised or transport.state_of(transport.rank) >= DONE

    def _run(self) -> None:
        while not self._is_over():
            time.sleep(LOOK_S)
            error = self._failure()
            if error is not None:
                # A rank that waits in a collective notices the failure by itself, and its error names the call.
                time.sleep(GRACE_S)
                if not self._is_over():
                    self._error = error
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    def _failure(self) -> CommError | None:
        self._exit_codes.publish()
        try:
            AbstractTransport.check_health(self._transport, Condition((), (), 0), _own_code)
        except CommError as error:
            return error
        return None

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # Our own signal, unless a process forked by the rank has inherited this handler. All others are the user's.
        error, self._error = self._error, None
        if error is not None and os.getpid() == self._pid:
            self._transport.has_raised = True
            raise error
        if callable(self._before):
            self._before(number, frame)
        elif self._before == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


def _own_code() -> str:
    return "its own code, outside of collectives"


def _wait_for_ends() -> str:
    return "its wait for the end of the other ranks"


def exit_status(pid: int, pidfd: int) -> int | None:
    """Return the exit status, as from `os.wait`, of a process that is not our child; None if it is unknown.

    The pidfd gives the status of a reaped process, /proc that of a zombie.
    """
    # Ask the pidfd twice: the parent may reap the zombie between the first two questions.
    for ask in (_status_of_reaped, _status_of_zombie, _status_of_reaped):
        status = ask(pid, pidfd)
        if status is not None:
            return status
    return None


def _status_of_reaped(pid: int, pidfd: int) -> int | None:
    # Windows has none, and no device processes.
    import fcntl

    info = bytearray(64)
    struct.pack_into("Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
    except OSError:
        # An older kernel, or a pipe in place of a pidfd.
        return None
    known: int = struct.unpack_from("Q", info, 0)[0]
    status: int = struct.unpack_from("i", info, 60)[0]
    return status if known & _INFO_EXIT else None


def _status_of_zombie(pid: int, pidfd: int) -> int | None:
    fields = process_fields(pid)
    return int(fields[49]) if fields[:1] == ["Z"] else None


def join(timeout_s: float | None, start_timeout_s: float | None) -> bool:
    """Make this process a rank of the job that another launcher started, until the process ends.

    Args:
        timeout_s: seconds that a rank waits for another one; None for 60.
        start_timeout_s: seconds to wait until all processes have arrived; None for 300.

    Returns:
        False if the job has one rank only: then nothing is done.

    Collective: over all processes of the job.

    Raises:
        LaunchError: see `identify` and `meet`; or MPI does not connect this process with the others.
        InputError: a limit is not above 0, or SIMPARALLEL_FAULT has a wrong field.
        SharedMemoryError: there is not enough memory.
    """
    limit_s = DEFAULT_TIMEOUT_S if timeout_s is None else check_seconds("init", "timeout_s", timeout_s)
    if start_timeout_s is not None:
        start_timeout_s = check_seconds("init", "start_timeout_s", start_timeout_s)
    identity = identify(os.environ)
    # All ranks have the same notes.
    for note in identity.notes if identity.rank == 0 else ():
        tell(f"note: {note}")
    if identity.world_size == 1:
        return False
    place = _over_mpi(identity, limit_s) if identity.is_mpi else _here(identity, limit_s, start_timeout_s)
    if isinstance(place, str):
        # Without MPI, ranks of one machine still meet in its memory.
        if not (identity.is_here and identity.world_size):
            size = identity.world_size
            started = f"{size} processes, some of them on other machines" if size else "this process"
            raise LaunchError(
                f"init: another launcher started {started}, by {identity.source}, but {place}. To run all ranks on "
                f"this machine: simparallel run -n {size or 'N'} SCRIPT"
            )
        place = _here(identity, limit_s, start_timeout_s, f", as {place}")
    if place is None:
        return False
    recorder = Recorder(place.transport.rank, describe(place.transport.world_size, nodes=place.nodes))
    communicator = Communicator(place.transport, recorder, medium=place.medium)
    # From here on this thread is the rank, until the process ends; `Leaving` then publishes its state. Over MPI its
    # exit hook runs before MPI's, which was registered earlier.
    place.transport.start()
    set_recorder(recorder)
    join_run(communicator)
    Leaving(communicator, place.transport)
    set_name(communicator.rank, sys.argv[0])
    return True


class Connection(NamedTuple):
    """The place of this process among the others: how it reaches them, and the ranks of each node."""

    transport: Any
    nodes: Sequence[Sequence[int]]
    medium: Medium


def _here(identity: RankIdentity, timeout_s: float, start_timeout_s: float | None, why: str = "") -> Connection:
    """Meet the other processes of the job, all on this machine."""
    _tell_place(identity, f"in the shared memory of this machine{why}")
    faults = parse(os.environ.get(VARIABLE, ""), identity.world_size)
    meeting = meet(identity, start_timeout_s or MEET_LIMIT_S, tell)
    settle(identity, identity.rank, meeting.nodes, meeting.device_ids)
    transport = JoinedTransport(meeting, identity.rank, timeout_s, faults=faults_of(faults, identity.rank))
    return Connection(transport, meeting.nodes, SHARED_MEMORY)


def _over_mpi(identity: RankIdentity, timeout_s: float) -> Connection | str | None:
    """Meet the other processes over MPI.

    Returns:
        Why MPI does not connect them; None if there are none, and the launcher stated no number.
    """
    # Not before it is needed: `world` imports mpi4py, which starts MPI.
    from simparallel.comm.mpi import transport as mpi
    from simparallel.comm.mpi.medium import MPI_MESSAGES

    if not mpi.is_available():
        return "mpi4py is not installed (pip install mpi4py)"
    everyone = mpi.world()
    if everyone.size == 1:
        reason = "MPI knows of this process only: mpi4py uses another MPI library than the launcher, or srun was not "
        return f"{reason}given --mpi=pmix" if identity.world_size else None
    if identity.world_size not in (0, everyone.size):
        raise LaunchError(
            f"init: {identity.world_size} processes are to be one job by {identity.source}, but MPI knows of "
            f"{everyone.size}. Start the ranks by one launcher, or unset the variables of the other one."
        )
    nodes = mpi.nodes_of(everyone)
    where = f"over MPI, on {len(nodes)} machine{'s' * (len(nodes) > 1)}"
    _tell_place(replace(identity, rank=everyone.rank, world_size=everyone.size), where)
    settle(identity, everyone.rank, nodes)
    # A duplicate, so that our messages and those of a script that uses mpi4py itself cannot meet.
    return Connection(mpi.MpiTransport(everyone.Dup(), timeout_s), nodes, MPI_MESSAGES)


def _tell_place(identity: RankIdentity, where: str) -> None:
    if identity.rank == 0:
        tell(f"rank 0 of {identity.world_size} by {identity.source}; the ranks meet {where}")


def settle(identity: RankIdentity, rank: int, nodes: Sequence[Sequence[int]], device_ids: Sequence[int] = ()) -> None:
    """Set this process's environment variables to those of its rank, under the names of all launchers."""
    masters = {name: identity.given[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in identity.given}
    os.environ.update(variables(rank, nodes, device_ids, masters))
