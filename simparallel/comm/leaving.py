"""The end of a process that became a rank by itself: no launcher watches it, so it tells the others how it ends."""

from __future__ import annotations

import atexit
import os
import sys
import time
import traceback
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol

from simparallel.comm.communicator import Communicator
from simparallel.comm.segment import DONE
from simparallel.comm.transport import LEFT
from simparallel.errors import RankFailedError


class EndingTransport(Protocol):
    """What a rank's transport has to offer for its end."""

    rank: int

    def state_of(self, rank: int) -> int: ...

    def fail(self, report: dict[str, Any], error: BaseException | None = None) -> None: ...

    def say_done(self, last_error: str) -> None:
        """Publish that this rank has ended; `last_error`: what the program last showed as an error, or ""."""

    def wait_for_the_others(self) -> bool:
        """Wait until all ranks have ended, or one has failed. Have they all ended?"""

    def unreceived(self, kept: Iterable[tuple[int, str]]) -> Exception | None:
        """The error for messages to this rank that it never received."""

    def stop(self, code: int) -> None:
        """End what has to end with a rank that failed."""

    def abort(self, code: int) -> None:
        """End this process at once."""


class Leaving:
    """Watches over the end of this process, from now on.

    Args:
        communicator: of the rank that the process is.
        transport: its transport.
    """

    def __init__(self, communicator: Communicator, transport: EndingTransport) -> None:
        self._communicator = communicator
        self._transport = transport
        self._pid = os.getpid()
        self._show = sys.excepthook
        sys.excepthook = self.failed
        atexit.register(self.left)

    def failed(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Show an error that nothing caught, and tell the other ranks; instead of `sys.excepthook`."""
        self._show(kind, error, trace)
        if not self._is_over():
            self._tell(error)
            self._transport.stop(1)

    def left(self) -> None:
        """Say goodbye at exit, if nothing failed, and check what is checked at the end of any run."""
        if self._is_over():
            return
        transport = self._transport
        try:
            self._communicator.finish()
            transport.say_done(_last_error())
            everyone = transport.wait_for_the_others()
            error = transport.unreceived(self._communicator.kept_letters()) if everyone else None
            if error is not None:
                raise error
        except BaseException as error:
            self.failed(type(error), error, error.__traceback__)
            transport.abort(130 if isinstance(error, KeyboardInterrupt) else 1)

    def _is_over(self) -> bool:
        """Has the rank ended, or is this a process that was forked from it?"""
        return os.getpid() != self._pid or self._transport.state_of(self._transport.rank) >= DONE

    def _tell(self, error: BaseException) -> None:
        caused_by_others = isinstance(error, RankFailedError) and error.facts.get("cause") != LEFT
        report = {
            "summary": _summary(error),
            "secondary": caused_by_others or isinstance(error, KeyboardInterrupt),
            "time_ns": time.monotonic_ns(),
        }
        self._transport.fail(report, error)


def _summary(error: BaseException) -> str:
    return "".join(traceback.format_exception_only(error)).strip()


def _last_error() -> str:
    """What the program showed as an error and went on, as test runners do."""
    error = getattr(sys, "last_value", None)
    return "" if error is None or hasattr(sys, "ps1") else _summary(error)
