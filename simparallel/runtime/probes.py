"""What only this room may try out: does this machine have semaphores for multiprocessing?"""

from __future__ import annotations

import multiprocessing
import os


def missing_semaphores() -> str:
    """Why multiprocessing's semaphores do not work here; "" if they do."""
    try:
        multiprocessing.get_context("fork").Lock()
    except (ImportError, OSError) as error:
        return str(error)
    return ""


def missing_pidfd() -> str:
    """Why pidfds do not work here; "" if they do."""
    if not hasattr(os, "pidfd_open"):
        return "not in this Python or system"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return str(error.strerror)
    return ""
