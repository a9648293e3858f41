"""`Mailbox`: a rank's messages, shared arrays and unfinished work; `Communicator` adds the collectives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import copy
from threading import current_thread
from typing import Any, Self

import numpy as np

from simparallel.base.checks import check_integer, is_integer
from simparallel.clock.recorder import Recorder
from simparallel.comm.p2p import USER_TAGS, Inbox, JointWork, Message, Outbox, Probe, Receive, receive
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.validate import check_array
from simparallel.comm.work import Lane, Work
from simparallel.errors import CommError, DTypeError, ShapeError

_NOTHING = Condition((), (), 0)


class Mailbox:
    """The messages, the shared memory and the unfinished communication of one rank.

    Args:
        transport: this rank's access to shared memory.
        recorder: clocks and events of this rank, or None to keep none.

    Attributes:
        lanes: the lanes (`work.Lane`) of this rank that have work; empty while no communication is in progress.
    """

    def __init__(self, transport: AbstractTransport, recorder: Recorder | None) -> None:
        self.transport, self.recorder = transport, recorder
        self.rank, self.world_size = transport.rank, transport.world_size
        self.lanes: dict[Lane, None] = {}
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        self._forbidden, self._has_memory = "", True

    def send(self, x: np.ndarray, dst: int, tag: int = 0) -> None:
        """Send x to rank `dst`; return once x may be changed again. Not collective."""
        self.isend(x, dst, tag).wait()

    def recv(self, x: np.ndarray, src: int | None = None, tag: int | None = 0) -> np.ndarray:
        """Fill x with the next message from `src` with this tag (None: any); return x. Not collective.

        If an exception interrupts it, such as one raised by a signal handler, no message is consumed.
        """
        return self.irecv(x, src, tag).wait_or_withdraw()

    def isend(self, x: np.ndarray, dst: int, tag: int = 0) -> Work:
        """Start a `send`; x must not change before `wait()`. Not collective."""
        self._check_send("send", x, dst, tag)
        return self.outbox(dst).send(x, tag)

    def irecv(self, x: np.ndarray, src: int | None = None, tag: int | None = 0) -> Receive:
        """Start a `recv`; x is filled when `wait()` returns. Not collective."""
        inboxes = self._sources("recv", src, tag)
        check_array("recv", x, written=True)
        return receive(inboxes, x, tag)

    def issend(self, x: np.ndarray, dst: int, tag: int = 0) -> Work:
        """Start a `send` whose `wait()` returns once the other side has received x. Not collective."""
        self._check_send("ssend", x, dst, tag)
        return self.outbox(dst).send_and_ask(x, tag, self.inbox(dst))

    def isendrecv(
        self,
        x: np.ndarray,
        dst: int,
        out: np.ndarray,
        src: int | None = None,
        send_tag: int = 0,
        recv_tag: int | None = 0,
    ) -> Work:
        """Start to send x to `dst`, and to fill `out` from `src`; `wait()` returns out. Not collective."""
        self._check_send("sendrecv", x, dst, send_tag)
        inboxes = self._sources("sendrecv", src, recv_tag)
        check_array("sendrecv", out, written=True, name="out")
        if np.may_share_memory(x, out):
            # The received message may arrive before x has been sent.
            x = x.copy()
        sent = self.outbox(dst).send(x, send_tag)
        received = receive(inboxes, out, recv_tag)
        return JointWork([received, sent], received)

    def probe(self, src: int | None = None, tag: int | None = None) -> Message:
        """Wait for a message without consuming it; None matches any. Not collective."""
        return Probe(self._sources("probe", src, tag), tag, self.lanes).wait()

    def iprobe(self, src: int | None = None, tag: int | None = None) -> Message | None:
        """Return the message that `probe` would return; None if none has arrived. Not collective."""
        probe = Probe(self._sources("iprobe", src, tag), tag, self.lanes)
        found = probe.found()
        if found is None:
            self.transport.looked(_NOTHING, lambda: "iprobe", 0.0)
            found = probe.found()
        return found

    def outbox(self, dst: int) -> Outbox:
        """Return the outbox for messages to rank `dst`."""
        self.check_allowed("outbox")
        if dst not in self._outboxes:
            self._outboxes[dst] = Outbox(self.transport, self.recorder, self.lanes, dst)
        return self._outboxes[dst]

    def inbox(self, src: int) -> Inbox:
        """Return the inbox for messages from rank `src`."""
        self.check_allowed("inbox")
        found = self._inboxes.get(src)
        if found is None:
            found = self._inboxes[src] = Inbox(self.transport, self.recorder, self.lanes, src)
            found.reply = lambda *message: self.outbox(src).send(*message)
        return found

    def kept_messages(self) -> list[tuple[int, str]]:
        """Return (sender, text) of messages that arrived and were never received, because of their tag."""
        return [message for inbox in self._inboxes.values() for message in inbox.kept()]

    def _sources(self, op: str, src: int | None, tag: int | None) -> list[Inbox]:
        """Return the inboxes that a receive may take from; this rank's own comes last."""
        self.check_allowed(op)
        if tag is not None:
            check_integer(op, "tag", tag, high=USER_TAGS - 1)
        if src is not None:
            return [self.inbox(check_integer(op, "src", src, high=self.world_size - 1))]
        # Its own inbox last: a receive from any rank then reports waiting for others, not for itself.
        size = self.world_size
        return [self.inbox((self.rank + i) % size) for i in range(1, size + 1)]

    def _check_send(self, op: str, x: np.ndarray, dst: int, tag: int) -> None:
        self.check_allowed(op)
        check_array(op, x)
        check_integer(op, "dst", dst, high=self.world_size - 1)
        check_integer(op, "tag", tag, high=USER_TAGS - 1)

    # --- memory, end of a run -------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...] | int, dtype: Any = np.float32) -> np.ndarray:
        """Return a new array in this rank's shared arena: collectives do not copy it in or out. Not collective.

        Raises:
            SharedMemoryError: no memory.
            ShapeError: shape is not an integer or a tuple of integers of 0 or more.
            DTypeError: dtype is no dtype, or one of Python objects.
        """
        if not self._has_memory:
            self.check_allowed("empty")
        sizes: Any = (shape,) if is_integer(shape) else shape
        if not isinstance(sizes, Sequence) or not all(is_integer(size) and size >= 0 for size in sizes):
            raise ShapeError(f"empty: shape={shape!r} must be an integer of 0 or more, or a tuple of them.")
        try:
            kind = np.dtype(dtype)
        except TypeError as error:
            raise DTypeError(f"empty: dtype={dtype!r:.60} is no dtype: {error}.") from None
        if kind.hasobject:
            raise DTypeError(f"empty: dtype={dtype!r:.60}: Python objects cannot be in memory that ranks share.")
        return self.transport.arena.empty(tuple(map(int, sizes)), kind)

    def forbid(self, why: str, *, memory: bool = False) -> None:
        """Make collectives and messages raise CommError with this reason from now on. An earlier reason is kept.

        `memory`: `empty` raises, too.
        """
        self._forbidden = self._forbidden or why
        self._has_memory = self._has_memory and not memory

    def check_allowed(self, op: str) -> None:
        """Raise CommError if this communicator must not communicate."""
        if self._forbidden:
            raise CommError(f"{op}: {self._forbidden}")

    def progress(self) -> None:
        """Advance work started with `async_op=True`, without waiting. Not collective."""
        if self._forbidden:
            self.check_allowed("progress")
        # Lanes leave the dict when they have no more work, so a copy is iterated.
        for lane in tuple(self.lanes):
            lane.advance()

    def finish(self) -> None:
        """Wait for all work that was started and not waited for. Called at the end of a run."""
        self.check_allowed("finish")
        while self.lanes:
            next(iter(self.lanes)).finish()

    def abandon(self, error: CommError) -> None:
        """Make all unfinished work raise `error` in this process, a fork; the process of the rank completes it."""
        for lane in tuple(self.lanes):
            lane.fail(error)

    def beside(self) -> Self:
        """Return a copy for another thread of the rank's process: readable, but communication raises."""
        quiet = copy(self)
        quiet.forbid(
            f"rank {self.rank} communicates only in the thread that runs its function, while it runs, and this is "
            f"thread {current_thread().name!r}: calls of several threads have no order that all ranks share. "
            "Hand the data over to the function, and call it there."
        )
        return quiet

    def silence_fork(self) -> None:
        """Silence a process that the rank has forked: it shares the rank's memory and would write in its name."""
        why = (
            f"this process (pid {os.getpid()}) was forked from rank {self.rank} (pid {os.getppid()}) and is not one of "
            f"the ranks. Let rank {self.rank} communicate, and send it the data through a pipe or a queue."
        )
        # No shared arrays either: the rank would allocate the same memory again.
        self.forbid(why, memory=True)
        self.abandon(CommError(why))

    def release(self) -> None:
        """Return this run's message memory to the arena. Only when all ranks have ended."""
        for outbox in self._outboxes.values():
            outbox.release()
