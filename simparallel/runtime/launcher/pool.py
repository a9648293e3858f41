"""The launcher's side: start the host and its devices, send runs, collect outcomes, end all processes.

A `Pool` is one host process and its devices. It stays warm between runs. Whatever goes wrong, it
ends in bounded time and leaves nothing behind: the shared memory is unnamed, every process holds the
read end of a pipe whose write end is here, and the process group is killed if it does not end when asked.
"""

from __future__ import annotations

import contextlib
import errno
import json
import linecache
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import cloudpickle

from simparallel.base import pickling
from simparallel.base.blas import THREAD_VARIABLES, default_threads
from simparallel.base.callsite import cell_of
from simparallel.base.system import missing_for_processes, python_command
from simparallel.comm.memory.memfd import open_unnamed, start_method
from simparallel.comm.memory.segment import SharedSegment
from simparallel.errors import LaunchError
from simparallel.runtime import channel
from simparallel.runtime.launcher.run import LOOK_S, Note, Run
from simparallel.runtime.log_folder import RANK_LINKS
from simparallel.runtime.logs import Apart, LogFiles, Tail, console
from simparallel.runtime.module_watch import Sources
from simparallel.runtime.ranks.rank import RunSettings
from simparallel.runtime.reports import Outcome, report_unreceived, where_stopped

START_LIMIT_S = 30.0
# Time for the host and its devices to end after the connections are shut down.
STOP_LIMIT_S = 2.5
PAYLOAD_WARNING_BYTES = 64 << 20
_SCARCE = errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.ENOMEM


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as bytes for the devices; functions and classes of `__main__` travel by value.

    Raises:
        LaunchError: a part of it cannot be pickled.
    """
    try:
        with _main_by_value():
            payload = pickling.dumps((function, args, kwargs))
    except Exception as error:
        # A user's object may fail in any way.
        name = getattr(function, "__qualname__", repr(function))
        raise LaunchError(
            f"{name} cannot be sent to the device processes: {type(error).__name__}: {error}. Locks, sockets, "
            "generators and files open for writing cannot be sent: create them inside the function."
        ) from error
    if len(payload) > PAYLOAD_WARNING_BYTES:
        warnings.warn(
            f"the function and its arguments are {len(payload) >> 20} MiB, copied to every rank; load big data "
            "inside the function instead.",
            stacklevel=3,
        )
    return payload


@contextlib.contextmanager
def _main_by_value() -> Iterator[None]:
    """Pickle `__main__` by value also in a child that multiprocessing has spawned.

    There its name is `__mp_main__`, which devices cannot import.
    """
    main = sys.modules.get("__mp_main__")
    if main is None or main.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(main)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(main)


class Pool:
    """Device processes that wait for work.

    Args:
        nodes: the ranks of each node.
        device_ids, environment: see `environment.variables`.
        log_dir, links, files: see `LogFiles`.
        arena_bytes: address space of each rank's shared memory; 0 for the default.
        blas_threads: BLAS threads of each device; None for cores // ranks, at least 1.
        start_timeout_s: seconds that the processes may take to start.

    Attributes:
        usable: whether another run can be sent.
        sources: the user's modules that its devices have imported.
        owner: pid of the launcher; the copy of the pool in a forked process must not be used.

    Raises:
        LaunchError: the processes did not start.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        *,
        device_ids: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
        log_dir: str | Path | None = None,
        links: str = RANK_LINKS,
        files: Sequence[str] = (),
        arena_bytes: int = 0,
        blas_threads: int | None = None,
        start_timeout_s: float = START_LIMIT_S,
    ) -> None:
        if missing := missing_for_processes():
            raise LaunchError(f'{missing}; use transport="inline": ranks are threads.')
        self.world_size = sum(map(len, nodes))
        self.usable = True
        self.sources = Sources()
        self.owner = os.getpid()
        self._start_timeout_s = start_timeout_s
        environment = dict(environment or {})
        facts = {
            "nodes": [list(node) for node in nodes], "device_ids": list(device_ids), "environment": environment,
            "blas_threads": blas_threads or default_threads(self.world_size, {**os.environ, **environment}),
        }  # fmt: skip
        try:
            with _standard_streams_taken():
                self._start(LogFiles(log_dir, nodes, links, files), arena_bytes, facts)
        except OSError as error:
            way_out = " Use fewer ranks, or raise the limit (ulimit -n, -u)." * (error.errno in _SCARCE)
            raise LaunchError(f"the device processes did not start: {error}.{way_out}") from error
        try:
            self._pids = self._wait_until_ready()
        except BaseException:
            # Also on Ctrl-C, whose traceback would keep this pool alive.
            self.close()
            raise

    def _start(self, logs: LogFiles, arena_bytes: int, facts: dict[str, Any]) -> None:
        # `undo`: released if a later step fails. `theirs`: the child's ends, closed here in any case.
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            self.logs = logs
            undo.callback(self.logs.close)
            # Unnamed shared memory: the kernel frees it with its last descriptor, however the processes end.
            self.segment = SharedSegment(self.world_size, arena_bytes=arena_bytes)
            undo.callback(self.segment.close_fd)
            # One connection for each rank, and one to the host, which reports the ends of processes.
            ends = []
            for _ in range(self.world_size + 1):
                ends.append(Pipe())
                undo.callback(ends[-1][0].close)
                theirs.callback(ends[-1][1].close)
            *self.connections, self.control = [ours for ours, _ in ends]
            for connection in self.connections:
                channel.limit_waits(connection, LOOK_S)
            # The others hold the read end and see the end of file when this process ends, even by SIGKILL.
            life_read, life_write = os.pipe()
            theirs.callback(os.close, life_read)
            # Closing this end also ends a host that has just started.
            undo.callback(os.close, life_write)
            *connection_fds, control_fd = [end.fileno() for _, end in ends]
            wiring = {
                "segment_fd": self.segment.fd,
                "life_fd": life_read,
                "log_fds": list(self.logs.rank_fds.values()),
                "connection_fds": connection_fds,
                "control_fd": control_fd,
                "start_method": start_method(),
                "world_size": self.world_size,
                "path": _module_path(),
                **facts,
            }
            config = json.dumps({"wiring": wiring, "launcher_pid": os.getpid()}).encode()
            config_fd = open_unnamed(len(config), len(config))
            theirs.callback(os.close, config_fd)
            with open(config_fd, "wb", closefd=False) as file:
                file.write(config)
                # The host reads from the position of the descriptor that it shares with us.
                file.seek(0)
            inherited = [self.segment.fd, life_read, control_fd, *self.logs.rank_fds.values(), *connection_fds]
            self._host = self._exec_host(config_fd, inherited)
            # Runs when the pool is closed or collected, or at exit. It must not refer to the pool, hence the arguments.
            # From here on it releases everything.
            connections = [*self.connections, self.control]
            self._closer = weakref.finalize(self, _close, self.owner, self._host, connections, undo.pop_all())

    def _exec_host(self, config_fd: int, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start the host process.

        The configuration travels through a descriptor: it may hold secrets, and every user may read a command line.
        """
        environment = {**os.environ, **dict.fromkeys(THREAD_VARIABLES, "1"), "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(
            python_command("simparallel.runtime.ranks.host", config_fd),
            stdin=subprocess.DEVNULL,
            stdout=self.logs.host_fd,
            stderr=self.logs.host_fd,
            pass_fds=[config_fd, *inherited],
            env=environment,
            # A single signal reaches all devices.
            process_group=0,
        )

    def _wait_until_ready(self) -> list[int]:
        # One deadline for all ranks, which start at the same time.
        deadline = time.monotonic() + self._start_timeout_s
        pids = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(min(max(0.0, deadline - time.monotonic()), channel.LONGEST_WAIT_S)):
                raise self._start_error(rank, f"was not ready after {self._start_timeout_s:g} s")
            try:
                pids.append(cloudpickle.loads(channel.receive(connection))["pid"])
            except (EOFError, OSError):
                raise self._start_error(rank, "ended before it was ready") from None
        return pids

    def _start_error(self, rank: int, what: str) -> LaunchError:
        said, own = self.logs.output_of() or "(nothing)", self.logs.output_of(rank)
        self.close()
        own = f"\nRank {rank} said:\n{own}" if own else ""
        return LaunchError(
            f"the device processes did not start: rank {rank} {what}. The host process said:\n{said}{own}"
        )

    # --- a run ------------------------------------------------------------------------------------

    def run(
        self,
        payload: bytes,
        settings: RunSettings,
        *,
        fork: bool = False,
        echo: bool | Collection[int] = True,
        note: Note | None = None,
        apart: Apart = contextlib.nullcontext,
    ) -> list[Outcome]:
        """Run a packed call on every rank; return one outcome per rank, in order.

        Args:
            payload: the call, see `pack`.
            settings: the settings of the run.
            fork: whether each rank runs in a process forked for this run, which begins with the environment, the
                directory and the path for imports of this one.
            echo: see `Cluster`.
            note: called with each message that a rank sends while it runs: progress, figures.
            apart: returns a context manager inside which the ranks' lines are printed, see `Tail`.

        Raises:
            KeyboardInterrupt: after every rank was stopped; the pool is usable if they all answered.
            LaunchError: the host process is gone.
        """
        # All ranks have answered the previous run, so none uses the shared words any more.
        began_ns = time.time_ns()
        self.segment.reset()
        for rank, pid in enumerate(self._pids):
            self.segment.words[self.segment.map.pid(rank)] = pid
        # Pickled once for all ranks.
        surroundings = (dict(os.environ), _module_path(), _directory()) if fork else None
        call = {"payload": payload, "settings": settings, "surroundings": surroundings}
        message = pickling.dumps({**call, **_cells()})
        run = Run(self, Tail(self.logs.rank_fds, console(), apart=apart, echo=echo), note, settings.timeout_s)
        try:
            for rank, connection in enumerate(self.connections):
                # Before sending: after an interrupted send, the rank still counts as unanswered.
                run.waiting[connection] = rank
                # If the rank has died, the host reports that through `control`.
                with contextlib.suppress(OSError):
                    channel.send(connection, message, run.look)
            run.collect()
        except KeyboardInterrupt as error:
            run.interrupt()
            if places := where_stopped({outcome.rank: outcome.report for outcome in run.outcomes}):
                error.add_note(places)
            raise
        finally:
            # A rank that has not answered is in an unknown state.
            if run.waiting or run.dead:
                self.usable = False
            self.sources.add((file for outcome in run.outcomes for file in outcome.modules), began_ns)
            run.tail.show(final=True)
        report_unreceived(self.segment, run.outcomes)
        return run.outcomes

    @property
    def pids(self) -> list[int]:
        """The processes that run the ranks."""
        return [self.segment.words[self.segment.map.pid(rank)] for rank in range(self.world_size)]

    def is_intact(self) -> bool:
        """Return False if a device or the host has ended since the last run."""
        return self.usable and not self.control.poll(0)

    def signal_all(self, number: int) -> None:
        """Send a signal to the process group: the devices, and the host, which ignores SIGINT."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._host.pid, number)

    def signal_rank(self, rank: int, number: int) -> None:
        """Send a signal to one device, not to the host, which has to report how the device ends."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids[rank], number)

    def close(self) -> None:
        """End all processes and release everything. Idempotent."""
        self.usable = False
        self._closer()


@contextlib.contextmanager
def _standard_streams_taken() -> Iterator[None]:
    """Open any closed descriptors from 0 to 2 for the duration of the block.

    A daemon may have closed them. Descriptors for the host must not get these numbers, which its own streams need.
    """
    with contextlib.ExitStack() as taken:
        while (fd := os.open(os.devnull, os.O_RDWR)) < 3:
            taken.callback(os.close, fd)
        os.close(fd)
        yield


def _module_path() -> list[str]:
    """Return `sys.path` for the devices as text, with "" replaced by the current directory if it still exists."""
    found = [os.fsdecode(entry) for entry in sys.path if isinstance(entry, (str, bytes, os.PathLike))]
    # Python skips the entry of a directory that was removed, too.
    return [path for entry in found for path in [entry or _directory()] if path]


def _directory() -> str:
    """Return the current directory; "" if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _cells() -> dict[str, dict[str, Any]]:
    """Return the source texts that are in no file, and the names of the notebook cells among them: for tracebacks."""
    sources = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and entry[1] is None}
    cells = {name: cell for name in sources if (cell := cell_of(name)) is not None}
    return {"sources": sources, "cells": cells}


def _close(
    owner: int, host: subprocess.Popen[bytes], connections: list[Connection], descriptors: contextlib.ExitStack
) -> None:
    """Shut down the connections, wait, kill; close every descriptor. Runs once, at the latest at exit.

    In a process that the user forked from the launcher, only the descriptors are closed.
    """
    with descriptors:
        if os.getpid() == owner:
            for connection in connections:
                _shut_down(connection)
            _end_host(host)


def _shut_down(connection: Connection) -> None:
    """Send end of file to the other side, even if a forked process holds a copy of our end. Never blocks."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


def _end_host(host: subprocess.Popen[bytes]) -> None:
    try:
        # A stopped process would not see the end of file.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGCONT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(STOP_LIMIT_S)
    finally:
        # Also after Ctrl-C, and the whole group: a device may outlive the host.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
