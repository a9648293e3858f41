"""Calls that check at every phase and step whether a fault is due. Imported only where one was requested."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.comm.call import Body, Call
from simparallel.comm.direct.by_messages import MessagePort
from simparallel.comm.group import Group
from simparallel.comm.work import Steps, Work


class FaultyMessagePort(MessagePort):
    """Sends and receives that check for faults before they begin and when they are done."""

    def __init__(self, group: Group, call: FaultyCall) -> None:
        super().__init__(group, call)
        self._call = call
        self._ends: dict[Work, str] = {}

    def start_send(self, x: np.ndarray, dst: int) -> Work:
        self._at("send")
        work = super().start_send(x, dst)
        self._ends[work] = "sent"
        return work

    def start_recv(self, x: np.ndarray, src: int) -> Work:
        self._at("receive")
        work = super().start_recv(x, src)
        self._ends[work] = "received"
        return work

    def until(self, begun: Work) -> Steps:
        yield from super().until(begun)
        self._at(self._ends.pop(begun))

    def _at(self, phase: str) -> None:
        faults = self._call.group.transport.faults
        if faults is not None:
            faults.at(phase, *self._call.place(), step=len(self.traffic))


class FaultyBody(Body):
    """A body that checks for faults before and after its parts."""

    def __init__(self, body: Body) -> None:
        super().__init__(body.group, None, body.settings)
        self._body = body
        self.price = body.price  # type: ignore[method-assign]

    def expose(self, call: FaultyCall) -> tuple[int, int]:  # type: ignore[override]
        # At phase copy_in the second half of the copy holds garbage, as if the rank died in the middle of copying.
        offset, size_bytes = self._body.expose(call)
        plan, transport = call.plan, call.group.transport
        is_one = not plan.exposes or math.prod(plan.shape) < 2
        if is_one or call.group.size == 1 or call.zero_copy or plan.body.by_messages:
            call.at("copy_in")
            return offset, size_bytes
        copy = transport.segment.array(transport.rank, offset, (size_bytes,), np.dtype(np.uint8))
        second_half = copy[size_bytes // 2 :]
        saved = second_half.copy()
        second_half[...] = 0xFF
        call.at("copy_in")
        second_half[...] = saved
        return offset, size_bytes

    def run(self, call: FaultyCall) -> Steps:  # type: ignore[override]
        # A call without peers has not reached this phase before: it waited for no arrival.
        call.at("published")
        call.at("reduce")
        # After the first wait its own part is written; the other ranks' parts are copied next.
        return (yield from _observed(self._body.run(call), call.at, "copy_out", ("copy_out", "leave")))


class FaultyCall(Call):
    """A collective that checks for faults in each phase."""

    port_type = FaultyMessagePort

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.body = FaultyBody(self.body)
        # These phases belong to copies of the payload; a collective on messages has the phases of its messages instead.
        self._passed = {"copy_in", "copy_out"} if self.plan.body.by_messages else set()

    def at(self, phase: str) -> None:
        """Act if a fault is due at a phase that is reached for the first time."""
        if phase in self._passed:
            return
        self._passed.add(phase)
        faults = self.group.transport.faults
        if faults is not None:
            faults.at(phase, *self.place())

    def place(self) -> tuple[str, str, int]:
        """Return group, op and number, as `Faults` takes them."""
        group = self.group
        seq = self.seq if self.seq > 0 else group.seq + 1
        return "world" if group.slot == 0 else str(group.slot), self.plan.op, seq

    def _publish(self) -> None:
        super()._publish()
        views, faults = self.group.views, self.group.transport.faults
        # Before the `arrive` mark, so no peer has read the header yet.
        if faults is not None:
            faults.corrupt(self.group.transport.words, views.own_headers[self.seq & 1], *self.place())

    def _life(self) -> Steps:
        self.at("enter")
        # The first condition is the arrival of the others.
        return (yield from _observed(super()._life(), self.at, "published", ("returned",)))


def _observed(steps: Steps, at: Callable[[str], None], after_wait: str, at_end: tuple[str, ...]) -> Steps:
    """Run the steps and report the phases: "published" before each wait, `after_wait` after it, `at_end` at the end."""
    while True:
        try:
            condition = next(steps)
        except StopIteration as end:
            for phase in at_end:
                at(phase)
            return end.value
        at("published")
        yield condition
        at(after_wait)
