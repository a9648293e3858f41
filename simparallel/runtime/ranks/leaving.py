"""The end of a rank whose process no host watches: it reports its end to the other ranks, and waits for theirs."""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Any, NoReturn, Protocol

from simparallel.comm import Communicator
from simparallel.comm.memory.segment import DONE, SharedSegment
from simparallel.runtime.ranks.rank import finish
from simparallel.runtime.reports import check_received, failure_report


class EndingTransport(Protocol):
    """The part of the transport of such a rank that its end needs, beside that of every transport."""

    rank: int
    segment: SharedSegment

    def state_of(self, rank: int) -> int: ...

    def fail(self, report: dict[str, Any], error: BaseException | None = None) -> None: ...

    def wait_for_the_others(self) -> bool:
        """Wait until all ranks have ended or one has failed; return whether all have ended."""

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
        # The rank may have reported its end already, and a forked process must not report for it.
        if not self._is_over():
            self._transport.fail(failure_report(error), error)
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
            finish(self._communicator, self._reasons())
            if transport.wait_for_the_others():
                check_received(transport.segment, transport.rank, self._communicator.kept_messages())
        except BaseException as error:
            self.failed(type(error), error, error.__traceback__)
            own = self._exit_code if isinstance(self._exit_code, int) else 0
            transport.abort(130 if isinstance(error, KeyboardInterrupt) else own & 0xFF or 1)

    def _reasons(self) -> str:
        """Return possible reasons for an early end: the last error that was caught and printed, and the exit code."""
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        reasons = [failure_report(error)["summary"]] if error is not None else []
        reasons += [f"sys.exit({self._exit_code!r})"] if self._exit_code not in (None, 0) else []
        return ", ".join(reasons)

    def _is_over(self) -> bool:
        """Return whether the rank has ended, or this process was forked from it."""
        return os.getpid() != self._pid or self._transport.state_of(self._transport.rank) >= DONE
