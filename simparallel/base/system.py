"""Differences between operating systems.

Device processes need fork and shared memory; everything else runs on any system with Python.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

# Flags of os.open, 0 on systems that lack them.
NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
CLOSE_ON_EXEC = getattr(os, "O_CLOEXEC", 0) or getattr(os, "O_NOINHERIT", 0)
NON_BLOCKING = getattr(os, "O_NONBLOCK", 0)
BINARY = getattr(os, "O_BINARY", 0)

# Windows has no SIGKILL; there SIGTERM ends a process at once, too.
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def python_command(module: str, *arguments: object) -> list[str]:
    """Return the command of a Python interpreter that calls `main(*arguments)` of a module of this package."""
    home = str(Path(__file__).resolve().parents[2])
    # -P: the current directory must not shadow modules.
    code = f"import sys; sys.path.insert(0, {home!r}); from {module} import main; main(*{arguments!r})"
    return [sys.executable, "-P", "-c", code]


def process_fields(pid: int | str) -> list[str]:
    """Return the fields of a process in /proc/PID/stat, see proc(5), from its state on; none if it has ended."""
    try:
        # The name in parentheses may itself contain blanks and parentheses.
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def without_huge_pages() -> Iterator[None]:
    """Keep the kernel from giving this process huge pages inside the block: unwritten memory then stays unallocated.

    A huge page is allocated as a whole when its first byte is written, such as the header of an allocation.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    before = prctl(_GET_THP_DISABLE, 0, 0, 0, 0)
    prctl(_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_SET_THP_DISABLE, max(before, 0), 0, 0, 0)


# PR_SET_THP_DISABLE and PR_GET_THP_DISABLE of prctl(2).
_SET_THP_DISABLE, _GET_THP_DISABLE = 41, 42


AddressSpace = mmap.mmap


def address_space(size_bytes: int) -> AddressSpace | None:
    """Return memory of any size whose pages are allocated when they are written; None on a system that has none."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return None
    # Without this flag, Linux refuses sizes that it could not back.
    unbacked = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform.startswith("linux") else 0)
    try:
        return AddressSpace(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | unbacked)
    except (OSError, ValueError, OverflowError):
        return None


def memory_size_bytes() -> int:
    """Return the size of this machine's memory [bytes], or 0 on a system that does not report it."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 0


def missing_for_processes() -> str:
    """Return why device processes cannot run on this system; "" if they can."""
    return "" if hasattr(os, "fork") else f"device processes do not run on {platform.system() or sys.platform}"


def can_fork() -> bool:
    """Return whether a process may go on after a fork without exec, which system libraries of macOS do not allow."""
    return hasattr(os, "fork") and sys.platform != "darwin"


def try_lock(file: IO[bytes]) -> None:
    """Lock an open file against other processes, until it is closed.

    Raises:
        BlockingIOError: another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        # Windows.
        import msvcrt

        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        except OSError as error:
            raise BlockingIOError(*error.args) from None
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Read bytes from `offset` on into `buffer`; return their number, 0 at the end of the file."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [buffer], offset)
    # Windows: the position of the descriptor changes.
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(offset)
        return file.readinto(buffer)


def memory_barrier() -> Callable[[], None]:
    """Return a function that orders the stores and loads before it before those after it, on weak memory models."""
    if sys.platform == "darwin" and hasattr(libc := ctypes.PyDLL(None), "OSMemoryBarrier"):
        return libc.OSMemoryBarrier
    # A system call serves as one. Windows has no processes that need it, and its threads hold the GIL.
    return getattr(os, "sched_yield", lambda: None)


def reserve(fd: int, start: int, length: int) -> None:
    """Allocate memory for a part of a file, whose data stays, so that a lack of memory is an error, not a SIGBUS.

    Raises:
        OSError: there is not enough memory.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, start, length)
        return
    # macOS lacks the call: write zeros into the holes.
    at, stop = start, start + length
    for begin, end in [*parts_with_data(fd, start, stop), (stop, stop)]:
        while at < begin:
            at += os.pwrite(fd, bytes(min(begin - at, 1 << 20)), at)
        at = end


def parts_with_data(fd: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of each part of a file, within these bounds, that is not a hole."""
    while start < stop:
        try:
            begin = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            # ENXIO means that there is no data up to the end of the file.
            if error.errno != errno.ENXIO:
                raise
            return
        start = min(os.lseek(fd, begin, os.SEEK_HOLE), stop)
        if begin < start:
            yield begin, start
        else:
            return
