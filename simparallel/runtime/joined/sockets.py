"""Unix sockets private to this user: their folder, locks in it, and messages with descriptors.

The kernel tells each side the pid of the other. Messages are JSON; descriptors travel as SCM_RIGHTS.
Nothing listens on a network.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import stat
import struct
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from simparallel.comm.memory.memfd import is_disabled
from simparallel.errors import LaunchError

MESSAGE_BYTES = 1 << 17
# Descriptors in a message; the kernel's limit is 253.
FDS_AT_ONCE = 128


def check_system() -> None:
    """Refuse systems whose kernel does not tell who is at the other end of a socket.

    Raises:
        LaunchError: this is one.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        raise LaunchError(
            "processes that are started one by one, or by a command for each node, find each other only on Linux; "
            "start all ranks by one command here: simparallel run -n N train.py."
        )


@dataclass
class Folder:
    """The folder of this user's sockets, open."""

    path: str
    fd: int

    def address_of(self, name: str) -> str:
        # Linux limits socket addresses to 108 bytes; the descriptor gives a short name for a long path.
        path = os.path.join(self.path, name)
        return path if len(os.fsencode(path)) < 100 else f"/proc/self/fd/{self.fd}/{name}"

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


@contextlib.contextmanager
def open_folder() -> Iterator[Folder]:
    """Make and open the folder of this user's sockets.

    Raises:
        LaunchError: it belongs to another user, or others could write to it.
    """
    path = os.path.join(tempfile.gettempdir(), f"simparallel-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Another job has removed the folder meanwhile: the caller tries again.
        raise
    except OSError as error:
        raise LaunchError(f"{path}, where ranks meet, cannot be used: {error.strerror}.") from error
    try:
        # Checked on the open folder: a path may be replaced in between.
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(
                f"{path}, where ranks meet, must belong to user {os.getuid()} alone, but it belongs to user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):03o}. Remove it, or set TMPDIR to another "
                "folder."
            )
        try:
            yield Folder(path, fd)
        finally:
            # It is not empty while another job uses it.
            with contextlib.suppress(OSError):
                os.rmdir(path)
    finally:
        os.close(fd)


@contextlib.contextmanager
def hold_lock(folder: Folder, key: str) -> Iterator[bool]:
    """Hold the lock of the job in the block; yield False if another process has it.

    Raises:
        FileNotFoundError: the previous holder has removed the file meanwhile; try again.
    """
    # Windows has none, and no device processes.
    import fcntl

    name = f"{key}.lock"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder.fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # The previous holder may have removed the file after we opened it: then we hold a lock that no other sees.
        if os.stat(name, dir_fd=folder.fd).st_ino != os.fstat(fd).st_ino:
            raise FileNotFoundError(name)
        try:
            yield True
        finally:
            folder.remove(f"{key}.sock")
            folder.remove(name)
    finally:
        os.close(fd)


# --- messages ----------------------------------------------------------------------------------------------


def send(connection: socket.socket, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
    # `socket.send_fds` ignores the flag, without which a program's own SIGPIPE could end this process.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return (message, descriptors); the message is None at the end of file.

    Raises:
        ValueError: it is truncated, or no JSON object.
    """
    # One packet is one message, so a message is never split over several reads.
    data, fds, flags, _ = socket.recv_fds(connection, MESSAGE_BYTES, FDS_AT_ONCE)
    # Received descriptors are inheritable by default; programs that the rank starts must not get them.
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        if not data:
            close_all(fds)
            return None, []
        message = json.loads(data)
        if not isinstance(message, dict) or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ValueError("cut off, or not an object")
    except (ValueError, RecursionError) as error:
        close_all(fds)
        raise ValueError(str(error)) from None
    return message, fds


def close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def pid_of_peer(connection: socket.socket) -> int:
    """Return the pid of the process at the other end, from the kernel."""
    # pid, user and group; the folder's mode lets no other user in.
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", raw)
    return int(pid)


def own_life() -> int:
    """Make a descriptor whose copies become readable when this process ends."""
    if hasattr(os, "pidfd_open") and not is_disabled("pidfd"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(os.getpid())
    end, own = os.pipe()
    # The kernel closes `own` when this process ends. A forked process must not keep it open.
    os.register_at_fork(after_in_child=lambda: os.close(own))
    return end
