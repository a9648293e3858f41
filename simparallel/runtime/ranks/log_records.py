"""Log records of a device go to the log of all ranks, to the rank's own log, and to the program's handlers.

Until a program configures logging, records from INFO on go to the log of all ranks, and warnings are shown, as in a
plain interpreter. After that the program's settings apply, and the log of all ranks gets the records that pass them.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from typing import Any

from multiprocessing_logging import MultiProcessingHandler

FLUSH_LIMIT_S = 1.0


def begin() -> None:
    """Send records to this rank's own log, too, which depends on no other process."""
    root = logging.getLogger()
    for inherited in list(root.handlers):
        # Remove the host's handler if multiprocessing-logging could not wrap it.
        if not isinstance(inherited, MultiProcessingHandler):
            root.removeHandler(inherited)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    # With a merged log, INFO records go there. Without one, they have to go to this log.
    if _queues():
        handler.setLevel(logging.WARNING)
    root.addHandler(handler)
    _let_programs_configure(handler)


def _let_programs_configure(own: logging.Handler) -> None:
    """Replace `logging.basicConfig`, a no-op if the root logger has handlers, by one that ignores our handlers."""
    plain, level = logging.basicConfig, logging.getLogger().level

    @functools.wraps(plain)
    def basic_config(**settings: Any) -> None:
        root = logging.getLogger()
        ours = [h for h in root.handlers if h is own or isinstance(h, MultiProcessingHandler)]
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
    return [handler.queue for handler in logging.getLogger().handlers if isinstance(handler, MultiProcessingHandler)]


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
