"""The end of a process that became a rank by itself: no launcher watches it, so it reports its end to the others."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NoReturn, Protocol

from simparallel.comm.communicator import Communicator
from simparallel.comm.memory.segment import DONE
from simparallel.comm.transport import LEFT
from simparallel.errors import RankFailedError


class EndingTransport(Protocol):
    """The part of a rank's transport that its end needs."""

    rank: int

    def state_of(self, rank: int) -> int: ...

    def fail(self, report: dict[str, Any], error: BaseException | None = None) -> None: ...

    def say_done(self, last_words: str) -> None:
        """Publish that this rank has ended; `last_words`: a possible reason for an early end, or ""."""

    def wait_for_the_others(self) -> bool:
        """Wait until all ranks have ended or one has failed; return whether all have ended."""

    def unreceived(self, kept: Iterable[tuple[int, str]]) -> Exception | None:
        """Return the error for messages to this rank that it never received, or None."""

    def stop(self, code: int) -> None:
        """End everything that has to end with a rank that failed."""

    def abort(self, code: int) -> None:
        """End this process at once."""


class Leaving:
    """Hooks that watch the end of this process, from now on.

    Args:
        communicator: of the rank that the process is.
        transport: its transport.
    """

    def __init__(self, communicator: Communicator, transport: EndingTransport) -> None:
        self._communicator = communicator
        self._transport = transport
        self._pid = os.getpid()
        # The program's own, if it called `sys.exit`.
        self._exit_code: object = None
        self._show, self._exit = sys.excepthook, sys.exit
        sys.excepthook, sys.exit = self.failed, self.exit
        atexit.register(self.left)

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an uncaught error and report it to the other ranks; replaces `sys.excepthook`."""
        self._show(kind, error, trace)
        # The rank may have reported its end already, and a forked process must not speak for it.
        if not self._is_over():
            self._tell(error)
            self._transport.stop(1)

    def exit(self, status: object = None, /) -> NoReturn:
        """Note the exit code; replaces `sys.exit`. The program may still continue, so nothing is reported yet."""
        self._exit_code = status
        self._exit(status)  # type: ignore[arg-type]

    def left(self) -> None:
        """Check the end of the run and report this rank as ended, at exit and if nothing failed."""
        if self._is_over():
            return
        transport = self._transport
        try:
            # Communication in progress is finished first: other ranks may wait for it.
            self._communicator.finish()
            transport.say_done(self._last_words())
            everyone = transport.wait_for_the_others()
            error = transport.unreceived(self._communicator.kept_letters()) if everyone else None
            if error is not None:
                raise error
        except BaseException as error:
            self.failed(type(error), error, error.__traceback__)
            own = self._exit_code if isinstance(self._exit_code, int) else 0
            transport.abort(130 if isinstance(error, KeyboardInterrupt) else own & 0xFF or 1)

    def _last_words(self) -> str:
        """Return possible reasons for an early end: the last error shown, as by test runners, and the exit code."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        reasons = [_summary(error)] if error is not None else []
        reasons += [f"sys.exit({self._exit_code!r})"] if self._exit_code not in (None, 0) else []
        return ", ".join(reasons)

    def _is_over(self) -> bool:
        """Return whether the rank has ended, or this process was forked from it."""
        return os.getpid() != self._pid or self._transport.state_of(self._transport.rank) >= DONE

    def _tell(self, error: BaseException) -> None:
        # A rank that was stopped by another's failure is no root cause.
        caused_by_others = isinstance(error, RankFailedError) and error.facts.get("cause") != LEFT
        report = {
            "summary": _summary(error),
            "secondary": caused_by_others or isinstance(error, KeyboardInterrupt),
            "time_ns": time.monotonic_ns(),
        }
        self._transport.fail(report, error)


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()
