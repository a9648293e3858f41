"""Ranks as threads of this process, taking turns: for tests, and for systems without device processes."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from simparallel.base import blas
from simparallel.base.callsite import frames_of, user_place
from simparallel.base.units import format_numbers
from simparallel.clock.recorder import Recorder
from simparallel.comm.communicator import Communicator
from simparallel.comm.fault_spec import faults_of
from simparallel.comm.group import Medium
from simparallel.comm.inline import InlineTransport, RoundRobin
from simparallel.comm.memory.segment import ABORT_INTERRUPT, FAILED, RUNNING, THREAD_ARENA_BYTES, SharedSegment
from simparallel.comm.shm.medium import SHARED_MEMORY
from simparallel.errors import DeadlineError, LaunchError
from simparallel.rank_local import RankLocal
from simparallel.runtime.preflight import check_depth
from simparallel.runtime.ranks.random_streams import Draws
from simparallel.runtime.ranks.rank import RunSettings, Tell, play_rank
from simparallel.runtime.reports import Outcome, failure_report, report_unreceived

LOOK_S = 0.1
# Interrupt a rank again if it still runs after this time.
AGAIN_S = 1.0
# A rank that still runs after this time is in a call that Python cannot interrupt.
GIVE_UP_S = 2.5
_DEBUGGERS = ("bdb", "pydevd", "_pydevd_bundle")


class _Nested(RankLocal):
    """The nesting depth of the launch whose rank this thread runs."""

    depth = 0


_nested = _Nested()


def run_threads(
    call: Callable[[], Any],
    settings: RunSettings,
    *,
    tell: Tell | None = None,
    arena_bytes: int = 0,
    medium: Medium = SHARED_MEMORY,
    segment: SharedSegment | None = None,
    recorder_type: type[Recorder] = Recorder,
    limit_s: float = math.inf,
) -> list[Outcome]:
    """Run `call()` on ranks that are threads; return one outcome per rank that runs, in order.

    Ranks see the same environment as device processes: as many BLAS threads, and their own streams of `random` and
    `np.random`, all with the same seed. The caller's streams are restored.

    Args:
        call: the user's function with its arguments.
        settings: the settings of the run.
        tell: called with each message of a rank: progress.
        arena_bytes: address space of each rank's shared memory; 0 for the default.
        medium: how the payloads of collectives travel.
        segment: the shared memory, which also determines the ranks that run; None makes one for all ranks.
        recorder_type: class of the ranks' recorders.
        limit_s: seconds that the run may take; then the ranks are interrupted, with a DeadlineError.

    Raises:
        LaunchError: runs are nested too deep, see `preflight.check_depth`.
    """
    depth = _nested.depth + 1
    check_depth(depth)
    segment = segment or SharedSegment(settings.cluster.world_size, arena_bytes=arena_bytes or THREAD_ARENA_BYTES)
    num_threads = len(segment.ranks)
    draws = Draws(num_threads)
    turns = RoundRobin(num_threads, draws.leave, draws.enter)
    transports = [
        InlineTransport(
            segment, rank, turns, settings.timeout_s, check=settings.check, faults=faults_of(settings.faults, rank)
        )
        for rank in segment.ranks
    ]
    watch = _ThreadWatch(segment, turns, call, settings.timeout_s, limit_s)

    communicators: dict[int, Communicator] = {}

    def play(turn: int) -> None:
        # Blocks until the rank gets its first turn.
        _nested.depth = depth
        turns.begin(turn)
        rank = segment.ranks[turn]
        outcome = Outcome(rank)
        try:
            with blas.limited_threads(settings.blas_threads or blas.default_threads(num_threads)):
                outcome, communicators[turn] = play_rank(
                    watch.calls[turn], transports[turn], settings, medium=medium, recorder_type=recorder_type, tell=tell
                )
        except BaseException as error:
            # Raised by a user's object that `play_rank` looked at after the call.
            raised = LaunchError(f"rank {rank}: {type(error).__name__} was raised while its outcome was recorded.")
            outcome.report = report = failure_report(raised)
            transports[turn].fail(report)
        finally:
            watch.end(turn, outcome)

    # Daemons: a thread that cannot be interrupted must not hold up the end of the interpreter.
    threads = [
        threading.Thread(target=play, args=(turn,), name=f"rank {rank}", daemon=True)
        for turn, rank in enumerate(segment.ranks)
    ]
    for thread in threads:
        thread.start()
    try:
        watch.wait()
    finally:
        for turn in set(range(num_threads)) - watch.left_behind:
            threads[turn].join()
        if not watch.left_behind:
            for communicator in communicators.values():
                communicator.release()
            # Break the reference cycle, so that the memory is freed without the garbage collector.
            turns.transports.clear()
        # The interrupts of these threads are still pending, and with them a request to every thread.
        if watch.left_behind:
            _take_late_interrupt()
        segment.close_fd()
        draws.close()
    report_unreceived(segment, watch.outcomes)
    return watch.outcomes


class _ThreadWatch:
    """The watch over ranks that are threads: wait for their end, and interrupt a rank that blocks the others.

    A thread is interrupted by an exception that Python raises between two of its instructions. A call that does not
    return to Python (`time.sleep`, `input`, a lock, one long matrix product) cannot be interrupted.

    Attributes:
        outcomes: one per rank that runs; as all lists here, by turn: by the number among the ranks that run.
        calls: the user's call, per rank.
        left_behind: turns whose threads still run although the run has ended.
    """

    def __init__(
        self, segment: SharedSegment, turns: RoundRobin, call: Callable[[], Any], timeout_s: float, limit_s: float
    ) -> None:
        num_threads = len(segment.ranks)
        self.outcomes = [Outcome(rank) for rank in segment.ranks]
        self.calls = [_Call(call, self._is_interrupted) for _ in range(num_threads)]
        self.left_behind: set[int] = set()
        self._segment, self._turns = segment, turns
        self._timeout_s = timeout_s if num_threads > 1 else math.inf
        self._limit_s, self._since_s = limit_s, time.monotonic()
        self._ended = [threading.Event() for _ in range(num_threads)]

    def end(self, turn: int, outcome: Outcome) -> None:
        """Record the outcome of a rank. Called by its thread at the end."""
        # The run has ended without a thread that was left behind: its late outcome no longer counts.
        if turn not in self.left_behind:
            self.outcomes[turn] = outcome
            self._turns.transports[turn].end()
            self._ended[turn].set()

    def wait(self) -> None:
        """Give the first rank the first turn, for which every thread waits, and wait until every rank has ended.

        Raises:
            KeyboardInterrupt: after all ranks have ended; at a second Ctrl-C, without waiting for the running rank.
            What another signal handler raises, such as that of a time limit: after all ranks have ended, or without
            a rank that Python cannot interrupt.
        """
        try:
            self._turns.give(0)
            self._wait(self._look_at_the_time)
        except BaseException as error:
            # Signal handlers run in the main thread only; ranks that wait in a collective see the abort word.
            self._segment.words[self._segment.map.abort()] = ABORT_INTERRUPT
            self._interrupt_all(error)
            raise

    def _wait(self, look: Callable[[], None]) -> None:
        for ended in self._ended:
            # Always with a limit: a Ctrl-C that arrives just before the wait, or in another thread, does not end it.
            while not ended.wait(LOOK_S):
                look()

    # --- a rank that holds up the others ------------------------------------------------------------

    def _look_at_the_time(self) -> None:
        turns, ranks = self._turns, self._segment.ranks
        # Read the turn before the time: one that begins in between is not late.
        turn, now_s = turns.running, time.monotonic()
        over_s = now_s - self._since_s - self._limit_s
        late_s = max(over_s, now_s - turns.since_s - self._timeout_s)
        if late_s < 0:
            return
        call, transport, rank = self.calls[turn], turns.transports[turn], ranks[turn]
        # The user is debugging it.
        if call.is_debugged():
            self._since_s = now_s
            return
        # A rank may run as long as it likes if no other rank waits and none has failed.
        waiting, failed = (
            [r for r in ranks if r != rank and transport.state_of(r) == state] for state in (RUNNING, FAILED)
        )
        if over_s < 0 and not (waiting or failed):
            return
        if call.error is None and over_s >= 0:
            place = call.place()
            call.error = DeadlineError(
                f"rank {rank} was at {place} when the run had taken {self._limit_s:g} s, its limit.",
                missing=[rank],
                timeout_s=self._limit_s,
                place=place,
            )
        elif call.error is None:
            others = f"rank{'s' * (len(waiting) > 1)} {format_numbers(waiting)}"
            held_up = f"{others} cannot continue" if waiting else f"the failed rank {failed[0]} cannot be reported"
            call.error = DeadlineError(
                f"rank {rank} has not passed on its turn for {self._timeout_s:g} s, at {call.place()}, and {held_up}: "
                "ranks that are threads take turns, and pass the turn on when they communicate. Raise "
                "timeout_s if a rank may work that long.",
                rank=(waiting or failed)[0],
                missing=[rank],
                timeout_s=self._timeout_s,
            )
        call.interrupt(late_s)
        if late_s > GIVE_UP_S:
            call.error.add_note("Python cannot interrupt what it does there; its thread ends when it returns.")
            self._leave_behind(turn, call.error)

    def _leave_behind(self, turn: int, error: BaseException) -> None:
        """Continue without a rank whose thread cannot be interrupted."""
        transport = self._turns.transports[turn]
        self.left_behind.add(turn)
        report = failure_report(error, keep=True)
        self.outcomes[turn].report = report
        transport.fail(report, error)
        transport.end()
        self._ended[turn].set()

    # --- Ctrl-C, and what other signal handlers raise ----------------------------------------------

    def _is_interrupted(self) -> bool:
        return self._segment.words[self._segment.map.abort()] == ABORT_INTERRUPT

    def _interrupt_all(self, reason: BaseException) -> None:
        """Interrupt the running rank, and others at their turns; at another Ctrl-C leave the running one behind."""
        is_person = isinstance(reason, KeyboardInterrupt)
        since_s, is_reported = time.monotonic(), False

        def look() -> None:
            nonlocal since_s, is_reported
            passed_s, turn = time.monotonic() - since_s, self._turns.running
            self.calls[turn].interrupt(passed_s)
            if passed_s > GIVE_UP_S and not is_person:
                # A signal of a timer does not come again.
                since_s = time.monotonic()
                self._leave_behind(turn, reason)
            elif passed_s > GIVE_UP_S and not is_reported:
                is_reported = True
                print(
                    f"rank {self._segment.ranks[turn]} is in a call that Python cannot interrupt, at "
                    f"{self.calls[turn].place()}. Ctrl-C "
                    "again goes on without it; its thread then ends when that call returns.",
                    file=sys.stderr,
                )

        while True:
            try:
                look()
                return self._wait(look)
            except BaseException as again:
                self._leave_behind(self._turns.running, again)


class _Call:
    """The user's function on one rank, which another thread can interrupt.

    Attributes:
        error: the error to raise in place of KeyboardInterrupt; None for Ctrl-C.
    """

    def __init__(self, call: Callable[[], Any], is_interrupted: Callable[[], bool]) -> None:
        self.error: BaseException | None = None
        self._call, self._is_interrupted = call, is_interrupted
        # Identifier of the thread while the call runs, and the number of interrupts sent to it.
        self._thread: int | None = None
        self._sent = 0

    def __call__(self) -> Any:
        try:
            self._thread = threading.get_ident()
            if self._is_interrupted():
                raise KeyboardInterrupt
            return self._call()
        except KeyboardInterrupt as interrupt:
            if self.error is None:
                raise
            raise self.error.with_traceback(interrupt.__traceback__) from None
        finally:
            # No interrupt is sent from here on, but one may be under way: it must not hit our own code.
            self._thread = None
            if self._sent:
                _take_late_interrupt()

    def interrupt(self, passed_s: float) -> None:
        """Raise KeyboardInterrupt in the thread, and again each `AGAIN_S` while it still runs."""
        thread = self._thread
        if thread is not None and passed_s >= self._sent * AGAIN_S:
            self._sent += 1
            _raise_in(thread, KeyboardInterrupt)

    def place(self) -> str:
        """Return the user's line that is running."""
        return user_place(self._thread)

    def is_debugged(self) -> bool:
        """Return whether a debugger is in the thread: then time limits do not apply."""
        return any(
            frame.f_trace is not None or frame.f_globals.get("__name__", "").split(".")[0] in _DEBUGGERS
            for frame in frames_of(self._thread)
        )


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in another thread before its next instruction."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind))


class _Late(BaseException):
    """A replacement for an interrupt that came too late."""


def _take_late_interrupt() -> None:
    """Discard an exception that another thread raised in this one and that has not arrived.

    Python can also cancel it, but then keeps a request to look for exceptions in all threads, which makes Python 3.11
    hang under a profiler or a tracer. Taking one clears the request.
    """
    try:
        _raise_in(threading.get_ident(), _Late)
        # The exception may arrive in any iteration.
        while True:
            pass
    except _Late:
        return
