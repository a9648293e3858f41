"""Messages between two ranks: a ring of 16 message slots in each direction.

The sender copies its payload into its own arena, writes the header into a slot (a letter in the code), and then raises
its `sent` number. The receiver copies the payload out and raises its `taken` number; from then on the memory belongs
to the sender again. So `send` returns once the payload is on its way, and only a full ring makes it wait. Messages are
taken in the order they were sent. The payload goes straight to the receive with the same tag; if there is none yet, a
copy is kept for it.
"""

from __future__ import annotations

import contextlib
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from time import perf_counter_ns
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.backend import has_data, without_data
from simparallel.comm.asked import BYTES, Message, Named, Receive, Together
from simparallel.comm.diagnosis import letter_text
from simparallel.comm.shm.segment import LETTER_WORDS, RING
from simparallel.comm.transport import AbstractTransport, Condition, order
from simparallel.comm.work import Lane, Steps, Work
from simparallel.errors import CollectiveMismatchError
from simparallel.hardware.recorder import Recorder


@lru_cache(maxsize=1024)
def _form(dtype: np.dtype, shape: tuple[int, ...]) -> array[int]:
    """Encode the header of a message of such an array, without the words that change from message to message."""
    return h.encode("send", dtype=dtype, shape=shape)


class Send(Work):
    """A message being sent."""

    def __init__(self, outbox: Outbox, steps: Steps, named: Named) -> None:
        super().__init__(outbox, steps)
        self._named = named

    def describe(self) -> str:
        return self._named.text(self._lane.transport)


class Outbox(Lane):
    """Messages from this rank to one other rank."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], dst: int
    ) -> None:
        super().__init__(transport, lanes, recorder.join if recorder else None)
        self.dst = dst
        self.recorder = recorder
        self._sent = 0
        self._replies = 0  # number of replies requested
        self._in_flight: list[tuple[int, int]] = []  # (number, offset), oldest first
        control = transport.segment.map
        self._sent_index = control.sent(transport.rank, dst)
        self._taken_index = control.taken(dst, transport.rank)
        self._letters = [control.letter(transport.rank, dst, number) for number in range(RING)]
        transport.segment.reserve_words(transport.rank, self._letters[0], RING * LETTER_WORDS)

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
        issued_ps = recorder.issue(f"send to {self.dst}") if recorder else at_ps
        named = Named("send", x.dtype, x.shape, "dst", self.dst, tag, site)
        return self.submit(Send(self, self._steps(x, tag, site, issued_ps, recorder), named))

    def send_and_ask(self, x: np.ndarray, tag: int, replies: Inbox) -> Work:
        """Queue a message; the work is finished once the other side has received it and replied."""
        site = self.transport.call_site()
        self._replies += 1
        issued_ps = self.recorder.issue(f"send to {self.dst}") if self.recorder else 0
        named = Named("ssend", x.dtype, x.shape, "dst", self.dst, tag, site)
        reply = Receive([replies], np.empty(0, BYTES), -self._replies, named, issued_ps, None)
        sent = Send(self, self._steps(x, tag, site, issued_ps, self.recorder, self._replies), named)
        return Together([self.submit(sent), reply.begin()])

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
        letter = _form(x.dtype, x.shape)[:]
        letter[h.SEQ], letter[h.SITE], letter[h.SIM_PS] = number, site, start_ps
        letter[h.OFFSET], letter[h.NBYTES], letter[h.TAG] = offset, x.nbytes, tag
        letter[h.SHOWN], letter[h.WISH] = reply, 0 if has_data(x) else h.NO_DATA
        if faults is not None:
            faults.corrupt(letter, 0, "p2p", "send", number + 1)
        start = self._letters[number % RING]
        words[start : start + h.USED] = letter
        order()
        # Published: the payload and the header were stored before the number that the receiver polls.
        self._sent = words[self._sent_index] = number + 1
        transport.notify(self._sent_index)
        self._in_flight.append((number, offset))
        if faults is not None:
            faults.at("published", "p2p", "send", number + 1)
        if recorder is not None:
            cost = recorder.cluster.message(x.nbytes, transport.rank, self.dst)
            end_ps = self._queue[0].sim_end_ps = start_ps + cost.time_ps  # the running work is this one
            recorder.communicate(
                "send",
                "p2p",
                stream,
                start_ns,
                perf_counter_ns(),
                start_ps,
                end_ps,
                x.nbytes,
                cost.sent_bytes,
                (transport.rank, self.dst),
                number,
            )
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


class Inbox(Lane):
    """Messages to this rank from one other rank. Receives finish as their messages arrive, by tag."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], src: int
    ) -> None:
        super().__init__(transport, lanes, recorder.join if recorder else None)
        self.src = src
        self.recorder = recorder
        self._taken = 0
        # Sends a message back to the sender.
        self.reply: Callable[..., Work] | None = None
        self._last_call: Named | None = None
        self._queue: deque[Any] = deque()  # of `Receive`
        self._unclaimed: list[tuple[list[int], np.ndarray]] = []  # headers and copied payloads, not yet received
        control = transport.segment.map
        self._sent_index = control.sent(src, transport.rank)
        self._taken_index = control.taken(transport.rank, src)
        self._letters = [control.letter(src, transport.rank, number) for number in range(RING)]

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
        for i, (letter, raw) in enumerate(self._unclaimed):
            if receive.takes(letter[h.TAG]):
                del self._unclaimed[i]
                self._deliver(receive, letter, raw)
                self._fault("returned", letter[h.SEQ])
                return True
        return False

    def look_for(self, receive: Receive) -> Message | None:
        """Return a message that could be delivered now, or None."""
        # Messages that have arrived but were not received are sorted by tag here, as in `advance`.
        self.check()
        while self.transport.met(self.awaited()):
            self._take()
        for letter, _ in self._unclaimed:
            if receive.takes(letter[h.TAG]):
                ndim, code = letter[h.NDIM], letter[h.DTYPE]
                shape = tuple(letter[h.SHAPE : h.SHAPE + ndim]) if ndim <= h.ALGORITHM - h.SHAPE else None
                dtype = h.decode_given(code, 0)[1] if code > 0 else None
                return Message(self.src, letter[h.TAG], shape, dtype, letter[h.NBYTES])
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
        start = self._letters[self._taken % RING]
        letter = words[start : start + h.USED].tolist()
        size_bytes = 0 if letter[h.WISH] == h.NO_DATA else letter[h.NBYTES]
        raw = transport.segment.array(self.src, letter[h.OFFSET], (size_bytes,), BYTES)
        # The first receive in order that takes this tag: messages with other tags do not block it.
        receive = next((work for work in self._queue if work.takes(letter[h.TAG])), None)
        try:
            if receive is None:
                # The ring's slot belongs to the sender again once the message is taken, so a message without a receive
                # is copied.
                self._unclaimed.append((letter, raw.copy()))
            else:
                self._deliver(receive, letter, raw)
                receive.withdraw()
        finally:  # also after a mismatch, so that the sender is not held up
            self._fault("copy_out", self._taken)
            # The payload has been read before the sender learns that its memory is free.
            order()
            self._fault("leave", self._taken)
            self._taken = words[self._taken_index] = self._taken + 1
            transport.notify(self._taken_index)
        if receive is not None:
            self._fault("returned", letter[h.SEQ])

    def _fault(self, phase: str, number: int) -> None:
        if self.transport.faults is not None:
            self.transport.faults.at(phase, "p2p", "recv", number + 1)

    def letters(self) -> list[str]:
        """Describe the messages that were taken out of the ring and are not received yet."""
        return [letter_text(self.transport.segment, self.src, letter) for letter, _ in self._unclaimed]

    def kept(self) -> list[tuple[int, str]]:
        """Return (sender, text) of these messages, at the end of a run."""
        last = self._last_call
        asked = f", but the last one asked for was {last.text(self.transport)}" if last is not None else ""
        return [(self.src, f"{letter}{asked}") for letter in self.letters()]

    def _deliver(self, receive: Receive, letter: list[int], raw: np.ndarray) -> None:
        x, transport, recorder = receive.x, self.transport, receive.recorder
        # The form is compared as words: dtype, dims and shape as the sender encoded them.
        if letter[h.DTYPE : h.ALGORITHM] != _form(x.dtype, x.shape)[h.DTYPE : h.ALGORITHM].tolist():
            place = transport.site_text(self.src, letter[h.SITE])
            call = receive.named.text(transport)
            error = CollectiveMismatchError(
                f"rank {transport.rank}: {call}, but rank {self.src} sent {h.describe(letter)[5:]} "
                f"at {place}. No data was changed. Both sides need the same shape and dtype.",
                group=f"ranks {self.src} -> {transport.rank}",
                seq=letter[h.SEQ],
                calls={self.src: h.describe(letter), transport.rank: call},
            )
            # Later receives from this rank raise it too.
            self.fail(error)
            raise error
        if letter[h.WISH] == h.NO_DATA:
            x = without_data(x)
        else:
            x[...] = raw.view(x.dtype).reshape(x.shape)
        receive.result, receive.finished = x, True
        receive.source, receive.sent_tag = self.src, letter[h.TAG]
        receive.sim_end_ps = letter[h.SIM_PS]
        if recorder is not None:
            # The receive ends no earlier than the message arrives, and no earlier than it was asked for.
            stream = f"recv from {self.src}"
            cost = recorder.cluster.message(x.nbytes, self.src, transport.rank)
            end_ps = max(receive.issued_ps, letter[h.SIM_PS] + cost.time_ps)
            begin_ps = max(receive.issued_ps, letter[h.SIM_PS], recorder.clock_ps.get(stream, 0))
            receive.sim_end_ps = end_ps
            recorder.communicate(
                "recv",
                "p2p",
                stream,
                receive.start_ns,
                perf_counter_ns(),
                min(begin_ps, end_ps),
                end_ps,
                x.nbytes,
                0,
                (self.src, transport.rank),
                letter[h.SEQ],
            )
        # The sender asked for a reply (`ssend`)
        if letter[h.SHOWN] and self.reply is not None:
            self.reply(np.empty(0, BYTES), -letter[h.SHOWN], receive.named.site, receive.sim_end_ps)


def receive(inboxes: Sequence[Inbox], x: np.ndarray, tag: int | None, part_of: int | None = None) -> Receive:
    """Start a receive of a message from any of these inboxes. `part_of`: see `Inbox.receive`."""
    first = inboxes[0]
    site = first.transport.call_site() if part_of is None else part_of
    recorder = first.recorder if part_of is None else None
    named = Named("recv", x.dtype, x.shape, "src", first.src if len(inboxes) == 1 else None, tag, site)
    issued_ps = recorder.issue(f"recv from {first.src}") if recorder else 0
    return Receive(inboxes, x, tag, named, issued_ps, recorder).begin()
