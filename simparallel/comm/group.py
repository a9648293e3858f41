"""A group of ranks, and how its collectives are run.

Small payloads lie in the group's slot, of which there are two: a rank that is in collective n+2
has seen everyone arrive at n+1, so everyone has finished n and its slot is free. That holds
because a rank arrives only after it has finished its previous collective of the group.
Larger payloads lie in staging memory, two again, or are read where they are if the array lives
in the arena; then its owner also waits for `done` of all before it returns.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from sys import byteorder
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from simparallel.cluster import Traffic
from simparallel.comm import header as h
from simparallel.comm.call import (
    ARRIVE,
    DONE_MARK,
    IN_PIECES,
    OWN_ARRAY,
    PHASE,
    Body,
    BodySteps,
    Call,
    CallPlan,
)
from simparallel.comm.direct import Direct
from simparallel.comm.segment import WORD, ControlMap, order
from simparallel.comm.staging import MAX_PLACES, Arenas, Payloads, Staging
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.work import Lane
from simparallel.events import COMPUTE, Recorder

MAX_PLANS = 1024  # kept for calls that may come again
_ZERO = bytes(WORD)


class _Desk(NamedTuple):
    """Where a collective reads and writes, by parity: words of its own, and bytes of all members.

    The bytes are those of all ranks from the first to the last member; ranks between that are none have zeros.
    """

    site: int
    sim_ps: int
    offset: int
    shown: int
    seq: int
    arrive: int
    arrivals: slice
    headers: slice
    offsets: Callable[[memoryview], tuple[int, ...]]
    all_shown: Callable[[memoryview], tuple[int, ...]]
    sims: Callable[[memoryview], tuple[int, ...]]


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
        self._arenas: dict[np.dtype, Arenas] = {}
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
        self.staging = Staging(transport.arena, slot, self.size)
        self._span = range(min(ranks), max(ranks) + 1)
        self._is_dense = len(self._span) == self.size
        self._desks = [self._desk(control, parity) for parity in both]

    def _desk(self, control: ControlMap, parity: int) -> _Desk:
        slot, me, first, last = self._slot, self.transport.rank, self._span[0], self._span[-1]
        note = control.note(slot, parity, me) - h.COMPARED
        arrivals = [control.mark(slot, rank, ARRIVE + parity) for rank in (first, last)]
        headers = [control.header(slot, parity, rank) for rank in (first, last)]
        return _Desk(
            note + h.SITE, note + h.SIM_PS, note + h.OFFSET, note + h.SHOWN, note + h.SEQ,
            control.mark(slot, me, ARRIVE + parity),
            slice(WORD * arrivals[0], WORD * (arrivals[1] + 1)),
            slice(WORD * headers[0], WORD * (headers[1] + h.COMPARED)),
            self._reader(h.OFFSET, parity), self._reader(h.SHOWN, parity), self._reader(h.SIM_PS, parity),
        )  # fmt: skip

    def _reader(self, word: int, parity: int) -> Callable[[memoryview], tuple[int, ...]]:
        """What takes one word of the notes of all members out of the shared words."""
        indices = [note + word - h.COMPARED for note in self.notes[parity]]
        return itemgetter(*indices) if len(indices) > 1 else lambda words: (words[indices[0]],)

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
        plan.at_once = self.size > 1 and not plan.has_steps and plan.kind is Call
        compared = header[: h.COMPARED].tobytes()
        plan.expected = b"".join(
            compared if rank in self.ranks else bytes(len(compared)) for rank in self._span
        )
        if not plan.in_slot:
            plan.place_bytes = self.staging.place_bytes(plan.payload[2])
        plans[key] = plan
        return plan

    def run(
        self, plan: CallPlan, x: Any, async_op: bool = False, out: Any = None, *, is_apart: bool = False
    ) -> Any:
        """Run one collective with this rank's argument: its result, or with `async_op` its `Work`.

        Args:
            plan: of the collective.
            x: what the rank gives.
            async_op: do not wait.
            out: where the result goes, if that was said.
            is_apart: x itself may not be read once the result is written, because `out` shares memory with it.
        """
        if async_op or self._busy or not plan.at_once:
            work = plan.kind(self, plan, x)
            work.out, work.is_apart = out, is_apart
            self.lane.submit(work)
            return work if async_op else work.wait()
        # What `Call` does, in one go: nobody else has to be advanced meanwhile, and nothing is looked up twice.
        start_ns = perf_counter_ns()
        transport, recorder = self.transport, self.recorder
        words, memory, site = transport.words, transport.memory, transport.call_site()
        seq = self._seq = self._seq + 1
        parity = seq & 1
        (
            site_at, sim_at, offset_at, shown_at, seq_at, arrive_at, arrivals, headers, offsets, all_shown, sims,
        ) = self._desks[parity]  # fmt: skip
        try:
            words[offset_at], zero_copy, given = self.offer(plan, parity, x, is_apart)
            if not plan.copied:
                words[shown_at] = OWN_ARRAY if zero_copy else IN_PIECES
            if self._shown[parity] is not plan:
                self.publish(plan, parity)
            words[site_at] = site
            if recorder is not None:
                now_ps, until_ps = recorder.clock_ps[COMPUTE], recorder.clock_ps.get(self.stream, 0)
                words[sim_at] = now_ps if now_ps > until_ps else until_ps
            words[seq_at] = seq
            order()
            words[arrive_at] = seq
            transport.notify(arrive_at)
            # Nobody can be further: the other parity comes next.
            arrived = seq.to_bytes(WORD, byteorder)
            arrived = arrived * self.size if self._is_dense else self._spread(arrived)
            if memory[arrivals] != arrived and not transport.sees(arrivals, arrived):
                describe = partial(self.describe, plan, seq, site)
                transport.wait((self.condition(ARRIVE + parity, seq),), describe)
            order()
            if memory[headers] != plan.expected:
                self.compare(plan, parity)
            if plan.by_note:
                result = plan.body(self, seq, x, out, partial(self.describe, plan, seq, site))
            else:
                shown = plan.shown.get(parity) if plan.in_slot else None
                if shown is None:
                    shown = self.payloads(plan, parity, offsets(words))
                result = plan.body(shown, given) if out is None else plan.body(shown, given, out)
            if not plan.copied and OWN_ARRAY in all_shown(words):
                self.mark(DONE_MARK, seq)
                if zero_copy:
                    transport.wait((self.condition(DONE_MARK, seq),), partial(self.describe, plan, seq, site))
        except BaseException as error:
            self.lane.fail(error)
            if isinstance(error, KeyboardInterrupt):
                describe = partial(self.describe, plan, seq, site)
                transport.interrupted(self.condition(ARRIVE + parity, seq), describe)
            raise
        if recorder is not None:
            size_bytes = self.size_bytes_of(plan, parity)
            cost = plan.cost or self.price(plan, recorder, size_bytes)
            sim_start_ps = max(sims(words))
            sim_end_ps = sim_start_ps + cost.time_ps
            recorder.communicate(
                plan.op, "collective", self.stream, start_ns, perf_counter_ns(),
                sim_start_ps, sim_end_ps, size_bytes, cost.sent_bytes, self.ranks, seq,
            )  # fmt: skip
            recorder.join(sim_end_ps)
        return result

    def publish(self, plan: CallPlan, parity: int) -> None:
        """Show the header of a plan."""
        start = self._own_headers[parity]
        words = self.transport.words
        words[start : start + h.COMPARED] = plan.header[: h.COMPARED]
        if plan.by_note:
            note = self.notes[parity][self.position] - h.COMPARED
            words[note + h.NBYTES] = plan.payload[2]
            words[note + h.GIVEN_DTYPE : note + h.USED] = plan.header[h.GIVEN_DTYPE :]
        self._shown[parity] = plan

    def _spread(self, word: bytes) -> bytes:
        """A word for each rank of the span: this one for the members."""
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
        return max(self._desks[seq & 1].sims(self.transport.words))

    def price(self, plan: CallPlan, recorder: Recorder, size_bytes: int) -> Traffic:
        """What the described network takes for a call."""
        cost = recorder.cluster.collective(
            plan.op, size_bytes, self.ranks, position=self.position, root=plan.root
        )
        if plan.vector_bytes >= 0:
            plan.cost = cost
        return cost

    def size_bytes_of(self, plan: CallPlan, parity: int) -> int:
        """The vector that the network model prices."""
        if plan.vector_bytes >= 0:
            return plan.vector_bytes
        return self.note_of(plan.root, parity)[h.NBYTES - h.COMPARED]

    def describe(self, plan: CallPlan, seq: int, site: int) -> str:
        """A call in words, with its place."""
        number = f"#{seq} " if seq >= 0 else ""
        place = self.transport.site_text(self.transport.rank, site)
        return f"{self.name}, collective {number}{h.describe(plan.header)} at {place}"

    # --- memory --------------------------------------------------------------------------------------

    def offer(self, plan: CallPlan, parity: int, x: Any, is_apart: bool) -> tuple[int, bool, Any]:
        """Put this rank's payload where peers can read it.

        Returns:
            Its offset, whether it is x itself, and what the body may read of it.
        """
        if not plan.exposes or not plan.payload[2] or self.size == 1:  # a group of one reads its own array
            return 0, False, x.copy() if is_apart else x
        if not plan.copied and not is_apart:
            own_at = self.transport.arena.offset_of(x)
            if own_at is not None:
                return own_at, True, x
        offset = self.show(plan, parity, x, whole=is_apart)
        return offset, False, plan.own[offset] if is_apart and not plan.in_slot else x

    def show(
        self, plan: CallPlan, parity: int, x: np.ndarray | list[np.ndarray], *, whole: bool = False
    ) -> int:
        """Copy what peers read of this rank's payload to where they do, or (whole) all of it: its offset."""
        slots, next_place = self.staging.slots, self.staging.next
        offset = slots[parity] if plan.in_slot else next_place(plan.place_bytes, plan.payload[2])
        own = plan.own.get(offset)
        if own is None:
            if len(plan.own) == MAX_PLACES:
                plan.own.clear()
            shape, dtype, _ = plan.payload
            size = math.prod(shape)
            if size == 1 and plan.in_slot:  # a lone element goes to its slot twice, see `reduce_stack`
                size, shape = 2, (2, *shape)
            own = self.arenas(dtype).one(self.position, offset, size).reshape(shape)
            plan.own[offset] = own
        if plan.others is None or whole:
            own[...] = x
        else:
            for part in plan.others:
                own[part] = x[part]
        return offset

    def show_to_others(self, flat: np.ndarray, offset: int) -> None:
        """Copy to this place what others work on: all but the part that is this rank's own."""
        room = self.arenas(flat.dtype).one(self.position, offset, flat.size)
        mine = self.bounds(flat.size, self.position)
        for others in (slice(0, mine.start), slice(mine.stop, flat.size)):
            room[others] = flat[others]

    def payloads(self, plan: CallPlan, parity: int, offsets: Sequence[int]) -> Payloads:
        """What the members show; kept, as places come again.

        Args:
            plan: of the collective.
            parity: of its number.
            offsets: where their payloads are, unless they are in slots.
        """
        shape, dtype, _ = plan.payload
        if plan.in_slot:
            key, offsets = parity, [self.staging.slots[parity]] * self.size
        else:
            key = offsets[0]
            if key in plan.shown and offsets.count(key) == self.size:
                return plan.shown[key]
        shown = Payloads.of([])
        if dtype is not None:
            shown = Payloads(self.arenas(dtype), offsets, math.prod(shape), shape)
        if plan.in_slot or offsets.count(key) == self.size:
            if len(plan.shown) == MAX_PLACES:
                plan.shown.clear()
            plan.shown[key] = shown
        return shown

    def arenas(self, dtype: np.dtype) -> Arenas:
        """The members' arenas as arrays of a dtype."""
        found = self._arenas.get(dtype)
        if found is None:
            found = self._arenas[dtype] = Arenas(self.transport.segment, self.ranks, dtype)
        return found

    def note_of(self, position: int, parity: int) -> list[int]:
        """What a member wrote beside its header, in the order of `header`, from word `COMPARED` on."""
        note = self.notes[parity][position]
        return self.transport.words[note : note + h.USED - h.COMPARED].tolist()

    def words_of(self, word: int, parity: int) -> list[int]:
        """One word of the notes of all members."""
        words, at = self.transport.words, word - h.COMPARED
        return [words[note + at] for note in self.notes[parity]]

    def slots(self, parity: int, size: int, dtype: np.dtype) -> Payloads:
        """The members' slots, for what a body exchanges beside its payload, which must not lie there itself."""
        return Payloads(self.arenas(dtype), [self.staging.slots[parity]] * self.size, size, (size,))

    def release(self) -> None:
        """Give the staging memory back. Only when no rank can read it any more."""
        if self.rank is not None:
            self.staging.release()

    def end_phase(self) -> Condition:
        """Mark the end of a part of a collective; when the condition is met, all have ended it."""
        self._phase += 1
        self.mark(PHASE, self._phase)
        return self.condition(PHASE, self._phase)
