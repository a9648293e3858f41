"""Processes that were started one by one find each other, and get one shared memory.

The first process that comes leads: it holds a lock file, listens on a Unix socket beside it, and gathers the others.
Both are in a folder of the temporary directory that belongs to this user alone, and each side asks the kernel
whether the other one is of the same user. Messages are JSON; descriptors travel as SCM_RIGHTS.

    rank -> leader    who it is, with a descriptor that shows its end to whoever polls it
    leader -> rank    {"leader": rank}, at once; or {"refused": why}
    leader -> rank    {"nodes", "device_ids"} with the descriptor of the memory, when all have come,
                      then the descriptors that show the ends of the others; or {"failed": why}

Nothing depends on a process tidying up: the kernel drops the lock of a dead leader, and the next one removes its socket.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from simparallel.comm.segment import ControlMap, Segment
from simparallel.comm.unnamed import is_disabled
from simparallel.errors import LaunchError
from simparallel.runtime.identity import Identity

PROTOCOL = 1
MESSAGE_BYTES = 1 << 17
FDS_AT_ONCE = 128  # the kernel takes 253
RETRY_S = 0.01
TELL_AFTER_S = 5.0  # who waits for longer is told for whom
LATE_S = 5.0  # after the leader's time limit, for its word
_CREDENTIALS = struct.Struct("3i")
Tell = Callable[[str], None]


@dataclass
class Meeting:
    """What the ranks of a job have in common.

    Attributes:
        segment: their memory; the pids of all are in it.
        lives: by rank, of all others, a descriptor that becomes readable when its process ends.
        nodes: the ranks of each node.
        device_ids: number of each rank's device.
    """

    segment: Segment
    lives: dict[int, int]
    nodes: list[list[int]]
    device_ids: list[int]


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself.

    Attributes:
        protocol, layout: tell versions of this file and of the shared memory apart.
        key, rank, world_size, node, device_id: see `Identity`.
    """

    protocol: int
    layout: int
    key: str
    rank: int
    world_size: int
    node: int
    device_id: int | None


def meet(identity: Identity, limit_s: float, tell: Tell) -> Meeting:
    """Wait until all ranks of the job have come.

    Args:
        identity: who this process is.
        limit_s: how long to wait for the others.
        tell: shows the user a line.

    Raises:
        LaunchError: some never came (fact `missing`), one ended meanwhile (fact `rank`), this process is none of
            theirs, or the folder cannot be used.
        SharedMemoryError: there is not enough memory.
    """
    hello = Hello(
        PROTOCOL, ControlMap(identity.world_size).num_words, identity.key, identity.rank, identity.world_size,
        identity.node, identity.device_id,
    )  # fmt: skip
    deadline = time.monotonic() + limit_s
    life = _own_life()
    try:
        while True:
            with (
                contextlib.suppress(FileNotFoundError),
                _folder() as folder,
            ):  # another job has removed it meanwhile
                with _lock(folder, identity.key) as is_leader:
                    if is_leader:
                        return _Leader(identity, hello, folder, limit_s, tell).gather(deadline, life)
                found = _follow(identity, hello, folder, deadline, life)
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {identity.rank}: no process gathers the ranks of {identity.where()} for {limit_s:g} s."
                )
            time.sleep(RETRY_S)
    finally:
        os.close(life)


# --- files -------------------------------------------------------------------------------------------------


@dataclass
class Folder:
    """The folder of this user's sockets, open."""

    path: str
    fd: int

    def address_of(self, name: str) -> str:
        path = os.path.join(self.path, name)
        return path if len(os.fsencode(path)) < 100 else f"/proc/self/fd/{self.fd}/{name}"

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)


@contextlib.contextmanager
def _folder() -> Iterator[Folder]:
    """Make and open it.

    Raises:
        LaunchError: it is somebody else's, or others could write to it.
    """
    path = os.path.join(tempfile.gettempdir(), f"simparallel-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise LaunchError(f"{path}, where ranks meet, cannot be used: {error.strerror}.") from error
    try:
        found = os.fstat(fd)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise LaunchError(
                f"{path}, where ranks meet, must belong to user {os.getuid()} alone, but it belongs to user "
                f"{found.st_uid} with mode {stat.S_IMODE(found.st_mode):03o}. Remove it, or set TMPDIR to another folder."
            )
        yield Folder(path, fd)
        with contextlib.suppress(OSError):  # another job needs it
            os.rmdir(path)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _lock(folder: Folder, key: str) -> Iterator[bool]:
    """Hold the lock of the job in the block; False if another process has it."""
    name = f"{key}.lock"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=folder.fd)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        # The one that had it may have removed the file since we opened it: the lock is on nothing then.
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


def _send(connection: socket.socket, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([json.dumps(message).encode()], rights, socket.MSG_NOSIGNAL)


def _receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """(message, descriptors); None at the end of file.

    Raises:
        ValueError: it is no message.
    """
    room = socket.CMSG_LEN(FDS_AT_ONCE * array.array("i").itemsize)
    data, rights, flags, _ = connection.recvmsg(MESSAGE_BYTES, room)
    fds = array.array("i")
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    for fd in fds:
        os.set_inheritable(fd, False)
    try:
        if not data:
            _close(fds)
            return None, []
        message = json.loads(data)
        if not isinstance(message, dict) or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
            raise ValueError("cut off, or not an object")
    except (ValueError, RecursionError) as error:
        _close(fds)
        raise ValueError(str(error)) from None
    return message, list(fds)


def _close(fds: Any) -> None:
    for fd in fds:
        os.close(fd)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """(pid, user) of the process at the other end, from the kernel."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(raw)
    return pid, user


def _own_life() -> int:
    """A descriptor that becomes readable, for whoever has a copy of it, when this process ends."""
    if hasattr(os, "pidfd_open") and not is_disabled("pidfd"):
        with contextlib.suppress(OSError):
            return os.pidfd_open(os.getpid())
    end, own = os.pipe()
    # A process that is forked from this one must not keep it alive. Closed by the kernel when this process ends.
    os.register_at_fork(after_in_child=lambda: os.close(own))
    return end


# --- the one that gathers ----------------------------------------------------------------------------------


class _Leader:
    """The rank that came first."""

    def __init__(self, identity: Identity, hello: Hello, folder: Folder, limit_s: float, tell: Tell) -> None:
        self._identity = identity
        self._folder = folder
        self._limit_s = limit_s
        self._tell = tell
        self._hellos = {identity.rank: hello}
        self._pids = {identity.rank: os.getpid()}
        self._lives: dict[int, int] = {}  # of the others
        self._connections: dict[int, socket.socket] = {}  # by rank
        self._new: dict[int, socket.socket] = {}  # by descriptor: they have not said yet who they are
        self._watched: dict[int, int] = {}  # descriptor -> rank
        self._poll = select.poll()

    def gather(self, deadline: float, life: int) -> Meeting:
        """See `meet`."""
        name = f"{self._identity.key}.sock"
        self._folder.remove(name)  # of a leader that was killed
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self._folder.address_of(name))
                listener.listen(self._identity.world_size + 8)
                self._wait(listener, deadline)
                meeting = self._share(life)
        except BaseException as error:
            what = str(error) or type(error).__name__
            if not isinstance(error, LaunchError):
                what = f"rank {self._identity.rank}, which gathers the ranks, failed with {type(error).__name__}: {what}"
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    _send(connection, {"failed": what, "facts": getattr(error, "facts", {})})
            _close(self._lives.values())
            raise
        finally:
            for connection in (*self._connections.values(), *self._new.values()):
                connection.close()
        return meeting

    def _wait(self, listener: socket.socket, deadline: float) -> None:
        self._poll.register(listener, select.POLLIN)
        tell_at = time.monotonic() + TELL_AFTER_S
        while missing := self._missing():
            now = time.monotonic()
            if now > deadline:
                raise self._never_came(missing)
            if now > tell_at:
                self._tell(
                    f"waiting for rank{_ranks(missing)} of {self._identity.where()} (for {self._limit_s:g} s)"
                )
                tell_at = deadline
            for fd, _ in self._poll.poll(max(1.0, 1000 * (min(deadline, max(tell_at, now)) - now))):
                if fd == listener.fileno():
                    self._accept(listener)
                elif fd in self._watched:
                    raise self._ended(self._watched[fd])
                else:
                    self._hear(fd)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._identity.world_size) if rank not in self._hellos]

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._new[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _hear(self, fd: int) -> None:
        """A process says who it is: one of the missing ranks, or it is refused."""
        connection = self._new.pop(fd)
        self._poll.unregister(fd)
        fds: list[int] = []
        try:
            pid, user = _peer(connection)
            message, fds = _receive(connection)
            if message is None:
                connection.close()
                return
            why, hello = self._refusal(message, user, len(fds))
            if hello is None:
                _send(connection, {"refused": why})
                self._tell(f"refused process {pid}: {why}")
            else:
                _send(connection, {"leader": self._identity.rank})
                self._hellos[hello.rank], self._pids[hello.rank] = hello, pid
                self._connections[hello.rank], self._lives[hello.rank] = connection, fds.pop()
                for own in (connection.fileno(), self._lives[hello.rank]):
                    self._watched[own] = hello.rank
                    self._poll.register(own, select.POLLIN)
                return
        except (OSError, ValueError) as error:  # it has gone, or it speaks another language
            self._tell(f"refused a process that said nothing of use: {error}")
        _close(fds)
        connection.close()

    def _refusal(self, message: dict[str, Any], user: int, num_fds: int) -> tuple[str, Hello | None]:
        """Why a process is none of the missing ranks, or its words."""
        own = self._hellos[self._identity.rank]
        try:
            hello = Hello(**message)
        except TypeError:
            return "it speaks another version of the protocol", None
        numbers = hello.rank, hello.world_size, hello.node, hello.device_id or 0
        if user != os.getuid():
            return f"it belongs to user {user}, and the job to user {os.getuid()}", None
        if hello.key != own.key or num_fds != 1 or not all(isinstance(number, int) for number in numbers):
            return f"it belongs to another job than {self._identity.where()}", None
        if hello.world_size != own.world_size:
            return (
                f"it is rank {hello.rank} of {hello.world_size}, and {self._identity.where()} is a job of "
                f"{own.world_size} ranks, of which rank {own.rank} (pid {os.getpid()}) came first; give each job a "
                "MASTER_PORT or SIMPARALLEL_JOB_ID of its own",
                None,
            )
        if (hello.protocol, hello.layout) != (own.protocol, own.layout):
            return "it has another version of simparallel than the job", None
        if not 0 <= hello.rank < own.world_size:
            return f"there is no rank {hello.rank} of {own.world_size}", None
        if hello.rank in self._hellos:
            return (
                f"rank {hello.rank} of {self._identity.where()} is process {self._pids[hello.rank]} already; each process "
                "needs a rank of its own, and each job a MASTER_PORT or SIMPARALLEL_JOB_ID of its own",
                None,
            )
        return "", hello

    def _never_came(self, missing: list[int]) -> LaunchError:
        came = sorted(self._hellos)
        return LaunchError(
            f"rank{_ranks(missing)} never came: {self._identity.where()} is a job of {self._identity.world_size} ranks, "
            f"and in {self._limit_s:g} s came rank{_ranks(came)}. Start rank {missing[0]} like this one:\n"
            f"    {self._identity.command_of(missing[0])}\n"
            "or all of them with one command: simparallel run.",
            missing=missing,
        )

    def _ended(self, rank: int) -> LaunchError:
        return LaunchError(
            f"rank {rank} (pid {self._pids[rank]}) ended before all ranks of {self._identity.where()} had come; its "
            "own output says why.",
            rank=rank,
        )

    def _share(self, life: int) -> Meeting:
        """All have come: give them the memory."""
        size = self._identity.world_size
        labels = sorted({hello.node for hello in self._hellos.values()})
        nodes = [[rank for rank in range(size) if self._hellos[rank].node == label] for label in labels]
        ids = [self._hellos[rank].device_id for rank in range(size)]
        device_ids = [_local(nodes, rank) if number is None else number for rank, number in enumerate(ids)]
        segment = Segment(size)
        for rank, pid in self._pids.items():
            segment.words[segment.map.pid(rank)] = pid
        lives = {**self._lives, self._identity.rank: life}
        for rank, connection in self._connections.items():
            connection.setblocking(True)
            connection.settimeout(LATE_S)
            try:
                _send(connection, {"nodes": nodes, "device_ids": device_ids}, [segment.fd])
                others = [other for other in range(size) if other != rank]
                for some in (others[i : i + FDS_AT_ONCE] for i in range(0, len(others), FDS_AT_ONCE)):
                    _send(connection, {"lives": some}, [lives[other] for other in some])
            except OSError:
                raise self._ended(rank) from None
        return Meeting(segment, self._lives, nodes, device_ids)


def _local(nodes: list[list[int]], rank: int) -> int:
    return next(node.index(rank) for node in nodes if rank in node)


def _ranks(ranks: list[int]) -> str:
    """ "s 1, 2, 5", for after "rank"."""
    shown = ", ".join(map(str, ranks[:20])) + f" and {len(ranks) - 20} more" * (len(ranks) > 20)
    return f"{'s' * (len(ranks) > 1)} {shown}"


# --- the others --------------------------------------------------------------------------------------------


def _follow(identity: Identity, hello: Hello, folder: Folder, deadline: float, life: int) -> Meeting | None:
    """Say who we are, and wait for the memory; None if there is no leader to say it to."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(LATE_S)
            connection.connect(folder.address_of(f"{identity.key}.sock"))
            pid, user = _peer(connection)
            if user != os.getuid():
                raise LaunchError(
                    f"the ranks of {identity.where()} are gathered by user {user}, not {os.getuid()}."
                )
            _send(connection, asdict(hello), [life])
        except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError):
            return None  # it does not listen yet, it is gone, or all have come without us
        answer, _ = _next(connection, identity, deadline, f"the process that gathers the ranks (pid {pid})")
        if answer is None:
            return None
        leader = f"rank {answer['leader']} (pid {pid}), which gathers the ranks,"
        told, fds = _next(connection, identity, deadline, leader)
        if told is None:
            raise LaunchError(
                f"rank {identity.rank}: {leader} ended before all ranks of {identity.where()} had come; its own output "
                "says why.",
                rank=answer["leader"],
            )
        lives: dict[int, int] = {}
        try:
            segment = Segment(identity.world_size, fd=fds[0])
            while len(lives) < identity.world_size - 1:
                some, fds = _next(connection, identity, deadline, leader)
                if some is None:
                    raise LaunchError(
                        f"rank {identity.rank}: {leader} ended meanwhile.", rank=answer["leader"]
                    )
                lives.update(zip(some["lives"], fds, strict=True))
        except BaseException:
            _close(lives.values())
            raise
        return Meeting(segment, lives, told["nodes"], told["device_ids"])


def _next(
    connection: socket.socket, identity: Identity, deadline: float, leader: str
) -> tuple[dict[str, Any] | None, list[int]]:
    """What the leader says next.

    Raises:
        LaunchError: it refuses us, or it says that the ranks will not meet.
    """
    connection.settimeout(max(0.0, deadline - time.monotonic()) + LATE_S)
    try:
        message, fds = _receive(connection)
    except ConnectionError:
        return None, []
    except TimeoutError:
        raise LaunchError(
            f"rank {identity.rank}: {leader} does not answer; it may be stopped (SIGSTOP)."
        ) from None
    if message is not None and "refused" in message:
        raise LaunchError(f"rank {identity.rank} (pid {os.getpid()}) was refused: {message['refused']}.")
    if message is not None and "failed" in message:
        raise LaunchError(f"rank {identity.rank}: {message['failed']}", **message["facts"])
    return message, fds


def tell(text: str) -> None:
    """Show a line to the user, apart from the output of the program."""
    print(f"simparallel: {text}", file=sys.stderr, flush=True)
