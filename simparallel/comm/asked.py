"""Requests of a rank to its mailboxes: receives, probes, and several communications as one."""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from simparallel.comm.transport import AbstractTransport, Condition, any_of
from simparallel.comm.work import Lane, Work
from simparallel.hardware.recorder import Recorder

if TYPE_CHECKING:
    from simparallel.comm.p2p import Inbox

BYTES = np.dtype(np.uint8)
# Tags of users are below this number, tags of algorithms are not.
USER_TAGS = 2**62


class Named(NamedTuple):
    """The identity of a call, without its array."""

    op: str
    dtype: np.dtype
    shape: tuple[int, ...]
    peer: str
    rank: int | None
    tag: int | None
    site: int
    # If set, replaces the description of op, array and peer in `text`.
    call: str = ""

    def text(self, transport: AbstractTransport) -> str:
        rank, tag = ("any" if number is None else number for number in (self.rank, self.tag))
        call = self.call or f"{self.op}({self.dtype} {self.shape}, {self.peer}={rank}, tag={tag})"
        return f"{call} at {transport.site_text(transport.rank, self.site)}"


class Receive(Work):
    """A pending receive: from one sender, or from the first to send.

    Args:
        inboxes: inboxes of the possible senders.
        x: array to fill.
        tag: tag of the message; None for any user tag.
        named: identity of the call, for errors.
        issued_ps: start of the call in simulated time.
        recorder: records the event; None for a part of another call.

    Attributes:
        source: rank of the sender, once the message has arrived.
        sent_tag: tag of that message.
    """

    def __init__(
        self,
        inboxes: Sequence[Inbox],
        x: np.ndarray,
        tag: int | None,
        named: Named,
        issued_ps: int,
        recorder: Recorder | None,
    ) -> None:
        # It waits in the lane of the first inbox. This rank's own inbox is last: a waiting rank sends itself nothing.
        super().__init__(inboxes[0], None)
        self.inboxes = inboxes
        self.recorder = recorder
        self.x = x
        self.tag = tag
        self.named = named
        self.issued_ps = issued_ps
        self.start_ns = perf_counter_ns()
        self.source: int | None = None
        self.sent_tag: int | None = None

    def begin(self) -> Receive:
        """Start the receive; a message that has already arrived finishes it."""
        for inbox in self.inboxes:
            inbox.note(self)
        if any(inbox.claim(self) for inbox in self.inboxes):
            return self
        try:
            for inbox in self.inboxes:
                inbox.submit(self)
                if self.finished:
                    break
        except BaseException:  # also an exception of a signal handler: no caller has this receive
            self.withdraw()
            raise
        return self

    def takes(self, tag: int) -> bool:
        """Return whether a message of this tag matches."""
        return tag == self.tag if self.tag is not None else 0 <= tag < USER_TAGS

    def withdraw(self) -> None:
        """Cancel the receive."""
        for inbox in self.inboxes:
            inbox.withdraw(self)

    def wait_or_withdraw(self) -> Any:
        """Wait, and withdraw the receive after an exception, so that the next receive gets the message."""
        try:
            return self.wait()
        except BaseException:
            self.withdraw()
            raise

    def needs(self, condition: Condition) -> Condition:
        # A receive from any rank waits for all inboxes at once.
        return any_of([condition, *(inbox.awaited() for inbox in self.inboxes[1:])])

    def source_rank(self) -> int:
        self.wait()
        assert self.source is not None
        return self.source

    def describe(self) -> str:
        """Describe the receive and unmatched messages: one with another tag explains why it waits in vain."""
        text = self.named.text(self._lane.transport)
        letters = [f"rank {inbox.src} sent {letter}" for inbox in self.inboxes for letter in inbox.letters()]
        if letters:
            more = f"; and {len(letters) - 3} more" if len(letters) > 3 else ""
            text += f" ({'; '.join(letters[:3])}{more}, which no receive has requested)"
        return text


class Message(NamedTuple):
    """A message that has arrived and is not received yet.

    Attributes:
        src, tag: rank of the sender, and tag.
        shape, dtype: of the payload; None if they are too long for the header.
        size_bytes: size of the payload.
    """

    src: int
    tag: int
    shape: tuple[int, ...] | None
    dtype: np.dtype | None
    size_bytes: int


class Probe(Lane):
    """A wait for a message that does not consume it."""

    def __init__(self, inboxes: Sequence[Inbox], tag: int | None, others: dict[Lane, None]) -> None:
        transport = inboxes[0].transport
        super().__init__(transport, others, None)
        self._inboxes = inboxes
        rank = inboxes[0].src if len(inboxes) == 1 else None
        named = Named("probe", BYTES, (), "src", rank, tag, transport.call_site())
        self._asked = Receive(inboxes, np.empty(0, BYTES), tag, named, 0, None)

    def found(self) -> Message | None:
        """Return the first message that has arrived, or None, without waiting."""
        for inbox in self._inboxes:
            message = inbox.look_for(self._asked)
            if message is not None:
                return message
        return None

    def wait(self) -> Message:
        """Wait for a message and return it."""
        self._thread = threading.get_ident()
        self._others[self] = None
        try:
            # A probe uses the waiting of a lane, with a receive that is never submitted.
            self.finish(self._asked)
        finally:
            self._others.pop(self, None)
        message: Message = self._asked.result
        return message

    def advance(self) -> Condition | None:
        asked = self._asked
        asked.result = self.found()
        asked.finished = asked.result is not None
        return None if asked.finished else self._inboxes[0].awaited()


class Together(Work):
    """Several communications as one work.

    Args:
        works: at least one; waited for in this order.
        giver: the work whose result is the result of the whole; None for no result.
    """

    def __init__(self, works: Sequence[Work], giver: Work | None = None) -> None:
        super().__init__(works[-1]._lane, None)
        self._works, self._giver = works, giver

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        self._end()
        return self.result

    def _end(self) -> None:
        self.finished, self.result = True, None if self._giver is None else self._giver.result

    def is_completed(self) -> bool:
        # A list, not a generator: `all` would stop at the first unfinished work, and each has to advance.
        done = [work.is_completed() for work in self._works]
        if all(done):
            self._end()
        return self.finished

    def source_rank(self) -> int:
        return next(work for work in self._works if isinstance(work, Receive)).source_rank()

    def steps(self) -> Generator[Condition, None, None]:
        for work in self._works:
            yield from work.steps()
        self.wait()

    def describe(self) -> str:
        return next((work for work in self._works if not work.finished), self._works[-1]).describe()
