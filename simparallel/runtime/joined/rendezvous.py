"""Rendezvous of processes that were started one by one: they find each other and share one memory segment.

The first process is the leader: it holds a lock, listens on a Unix socket, and waits for the others (`sockets`).

    rank -> leader    its number and its job, with a descriptor that becomes readable when it ends
    leader -> rank    {"leader": rank}, at once; or {"refused": why}
    leader -> rank    {"nodes", "device_ids"} with the descriptor of the memory, once all have arrived,
                      then a descriptor for each other rank, which becomes readable when that rank ends;
                      or {"failed": why}

No process has to clean up: the kernel releases the lock of a dead leader, and the next leader removes its socket.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from simparallel.comm.memory.segment import ControlMap, SharedSegment
from simparallel.errors import LaunchError
from simparallel.runtime.joined import sockets
from simparallel.runtime.joined.identity import RankIdentity
from simparallel.runtime.preflight import check_memory

RETRY_S = 0.01
# After this wait the leader prints the missing ranks.
TELL_AFTER_S = 5.0
# Extra time for the leader's message after its time limit.
LATE_S = 5.0
Tell = Callable[[str], None]


@dataclass
class Meeting:
    """The result of a rendezvous: the shared memory and the other processes.

    Attributes:
        segment: the shared memory; it contains the pids of all ranks.
        lives: for each other rank a descriptor that becomes readable when its process ends.
        nodes: the ranks of each node.
        device_ids: number of each rank's device.
    """

    segment: SharedSegment
    lives: dict[int, int]
    nodes: list[list[int]]
    device_ids: list[int]


@dataclass(frozen=True)
class Hello:
    """A rank's introduction to the leader.

    Attributes:
        layout: number of control words of a rank in the shared memory, by which versions of the package differ.
        rank, world_size, node, device_id: see `RankIdentity`.
    """

    layout: int
    rank: int
    world_size: int
    node: int
    device_id: int | None


def meet(identity: RankIdentity, limit_s: float, tell: Tell) -> Meeting:
    """Wait until all ranks of the job have arrived.

    Args:
        identity: identity of this process.
        limit_s: seconds to wait for the others.
        tell: prints a line for the user.

    Collective: over all processes of the job.

    Raises:
        LaunchError: ranks never arrived (fact `missing`), one ended too early (fact `rank`), the leader refused this
            process, the folder cannot be used, the ranks do not fit into memory (see `check_memory`), or this is
            not Linux.
        SharedMemoryError: there is not enough memory.
    """
    sockets.check_system()
    layout, size = ControlMap(1).num_words, identity.world_size
    hello = Hello(layout, identity.rank, size, identity.node, identity.device_id)
    deadline = time.monotonic() + limit_s
    life = sockets.own_life()
    try:
        while True:
            # Try again on this error: another job may remove the folder at any time.
            with contextlib.suppress(FileNotFoundError), sockets.open_folder() as folder:
                with sockets.hold_lock(folder, identity.key) as is_leader:
                    if is_leader:
                        # Others may come when the first ones have taken their part of the memory.
                        check_memory(size)
                        return _Leader(identity, hello, folder, limit_s, tell).gather(deadline, life)
                found = _follow(identity, hello, folder, deadline, life)
                if found is not None:
                    return found
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"rank {identity.rank}: no process has gathered the ranks of {identity.where()} within "
                    f"{limit_s:g} s (start_timeout_s). Start the ranks of this job again, or raise the limit."
                )
            time.sleep(RETRY_S)
    finally:
        os.close(life)


# --- the leader --------------------------------------------------------------------------------------------


class _Leader:
    """The first rank of the job to arrive: it waits for the others, and gives them the memory."""

    def __init__(
        self, identity: RankIdentity, hello: Hello, folder: sockets.Folder, limit_s: float, tell: Tell
    ) -> None:
        self._identity = identity
        self._folder = folder
        self._limit_s = limit_s
        self._tell = tell
        self._hellos = {identity.rank: hello}
        self._pids = {identity.rank: os.getpid()}
        # By rank, without our own.
        self._lives: dict[int, int] = {}
        self._connections: dict[int, socket.socket] = {}
        # By descriptor: processes that have connected, but sent no Hello yet.
        self._new: dict[int, socket.socket] = {}
        # Descriptor -> rank; one that becomes readable means that the rank has ended.
        self._watched: dict[int, int] = {}
        self._poll = select.poll()

    def gather(self, deadline: float, life: int) -> Meeting:
        """Wait for all ranks and give them the memory, see `meet`."""
        name = f"{self._identity.key}.sock"
        # A leader that was killed may have left its socket.
        self._folder.remove(name)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                listener.bind(self._folder.address_of(name))
                listener.listen(self._identity.world_size + 8)
                self._wait(listener, deadline)
                meeting = self._share(life)
        except BaseException as error:
            # The others would otherwise wait for their whole time limit.
            what = str(error) or type(error).__name__
            if not isinstance(error, LaunchError):
                who = f"rank {self._identity.rank}, which gathers the ranks,"
                what = f"{who} failed with {type(error).__name__}: {what}"
            for connection in self._connections.values():
                with contextlib.suppress(OSError):
                    sockets.send(connection, {"failed": what, "facts": getattr(error, "facts", {})})
            sockets.close_all(self._lives.values())
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
                raise self._missing_error(missing)
            if now > tell_at:
                self._tell(f"waiting for rank{_ranks(missing)} of {self._identity.where()} (for {self._limit_s:g} s)")
                # Print it once.
                tell_at = deadline
            for fd, _ in self._poll.poll(max(1.0, 1000 * (min(deadline, max(tell_at, now)) - now))):
                if fd == listener.fileno():
                    self._accept(listener)
                elif fd in self._watched:
                    raise self._ended(self._watched[fd])
                else:
                    self._admit(fd)

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._identity.world_size) if rank not in self._hellos]

    def _accept(self, listener: socket.socket) -> None:
        # A process that connects and stays silent must not hold up the leader.
        connection, _ = listener.accept()
        connection.setblocking(False)
        self._new[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _admit(self, fd: int) -> None:
        """Accept a process as one of the missing ranks, or refuse it."""
        connection = self._new.pop(fd)
        self._poll.unregister(fd)
        fds: list[int] = []
        try:
            pid = sockets.pid_of_peer(connection)
            message, fds = sockets.receive(connection)
            if message is None:
                connection.close()
                return
            why, hello = self._refusal(message, fds)
            if hello is None:
                sockets.send(connection, {"refused": why})
                self._tell(f"refused process {pid}: {why}")
            else:
                sockets.send(connection, {"leader": self._identity.rank})
                self._hellos[hello.rank], self._pids[hello.rank] = hello, pid
                self._connections[hello.rank], self._lives[hello.rank] = connection, fds.pop()
                for own in (connection.fileno(), self._lives[hello.rank]):
                    self._watched[own] = hello.rank
                    self._poll.register(own, select.POLLIN)
                return
        except (OSError, ValueError) as error:
            # The process has gone, or does not follow the protocol.
            self._tell(f"refused a process that does not follow the protocol: {error}")
        sockets.close_all(fds)
        connection.close()

    def _refusal(self, message: dict[str, Any], fds: list[int]) -> tuple[str, Hello | None]:
        """Return (reason to refuse a process, None), or ("", its introduction)."""
        own = self._hellos[self._identity.rank]
        try:
            hello = Hello(**message)
        except TypeError:
            hello = None
        if hello is None or hello.layout != own.layout or not fds:
            return "it has another version of simparallel than the job", None
        if hello.world_size != own.world_size:
            return (
                f"it is rank {hello.rank} of {hello.world_size}, and {self._identity.where()} is a job of "
                f"{own.world_size} ranks, of which rank {own.rank} (pid {os.getpid()}) came first; give each job a "
                "MASTER_PORT or SIMPARALLEL_JOB_ID of its own",
                None,
            )
        if hello.rank in self._hellos:
            return (
                f"rank {hello.rank} of {self._identity.where()} is process {self._pids[hello.rank]} already; each "
                "process needs a rank of its own, and each job a MASTER_PORT or SIMPARALLEL_JOB_ID of its own",
                None,
            )
        return "", hello

    def _missing_error(self, missing: list[int]) -> LaunchError:
        arrived = sorted(self._hellos)
        return LaunchError(
            f"rank{_ranks(missing)} did not arrive: {self._identity.where()} is a job of {self._identity.world_size} "
            f"ranks, of which only rank{_ranks(arrived)} arrived in {self._limit_s:g} s. Start "
            f"rank {missing[0]} like this one:\n"
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
        """Give all ranks the memory, and the descriptors of each other."""
        size = self._identity.world_size
        # Nodes are numbered in the order of their labels.
        labels = sorted({hello.node for hello in self._hellos.values()})
        nodes = [[rank for rank in range(size) if self._hellos[rank].node == label] for label in labels]
        ids = [self._hellos[rank].device_id for rank in range(size)]
        device_ids = [_local(nodes, rank) if number is None else number for rank, number in enumerate(ids)]
        segment = SharedSegment(size)
        for rank, pid in self._pids.items():
            segment.words[segment.map.pid(rank)] = pid
        lives = {**self._lives, self._identity.rank: life}
        for rank, connection in self._connections.items():
            connection.setblocking(True)
            connection.settimeout(LATE_S)
            try:
                sockets.send(connection, {"nodes": nodes, "device_ids": device_ids}, [segment.fd])
                others = [other for other in range(size) if other != rank]
                # A message holds a limited number of descriptors.
                for some in (others[i : i + sockets.FDS_AT_ONCE] for i in range(0, len(others), sockets.FDS_AT_ONCE)):
                    sockets.send(connection, {"lives": some}, [lives[other] for other in some])
            except OSError:
                raise self._ended(rank) from None
        return Meeting(segment, self._lives, nodes, device_ids)


def _local(nodes: list[list[int]], rank: int) -> int:
    return next(node.index(rank) for node in nodes if rank in node)


def _ranks(ranks: list[int]) -> str:
    """Return a list such as "s 1, 2, 5", to be appended to "rank"."""
    shown = ", ".join(map(str, ranks[:20])) + f" and {len(ranks) - 20} more" * (len(ranks) > 20)
    return f"{'s' * (len(ranks) > 1)} {shown}"


# --- the others --------------------------------------------------------------------------------------------


def _follow(identity: RankIdentity, hello: Hello, folder: sockets.Folder, deadline: float, life: int) -> Meeting | None:
    """Connect to the leader and wait for the memory; return None if there is no leader."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        try:
            connection.settimeout(LATE_S)
            connection.connect(folder.address_of(f"{identity.key}.sock"))
            pid = sockets.pid_of_peer(connection)
            sockets.send(connection, asdict(hello), [life])
            # The first answer comes at once and names the leader, for the messages about a longer wait.
            answer, _ = _next(connection, identity, deadline, f"the process that gathers the ranks (pid {pid})")
        except (FileNotFoundError, ConnectionError, BlockingIOError, TimeoutError):
            # The leader does not listen yet, has gone, or already has all ranks.
            return None
        leader = f"rank {answer['leader']} (pid {pid}), which gathers the ranks,"
        # The descriptors of the other ranks come in several messages; on an error none may stay open.
        lives: dict[int, int] = {}
        try:
            meeting, fds = _next(connection, identity, deadline, leader)
            segment = SharedSegment(identity.world_size, fd=fds[0])
            while len(lives) < identity.world_size - 1:
                some, fds = _next(connection, identity, deadline, leader)
                lives.update(zip(some["lives"], fds, strict=True))
        except BaseException as error:
            sockets.close_all(lives.values())
            if isinstance(error, ConnectionError):
                raise LaunchError(
                    f"rank {identity.rank}: {leader} ended before all ranks of {identity.where()} had come; its own "
                    "output says why.",
                    rank=answer["leader"],
                ) from None
            raise
        return Meeting(segment, lives, meeting["nodes"], meeting["device_ids"])


def _next(
    connection: socket.socket, identity: RankIdentity, deadline: float, leader: str
) -> tuple[dict[str, Any], list[int]]:
    """Receive the next message of the leader, and its descriptors.

    Raises:
        ConnectionError: the leader has ended.
        LaunchError: the leader refuses this process, reports a failure, or does not answer in time.
    """
    connection.settimeout(max(0.0, deadline - time.monotonic()) + LATE_S)
    try:
        message, fds = sockets.receive(connection)
    except TimeoutError:
        raise LaunchError(
            f"rank {identity.rank}: {leader} does not answer: if it is stopped (SIGSTOP), send it SIGCONT."
        ) from None
    if message is None:
        raise ConnectionError
    if "refused" in message:
        raise LaunchError(f"rank {identity.rank} (pid {os.getpid()}) was refused: {message['refused']}.")
    if "failed" in message:
        raise LaunchError(f"rank {identity.rank}: {message['failed']}", **message["facts"])
    return message, fds


def tell(text: str) -> None:
    """Print a line for the user to standard error."""
    print(f"simparallel: {text}", file=sys.stderr, flush=True)
