"""The launcher's side: start the host and its devices, send runs, collect outcomes, end it all.

A `Pool` is one host process and its devices. It stays warm between runs. Whatever goes wrong, it
ends in bounded time and leaves nothing: the memory is unnamed, every process holds the read end
of a pipe whose write end is here, and the whole process group is killed if asking does not help.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import cloudpickle

from simparallel.cluster import ClusterSpec
from simparallel.comm.segment import ABORT_INTERRUPT, Segment
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.errors import LaunchError
from simparallel.runtime.logs import LogFiles, Tail, console
from simparallel.runtime.reports import Outcome, death_report

START_LIMIT_S = 30.0
POLL_S = 0.02
STOP_ASK_S, STOP_TERM_S, STOP_KILL_S = 0.3, 1.0, 2.0  # after the first failure or Ctrl-C
PAYLOAD_WARNING_BYTES = 64 << 20
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS",
)  # fmt: skip
Note = Callable[[dict[str, Any]], None]


def pack(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """The call as bytes for the devices; functions and classes of `__main__` travel by value.

    Raises:
        LaunchError: something in it cannot be pickled.
    """
    try:
        payload = cloudpickle.dumps((function, args, kwargs))
    except Exception as error:  # any object of the user's may refuse, in any way
        name = getattr(function, "__qualname__", repr(function))
        raise LaunchError(
            f"{name} cannot be sent to the device processes: {type(error).__name__}: {error}. Open files, locks, "
            "sockets and generators cannot travel: create them inside the function."
        ) from error
    if len(payload) > PAYLOAD_WARNING_BYTES:
        warnings.warn(
            f"the function and its arguments are {len(payload) >> 20} MiB, copied to every rank; load big data "
            "inside the function instead.",
            stacklevel=3,
        )
    return payload


class Pool:
    """Device processes that wait for work.

    Args:
        world_size: number of devices.
        log_dir: see `LogFiles`.
        arena_bytes: address space of each rank's shared memory; 0 for the default.
        blas_threads: of each device; None for cores // ranks, at least 1.

    Raises:
        LaunchError: the processes did not come up.
    """

    def __init__(
        self, world_size: int, *, log_dir: str | Path | None = None, arena_bytes: int = 0,
        blas_threads: int | None = None,
    ) -> None:  # fmt: skip
        self.world_size = world_size
        self.usable = True
        self.segment = Segment(world_size, arena_bytes=arena_bytes)
        self.logs = LogFiles(log_dir, world_size)
        ends = [Pipe() for _ in range(world_size)]
        self.connections: list[Connection] = [ours for ours, _ in ends]
        self.control, host_end = Pipe()
        life_read, self._life_write = os.pipe()
        wiring = {
            "segment_fd": self.segment.fd,
            "life_fd": life_read,
            "log_fds": self.logs.rank_fds,
            "connection_fds": [theirs.fileno() for _, theirs in ends],
            "world_size": world_size,
            "blas_threads": blas_threads or max(1, len(os.sched_getaffinity(0)) // world_size),
            "path": [path or os.getcwd() for path in sys.path],
        }
        try:
            self._host = self._exec_host(wiring, host_end.fileno())
        finally:
            for end in (host_end, *(theirs for _, theirs in ends)):
                end.close()
            os.close(life_read)
        self._closer = weakref.finalize(
            self,
            _close,
            self._host,
            self.control,
            self.connections,
            self.logs,
            self._life_write,
            self.segment,
        )
        self.pids = self._wait_until_ready()

    def _exec_host(self, wiring: dict[str, Any], control_fd: int) -> subprocess.Popen[bytes]:
        config = json.dumps({"wiring": wiring, "control_fd": control_fd})
        home = str(Path(__file__).resolve().parents[2])
        code = (
            f"import sys; sys.path.insert(0, {home!r}); "
            "from simparallel.runtime._host import main; main(sys.argv[1])"
        )
        environment = {**os.environ, **dict.fromkeys(_THREAD_VARIABLES, "1"), "PYTHONUNBUFFERED": "1"}
        inherited = [wiring["segment_fd"], wiring["life_fd"], control_fd]
        return subprocess.Popen(
            [sys.executable, "-P", "-c", code, config],
            stdin=subprocess.DEVNULL, stdout=self.logs.host_fd, stderr=self.logs.host_fd,
            pass_fds=[*inherited, *wiring["log_fds"], *wiring["connection_fds"]],
            env=environment, process_group=0,
        )  # fmt: skip

    def _wait_until_ready(self) -> list[int]:
        deadline = time.monotonic() + START_LIMIT_S
        pids = []
        for rank, connection in enumerate(self.connections):
            if not connection.poll(max(0.0, deadline - time.monotonic())):
                raise self._start_error(f"rank {rank} was not ready after {START_LIMIT_S:g} s")
            try:
                pids.append(cloudpickle.loads(connection.recv_bytes())["pid"])
            except (EOFError, OSError):
                raise self._start_error(f"rank {rank} ended before it was ready") from None
        return pids

    def _start_error(self, what: str) -> LaunchError:
        said = os.pread(self.logs.host_fd, 4000, 0).decode(errors="replace").strip()
        self.close()
        return LaunchError(
            f"the device processes did not start: {what}. The host process said:\n{said or '(nothing)'}"
        )

    # --- a run ------------------------------------------------------------------------------------

    def run(
        self, payload: bytes, cluster: ClusterSpec, *, timeout_s: float = DEFAULT_TIMEOUT_S,
        keep_events: bool = True, echo: bool = True, note: Note | None = None,
    ) -> list[Outcome]:  # fmt: skip
        """Run a packed call on every rank; one outcome per rank, in order.

        Raises:
            KeyboardInterrupt: after every rank was stopped; the pool is usable if they all answered.
            LaunchError: the host process is gone.
        """
        self.segment.reset()
        settings = {"cluster": cluster, "timeout_s": timeout_s, "keep_events": keep_events}
        message = cloudpickle.dumps({"kind": "run", "payload": payload, "settings": settings})
        run = _Run(self, Tail(self.logs.rank_fds, console(echo)), note)
        try:
            for rank, connection in enumerate(self.connections):
                with contextlib.suppress(OSError):  # its death is on its way through `control`
                    connection.send_bytes(message)
                run.waiting[connection] = rank
            run.collect()
        except KeyboardInterrupt:
            run.interrupt()
            raise
        finally:
            run.tail.show(final=True)
            if run.waiting or run.dead:
                self.usable = False
        return run.outcomes

    def signal_all(self, number: int) -> None:
        """Send a signal to the host's process group: the devices, and the host, which ignores SIGINT."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._host.pid, number)

    @property
    def host_pid(self) -> int:
        return self._host.pid

    def close(self) -> None:
        """End all processes and give everything back. May be called again."""
        self.usable = False
        self._closer()


class _Run:
    """One run in progress, as the launcher sees it."""

    def __init__(self, pool: Pool, tail: Tail, note: Note | None) -> None:
        self.pool = pool
        self.tail = tail
        self.note = note
        self.waiting: dict[Connection, int] = {}
        self.dead: set[int] = set()
        self.outcomes = [Outcome(rank) for rank in range(pool.world_size)]
        self._first_failure_at: float | None = None
        self._asked = 0

    def collect(self) -> None:
        """Until every rank has answered or died."""
        while self.waiting:
            self._step(POLL_S)
            self._hurry()

    def _step(self, limit_s: float) -> None:
        ready = wait([*self.waiting, self.pool.control], limit_s)
        for connection in ready:
            if connection is self.pool.control:
                self._note_death()
            elif connection in self.waiting:
                self._receive(connection)
        self.tail.show()

    def _receive(self, connection: Connection) -> None:
        try:
            message = cloudpickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            # The process is gone; the host will say how. Listen no more on this end.
            self._lost(connection)
            return
        if message["kind"] == "outcome":
            rank = self.waiting.pop(connection)
            self.outcomes[rank] = message["outcome"]
            if message["outcome"].report is not None:
                self._first_failure_at = self._first_failure_at or time.monotonic()
        elif self.note is not None:
            self.note(message)

    def _lost(self, connection: Connection) -> None:
        rank = self.waiting[connection]
        deadline = time.monotonic() + 1.0
        while rank not in self.dead and time.monotonic() < deadline:
            if self.pool.control.poll(0.05):
                self._note_death()
        if rank not in self.dead:
            self._bury(rank, 0)

    def _note_death(self) -> None:
        try:
            told = json.loads(self.pool.control.recv_bytes())
        except (EOFError, OSError):
            self.pool.usable = False
            raise LaunchError(
                "the host process ended, and its devices with it. It may have been killed (out of memory?); "
                "its last words are in scheduler.log."
            ) from None
        self._bury(told["rank"], told["exit_code"])

    def _bury(self, rank: int, exit_code: int) -> None:
        self.dead.add(rank)
        connection = self.pool.connections[rank]
        while rank in self.waiting.values() and _has_message(connection):
            message = cloudpickle.loads(connection.recv_bytes())  # what it said before it died counts
            if message["kind"] == "outcome":
                self.outcomes[rank] = message["outcome"]
                self.waiting.pop(connection)
        if self.waiting.pop(connection, None) is not None:
            self.outcomes[rank].report = death_report(self.pool.pids[rank], exit_code)
            self._first_failure_at = self._first_failure_at or time.monotonic()

    def _hurry(self) -> None:
        """After a failure the others stop in their next collective; stop those that have none."""
        if self._first_failure_at is None or not self.waiting:
            return
        passed = time.monotonic() - self._first_failure_at
        ladder = ((STOP_ASK_S, signal.SIGINT), (STOP_TERM_S, signal.SIGTERM), (STOP_KILL_S, signal.SIGKILL))
        while self._asked < len(ladder) and passed > ladder[self._asked][0]:
            self.pool.signal_all(ladder[self._asked][1])
            self._asked += 1

    def interrupt(self) -> None:
        """Ctrl-C: devices raise KeyboardInterrupt, then are ended; a second Ctrl-C kills at once."""
        words, control = self.pool.segment.words, self.pool.segment.map
        words[control.abort()] = ABORT_INTERRUPT
        self.pool.signal_all(signal.SIGINT)
        self._asked = 1
        self._first_failure_at = time.monotonic()
        try:
            self.collect()
        except (KeyboardInterrupt, LaunchError):
            self.pool.signal_all(signal.SIGKILL)


def _has_message(connection: Connection) -> bool:
    try:
        return connection.poll(0)
    except OSError:
        return False


def _close(
    host: subprocess.Popen[bytes], control: Connection, connections: list[Connection], logs: LogFiles,
    life_write: int, segment: Segment,
) -> None:  # fmt: skip
    """Ask, wait, kill; then give back every descriptor. Runs once, at the latest at exit."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send_bytes(cloudpickle.dumps({"kind": "close"}))
    with contextlib.suppress(OSError):
        control.send_bytes(b"close")
    try:
        host.wait(STOP_KILL_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(host.pid, signal.SIGKILL)
        host.wait()
    with contextlib.suppress(ProcessLookupError):  # a device that outlived its host
        os.killpg(host.pid, signal.SIGKILL)
    for connection in (*connections, control):
        connection.close()
    os.close(life_write)
    logs.close()
    segment.close_fd()
