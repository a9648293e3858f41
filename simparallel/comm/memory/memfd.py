"""Unnamed memory: nothing is left behind, whichever process is killed.

A memfd where the system has one; else a file that is unlinked at birth, in /dev/shm or, if that is too small or
read-only, in the temporary directory. `SIMPARALLEL_DISABLE=memfd,futex,pidfd,fork` turns these primitives off.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

from simparallel.base.system import can_fork
from simparallel.errors import InputError

SHM = "/dev/shm"
PRIMITIVES = ("memfd", "futex", "pidfd", "fork")


def is_disabled(primitive: str) -> bool:
    """Return whether SIMPARALLEL_DISABLE names this primitive.

    Raises:
        InputError: it names something that cannot be disabled.
    """
    return primitive in disabled()


def disabled() -> list[str]:
    """Return the primitives that SIMPARALLEL_DISABLE names. Raises as `is_disabled`."""
    named = [name for name in os.environ.get("SIMPARALLEL_DISABLE", "").replace(" ", "").split(",") if name]
    for name in named:
        if name not in PRIMITIVES:
            raise InputError(f"SIMPARALLEL_DISABLE: {name!r} is not one of {', '.join(PRIMITIVES)}.")
    return named


def start_method() -> str:
    """Return how device processes are started: "fork", or "spawn" where a fork is not safe."""
    return "fork" if can_fork() and not is_disabled("fork") else "spawn"


def open_unnamed(size_bytes: int, at_once: int) -> int:
    """Return a descriptor of a new unnamed file.

    Args:
        size_bytes: size of the sparse file.
        at_once: bytes of it that are needed immediately.

    Raises:
        OSError: no memfd, and no directory with `at_once` bytes free.
    """
    if hasattr(os, "memfd_create") and not is_disabled("memfd"):
        try:
            fd = os.memfd_create("simparallel", os.MFD_CLOEXEC)
        except OSError as error:
            # Missing in the kernel, or forbidden by a sandbox.
            if error.errno not in (errno.ENOSYS, errno.EPERM):
                raise
        else:
            _truncate(fd, size_bytes)
            return fd
    # Sparse: only the pages that are needed at once have to fit now.
    free = {folder: free_bytes(folder) for folder in (SHM, tempfile.gettempdir())}
    folder = next((folder for folder, free in free.items() if free >= at_once), None)
    if folder is None:
        text = ", ".join(f"{folder} has {free} bytes free" for folder, free in free.items())
        raise OSError(errno.ENOSPC, f"{at_once} bytes are needed, but {text}")
    fd, path = tempfile.mkstemp(prefix="simparallel-", dir=folder)
    os.unlink(path)
    _truncate(fd, size_bytes)
    return fd


def _truncate(fd: int, size_bytes: int) -> None:
    try:
        os.ftruncate(fd, size_bytes)
    except BaseException:
        os.close(fd)
        raise


def free_bytes(folder: str) -> int:
    """Return the bytes free for files in a folder; 0 if it is not writable."""
    try:
        return shutil.disk_usage(folder).free if os.access(folder, os.W_OK) else 0
    except OSError:
        return 0


def free_of(fd: int) -> int:
    """Return the bytes by which an unnamed file may grow: free in its file system, or for a memfd in memory."""
    found = os.fstatvfs(fd)
    if found.f_blocks:
        return found.f_bavail * found.f_frsize
    return available_memory()


def available_memory() -> int:
    """Return the bytes that processes may still allocate, by the limits of the machine and of their control group."""
    free = 0
    for line in _lines("/proc/meminfo"):
        # MemAvailable counts memory that the kernel can reclaim; MemFree does not.
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    limit = cgroup_number("memory.max")
    if limit is not None:
        # The kernel reclaims file cache before it refuses memory to the group.
        used = (cgroup_number("memory.current") or 0) - _file_cache()
        free = min(free, max(0, limit - used))
    return free


def _file_cache() -> int:
    """Return the bytes of the control group's file cache that the kernel would reclaim first."""
    for line in _cgroup_lines("memory.stat"):
        name, _, number = line.partition(" ")
        if name == "inactive_file" and number.isdigit():
            return int(number)
    return 0


def cgroup_number(name: str) -> int | None:
    """Return the first number in a file of this process's control group (version 2), None for "max" or no file."""
    words = [word for line in _cgroup_lines(name) for word in line.split()]
    return int(words[0]) if words and words[0].isdigit() else None


def _cgroup_lines(name: str) -> list[str]:
    """Return the lines of a file of this process's control group, or of the root group's if it has none."""
    inside = next((line[3:].lstrip("/") for line in _lines("/proc/self/cgroup") if line.startswith("0::")), "")
    return _lines(str(Path("/sys/fs/cgroup", inside, name))) or _lines(str(Path("/sys/fs/cgroup", name)))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
