"""Runs in processes of their own, forked from the warm rank: what a run changes in its process ends with the run."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import sys
import warnings
from collections.abc import Callable
from importlib import import_module

from simparallel.runtime.module_watch import is_of_installed

# The launcher's environment, path for imports, and directory.
Surroundings = tuple[dict[str, str], list[str], str]


def follow(surroundings: Surroundings) -> None:
    """Set the environment variables, `sys.path` and the current directory of this process to those of the launcher."""
    environment, sys.path[:], directory = surroundings
    os.environ.clear()
    os.environ.update(environment)
    # The directory may have been removed.
    with contextlib.suppress(OSError):
        os.chdir(directory)


class Fork:
    """The forks of a warm rank: one process for each run, one after the other.

    Args:
        watch: called in the fork with the parent's pid; it ends the fork when the parent ends.
    """

    def __init__(self, watch: Callable[[int], None]) -> None:
        self._watch = watch
        # Written by the forked process once it has answered: a newline, and the modules that it has imported.
        self._answer = mmap.mmap(-1, 1 << 16)
        self._before: set[str] = set()

    def begin(self) -> bool:
        """Fork; return True in the new process, and False in this one when it has ended after its answer.

        If it ends without an answer, this process ends in the same way, which the host reports.
        """
        self._answer[0] = 0
        pid = os.getpid()
        with warnings.catch_warnings():
            # Python warns of forks with several threads. Here the other one holds no lock that the child needs: it only
            # waits for the launcher or the host to end.
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            # The objects and exit functions so far are the parent's.
            gc.freeze()
            atexit._clear()
            self._watch(pid)
            self._before = set(sys.modules)
            return True
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not self._answer[0]:
            _end_with(code)
        # The next process has them from the start. Modules of the user are imported with the function that needs them.
        for name in self._answer[1 : self._answer.find(b"\0")].decode("utf-8", "replace").split("\n")[:-1]:
            with contextlib.suppress(BaseException):
                import_module(name)
        return False

    def has_answered(self) -> None:
        """Record, in the forked process, that it has answered the launcher, and the modules that it has imported."""
        names = [name for name in sys.modules if name not in self._before and is_of_installed(name)]
        data = "\n".join(["", *names, "\0"]).encode()[: len(self._answer)]
        self._answer[: len(data)] = data


def _end_with(code: int) -> None:
    """End this process with an exit code, or by a signal if it is negative."""
    if code < 0:
        faulthandler.disable()
        # SIGKILL and SIGSTOP accept no handler, and need none.
        with contextlib.suppress(OSError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
