"""Log records of a device go to the log of all ranks, to the rank's own log, and to the program's handlers.

Until a program configures logging, records from INFO on go to the log of all ranks, and warnings are shown, as in a
plain interpreter. After that the program's settings apply, and the log of all ranks gets the records that pass them.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from typing import Any, TextIO

FLUSH_LIMIT_S = 1.0
WAKE_UP = "simparallel.host.wake-up"
# The handlers of this process that write to the log of all ranks.
to_all_ranks: list[logging.Handler] = []


class MergedLog(logging.StreamHandler[TextIO]):
    """The log of all ranks. It skips the record that only wakes the receiver of the host."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(logging.Formatter("%(asctime)s [%(processName)s] %(levelname)s %(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != WAKE_UP:
            super().emit(record)


def begin(log_of_host: TextIO | None = None) -> None:
    """Send records to this rank's own log, too, which depends on no other process.

    Args:
        log_of_host: the log of all ranks, for a process that has not inherited the host's handlers.
    """
    root = logging.getLogger()
    if log_of_host is not None:
        root.setLevel(logging.INFO)
        to_all_ranks.append(MergedLog(log_of_host))
        root.addHandler(to_all_ranks[0])
    for inherited in list(root.handlers):
        # Remove the host's handler if multiprocessing-logging could not wrap it.
        if hasattr(inherited, "queue"):
            to_all_ranks.append(inherited)
        elif inherited not in to_all_ranks:
            root.removeHandler(inherited)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # With a merged log, INFO records go there. Without one, they have to go to this log.
    if to_all_ranks:
        handler.setLevel(logging.WARNING)
    root.addHandler(handler)
    _let_programs_configure(handler)


def _let_programs_configure(own: logging.Handler) -> None:
    """Replace `logging.basicConfig`, a no-op if the root logger has handlers, by one that ignores our handlers."""
    plain, level = logging.basicConfig, logging.getLogger().level

    @functools.wraps(plain)
    def basic_config(**settings: Any) -> None:
        root = logging.getLogger()
        ours = [h for h in root.handlers if h is own or h in to_all_ranks]
        for handler in ours:
            root.removeHandler(handler)
        try:
            plain(**settings)
        finally:
            for handler in ours:
                if handler is not own or not root.handlers:
                    root.addHandler(handler)
        if own in ours and own not in root.handlers and root.level == level and "level" not in settings:
            # Python's default level.
            root.setLevel(logging.WARNING)

    logging.basicConfig = basic_config


def _queues() -> list[Any]:
    return [handler.queue for handler in to_all_ranks if hasattr(handler, "queue")]


def flush() -> None:
    """Give the feeder threads of the log queues a moment to empty their buffers."""
    for queue in _queues():
        # At most a tenth of a second; records that are still queued are sent later.
        buffer = getattr(queue, "_buffer", None)
        waited = threading.Event()
        for _ in range(20):
            if not buffer:
                break
            waited.wait(0.005)


def end() -> None:
    """Flush the log of all ranks, with a limit: another rank may have died while it held the lock."""
    for queue in _queues():
        queue.close()
        joiner = threading.Thread(target=queue.join_thread, daemon=True)
        joiner.start()
        joiner.join(FLUSH_LIMIT_S)
        queue.cancel_join_thread()
