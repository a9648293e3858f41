"""The end of a device process: it leaves by `os._exit`, so it has to run an interpreter's last steps itself.

It waits for non-daemon threads, runs `atexit` functions, and flushes files that are still open. Each wait
has a limit: a thread must not keep a device alive after its run.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import io
import logging
import multiprocessing
import multiprocessing.util
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from simparallel.base.system import KILL
from simparallel.comm import current
from simparallel.errors import LaunchError
from simparallel.runtime.channel import LONGEST_WAIT_S
from simparallel.runtime.ranks import log_records
from simparallel.runtime.ranks.script import run_script

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None
_IN_MEMORY = io.BytesIO, io.StringIO


def end_with_parent(number: int = KILL) -> None:
    """Have the kernel send this process a signal when its parent ends in any way. Linux only, otherwise a no-op."""
    if _libc is not None:
        _libc.prctl(PR_SET_PDEATHSIG, number)


def forget_the_hosts() -> None:
    """Unregister the exit functions inherited from the host: they could wait forever for the feeder of a log queue."""
    atexit.unregister(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    atexit.unregister(logging.shutdown)


def run_program(name: str, arguments: list[str], with_local_rank: bool = False, is_module: bool = False) -> None:
    """Run a script with `run_script`, then end its threads and child processes with `end_program`.

    Raises:
        InputError: see `run_script`.
        LaunchError: threads or processes of the script still run after the rank's `timeout_s`.
    """
    pid = os.getpid()
    run_script(name, arguments, with_local_rank, is_module)
    # In a process that the script forked, the threads and child processes are its parent's; those of a rank that is a
    # thread are the process's.
    if os.getpid() != pid or threading.current_thread() is not threading.main_thread():
        return
    communicator = current()
    limit_s = communicator.transport.timeout_s
    running = end_program(limit_s)
    if running:
        raise LaunchError(
            f"rank {communicator.rank}: {name} ended, but {', '.join(running)} did not finish within {limit_s:g} s. "
            "Join what you start, make it a daemon, or raise timeout_s (--timeout)."
        )


def end_program(limit_s: float) -> list[str]:
    """Wait up to `limit_s` for non-daemon threads and child processes, then run the `atexit` functions.

    Returns:
        Names of the threads and processes that still run.
    """
    # The order of a normal end of Python: threads, child processes, exit functions.
    limit_s = min(limit_s, LONGEST_WAIT_S)
    deadline = time.monotonic() + limit_s
    if _threads():
        # Telling an executor's idle threads to end also waits for its busy ones, so do it in a thread with a limit.
        ender = threading.Thread(target=_end_threads, name="end of threads", daemon=True)
        ender.start()
        ender.join(limit_s)
    # As multiprocessing's own exit function does: end daemons, join the others.
    children = multiprocessing.active_children()
    for child in children:
        if child.daemon:
            child.terminate()
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
    atexit._run_exitfuncs()
    running = [f"thread {thread.name!r}" for thread in _threads()]
    return running + [f"process {child.name!r}" for child in multiprocessing.active_children()]


def _threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]


def _end_threads() -> None:
    # Executors register here a function that ends their idle threads.
    callbacks: list[Callable[[], Any]] = getattr(threading, "_threading_atexits", [])
    for callback in reversed(callbacks):
        callback()
    for thread in _threads():
        thread.join()


def write_out() -> None:
    """Flush the buffers of open files and log handlers.

    The garbage collector finds only objects of this process: the host's were frozen before the fork.
    """
    # The log of all ranks is flushed by `log_records.end`, which has a time limit.
    handlers: list[Any] = logging._handlerList  # type: ignore[attr-defined]
    logging.shutdown([ref for ref in handlers if ref() not in log_records.to_all_ranks])
    own = sys.stdout, sys.stderr
    files = [x for x in gc.get_objects() if isinstance(x, io.IOBase) and not isinstance(x, _IN_MEMORY) and x not in own]
    # From the outermost layer inwards: each writes its buffer to the next.
    for file in sorted(files, key=_depth):
        try:
            if not file.closed and file.writable():
                # A compressed file is complete only after close. Others may still be in use: flush them.
                file.close() if _depth(file) == 1 else file.flush()
        except Exception as error:
            # A user's class may fail in any way; continue with the other files.
            name = getattr(file, "name", type(file).__name__)
            print(f"{name} was left open, and its end could not be written: {error}", file=sys.stderr)


def _depth(file: io.IOBase) -> int:
    """Return the layer of a file: 0 for text, 1 for codecs (gzip, …) below it, 2 for the buffer or raw file."""
    if isinstance(file, io.TextIOWrapper):
        return 0
    return 2 if isinstance(file, (io.BufferedWriter, io.BufferedRandom, io.RawIOBase)) else 1
