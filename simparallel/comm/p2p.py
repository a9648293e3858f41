"""Messages between two ranks: a ring of 16 letters in each direction.

The sender copies its payload into its own arena, writes the letter's header and then raises its
`sent` number; the receiver copies the payload out and raises its `taken` number, and then the
memory is the sender's again. So `send` returns once the payload is on its way, and only a full
ring makes it wait. Letters are taken in the order they were sent; those whose tag nobody has asked
for are kept until someone does.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from simparallel.comm import header as h
from simparallel.comm.progress import letter_text
from simparallel.comm.segment import RING, order
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.work import Lane, Steps, Work
from simparallel.errors import CollectiveMismatchError
from simparallel.events import Recorder


class _Named(NamedTuple):
    """What a call is told apart by, without its array."""

    op: str
    dtype: np.dtype
    shape: tuple[int, ...]
    peer: str
    rank: int
    tag: int
    site: int

    def text(self, transport: AbstractTransport) -> str:
        call = f"{self.op}({self.dtype} {self.shape}, {self.peer}={self.rank}, tag={self.tag})"
        return f"{call} at {transport.site_text(transport.rank, self.site)}"


class Send(Work):
    """A message that goes."""

    def __init__(self, outbox: Outbox, steps: Steps, named: _Named) -> None:
        super().__init__(outbox, steps)
        self._named = named

    def describe(self) -> str:
        return self._named.text(self._lane.transport)


class Outbox(Lane):
    """Messages from this rank to one other."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], dst: int
    ) -> None:
        super().__init__(transport, lanes, recorder.join if recorder else None)
        self.dst = dst
        self.recorder = recorder
        self._sent = 0
        self._in_flight: list[tuple[int, int]] = []  # (number, offset), oldest first
        control = transport.segment.map
        self._sent_index = control.sent(transport.rank, dst)
        self._taken_index = control.taken(dst, transport.rank)

    def send(self, x: np.ndarray, tag: int, part_of: int | None = None) -> Work:
        """Queue a message. `part_of`: call site of the collective whose event stands for this message too."""
        site = self.transport.call_site() if part_of is None else part_of
        issued_ps = self.recorder.now_ps if self.recorder else 0
        steps = self._steps(x, tag, site, issued_ps, self.recorder if part_of is None else None)
        return self.submit(Send(self, steps, _Named("send", x.dtype, x.shape, "dst", self.dst, tag, site)))

    def _steps(self, x: np.ndarray, tag: int, site: int, issued_ps: int, recorder: Recorder | None) -> Steps:
        transport, words = self.transport, self.transport.words
        start_ns, number = perf_counter_ns(), self._sent
        faults = transport.faults
        if faults is not None:
            faults.at("enter", "p2p", "send", number + 1)
        if words[self._taken_index] <= number - RING:
            yield Condition((self._taken_index,), (self.dst,), number - RING + 1)
        self._reclaim()
        offset = transport.arena.allocate(x.nbytes)
        transport.segment.array(transport.rank, offset, x.shape, x.dtype)[...] = x
        if faults is not None:
            faults.at("copy_in", "p2p", "send", number + 1)

        stream = f"send to {self.dst}"
        start_ps = max(issued_ps, recorder.clock_ps.get(stream, 0)) if recorder else 0
        letter = h.encode("send", dtype=x.dtype, shape=x.shape)
        letter[h.SEQ], letter[h.SITE], letter[h.SIM_PS] = number, site, start_ps
        letter[h.OFFSET], letter[h.NBYTES], letter[h.TAG] = offset, x.nbytes, tag
        if faults is not None:
            faults.corrupt(letter, 0, "p2p", "send", number + 1)
        start = transport.segment.map.letter(transport.rank, self.dst, number)
        words[start : start + h.USED] = letter
        order()
        self._sent = words[self._sent_index] = number + 1  # published: payload, letter, number
        transport.notify(self._sent_index)
        self._in_flight.append((number, offset))
        if faults is not None:
            faults.at("published", "p2p", "send", number + 1)
        if recorder is not None:
            cost = recorder.cluster.message(x.nbytes, transport.rank, self.dst)
            end_ps = self._queue[0].sim_end_ps = start_ps + cost.time_ps  # the first one is running
            recorder.communicate(
                "send", "p2p", stream, start_ns, perf_counter_ns(), start_ps, end_ps,
                x.nbytes, cost.sent_bytes, (transport.rank, self.dst), number,
            )  # fmt: skip
        if faults is not None:
            faults.at("returned", "p2p", "send", number + 1)

    def release(self) -> None:
        """Give the memory of all letters back. Only when no rank can read it any more."""
        self._reclaim(everything=True)

    def _reclaim(self, everything: bool = False) -> None:
        taken = self._sent if everything else self.transport.words[self._taken_index]
        while self._in_flight and self._in_flight[0][0] < taken:
            self.transport.arena.free(self._in_flight.pop(0)[1])


class Receive(Work):
    """A message that was asked for."""

    def __init__(
        self, inbox: Inbox, x: np.ndarray, tag: int, site: int, issued_ps: int, recorder: Recorder | None
    ) -> None:
        super().__init__(inbox, None)
        self.recorder = recorder
        self.x = x
        self.named = _Named("recv", x.dtype, x.shape, "src", inbox.src, tag, site)
        self.issued_ps = issued_ps
        self.start_ns = perf_counter_ns()

    def describe(self) -> str:
        return self.named.text(self._lane.transport)


class Inbox(Lane):
    """Messages to this rank from one other. Receives end as their messages come, by tag."""

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None], src: int
    ) -> None:
        super().__init__(transport, lanes, recorder.join if recorder else None)
        self.src = src
        self.recorder = recorder
        self._taken = 0
        self._last_call: _Named | None = None
        self._unclaimed: list[tuple[list[int], np.ndarray]] = []
        control = transport.segment.map
        self._sent_index = control.sent(src, transport.rank)
        self._taken_index = control.taken(transport.rank, src)

    def receive(self, x: np.ndarray, tag: int, part_of: int | None = None) -> Work:
        """Ask for a message. `part_of`: call site of the collective whose event stands for this message too."""
        site = self.transport.call_site() if part_of is None else part_of
        recorder = self.recorder if part_of is None else None
        receive = Receive(self, x, tag, site, recorder.now_ps if recorder else 0, recorder)
        self._last_call = receive.named
        self._fault("enter")
        self._queue.append(receive)
        self._others[self] = None
        self.advance()
        return receive

    def advance(self) -> Condition | None:
        if self._error is not None:
            raise self._error
        while True:
            self._match()
            if not self._queue:
                self._others.pop(self, None)
                return None
            if self.transport.words[self._sent_index] <= self._taken:
                return Condition((self._sent_index,), (self.src,), self._taken + 1)
            self._take()

    def _take(self) -> None:
        """Copy the next letter and its payload out of the ring."""
        transport, words = self.transport, self.transport.words
        order()
        start = transport.segment.map.letter(self.src, transport.rank, self._taken)
        letter = list(words[start : start + h.USED])
        raw = transport.segment.array(self.src, letter[h.OFFSET], (letter[h.NBYTES],), np.dtype(np.uint8))
        self._unclaimed.append((letter, raw.copy()))
        self._fault("copy_out")
        order()
        self._fault("leave")
        self._taken = words[self._taken_index] = self._taken + 1
        transport.notify(self._taken_index)

    def _fault(self, phase: str) -> None:
        if self.transport.faults is not None:
            self.transport.faults.at(phase, "p2p", "recv", self._taken + 1)

    def kept(self) -> list[tuple[int, str]]:
        """(sender, text) of messages that were taken out of the ring and never asked for."""
        segment, last = self.transport.segment, self._last_call
        asked = f", but the last one asked for was {last.text(self.transport)}" if last is not None else ""
        return [
            (self.src, f"{letter_text(segment, self.src, letter)}{asked}") for letter, _ in self._unclaimed
        ]

    def _match(self) -> None:
        for receive in list(self._queue):
            assert isinstance(receive, Receive)
            for i, (letter, raw) in enumerate(self._unclaimed):
                if letter[h.TAG] == receive.named.tag:
                    try:
                        self._deliver(receive, letter, raw)
                    except CollectiveMismatchError as error:  # whoever asks from now on gets it too
                        self._error = error
                        raise
                    del self._unclaimed[i]
                    self._queue.remove(receive)
                    if self.transport.faults is not None:
                        self.transport.faults.at("returned", "p2p", "recv", letter[h.SEQ] + 1)
                    break

    def _deliver(self, receive: Receive, letter: list[int], raw: np.ndarray) -> None:
        x, transport, recorder = receive.x, self.transport, receive.recorder
        expected = h.encode("send", dtype=x.dtype, shape=x.shape)
        if letter[h.DTYPE : h.MEMBERS] != expected[h.DTYPE : h.MEMBERS].tolist():
            place = transport.site_text(self.src, letter[h.SITE])
            raise CollectiveMismatchError(
                f"rank {transport.rank}: {receive.describe()}, but rank {self.src} sent {h.describe(letter)[5:]} "
                f"at {place}. No data was changed. Both sides need the same shape and dtype.",
                group=f"ranks {self.src} -> {transport.rank}", seq=letter[h.SEQ],
                calls={self.src: h.describe(letter), transport.rank: receive.describe()},
            )  # fmt: skip
        x[...] = raw.view(x.dtype).reshape(x.shape)
        receive.result, receive.finished = x, True
        if recorder is not None:
            stream = f"recv from {self.src}"
            cost = recorder.cluster.message(x.nbytes, self.src, transport.rank)
            end_ps = max(receive.issued_ps, letter[h.SIM_PS] + cost.time_ps)
            begin_ps = max(receive.issued_ps, letter[h.SIM_PS], recorder.clock_ps.get(stream, 0))
            receive.sim_end_ps = end_ps
            recorder.communicate(
                "recv", "p2p", stream, receive.start_ns, perf_counter_ns(), min(begin_ps, end_ps), end_ps,
                x.nbytes, 0, (self.src, transport.rank), letter[h.SEQ],
            )  # fmt: skip
