"""A group of ranks, and how its collectives are run.

Small payloads lie in the group's slot, of which there are two: a rank that is in collective n+2
has seen everyone arrive at n+1, so everyone has finished n and its slot is free. That holds
because a rank arrives only after it has finished its previous collective of the group.
Larger payloads lie in staging memory, two again, or are read where they are if the array lives
in the arena; then its owner also waits for `done` of all before it returns.
"""

from __future__ import annotations

import sys
from array import array
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from simparallel.cluster import Traffic
from simparallel.comm import header as h
from simparallel.comm.call import ARRIVE, NO_PAYLOADS, PHASE, Body, BodySteps, Call, CallPlan, Payloads
from simparallel.comm.direct import Direct
from simparallel.comm.segment import WORD, ControlMap, order
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.work import Lane
from simparallel.events import Recorder

MAX_PLANS = 1024  # kept for calls that may come again
_ZERO = bytes(WORD)


class _Desk(NamedTuple):
    """Where a collective reads and writes, by parity: words of its own, and bytes of all members.

    The bytes are those of all ranks from the first to the last member; ranks between that are none have zeros.
    """

    site: int
    sim_ps: int
    offset: int
    seq: int
    arrive: int
    arrivals: slice
    headers: slice


class Group(Direct):
    """An ordered list of ranks that communicate; its order is the chunk order.

    Attributes:
        ranks: global ranks, in the group's order.
        rank: this rank's position in the group, or None if it is not a member.
        size: number of members.
    """

    call_type: type[Call] = Call

    def __init__(
        self, transport: AbstractTransport, recorder: Recorder | None, lanes: dict[Lane, None],
        slot: int, ranks: tuple[int, ...],
    ) -> None:  # fmt: skip
        self.ranks = ranks
        self.size = len(ranks)
        self.rank = ranks.index(transport.rank) if transport.rank in ranks else None
        self.name = "world" if slot == 0 else f"group {slot} (ranks {', '.join(map(str, ranks))})"
        self.stream = f"comm {'world' if slot == 0 else slot}"
        self.transport = transport
        self.recorder = recorder
        self.lane = Lane(transport, lanes, recorder.join if recorder else None)
        self.plans: dict[Any, CallPlan] = {}
        self.by_messages: dict[str, Any] = {}  # this group by another algorithm
        self._busy = lanes  # empty while nothing of this rank was begun and not finished
        self._slot = slot
        self._seq = 0
        self._shown: list[CallPlan | None] = [None, None]  # whose header is in shared memory, by parity
        self._phase = 0
        self._staging: list[tuple[int, int]] = [(0, 0), (0, 0)]  # (offset, bytes) by parity
        self._pieces: list[tuple[int, int]] = [(0, 0), (0, 0)]  # the same, for payloads in pieces, by turns
        self._turn = 0
        self._slot_views: dict[Any, Payloads] = {}
        if self.rank is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Where everything is, is planned once; a collective only reads it."""
        transport, ranks, both = self.transport, self.ranks, (0, 1)
        control, slot, me = transport.segment.map, self._slot, transport.rank
        self.position = ranks.index(me)
        self._peers = tuple(rank for rank in ranks if rank != me)
        self._watched = [tuple(control.mark(slot, r, which) for r in self._peers) for which in range(4)]
        self._own_marks = [control.mark(slot, me, which) for which in range(4)]
        self._own_headers = [control.header(slot, parity, me) for parity in both]
        self.notes = [[control.note(slot, parity, rank) for rank in ranks] for parity in both]
        self._slots = transport.arena.reserve_slots(slot)
        self._span = range(min(ranks), max(ranks) + 1)
        self._desks = [self._desk(control, parity) for parity in both]

    def _desk(self, control: ControlMap, parity: int) -> _Desk:
        slot, me, first, last = self._slot, self.transport.rank, self._span[0], self._span[-1]
        note = control.note(slot, parity, me) - h.COMPARED
        arrivals = [control.mark(slot, rank, ARRIVE + parity) for rank in (first, last)]
        headers = [control.header(slot, parity, rank) for rank in (first, last)]
        return _Desk(
            note + h.SITE, note + h.SIM_PS, note + h.OFFSET, note + h.SEQ, control.mark(slot, me, ARRIVE + parity),
            slice(WORD * arrivals[0], WORD * (arrivals[1] + 1)),
            slice(WORD * headers[0], WORD * (headers[1] + h.COMPARED)),
        )  # fmt: skip

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Itself: a copy of a model that has a group has the same one."""
        return self

    # --- the life of a collective --------------------------------------------------------------------

    def add_plan(
        self, key: tuple[Any, ...], header: array[int], body: Body | BodySteps, x: np.ndarray | None = None,
        vector_bytes: int = 0, root: int = 0, *, exposes: bool = True, plans: dict[Any, CallPlan] | None = None,
        kind: type[Call] | None = None,
    ) -> CallPlan:  # fmt: skip
        """Plan a collective.

        Args:
            key: name of the op, and everything the plan depends on; `plans` finds it again by this.
            header: of its calls.
            body: reads from the peers, after the headers were found equal.
            x: what peers may read from us looks like this; None for nothing.
            vector_bytes: what the network model prices; -1 if only the root knows.
            root: its position.
            exposes: False if this rank has nothing to show.
            plans: where to keep it.
            kind: `Call`, or one whose payload travels otherwise.
        """
        plans = self.plans if plans is None else plans
        if len(plans) >= MAX_PLANS:
            plans.clear()
        payload = ((), None, 0) if x is None else (x.shape, x.dtype, x.nbytes)
        plan = CallPlan(
            key[0],
            header,
            body,
            kind or self.call_type,
            payload,
            exposes and x is not None,
            vector_bytes,
            root,
        )
        compared = header[: h.COMPARED].tobytes()
        plan.expected = b"".join(
            compared if rank in self.ranks else bytes(len(compared)) for rank in self._span
        )
        if plan.in_slot:
            for parity, offset in enumerate(self._slots):
                views = NO_PAYLOADS if x is None else self.views([offset] * self.size, x.shape, x.dtype)
                plan.seen[parity] = [], views
        plans[key] = plan
        return plan

    def run(self, plan: CallPlan, x: Any, async_op: bool = False) -> Any:
        """Run one collective with this rank's argument: its result, or with `async_op` its `Work`."""
        if async_op or self._busy or self.size == 1 or not plan.copied or plan.kind is not Call:
            work = plan.kind(self, plan, x)
            self.lane.submit(work)
            return work if async_op else work.wait()
        return self._run_now(plan, x)

    def _run_now(self, plan: CallPlan, x: Any) -> Any:
        """What `Call` does, in one go: nobody else has to be advanced meanwhile, and nothing is looked up twice."""
        self.lane.check()
        start_ns = perf_counter_ns()
        transport, recorder = self.transport, self.recorder
        words, memory = transport.words, transport.memory
        site = transport.call_site()
        seq = self._seq = self._seq + 1
        parity = seq & 1
        desk = self._desks[parity]
        try:
            if plan.exposes:
                offset, own = self.own_room(plan, parity)
                own[...] = x
                words[desk.offset] = offset
            if self._shown[parity] is not plan:
                self.publish(plan, parity)
            words[desk.site] = site
            if recorder is not None:
                words[desk.sim_ps] = max(recorder.now_ps, recorder.clock_ps.get(self.stream, 0))
            words[desk.seq] = seq
            order()
            words[desk.arrive] = seq
            transport.notify(desk.arrive)
            arrived = self._all_arrived(seq)
            if memory[desk.arrivals] != arrived and not transport.sees(desk.arrivals, arrived):
                transport.wait(
                    (self.condition(ARRIVE + parity, seq),), lambda: self.describe(plan, seq, site)
                )
            order()
            if memory[desk.headers] != plan.expected:
                self.compare(plan, parity)
            result = plan.body(self.payloads(plan, parity), x)
        except BaseException as error:
            self.lane.fail(error)
            if isinstance(error, KeyboardInterrupt):
                transport.interrupted(
                    self.condition(ARRIVE + parity, seq), lambda: self.describe(plan, seq, site)
                )
            raise
        if recorder is not None:
            cost = plan.cost or self.price(plan, recorder, plan.vector_bytes)
            sim_start_ps = self.sim_start_ps(seq)
            sim_end_ps = sim_start_ps + cost.time_ps
            recorder.communicate(
                plan.op, "collective", self.stream, start_ns, perf_counter_ns(),
                sim_start_ps, sim_end_ps, plan.vector_bytes, cost.sent_bytes, self.ranks, seq,
            )  # fmt: skip
            recorder.join(sim_end_ps)
        return result

    def publish(self, plan: CallPlan, parity: int) -> None:
        """Show the header of a plan."""
        start = self._own_headers[parity]
        self.transport.words[start : start + h.COMPARED] = plan.header[: h.COMPARED]
        self._shown[parity] = plan

    def _all_arrived(self, seq: int) -> bytes:
        """What the arrivals show when everyone is here. Nobody can be further: the other parity comes next."""
        word = seq.to_bytes(WORD, sys.byteorder)
        if len(self._span) == self.size:
            return word * self.size
        return b"".join(word if rank in self.ranks else _ZERO for rank in self._span)

    def condition(self, which: int, seq: int) -> Condition:
        return Condition(self._watched[which], self._peers, seq)

    def mark(self, which: int, seq: int) -> None:
        index = self._own_marks[which]
        order()
        self.transport.words[index] = seq
        self.transport.notify(index)

    def compare(self, plan: CallPlan, parity: int) -> None:
        """Compare the headers of all members, who have arrived.

        Raises:
            CollectiveMismatchError: with every rank's call and place.
        """
        transport = self.transport
        compared = transport.compared
        if compared == h.COMPARED:
            if transport.memory[self._desks[parity].headers] == plan.expected:
                return
        else:
            found = transport.memory[self._desks[parity].headers]
            size, step = compared * WORD, h.COMPARED * WORD
            starts = range(0, len(found), step)
            if all(found[i : i + size] == plan.expected[i : i + size] for i in starts):
                return
        segment = transport.segment
        headers = {rank: segment.call_of(self._slot, parity, rank) for rank in self.ranks}
        sites = {rank: transport.site_text(rank, words[h.SITE]) for rank, words in headers.items()}
        raise h.mismatch_error(self.name, headers, sites, transport.rank)

    def sim_start_ps(self, seq: int) -> int:
        """When the last member was ready for a collective, in simulated time."""
        return max(self.words_of(h.SIM_PS, seq & 1))

    def price(self, plan: CallPlan, recorder: Recorder, size_bytes: int) -> Traffic:
        """What the described network takes for a call."""
        cost = recorder.cluster.collective(
            plan.op, size_bytes, self.ranks, position=self.position, root=plan.root
        )
        if plan.vector_bytes >= 0:
            plan.cost = cost
        return cost

    def describe(self, plan: CallPlan, seq: int, site: int) -> str:
        """A call in words, with its place."""
        number = f"#{seq} " if seq >= 0 else ""
        place = self.transport.site_text(self.transport.rank, site)
        return f"{self.name}, collective {number}{h.describe(plan.header)} at {place}"

    # --- memory --------------------------------------------------------------------------------------

    def own_room(self, plan: CallPlan, parity: int) -> tuple[int, np.ndarray]:
        """Where this rank's payload is copied to: offset and view."""
        shape, dtype, size_bytes = plan.payload
        offset = self._slots[parity] if plan.in_slot else self.staging(parity, size_bytes)
        own = plan.own[parity]
        if own is None or own[0] != offset:
            if size_bytes == dtype.itemsize and plan.in_slot:
                shape = (2, *shape)  # see `reduce_stack`
            segment = self.transport.segment
            own = plan.own[parity] = offset, segment.array(self.transport.rank, offset, shape, dtype)
        return own

    def payloads(self, plan: CallPlan, parity: int) -> Payloads:
        """What the members expose; views are kept for the next call that finds it in the same place."""
        offsets, views = plan.seen[parity]
        if not plan.in_slot:
            found = self.words_of(h.OFFSET, parity)
            if found != offsets:
                views = self.views(found, *plan.payload[:2])
                plan.seen[parity] = found, views
        return views

    def words_of(self, word: int, parity: int) -> list[int]:
        """One word of the notes of all members."""
        words, at = self.transport.words, word - h.COMPARED
        return [words[note + at] for note in self.notes[parity]]

    def view(self, position: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """What lies at this place of a member's arena."""
        return self.transport.segment.array(self.ranks[position], offset, shape, dtype)

    def views(self, offsets: list[int], shape: tuple[int, ...], dtype: np.dtype) -> Payloads:
        """What lies at these places of the members' arenas."""
        segment = self.transport.segment
        arrays = [
            segment.array(r, offset, shape, dtype) for r, offset in zip(self.ranks, offsets, strict=True)
        ]
        flat = [array.reshape(-1) for array in arrays]
        starts = [segment.arena_at(rank) + offset for rank, offset in zip(self.ranks, offsets, strict=True)]
        spacings = {b - a for a, b in zip(starts, starts[1:], strict=False)}
        rows = None
        if len(spacings) == 1 and flat[0].size:
            width = max(2, flat[0].size)  # a lone element lies there twice, see `reduce_stack`
            rows = np.lib.stride_tricks.as_strided(
                flat[0], (self.size, width), (spacings.pop(), dtype.itemsize), writeable=False
            )
        return Payloads(arrays, flat, rows)

    def slots(self, parity: int, size: int, dtype: np.dtype) -> Payloads:
        """The members' slots, for what a body exchanges beside its payload, which must not lie there itself."""
        key = parity, size, dtype
        found = self._slot_views.get(key)
        if found is None:
            found = self._slot_views[key] = self.views([self._slots[parity]] * self.size, (size,), dtype)
        return found

    def staging(self, parity: int, size_bytes: int) -> int:
        """Offset of memory for a large payload."""
        return self._grown(self._staging, parity, size_bytes)

    def next_piece(self, room_bytes: int) -> int:
        """Offset of memory for the next piece of a payload.

        There are two, by turns: who begins piece n+2 has waited for the results of piece n+1, so
        everyone has read those of piece n.

        Args:
            room_bytes: its size. Always the same where payloads have several pieces: peers may still read the
                memory that the piece after this one will have.
        """
        self._turn += 1
        return self._grown(self._pieces, self._turn & 1, room_bytes)

    def other_piece(self, room_bytes: int) -> int:
        """Offset of the memory that `next_piece` gives next."""
        return self._grown(self._pieces, (self._turn + 1) & 1, room_bytes)

    def _grown(self, kept: list[tuple[int, int]], which: int, size_bytes: int) -> int:
        offset, room = kept[which]
        if room < size_bytes:
            arena = self.transport.arena
            if room:
                arena.free(offset)
                kept[which] = (0, 0)
            offset = arena.allocate(size_bytes)
            kept[which] = (offset, size_bytes)
        return offset

    def release(self) -> None:
        """Give the staging memory back. Only when no rank can read it any more."""
        for kept in (self._staging, self._pieces):
            for which, (offset, size_bytes) in enumerate(kept):
                if size_bytes:
                    self.transport.arena.free(offset)
                kept[which] = (0, 0)

    def end_phase(self) -> Condition:
        """Mark the end of a part of a collective; when the condition is met, all have ended it."""
        self._phase += 1
        self.mark(PHASE, self._phase)
        return self.condition(PHASE, self._phase)
