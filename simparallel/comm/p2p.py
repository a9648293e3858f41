"""Messages between two ranks: a ring of 16 message slots in each direction.

The sender copies the payload into its own arena, writes the header into a slot of the ring, and then raises its `sent`
number. The receiver copies the payload out and raises its `taken` number; from then on the sender may reuse slot and
memory. So `send` returns as soon as the payload is copied, and waits only if the ring is full. Messages are taken in
the order they were sent. The payload is copied straight to the receive with the same tag; if there is none yet, to a
buffer that is kept for it.
"""

from __future__ import annotations

import contextlib
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

import simparallel.comm.call_header as h
from simparallel.backend import has_data, without_data
from simparallel.clock.recorder import Recorder
from simparallel.comm.diagnosis import message_text
from simparallel.comm.memory.segment import MESSAGE_WORDS, RING
from simparallel.comm.transport import AbstractTransport, Condition, any_of, order
from simparallel.comm.work import Lane, Steps, Work
from simparallel.errors import CollectiveMismatchError

BYTES = np.dtype(np.uint8)
# Tags of users are below this number, tags of algorithms are not.
USER_TAGS = 2**62


@lru_cache(maxsize=1024)
def _form(dtype: np.dtype, shape: tuple[int, ...]) -> array[int]:
    """Encode the header of a message of such an array, without the words that change from message to message."""
    return h.encode("send", dtype=dtype, shape=shape)


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


class Send(Work):
    """A message being sent."""

    def __init__(self, outbox: Outbox, steps: Steps, named: Named) -> None:
        super().__init__(outbox, steps)
        self._named = named

    def describe(self) -> str:
        return self._named.text(self._lane.transport)


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
        kept = [f"rank {inbox.src} sent {text}" for inbox in self.inboxes for text in inbox.descriptions()]
        if kept:
            more = f"; and {len(kept) - 3} more" if len(kept) > 3 else ""
            text += f" ({'; '.join(kept[:3])}{more}, which no receive has requested)"
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


class JointWork(Work):
    """Several communications as one work.

    Args:
        works: at least one; waited for in this order.
        main: the work whose result is the result of the whole; None for no result.
    """

    def __init__(self, works: Sequence[Work], main: Work | None = None) -> None:
        super().__init__(works[-1]._lane, None)
        self._works, self._main = works, main

    def wait(self) -> Any:
        for work in self._works:
            work.wait()
        self._end()
        return self.result

    def _end(self) -> None:
        self.finished, self.result = True, None if self._main is None else self._main.result

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


class MessageLane(Lane):
    """Messages from one rank to another, on one of the two.

    Args:
        transport: this rank's access to shared memory.
        recorder: clocks and events of this rank, or None to keep none.
        lanes: the lanes of this rank that have work.
        src, dst: the sender and the receiver; this rank is one of them.
    """

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], src: int, dst: int
    ) -> None:
        super().__init__(transport, lanes, recorder.join if recorder else None)
        self.src, self.dst, self.recorder = src, dst, recorder
        control = transport.segment.map
        self._sent_index, self._taken_index = control.sent(src, dst), control.taken(dst, src)
        self._slots = [control.message(src, dst, number) for number in range(RING)]


class Outbox(MessageLane):
    """Messages from this rank to one other rank."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], dst: int
    ) -> None:
        super().__init__(transport, recorder, lanes, transport.rank, dst)
        self._sent = 0
        self._replies = 0  # number of replies requested
        self._in_flight: list[tuple[int, int]] = []  # (number, offset), oldest first
        transport.segment.reserve_words(transport.rank, self._slots[0], RING * MESSAGE_WORDS)

    def send(self, x: np.ndarray, tag: int, part_of: int | None = None, at_ps: int = 0) -> Work:
        """Queue a message.

        Args:
            x: payload.
            tag: tag of the message.
            part_of: call site of the collective whose event covers this message too.
            at_ps: start of such a message in simulated time.
        """
        site = self.transport.call_site() if part_of is None else part_of
        recorder = self.recorder if part_of is None else None
        issued_ps = recorder.issue() if recorder else at_ps
        named = Named("send", x.dtype, x.shape, "dst", self.dst, tag, site)
        return self.submit(Send(self, self._steps(x, tag, site, issued_ps, recorder), named))

    def send_and_ask(self, x: np.ndarray, tag: int, replies: Inbox) -> Work:
        """Queue a message; the work is finished once the other side has received it and replied."""
        site = self.transport.call_site()
        self._replies += 1
        issued_ps = self.recorder.issue() if self.recorder else 0
        named = Named("ssend", x.dtype, x.shape, "dst", self.dst, tag, site)
        reply = Receive([replies], np.empty(0, BYTES), -self._replies, named, issued_ps, None)
        sent = Send(self, self._steps(x, tag, site, issued_ps, self.recorder, self._replies), named)
        return JointWork([self.submit(sent), reply.begin()])

    def _steps(
        self, x: np.ndarray, tag: int, site: int, issued_ps: int, recorder: Recorder | None, reply: int = 0
    ) -> Steps:
        transport, words = self.transport, self.transport.words
        start_ns, number = perf_counter_ns(), self._sent
        faults = transport.faults
        if faults is not None:
            faults.at("enter", "p2p", "send", number + 1)
        # A full ring: wait until the oldest message in it has been taken.
        if words[self._taken_index] <= number - RING:
            yield Condition((self._taken_index,), (self.dst,), number - RING + 1)
        # Memory of taken messages comes back here, where new memory is needed, and not at each arrival.
        self._reclaim()
        offset = transport.arena.allocate(x.nbytes if has_data(x) else 0)
        if has_data(x):
            transport.segment.array(transport.rank, offset, x.shape, x.dtype)[...] = x
        if faults is not None:
            faults.at("copy_in", "p2p", "send", number + 1)

        stream = f"send to {self.dst}"
        start_ps = max(issued_ps, recorder.clock_ps.get(stream, 0)) if recorder else issued_ps
        header = _form(x.dtype, x.shape)[:]
        header[h.SEQ], header[h.SITE], header[h.SIM_PS] = number, site, start_ps
        header[h.OFFSET], header[h.NBYTES], header[h.TAG] = offset, x.nbytes, tag
        header[h.EXPOSURE], header[h.FORM] = reply, h.COPIED if has_data(x) else h.NO_DATA
        if faults is not None:
            faults.corrupt(header, 0, "p2p", "send", number + 1)
        start = self._slots[number % RING]
        words[start : start + h.USED] = header
        order()
        # Published: the payload and the header were stored before the number that the receiver polls.
        self._sent = words[self._sent_index] = number + 1
        transport.notify(self._sent_index)
        self._in_flight.append((number, offset))
        if faults is not None:
            faults.at("published", "p2p", "send", number + 1)
        if recorder is not None:
            size_bytes = x.size * recorder.cluster.itemsize(x.dtype)
            cost = recorder.cluster.message(size_bytes, transport.rank, self.dst)
            end_ps, sizes = start_ps + cost.time_ps, (size_bytes, cost.sent_bytes)
            # The running work is this one.
            self._queue[0].sim_end_ps = recorder.communicate(
                "send", "p2p", stream, start_ns, perf_counter_ns(), start_ps, end_ps, *sizes, (self.src, self.dst),
                number, after=(issued_ps,),
            )  # fmt: skip
        if faults is not None:
            faults.at("returned", "p2p", "send", number + 1)

    def release(self) -> None:
        """Free the memory of all messages. Only when no rank can read it any more."""
        self._reclaim(everything=True)

    def _reclaim(self, everything: bool = False) -> None:
        # The receiver takes messages in order, so one number frees all before it.
        taken = self._sent if everything else self.transport.words[self._taken_index]
        while self._in_flight and self._in_flight[0][0] < taken:
            self.transport.arena.free(self._in_flight.pop(0)[1])


class Inbox(MessageLane):
    """Messages to this rank from one other rank. Receives finish as their messages arrive, by tag."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], src: int
    ) -> None:
        super().__init__(transport, recorder, lanes, src, transport.rank)
        self._taken = 0
        # Sends a message back to the sender.
        self.reply: Callable[..., Work] | None = None
        self._last_call: Named | None = None
        self._queue: deque[Any] = deque()  # of `Receive`
        self._unclaimed: list[tuple[list[int], np.ndarray]] = []  # headers and copied payloads, not yet received

    def receive(self, x: np.ndarray, tag: int, part_of: int | None = None) -> Receive:
        """Start a receive. `part_of`: call site of the collective whose event covers this message too."""
        return receive([self], x, tag, part_of)

    def note(self, receive: Receive) -> None:
        """Register a receive that is about to begin."""
        self._last_call = receive.named
        self._fault("enter", self._taken)
        self.check()

    def claim(self, receive: Receive) -> bool:
        """Deliver a matching message that arrived before the receive, if there is one."""
        for i, (header, raw) in enumerate(self._unclaimed):
            if receive.takes(header[h.TAG]):
                del self._unclaimed[i]
                self._deliver(receive, header, raw)
                self._fault("returned", header[h.SEQ])
                return True
        return False

    def look_for(self, receive: Receive) -> Message | None:
        """Return a message that could be delivered now, or None."""
        # Messages that have arrived but were not received are sorted by tag here, as in `advance`.
        self.check()
        while self.transport.met(self.awaited()):
            self._take()
        for header, _ in self._unclaimed:
            if receive.takes(header[h.TAG]):
                ndim, code = header[h.NDIM], header[h.DTYPE]
                shape = tuple(header[h.SHAPE : h.SHAPE + ndim]) if ndim <= h.ALGORITHM - h.SHAPE else None
                dtype = h.decode_given(code, 0)[1] if code > 0 else None
                return Message(self.src, header[h.TAG], shape, dtype, header[h.NBYTES])
        return None

    def withdraw(self, receive: Receive) -> None:
        """Cancel a receive."""
        with contextlib.suppress(ValueError):  # its message has arrived
            self._queue.remove(receive)
        if not self._queue and self._error is None:
            self._others.pop(self, None)

    def awaited(self) -> Condition:
        """Return the condition of the next message's arrival."""
        return Condition((self._sent_index,), (self.src,), self._taken + 1)

    def advance(self) -> Condition | None:
        self.check()
        words, index = self.transport.words, self._sent_index
        while self._queue:
            if words[index] <= self._taken:
                return self.awaited()
            self._take()
        self._others.pop(self, None)
        return None

    def _take(self) -> None:
        """Take the next message out of the ring: deliver it to the first receive with its tag, or keep a copy."""
        transport, words = self.transport, self.transport.words
        order()
        start = self._slots[self._taken % RING]
        header = words[start : start + h.USED].tolist()
        size_bytes = 0 if header[h.FORM] == h.NO_DATA else header[h.NBYTES]
        raw = transport.segment.array(self.src, header[h.OFFSET], (size_bytes,), BYTES)
        # The first receive in order that takes this tag: messages with other tags do not block it.
        receive = next((work for work in self._queue if work.takes(header[h.TAG])), None)
        try:
            if receive is None:
                # The ring's slot belongs to the sender again once the message is taken, so a message without a receive
                # is copied.
                self._unclaimed.append((header, raw.copy()))
            else:
                self._deliver(receive, header, raw)
                receive.withdraw()
        finally:  # also after a mismatch, so that the sender is not held up
            self._fault("copy_out", self._taken)
            # The payload has been read before the sender learns that its memory is free.
            order()
            self._fault("leave", self._taken)
            self._taken = words[self._taken_index] = self._taken + 1
            transport.notify(self._taken_index)
        if receive is not None:
            self._fault("returned", header[h.SEQ])

    def _fault(self, phase: str, number: int) -> None:
        if self.transport.faults is not None:
            self.transport.faults.at(phase, "p2p", "recv", number + 1)

    def descriptions(self) -> list[str]:
        """Describe the messages that were taken out of the ring and are not received yet."""
        return [message_text(self.transport.segment, self.src, header) for header, _ in self._unclaimed]

    def kept(self) -> list[tuple[int, str]]:
        """Return (sender, description) of each message that is not received; called at the end of a run."""
        last = self._last_call
        asked = f", but the last one asked for was {last.text(self.transport)}" if last is not None else ""
        return [(self.src, f"{text}{asked}") for text in self.descriptions()]

    def _deliver(self, receive: Receive, header: list[int], raw: np.ndarray) -> None:
        x, transport, recorder = receive.x, self.transport, receive.recorder
        # The form is compared as words: dtype, dims and shape as the sender encoded them.
        if header[h.DTYPE : h.ALGORITHM] != _form(x.dtype, x.shape)[h.DTYPE : h.ALGORITHM].tolist():
            place = transport.site_text(self.src, header[h.SITE])
            call = receive.named.text(transport)
            error = CollectiveMismatchError(
                f"rank {transport.rank}: {call}, but rank {self.src} sent {h.describe(header)[5:]} "
                f"at {place}. No data was changed. Both sides need the same shape and dtype.",
                group=f"ranks {self.src} -> {transport.rank}",
                seq=header[h.SEQ],
                calls={self.src: h.describe(header), transport.rank: call},
            )
            # Later receives from this rank raise it too.
            self.fail(error)
            raise error
        if header[h.FORM] == h.NO_DATA:
            x = without_data(x)
        else:
            x[...] = raw.view(x.dtype).reshape(x.shape)
        receive.result, receive.finished = x, True
        receive.source = self.src
        receive.sim_end_ps = header[h.SIM_PS]
        if recorder is not None:
            # The receive ends no earlier than the message arrives, and no earlier than it was asked for.
            stream = f"recv from {self.src}"
            size_bytes = x.size * recorder.cluster.itemsize(x.dtype)
            cost = recorder.cluster.message(size_bytes, self.src, transport.rank)
            end_ps = max(receive.issued_ps, header[h.SIM_PS] + cost.time_ps)
            begin_ps = max(receive.issued_ps, header[h.SIM_PS], recorder.clock_ps.get(stream, 0))
            times = receive.start_ns, perf_counter_ns(), min(begin_ps, end_ps), end_ps
            receive.sim_end_ps = recorder.communicate(
                "recv", "p2p", stream, *times, size_bytes, 0, (self.src, self.dst), header[h.SEQ],
                after=(receive.issued_ps,),
            )  # fmt: skip
        elif self.recorder is not None and receive.named.op == "ssend":
            # The reply to a message of this rank.
            receive.sim_end_ps = self.recorder.reply("recv", header[h.SIM_PS], (self.src, self.dst), header[h.TAG])
        # The sender asked for a reply (`ssend`)
        if header[h.EXPOSURE] and self.reply is not None:
            tag, at_ps = -header[h.EXPOSURE], receive.sim_end_ps
            if recorder is not None:
                at_ps = recorder.reply("send", at_ps, (self.dst, self.src), tag)
            self.reply(np.empty(0, BYTES), tag, receive.named.site, at_ps)


def receive(inboxes: Sequence[Inbox], x: np.ndarray, tag: int | None, part_of: int | None = None) -> Receive:
    """Start a receive of a message from any of these inboxes. `part_of`: see `Inbox.receive`."""
    first = inboxes[0]
    site = first.transport.call_site() if part_of is None else part_of
    recorder = first.recorder if part_of is None else None
    named = Named("recv", x.dtype, x.shape, "src", first.src if len(inboxes) == 1 else None, tag, site)
    issued_ps = recorder.issue() if recorder else 0
    return Receive(inboxes, x, tag, named, issued_ps, recorder).begin()
