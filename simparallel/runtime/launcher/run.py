"""One run in progress on the launcher's side: collect answers, notice deaths, stop ranks after a failure."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

import cloudpickle

from simparallel.base.system import KILL, process_fields
from simparallel.comm.memory.segment import ABORT_INTERRUPT
from simparallel.errors import LaunchError
from simparallel.runtime import channel
from simparallel.runtime.logs import Tail
from simparallel.runtime.reports import Outcome, death_report, failure_report, stop_report

if TYPE_CHECKING:
    from simparallel.runtime.launcher.pool import Pool

POLL_S = 0.02
# Time between checks for ranks that a signal has stopped.
LOOK_S = 1.0
# Escalation after the first failure or Ctrl-C: (seconds later, signal for ranks that have not answered).
ESCALATION = ((0.5, signal.SIGINT), (1.5, signal.SIGTERM), (2.5, KILL))
Note = Callable[[dict[str, Any]], None]


class Run:
    """One run in progress on the launcher's side.

    Args:
        pool: the device processes.
        tail: shows their output.
        note: called with each message that they send while running.
        timeout_s: seconds that a process may be stopped.

    Attributes:
        waiting: connections of ranks that have not answered.
        dead: ranks whose processes have ended.
        outcomes: one per rank, filled as they answer or die.
    """

    def __init__(self, pool: Pool, tail: Tail, note: Note | None, timeout_s: float) -> None:
        self.pool = pool
        self.tail = tail
        self.note = note
        self.timeout_s = timeout_s
        self.waiting: dict[Connection, int] = {}
        self.dead: set[int] = set()
        self.outcomes = [Outcome(rank) for rank in range(pool.world_size)]
        self._first_failure_at: float | None = None
        # Number of steps of ESCALATION taken, and the signals sent.
        self._escalated = 0
        self._sent: set[int] = set()
        self._reading = False
        # By rank: seconds since a check found it stopped.
        self._stopped_s: dict[int, float] = {}
        # Ranks killed because they were stopped for too long, and ranks found stopped after another rank's failure.
        self._given_up: set[int] = set()
        self._found_stopped: set[int] = set()
        self._looked_at = time.monotonic()

    def collect(self) -> None:
        """Wait until every rank has answered or died."""
        while self.waiting:
            self._step(POLL_S)
            self._escalate()
            self.look()

    def look(self) -> None:
        """Kill a rank that a signal has stopped for longer than `timeout_s`. Checks at most once per `LOOK_S`.

        Ranks that wait for a stopped one time out by themselves, but perhaps no rank waits for it.
        """
        now = time.monotonic()
        passed = now - self._looked_at
        # After a failure `_escalate` stops all ranks anyway.
        if passed < LOOK_S or self._first_failure_at is not None:
            return
        self._looked_at = now
        before, self._stopped_s = self._stopped_s, {}
        for rank in self.waiting.values():
            if process_fields(self.pool.pids[rank])[:1] == ["T"]:
                # If more time has passed, this process was stopped as well: do not count that time against the rank.
                self._stopped_s[rank] = before[rank] + min(passed, 2 * LOOK_S) if rank in before else 0.0
                if self._stopped_s[rank] > self.timeout_s:
                    self._given_up.add(rank)
                    self.pool.signal_rank(rank, KILL)

    def _step(self, limit_s: float) -> None:
        ready = wait([*self.waiting, self.pool.control], limit_s)
        for connection in ready:
            if connection is self.pool.control:
                # Check again: `_lost` may have read the message in the meantime.
                if self.pool.control.poll(0):
                    self._receive_death()
            elif connection in self.waiting:
                self._receive(connection)
        self.tail.show()

    def _receive(self, connection: Connection) -> None:
        message = self._read(connection)
        if message is None:
            # The process is gone; the host reports how it ended.
            self._lost(connection)
        elif message["kind"] == "outcome":
            self._accept(self.waiting.pop(connection), message["outcome"], message["value"])
        elif self.note is not None:
            self.note(message)

    def _read(self, connection: Connection) -> dict[str, Any] | None:
        """Return the next message of a rank, None at the end of file. An outcome's value stays pickled."""
        # While set, Ctrl-C leaves the stream in the middle of a message, see `interrupt`.
        self._reading = True
        try:
            message: dict[str, Any] = cloudpickle.loads(channel.receive(connection, self.look))
            if message["kind"] == "outcome":
                message["value"] = channel.receive(connection, self.look)
        except (EOFError, OSError):
            self._reading = False
            return None
        self._reading = False
        return message

    def _accept(self, rank: int, outcome: Outcome, value: bytearray) -> None:
        try:
            outcome.value = cloudpickle.loads(value)
        except (Exception, SystemExit) as error:
            # A user's object may fail in any way.
            outcome.report = failure_report(
                LaunchError(
                    f"rank {rank}: its result arrived, but cannot be unpickled: {type(error).__name__}: "
                    f"{str(error).rstrip('.')}. Return arrays, numbers, strings, and lists or dicts of them."
                )
            )
            outcome.report["pid"] = self.pool.pids[rank]
        self.outcomes[rank] = outcome
        if outcome.report is not None:
            self._first_failure_at = self._first_failure_at or time.monotonic()

    def _lost(self, connection: Connection) -> None:
        # The host knows the exit code; give it a second to report it.
        rank = self.waiting[connection]
        deadline = time.monotonic() + 1.0
        while rank not in self.dead and time.monotonic() < deadline:
            if self.pool.control.poll(0.05):
                self._receive_death()
        # The host is stopped or too busy: inform the other ranks from here.
        if rank not in self.dead:
            self.pool.segment.words[self.pool.segment.map.lost()] = rank + 1
            self._record_death(rank, None)

    def _receive_death(self) -> None:
        try:
            death = json.loads(self.pool.control.recv_bytes())
        except (EOFError, OSError):
            self.pool.usable = False
            raise LaunchError(
                "the host process ended, and its devices with it. It may have been killed (out of memory?); "
                "its last output is in scheduler.log."
            ) from None
        self._record_death(death["rank"], death["exit_code"])

    def _record_death(self, rank: int, exit_code: int | None) -> None:
        self.dead.add(rank)
        connection = self.pool.connections[rank]
        # Messages sent before it died still count.
        while connection in self.waiting and _has_message(connection):
            message = self._read(connection)
            if message is None:
                break
            if message["kind"] == "outcome":
                self._accept(self.waiting.pop(connection), message["outcome"], message["value"])
        if self.waiting.pop(connection, None) is not None:
            # A rank that our own signal has ended is a consequence, not a cause.
            by_us = exit_code is not None and -exit_code in self._sent
            report = death_report(self.pool.pids[rank], exit_code, by_us=by_us)
            if rank in self._given_up | self._found_stopped:
                secondary = rank not in self._given_up
                report = stop_report(self.pool.pids[rank], self.timeout_s, secondary=secondary)
            self.outcomes[rank].report = report
            self._first_failure_at = self._first_failure_at or time.monotonic()

    def _escalate(self) -> None:
        """Escalate signals after a failure: ranks stop in their next collective by themselves, but may have none."""
        if self._first_failure_at is None or not self.waiting:
            return
        passed = time.monotonic() - self._first_failure_at
        while self._escalated < len(ESCALATION) and passed > ESCALATION[self._escalated][0]:
            for rank in self.waiting.values():
                number = ESCALATION[self._escalated][1]
                # A stopped process reacts to SIGKILL alone.
                if process_fields(self.pool.pids[rank])[:1] == ["T"]:
                    number = KILL
                    self._found_stopped.add(rank)
                self.pool.signal_rank(rank, number)
                self._sent.add(number)
            self._escalated += 1

    def interrupt(self) -> None:
        """Stop the run after Ctrl-C: devices raise KeyboardInterrupt, then are ended; a second Ctrl-C kills at once."""
        # Interrupted in the middle of a message: the stream cannot be read any further.
        if self._reading:
            self.pool.signal_all(KILL)
            return
        words, control = self.pool.segment.words, self.pool.segment.map
        # The word stops ranks that wait in a collective, the signal all others. SIGINT is the first step of ESCALATION.
        words[control.abort()] = ABORT_INTERRUPT
        self.pool.signal_all(signal.SIGINT)
        self._escalated = 1
        self._sent.add(signal.SIGINT)
        self._first_failure_at = time.monotonic()
        try:
            self.collect()
        except (KeyboardInterrupt, LaunchError):
            self.pool.signal_all(KILL)


def _has_message(connection: Connection) -> bool:
    try:
        return connection.poll(0)
    except OSError:
        return False
