"""The members' views of shared memory: where each one's header, note and payload are stored.

Small payloads are in the group's slots, of which there are two. Two suffice: a rank in collective n + 2 has seen all
members arrive at n + 1, and a rank arrives only after it has finished its previous collective of the group; so all
have finished n, and its slot is free. Larger payloads are copied to staging memory. A payload in an array that is
already in the arena is read in place; its owner then also waits for `done` of all before it returns.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

import simparallel.comm.call_header as h
from simparallel.comm.memory.segment import SLOT_BYTES, WORD, ControlMap
from simparallel.comm.memory.staging import MAX_PLACES, Arenas, Payloads, Staging
from simparallel.comm.plan import CallPlan
from simparallel.comm.transport import AbstractTransport, Condition, order

# The marks of a rank. It arrives at collective n in mark ARRIVE + (n & 1).
ARRIVE, PHASE, DONE_MARK = (0, 2, 3)
Place = Callable[[np.dtype, int, int], np.ndarray]  # place(dtype, offset in bytes, number of elements)


class Offsets(NamedTuple):
    """Offsets of a collective, for one parity: words that this rank writes, and byte ranges of all members.

    A byte range spans all ranks from the first to the last member; ranks in between that are no members have zeros
    there. `offsets`, `exposures` and `sims` fetch one word of every member's note.
    """

    site: int
    sim_ps: int
    offset: int
    exposure: int
    seq: int
    arrive: int
    arrivals: slice
    headers: slice
    offsets: Callable[[memoryview], tuple[int, ...]]
    exposures: Callable[[memoryview], tuple[int, ...]]
    sims: Callable[[memoryview], tuple[int, ...]]


class Views:
    """The views that one member has of the memory of all members of a group: headers, notes, marks and payloads.

    Args:
        transport: this rank's access to shared memory.
        slot: number of the group.
        ranks: global ranks, in the group's order.

    Attributes:
        position: this rank's position in the group.
        size: number of members.
        members: by position, the rank whose memory has a member's payload.
        notes: by parity, the index of each member's note in the shared words.
        staging: memory for this rank's payloads.
        offsets: by parity, the offsets of a collective.
        is_dense: all ranks from the first to the last member are members.
        published: by parity, the plan whose header is in shared memory: a repeated call need not write it again.
        is_shared: peers read this memory itself; on other transports the marks carry a copy of it.
    """

    is_shared = True

    def __init__(self, transport: AbstractTransport, slot: int, ranks: tuple[int, ...]) -> None:
        self.transport, self.ranks, self.size = transport, ranks, len(ranks)
        control, me, both = transport.segment.map, transport.rank, (0, 1)
        self.position = ranks.index(me)
        self.members: Sequence[int] = ranks
        self.published: list[CallPlan | None] = [None, None]
        self._slot = slot
        self._arenas: dict[np.dtype, Arenas] = {}
        transport.segment.reserve_words(me, control.group(slot), control.group_words)
        # A rank stores its own marks before it waits, so only its peers' are watched.
        self._peers = tuple(rank for rank in ranks if rank != me)
        self._watched = [tuple(control.mark(slot, r, which) for r in self._peers) for which in range(4)]
        self._own_marks = [control.mark(slot, me, which) for which in range(4)]
        self.own_headers = [control.header(slot, parity, me) for parity in both]
        self.notes = [[control.note(slot, parity, rank) for rank in ranks] for parity in both]
        self.staging = Staging(transport.arena, slot, self.size)
        first, last = min(ranks), max(ranks)
        self._span = [rank for rank in transport.segment.ranks if first <= rank <= last]
        self.is_dense = len(self._span) == self.size
        self.phase = 0
        # All offsets are computed here, once; a collective only looks them up.
        self.offsets = [self._offsets(control, parity) for parity in both]

    # --- headers and marks ----------------------------------------------------------------------------

    def _offsets(self, control: ControlMap, parity: int) -> Offsets:
        slot, me, first, last = self._slot, self.transport.rank, self._span[0], self._span[-1]
        note = control.note(slot, parity, me) - h.COMPARED
        arrivals = [control.mark(slot, rank, ARRIVE + parity) for rank in (first, last)]
        headers = [control.header(slot, parity, rank) for rank in (first, last)]
        return Offsets(
            note + h.SITE,
            note + h.SIM_PS,
            note + h.OFFSET,
            note + h.EXPOSURE,
            note + h.SEQ,
            control.mark(slot, me, ARRIVE + parity),
            slice(WORD * arrivals[0], WORD * (arrivals[1] + 1)),
            slice(WORD * headers[0], WORD * (headers[1] + h.COMPARED)),
            self._reader(h.OFFSET, parity),
            self._reader(h.EXPOSURE, parity),
            self._reader(h.SIM_PS, parity),
        )

    def _reader(self, word: int, parity: int) -> Callable[[memoryview], tuple[int, ...]]:
        """Return a function that fetches one word of every member's note from the shared words."""
        indices = [note + word - h.COMPARED for note in self.notes[parity]]
        # Of a single index `itemgetter` returns the word itself, not a tuple.
        return itemgetter(*indices) if len(indices) > 1 else lambda words: (words[indices[0]],)

    def publish(self, plan: CallPlan, parity: int, note: array[int] | None = None) -> None:
        """Write the header of a plan, and this rank's note; without `note`, only its words that all calls share."""
        start = self.own_headers[parity]
        words = self.transport.words
        words[start : start + h.COMPARED] = plan.header[: h.COMPARED]
        at = self.notes[parity][self.position]
        if note is not None:
            words[at : at + len(note)] = note
        elif plan.has_note:
            # From here `at` is where word 0 of a header would be, so that words are found by their usual numbers.
            at -= h.COMPARED
            words[at + h.NBYTES] = plan.payload_bytes
            words[at + h.GIVEN_DTYPE : at + h.USED] = plan.header[h.GIVEN_DTYPE :]
        self.published[parity] = plan

    def prepare(self, plan: CallPlan) -> None:
        """Complete a new plan by what these views compare, and where they copy the payload."""
        # Equal headers are equal bytes, so one comparison with these covers all members.
        plan.expected = self.spread(plan.header[: h.COMPARED].tobytes())
        plan.place_bytes = 0 if plan.in_slot else self.staging.place_bytes(plan.payload_bytes)

    def spread(self, data: bytes) -> bytes:
        """Return the bytes of a span of ranks: `data` for each member, zeros for other ranks."""
        if self.is_dense:
            return data * len(self._span)
        members = set(self.ranks)
        return b"".join(data if rank in members else bytes(len(data)) for rank in self._span)

    def agree(self, plan: CallPlan, parity: int) -> bool:
        """Return whether the headers of all members are equal to the plan's, at the run's level of checking."""
        transport = self.transport
        found, compared = transport.memory[self.offsets[parity].headers], transport.compared
        # The lighter levels look at the first words of each header. Most calls agree in all words, so the bytes are
        # compared first.
        if compared == h.COMPARED or found == plan.expected:
            return found == plan.expected
        size, step = compared * WORD, h.COMPARED * WORD
        return all(found[i : i + size] == plan.expected[i : i + size] for i in range(0, len(found), step))

    def condition(self, which: int, seq: int) -> Condition:
        """Return the condition that a mark of all peers has reached a number."""
        return Condition(self._watched[which], self._peers, seq)

    def mark(self, which: int, seq: int) -> None:
        """Raise one of this rank's marks, for its peers to see; everything that it wrote before is visible, too."""
        index = self._own_marks[which]
        # Peers that see the mark must see everything that it announces.
        order()
        self.transport.words[index] = seq
        self.transport.notify(index)

    def end_phase(self) -> Condition:
        """Mark the end of one phase of a collective. The condition is met when all members have ended it."""
        # A call has any number of phases, so they are counted across calls; the number of the collective would not do.
        self.phase += 1
        self.mark(PHASE, self.phase)
        return self.condition(PHASE, self.phase)

    def forget(self, which: int, seq: int) -> None:
        """Discard the payloads that came with the members' marks; in shared memory there are none."""

    # --- payloads -------------------------------------------------------------------------------------

    def reads_in_place(self, call: Any) -> bool:
        """Return whether a `Call` has nothing to copy: peers read its x in place, or there is no peer or no data."""
        if self.size == 1 or not call.plan.payload_bytes:
            return True
        return not call.must_copy and self.transport.arena.offset_of(call.x) is not None

    def offer(self, plan: CallPlan, parity: int, x: Any, must_copy: bool) -> tuple[int, bool, Any]:
        """Put this rank's payload where peers can read it.

        Returns:
            Its offset, whether it is x itself, and the array that the body may read in its place.
        """
        # A group of one reads its own array.
        if not plan.exposes or not plan.payload_bytes or self.size == 1:
            return 0, False, x.copy() if must_copy else x
        if not plan.copied and not must_copy:
            # An array that is in the arena already is read in place, without a copy.
            own_at = self.transport.arena.offset_of(x)
            if own_at is not None:
                return own_at, True, x
        offset = self.show(plan, parity, x, whole=must_copy)
        return offset, False, plan.own[offset] if must_copy and not plan.in_slot else x

    def show(self, plan: CallPlan, parity: int, x: np.ndarray | list[np.ndarray], *, whole: bool = False) -> int:
        """Copy the parts of this rank's payload that peers read (with `whole`, all of it); return its offset."""
        slots, next_place = self.staging.slots, self.staging.next
        offset = slots[parity] if plan.in_slot else next_place(plan.place_bytes, plan.payload_bytes)
        own = plan.own.get(offset)
        if own is None:
            if len(plan.own) == MAX_PLACES:
                plan.own.clear()
            shape, dtype = plan.shape, plan.dtype
            size = math.prod(shape)
            # A single element is stored twice, see `reduce_stack`.
            if size == 1 and plan.in_slot:
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
        """Copy all but this rank's own part: peers reduce the other parts."""
        place = self.arenas(flat.dtype).one(self.position, offset, flat.size)
        mine = self.bounds(flat.size, self.position)
        for others in (slice(0, mine.start), slice(mine.stop, flat.size)):
            place[others] = flat[others]

    def payloads(self, plan: CallPlan, parity: int, offsets: tuple[int, ...]) -> Payloads:
        """Return the members' payloads; views are kept, because places come round again.

        Args:
            plan: plan of the collective.
            parity: parity of its number.
            offsets: offsets of the payloads, unused for payloads in slots.
        """
        key: Any = parity if plan.in_slot else offsets
        # Payloads in slots are known by parity; others by the offsets of all members, which may have moved since the
        # last call.
        payloads = plan.payloads.get(key)
        if payloads is None:
            if plan.in_slot:
                offsets = (self.staging.slots[parity],) * self.size
            payloads = Payloads.of([])
            if plan.dtype is not None:
                payloads = Payloads(self.arenas(plan.dtype), offsets, math.prod(plan.shape), plan.shape)
            if len(plan.payloads) == MAX_PLACES:
                plan.payloads.clear()
            plan.payloads[key] = payloads
        return payloads

    def arenas(self, dtype: np.dtype) -> Arenas:
        """Return the members' arenas as arrays of a dtype."""
        found = self._arenas.get(dtype)
        if found is None:
            found = self._arenas[dtype] = Arenas(self.transport.segment, self.members, dtype)
        return found

    def note_of(self, position: int, parity: int) -> list[int]:
        """Return a member's note, in the order of `call_header`, from word `COMPARED` on."""
        note = self.notes[parity][position]
        return self.transport.words[note : note + h.USED - h.COMPARED].tolist()

    def places_for(
        self, sizes: Sequence[int], receivers: Iterable[int], parity: int, block_bytes: int
    ) -> tuple[int, int, list[tuple[Place, Sequence[int]]]]:
        """Return memory for a head and the parts behind it, of sizes [bytes] that differ by rank.

        Args:
            sizes: of the head, and of each part: one for all receivers, or one for each member.
            receivers: positions of the members that read a part.
            parity: parity of the collective's number.
            block_bytes: size of a block, if this is one of several in the same call; else 0.

        Returns:
            The offset, that of the next block, and the places to fill, each with the numbers of the parts in it.
        """
        total, other = sum(sizes), 0
        # Not in the ring: sizes differ by rank, and the ranks' offsets in the ring have to stay equal.
        if block_bytes:
            offset, other = self.staging.next_piece(block_bytes)
        else:
            offset = self.staging.slots[parity] if total <= SLOT_BYTES else self.staging.next(0, total)
        return offset, other, [(self._place_at(self.position, offset), range(len(sizes) - 1))]

    def place_of(self, position: int, parity: int, step: int = 0) -> Place:
        """Return access to what a member exposed; `step`: number of the block in a call that exposes several."""
        at = self.notes[parity][position] + (h.OFFSET, h.OTHER_OFFSET)[step & 1] - h.COMPARED
        return self._place_at(position, self.transport.words[at])

    def _place_at(self, position: int, offset: int) -> Place:
        """Return access to a member's memory from this offset of its arena on."""
        return lambda dtype, at, size: self.arenas(dtype).one(position, offset + at, size)

    def words_of(self, word: int, parity: int) -> list[int]:
        """Return one word of the notes of all members."""
        words, at = self.transport.words, word - h.COMPARED
        return [words[note + at] for note in self.notes[parity]]

    def slots(self, parity: int, size: int, dtype: np.dtype) -> Payloads:
        """Return the members' slots, for values that a body exchanges beside a payload that is not in the slots."""
        return Payloads(self.arenas(dtype), [self.staging.slots[parity]] * self.size, size, (size,))

    def bounds(self, size: int, position: int) -> slice:
        """Return the part of a vector that this position of the group reduces."""
        # Each rank computes all cuts by itself; sizes differ by one at most.
        return slice(size * position // self.size, size * (position + 1) // self.size)
