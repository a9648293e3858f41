"""The life of one collective on one rank, over shared memory.

    1 expose    copy the payload where peers can read it (or find that it is already there)
    2 publish   write the header, which has to be equal on all ranks, and the note, which has the payload's offset
    3 arrive    store the sequence number in this rank's `arrive` mark: now peers may read header, note and payload
    4 wait      until the `arrive` marks of all members show the number
    5 compare   the headers of all members; if they differ, every rank raises and no data has been changed
    6 body      compute this rank's result straight from the peers' pages
    7 done      only if some rank exposed its own array: mark that it is no longer read, and wait if it is ours
    8 event     record the simulated time

A small collective costs one copy in, one store that peers poll, one wait, and one read of the peers' memory. There
is no second wait at the end: a rank arrives at collective n + 1 only after it has finished n, so the memory of n is
free again once all have arrived at n + 1.

The computation of a collective is its `Body`. `Call._life` is a generator that yields a condition where it would wait,
so other communication of the rank proceeds meanwhile. `fast_call` unrolls the same life for a blocking call with
nothing else in progress.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms.ledger import Ledger, open_ledgers
from simparallel.clock.event import COMPUTE
from simparallel.clock.recorder import Recorder
from simparallel.comm.call_group import CallGroup
from simparallel.comm.memory.staging import Payloads
from simparallel.comm.plan import CallPlan, Settings
from simparallel.comm.transport import order
from simparallel.comm.views import ARRIVE, DONE_MARK
from simparallel.comm.work import Steps, Work
from simparallel.machine.cluster import Traffic


class Call(Work):
    """One collective of one rank, from its header to its result.

    Args:
        group: the group.
        plan: plan of the collective.
        x: this rank's argument.
        out: array for the result; None for the default place.
        must_copy: peers and body need a copy of x, because `out` shares memory with x, or x would be written.

    Attributes:
        seq: number of the collective in its group.
        exposure: form in which the payload is exposed, a value of the header's word EXPOSURE.
        given: array that the body may read: x or a copy of it.
        kept: value passed from the body's `expose` to the body.
        other_offset: offset of the second piece, if the payload is exposed in pieces.
        wall_ns: start and end of the body on a GPU; None for the host's times.
        step_ps: duration of each step of a message algorithm, for the trace.
        ledgers: records of messages that were open when the call began.
        port_type: class of the sends and receives of an algorithm on messages; None for its own.
    """

    seq = -1
    exposure = h.COPIED
    kept: Any = None
    other_offset = 0
    wall_ns: tuple[int, int] | None = None
    step_ps: tuple[int, ...] = ()
    ledgers: tuple[Ledger, ...] = ()
    port_type: Any = None

    def __init__(self, group: CallGroup, plan: CallPlan, x: Any, out: Any, must_copy: bool) -> None:
        super().__init__(group.lane, self._life())
        self.group, self.plan, self.body = group, plan, plan.body
        self.x = self.given = x
        self.out, self.must_copy = out, must_copy
        if plan.body.by_messages:
            self.ledgers = open_ledgers()
        self.site = group.transport.call_site(4)
        # An async call may be published later, when its lane is free; its simulated start counts from the call.
        recorder = group.recorder
        self._issued_ps = 0 if recorder is None else recorder.clock_ps[COMPUTE]
        if recorder is not None and recorder.launcher is not None:
            self._issued_ps = recorder.issue()

    @property
    def zero_copy(self) -> bool:
        """Whether peers read the user's own array in place."""
        return self.exposure == h.OWN_ARRAY

    def _life(self) -> Steps:
        group, views, plan, recorder = self.group, self.group.views, self.plan, self.group.recorder
        start_ns, words = perf_counter_ns(), group.transport.words
        seq = self.seq = group.seq = group.seq + 1
        parity, alone = seq & 1, group.size == 1
        # Steps 1 and 2. The payload first, then the header. Peers look at neither before the `arrive` mark.
        self._publish()
        if not alone:
            # Steps 3 and 4. The mark is the only word that peers poll; `order` keeps our reads behind the wait.
            views.mark(ARRIVE + parity, seq)
            yield views.condition(ARRIVE + parity, seq)
            order()
        # Step 5. Up to here none of the user's arrays has been written.
        if not views.agree(plan, parity):
            raise group.header_error(parity)
        some_zero_copy = not plan.copied and h.OWN_ARRAY in views.offsets[parity].exposures(words)
        # The collective begins, in simulated time, when its last member is ready.
        sim_start_ps = max(views.offsets[parity].sims(words))
        # Step 6.
        result = yield from self.body.run(self)
        # Step 7. The owner of an array that peers read in place must not return before all have read it. Every
        # rank marks it, also one that exposed a copy; only an owner waits.
        if some_zero_copy and not alone:
            views.mark(DONE_MARK, seq)
            if self.zero_copy:
                yield views.condition(DONE_MARK, seq)
        if not views.is_shared:
            views.forget(ARRIVE + parity, seq)
        # Step 8. A kept `Work` must not keep the arrays alive.
        if recorder is not None:
            size_bytes, cost = plan.price or self.body.price(self, recorder)
            self.sim_busy_ps = cost.time_ps
            wall_ns = self.wall_ns or (start_ns, perf_counter_ns())
            times = *wall_ns, sim_start_ps, sim_start_ps + cost.time_ps
            sizes = size_bytes, cost.sent_bytes
            self.sim_end_ps = recorder.communicate(
                plan.op, "collective", group.stream, *times, *sizes, group.ranks, seq, self.step_ps, cost.algorithm,
                after=(self._issued_ps,),
            )  # fmt: skip
        self.x = self.kept = self.out = self.given = None
        return result

    def _publish(self) -> None:
        group, plan, parity = self.group, self.plan, self.seq & 1
        offset, size_bytes = self.body.expose(self)
        sim_ps = self._issued_ps
        # A stream runs one communication at a time: this one begins when the previous one has ended.
        if group.recorder is not None:
            sim_ps = max(sim_ps, group.recorder.clock_ps.get(group.stream, 0))
        note = plan.header[h.COMPARED :]
        # The words from SITE to SEQ.
        note[: h.SEQ + 1 - h.COMPARED] = array("q", (self.site, sim_ps, offset, size_bytes, self.exposure, self.seq))
        # In a scatter, this word describes the root's arrays.
        if self.other_offset:
            note[h.OTHER_OFFSET - h.COMPARED] = self.other_offset
        group.views.publish(plan, parity, note)

    # --- arrays that bodies write ---------------------------------------------------------------------

    @property
    def target(self) -> np.ndarray:
        """The array that an in-place collective writes: `out` if given, else x."""
        return self.x if self.out is None else self.out

    def moved(self) -> np.ndarray:
        """Return the target, filled with x. Only after the comparison, as with every write to the user's data."""
        target = self.target
        if target is not self.x:
            target[...] = self.x
        return target

    # --- memory that bodies read ----------------------------------------------------------------------

    def notes(self, word: int) -> list[int]:
        """Return one word of the notes of all members."""
        return self.group.views.words_of(word, self.seq & 1)

    def payloads(self) -> Payloads:
        """Return the payloads that the members expose."""
        if self.group.size == 1 and isinstance(self.x, np.ndarray):
            return Payloads.of([self.given])
        views, parity = self.group.views, self.seq & 1
        return views.payloads(self.plan, parity, views.offsets[parity].offsets(self.group.transport.words))

    def seen(self, part: np.ndarray) -> np.ndarray:
        """Return a member's part in the form that the body may use; without data in a dry run."""
        return part

    def describe(self) -> str:
        return self.group.describe(self.plan, self.seq, self.site)


# --- steps 1 and 6 ---------------------------------------------------------------------------------------


class Body:
    """The computation of a collective on one rank, from the payloads of all members to this rank's result.

    A body serves all calls with one plan, so it keeps what depends on shapes alone.

    It runs after all members have arrived and are known to make the same call, and it writes nothing but its own
    result. A body whose result needs no further wait overrides `result`; any other one overrides `run`.

    Attributes:
        copied: peers read a copy of the payload, never the user's own array; then no rank waits at the end.
        others: parts of the payload that peers read; None for all of it, [] for no part.
        has_note: the root's note describes its arrays to the other ranks.
        by_messages: the payload travels in messages; peers read no memory.
        call_type: class of its calls; None for the medium's.
        is_root: this rank is the root of a collective that has one.

    Args:
        group: the group.
        x: an array like the payload; None if this rank has none.
        settings: the other arguments.
    """

    copied = False
    others: Sequence[Any] | None = None
    has_note = False
    by_messages = False
    call_type: type[Call] | None = None

    def __init__(self, group: CallGroup, x: np.ndarray | None, settings: Settings) -> None:
        self.group, self.position, self.settings, self.rule = group, group.position, settings, settings.rule
        self.is_root = group.position == settings.root

    def expose(self, call: Call) -> tuple[int, int]:
        """Put this rank's payload where peers can read it. Returns (offset in the arena, bytes)."""
        plan = call.plan
        offset, zero_copy, call.given = self.group.views.offer(plan, call.seq & 1, call.x, call.must_copy)
        if zero_copy:
            # The owner of an array that is read in place has to wait at the end (step 7), so all ranks are informed.
            call.exposure = h.OWN_ARRAY
        return offset, plan.payload_bytes * plan.exposes

    def result(self, peers: Any, x: Any, out: Any) -> Any:
        """Return this rank's result.

        Args:
            peers: the members' `Payloads`, in the order of the group.
            x: this rank's argument.
            out: array for the result; None for the default place.
        """
        raise NotImplementedError

    def run(self, call: Call) -> Steps:
        """Yield each condition that the body waits for, and return the result."""
        yield from ()
        return self.result(call.payloads(), call.given, call.out)

    def price(self, call: Call, recorder: Recorder) -> tuple[int, Traffic]:
        """Return the bytes of the vector and the price of a call on the described network."""
        return self.group.price(call.plan, call.seq & 1)

    @classmethod
    def waits(cls) -> bool:
        """Return whether the body itself may wait, between the arrival of the members and its result."""
        # A body that may wait is a generator, which `fast_call` cannot run.
        return cls.run is not Body.run


class Nothing(Body):
    """The body of a collective without a result."""

    def result(self, peers: Any, x: Any, out: Any) -> None:
        return None


def into(out: np.ndarray | None, result: np.ndarray) -> np.ndarray:
    """Copy a result to `out`, or to a new array."""
    if out is None:
        return result.copy()
    out[...] = result
    return out
