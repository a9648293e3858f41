"""A device process: it is started by the host and serves as one rank, run after run, until the launcher ends it."""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import io
import json
import linecache
import multiprocessing
import os
import select
import signal
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, TextIO

import cloudpickle

from simparallel.base import blas, callsite, pickling
from simparallel.base.units import format_bytes
from simparallel.comm import Communicator, use_communicator
from simparallel.comm.fault_spec import faults_of
from simparallel.comm.memory.arena import Arena
from simparallel.comm.memory.segment import SharedSegment
from simparallel.comm.shm.transport import ShmTransport
from simparallel.errors import LaunchError
from simparallel.runtime import channel
from simparallel.runtime.environment import variables
from simparallel.runtime.module_watch import Imported
from simparallel.runtime.ranks import log_records
from simparallel.runtime.ranks.fork import Fork, follow
from simparallel.runtime.ranks.rank import RunSettings, flush_output, play_rank
from simparallel.runtime.ranks.shutdown import end_program, end_with_parent, forget_the_hosts, run_program, write_out
from simparallel.runtime.reports import Outcome, failure_report
from simparallel.runtime.title import set_program
from simparallel.view import shown
from simparallel.world.process import seed_globals

# The host waits for twice as long.
END_LIMIT_S = 1.0
# Write errors that mean a full disk, an exhausted quota, or a file at its size limit.
_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG


@dataclass
class Wiring:
    """Descriptors and settings that reach a device from the launcher through the host's exec and its start method."""

    segment_fd: int
    # The read end; its write end is in the launcher.
    life_fd: int
    log_fds: list[int]
    connection_fds: list[int]
    # For the host alone.
    control_fd: int
    # How the host starts devices: "fork", or "spawn", which starts new interpreters.
    start_method: str
    world_size: int
    blas_threads: int
    path: list[str]
    nodes: list[list[int]]
    device_ids: list[int]
    environment: dict[str, str]


def read_config(config_fd: int) -> dict[str, Any]:
    """Return the launcher's JSON with the wiring in it, from a file that several processes read."""
    return json.loads(os.pread(config_fd, os.fstat(config_fd).st_size, 0))


def main(config_fd: int, rank: int, host_life_fd: int, host_pid: int) -> None:
    """Run a device that the host has spawned, with descriptors of its own rank alone."""
    wiring = Wiring(**read_config(config_fd)["wiring"])
    os.close(config_fd)
    sys.path[:] = wiring.path
    multiprocessing.current_process().name = f"rank {rank}"
    device_main(rank, wiring, host_life_fd, host_pid, ())


def device_main(rank: int, wiring: Wiring, host_life_fd: int, host_pid: int, others: Collection[int]) -> None:
    """Set the process up, then serve runs. Never returns.

    Args:
        rank: the rank of this process.
        wiring: the inherited descriptors.
        host_life_fd: the read end of a pipe whose write end only the host keeps open.
        others: inherited descriptors that belong to the host and to other ranks.
        host_pid: pid of the host, to detect that it died before this process began to watch it.
    """
    # The order matters: output goes to the rank's own log before anything can be printed, and the watch over the host
    # starts before anything can take long.
    code = 1
    streams = Streams()
    try:
        forget_the_hosts()
        # A forked process has the host's handlers.
        log_of_host = None if wiring.start_method == "fork" else os.fdopen(os.dup(2), "w", encoding="utf-8")
        _take_own_descriptors(wiring.log_fds[rank], others)
        streams.renew()
        faulthandler.enable(file=sys.stderr)
        # `kill -USR1 PID` writes the stack of every thread to the log.
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        _die_with_parent(wiring.life_fd, host_life_fd, host_pid)
        log_records.begin(log_of_host)
        _set_variables(rank, wiring)
        set_program(rank, wiring.world_size)
        interrupts = Interrupts()
        signal.signal(signal.SIGINT, interrupts)
        _serve(rank, wiring, interrupts, streams, host_life_fd)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code, streams)


def _set_variables(rank: int, wiring: Wiring) -> None:
    os.environ.update(variables(rank, wiring.nodes, wiring.device_ids, wiring.environment))
    os.environ["MPLBACKEND"] = shown.backend_for_ranks(os.environ.get("MPLBACKEND"))
    # Libraries that the user's modules import read their number of threads once.
    blas.limit_threads(wiring.blas_threads)


def _leave(code: int, streams: Streams) -> None:
    """End the process, even if the user's threads, exit functions or files fail to end."""
    try:
        # User code may have closed the streams that the lines below print to.
        if streams.are_lost():
            streams.renew()
        for running in end_program(END_LIMIT_S):
            print(f"the rank ends while {running} is still running: join it before the end", file=sys.stderr)
        write_out()
        log_records.end()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        streams.flush()
        os._exit(code)


class ToLauncher:
    """The connection to the launcher, for all threads of this process but not for processes that it forks.

    A forked process shares the connection: its messages would mix with the rank's.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending, self._pid = connection, threading.Lock(), os.getpid()
        self._socket = os.fstat(connection.fileno())

    def send(self, *messages: bytes) -> None:
        """Send the messages, with no message of another thread in between.

        Raises:
            OSError: the launcher is gone, or the program has closed this descriptor.
        """
        if os.getpid() == self._pid:
            with self._sending:
                # A file that the program has opened since may have the number of a descriptor that it has closed.
                if not os.path.samestat(os.fstat(self._connection.fileno()), self._socket):
                    raise OSError(errno.EBADF, "the program has closed the rank's connection to the launcher")
                for message in messages:
                    channel.send(self._connection, message)

    def tell(self, note: dict[str, Any]) -> None:
        self.send(pickling.dumps(note))


def _serve(rank: int, wiring: Wiring, interrupts: Interrupts, streams: Streams, host_life: int) -> None:
    connection = Connection(wiring.connection_fds[rank])
    launcher = ToLauncher(connection)
    segment = SharedSegment(wiring.world_size, fd=wiring.segment_fd)
    arena = Arena(segment, rank)
    last: Communicator | None = None
    imported = Imported()
    fork = Fork(partial(_die_with_parent, wiring.life_fd, host_life))
    shown.deliver = lambda png: launcher.tell({"kind": "figure", "rank": rank, "png": png})
    launcher.tell({"kind": "ready", "pid": os.getpid()})
    while True:
        try:
            message = cloudpickle.loads(channel.receive(connection))
        except (EOFError, ConnectionResetError):
            # The launcher has closed the connection, or has died.
            return
        if last is not None:
            # Safe only now: until all ranks had ended the previous run, peers could still read this rank's memory.
            last.release()
        settings: RunSettings = message["settings"]
        settings.blas_threads = wiring.blas_threads
        faults = faults_of(settings.faults, rank)
        transport = ShmTransport(segment, rank, settings.timeout_s, arena, check=settings.check, faults=faults)
        surroundings, modules = message["surroundings"], []
        if surroundings is not None:
            follow(surroundings)
            _set_variables(rank, wiring)
            _import_for(message["payload"], transport)
            modules = imported.new()
            streams.flush()
            if not fork.begin():
                continue
            launcher = ToLauncher(connection)
        transport.start()
        # The previous run's function may have set its own handler.
        signal.signal(signal.SIGINT, interrupts)
        streams.renew()
        # Sources of notebook cells, so that tracebacks show their lines.
        linecache.cache.update(message["sources"])
        callsite.cells.update(message["cells"])
        call = partial(_call, message["payload"], rank, wiring.world_size, interrupts)
        outcome, last = play_rank(call, transport, settings, is_process=True, tell=launcher.tell)
        # A signal may have interrupted the `finally` of `_call` before it disarmed the handler.
        interrupts.armed = False
        outcome.modules = modules + imported.new()
        streams.flush()
        outcome.lost_output = streams.lost()
        log_records.flush()
        launcher.send(*_packed(outcome))
        if surroundings is not None:
            fork.has_answered()
            return


def _import_for(payload: bytes, transport: ShmTransport) -> None:
    """Import the modules that the user's function refers to, as in a run: then processes that are forked have them."""
    seed_globals()
    # The forked process tries again, and reports the error.
    with use_communicator(Communicator(transport).beside()), contextlib.suppress(BaseException):
        cloudpickle.loads(payload)


def _call(payload: bytes, rank: int, world_size: int, interrupts: Interrupts) -> Any:
    """Unpickle and call the user's function; both run user code, so errors of both are the rank's failure."""
    interrupts.armed = True
    try:
        function, args, kwargs = cloudpickle.loads(payload)
        set_program(rank, world_size, program_of(function, args))
        return function(*args, **kwargs)
    finally:
        set_program(rank, world_size)
        interrupts.armed = False


def program_of(function: Any, args: tuple[Any, ...]) -> str:
    """Return the program's name for `ps`: a script with its arguments, or the name of a function."""
    if function is run_program:
        return " ".join([args[0], *args[1]])
    return str(getattr(function, "__qualname__", type(function).__name__))


def _packed(outcome: Outcome) -> tuple[bytes, bytes]:
    """Pickle the outcome and its value separately, since a user's value may fail to pickle or unpickle."""
    value, outcome.value = outcome.value, None
    try:
        packed_value = pickling.dumps(value)
    except BaseException as error:
        # A user's object may fail in any way.
        packed_value = pickling.dumps(None)
        outcome.report = failure_report(
            LaunchError(
                f"rank {outcome.rank}: its result, a {type(value).__name__}, cannot be sent back: "
                f"{type(error).__name__}: {str(error).rstrip('.')}. "
                "Return arrays, numbers, strings, and lists or dicts of them."
            )
        )
    return pickling.dumps({"kind": "outcome", "outcome": outcome}), packed_value


class LogFile(io.FileIO):
    """The log of a rank. If the disk is full, lines are dropped and training continues.

    Attributes:
        lost_bytes: bytes that could not be written.
        problem: the system's reason.
    """

    lost_bytes, problem = 0, ""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            size = memoryview(data).nbytes
            self.lost_bytes, self.problem = self.lost_bytes + size, os.strerror(error.errno)
            return size


class Streams:
    """Standard output and error of this rank, restored at the start of each run."""

    def __init__(self) -> None:
        self._own: list[TextIO] = []
        self._files: list[LogFile] = []

    def renew(self) -> None:
        """Install them as `sys.stdout` and `sys.stderr`; reopen them if user code has closed them."""
        # Line-buffered: the launcher shows complete lines while the rank runs.
        if not self._own or any(stream.closed for stream in self._own):
            self._files = [LogFile(fd, "w", closefd=False) for fd in (1, 2)]
            self._own = [
                io.TextIOWrapper(io.BufferedWriter(file), "utf-8", "backslashreplace", line_buffering=True)
                for file in self._files
            ]
        sys.stdout, sys.stderr = self._own

    def are_lost(self) -> bool:
        """Return whether `sys.stdout` or `sys.stderr` is None or closed."""
        return any(stream is None or getattr(stream, "closed", False) for stream in (sys.stdout, sys.stderr))

    def flush(self) -> None:
        flush_output(*self._own)

    def lost(self) -> str:
        """Return the size and cause of output lost since the last call; "" if there is none."""
        size = sum(file.lost_bytes for file in self._files)
        problem = next((file.problem for file in self._files if file.lost_bytes), "")
        for file in self._files:
            file.lost_bytes = 0
        return f"{format_bytes(size)} ({problem})" if size else ""


class Interrupts:
    """SIGINT handler: the launcher's signal interrupts the user's function, but not our own code."""

    armed = False

    def __call__(self, signum: int, frame: Any) -> None:
        if self.armed:
            raise KeyboardInterrupt


def _take_own_descriptors(log_fd: int, others: Collection[int]) -> None:
    # Descriptors, not only `sys.stdout`: C libraries and child processes write to 1 and 2.
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    # Only the host may hold the write end of its pipe, otherwise its death would go unnoticed, and a connection reaches
    # its end of file only when no process holds the rank's end open.
    for fd in (log_fd, *others):
        os.close(fd)


def _die_with_parent(launcher_life: int, host_life: int, parent: int) -> None:
    """End this process with its parent, the host or the launcher: by PR_SET_PDEATHSIG, and by a watch over pipes."""
    end_with_parent()
    # The parent may have died before prctl took effect.
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        poll = select.poll()
        for fd in (launcher_life, host_life):
            poll.register(fd, select.POLLIN)
        # No process ever writes: readable means that the other end is closed.
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="life", daemon=True).start()
