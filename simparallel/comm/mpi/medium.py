"""Collectives over MPI: as `direct`, but ranks send the data that they would read from each other's pages.

A header is sent together with the payload for its receiver, so most collectives take one message between each two
ranks; the payload of a mismatched call is discarded. A large all_reduce takes a second message: each rank reduces a
slice and sends it to all. Reductions run in the order of the group: all ranks get the same bits, on every run, and
the same as over shared memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms.reduction import reduce_into
from simparallel.comm.call import Body, Call
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.direct import direct
from simparallel.comm.direct.direct_adasum import SmallAdasum
from simparallel.comm.group import Group, Medium
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.memory.staging import Payloads
from simparallel.comm.mpi.codec import decode, encode
from simparallel.comm.mpi.transport import MpiTransport
from simparallel.comm.plan import CallPlan, Settings
from simparallel.comm.views import ARRIVE, PHASE, Place, Views
from simparallel.comm.work import Steps

# Arrays to send, by position in the group.
Shares = list[np.ndarray | None]


class SharedPayloads(Payloads):
    """Payloads of which each member has sent this rank's piece alone."""

    def pieces(self, piece: tuple[slice, ...], position: int, x: np.ndarray) -> list[np.ndarray]:
        return list(self.arrays)


class MpiViews(Views):
    """Headers, notes and payloads that the members send each other together with their marks.

    Attributes:
        given: payloads that the next mark is sent with.
        own: this rank's own share of the payload of the running collective.
    """

    is_shared = False
    transport: MpiTransport
    given: Shares | None = None
    own: np.ndarray | None = None

    def mark(self, which: int, seq: int) -> None:
        index, given, blocks = self._own_marks[which], self.given, []
        self.given = None
        self.transport.words[index] = seq
        # The header and the note travel with the mark of arrival, since peers cannot read them here.
        if which != PHASE and which - ARRIVE in (0, 1):
            parity = which - ARRIVE
            header, note = self.own_headers[parity], self.notes[parity][self.position]
            blocks = [(header, h.COMPARED), (note, h.USED - h.COMPARED)]
        for position, rank in enumerate(self.ranks):
            if position != self.position:
                self.transport.tell(rank, index, seq, blocks, given[position] if given else None)

    def reads_in_place(self, call: Call) -> bool:
        # Marks carry the payload, so there is nothing to copy into shared memory.
        return True

    def offer(self, plan: CallPlan, parity: int, x: Any, must_copy: bool) -> tuple[int, bool, Any]:
        shares = self._shares(plan, x)
        own = shares[self.position]
        if own is not None and (must_copy or own.nbytes <= SLOT_BYTES):
            # A small reduction writes to its target before it has read all parts.
            own = own.copy()
        self.given, self.own = shares, own
        return 0, False, x.copy() if must_copy else x

    def _shares(self, plan: CallPlan, x: Any) -> Shares:
        """Return the array that each member is sent at the start of a collective."""
        everyone, settings = range(self.size), plan.body.settings
        # If x is cut, this rank needs its own piece even where peers read nothing.
        if not plan.exposes and not COLLECTIVES[plan.op].divides:
            return [None] * self.size
        if plan.op in ("reduce", "gather"):
            return [x if position == plan.root else None for position in everyone]
        if plan.op == "scatter":
            return list(x)
        if plan.op in ("scan", "exscan"):
            return [x if position >= self.position else None for position in everyone]
        if COLLECTIVES[plan.op].divides:
            ends = self.size if settings.sizes is None else np.cumsum(settings.sizes)[:-1]
            return list(np.split(x, ends, settings.dims[0]))
        if plan.op == "all_reduce" and x.nbytes > SLOT_BYTES:
            flat = x.reshape(-1)
            return [flat[self.bounds(x.size, position)] for position in everyone]
        return [x] * self.size

    def payloads(self, plan: CallPlan, parity: int, offsets: tuple[int, ...]) -> Payloads:
        """Return the arrays that the members sent to this rank; empty where a member sent none."""
        if plan.dtype is None or plan.body.has_note:
            return Payloads.of([])
        shape = plan.shape
        if COLLECTIVES[plan.op].divides:
            sizes, dim = plan.body.settings.sizes, plan.body.settings.dims[0]
            part = shape[dim] // self.size if sizes is None else sizes[self.position]
            shape = (*shape[:dim], part, *shape[dim + 1 :])
        seq = self.seq_of(parity)
        return SharedPayloads.of([self.peer(position, seq, shape, plan.dtype) for position in range(self.size)])

    def seq_of(self, parity: int) -> int:
        """Return the number of this rank's last collective of a parity."""
        return self.note_of(self.position, parity)[h.SEQ - h.COMPARED]

    def peer(self, position: int, seq: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the array that a member sent to this rank for a collective."""
        if position == self.position:
            return np.empty(0, dtype) if self.own is None else self.own.reshape(shape)
        return self.parcel(position, ARRIVE + (seq & 1), seq, shape, dtype)

    def places_for(
        self, sizes: Sequence[int], receivers: Iterable[int], parity: int, block_bytes: int
    ) -> tuple[int, int, list[tuple[Place, Sequence[int]]]]:
        """Return a message for each receiver with a part of its own, or a single one for all."""
        head, *parts = sizes
        given: Shares = [None] * self.size
        messages: dict[int, np.ndarray] = {}
        for position in receivers:
            number = position if len(parts) > 1 else 0
            if number not in messages:
                messages[number] = np.zeros(head + parts[number], np.uint8)
            given[position] = messages[number]
        self.given, self.own = given, given[self.position]
        return 0, 0, [(place_in(message), [number]) for number, message in messages.items()]

    def place_of(self, position: int, parity: int, step: int = 0) -> Place:
        if position == self.position and self.own is not None:
            return place_in(self.own)
        # Later blocks come with the marks of a phase.
        which, number = (PHASE, self.phase) if step else (ARRIVE + parity, self.seq_of(parity))
        data = self.transport.parcels.get((self.mark_of(position, which), number))
        return place_in(np.empty(0, np.uint8) if data is None else data)

    def parcel(self, position: int, which: int, seq: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return the payload that came with a member's mark; empty if none did."""
        data = self.transport.parcels.get((self.mark_of(position, which), seq))
        if data is None or data.size == 0:
            return np.empty(shape if 0 in shape or dtype.itemsize == 0 else 0, dtype)
        return data.view(dtype).reshape(shape)

    def forget(self, which: int, seq: int) -> None:
        """Discard the payloads that came with the members' marks, and this rank's own."""
        self.given = self.own = None
        for position in range(self.size):
            self.transport.parcels.pop((self.mark_of(position, which), seq), None)

    def mark_of(self, position: int, which: int) -> int:
        """Return the index of a member's mark."""
        return self.transport.segment.map.mark(self._slot, self.ranks[position], which)


def place_in(data: np.ndarray) -> Place:
    """Return access to these bytes, as `Place`."""

    def place(dtype: np.dtype, at: int, size: int) -> np.ndarray:
        count = size * dtype.itemsize
        return data[at : at + count].view(dtype) if count else np.empty(size, dtype)

    return place


# --- bodies that differ from `direct` ------------------------------------------------------------------


class TwoStepAllReduce(Body):
    """all_reduce in two messages: each rank reduces a slice, and sends it to all."""

    def run(self, call: Call) -> Steps:
        views, x, me = self.group.views, call.target, self.position
        assert isinstance(views, MpiViews)
        everyone = range(views.size)
        pieces = [views.bounds(x.size, position) for position in everyone]
        own = np.empty(pieces[me].stop - pieces[me].start, x.dtype)
        reduce_into(self.rule, [views.peer(position, call.seq, own.shape, x.dtype) for position in everyone], own)
        views.given = [own] * views.size
        reduced_by_all = views.end_phase()
        number = reduced_by_all.target
        yield reduced_by_all
        # The array itself receives the results if it is contiguous; else they are copied at the end.
        target = x.reshape(-1) if x.flags.c_contiguous else np.empty(x.size, x.dtype)
        for position, piece in enumerate(pieces):
            parcel = own if position == me else views.parcel(position, PHASE, number, target[piece].shape, x.dtype)
            target[piece] = parcel
        views.forget(PHASE, number)
        if not x.flags.c_contiguous:
            x[...] = target.reshape(x.shape)
        return x


def all_reduce(group: Group, x: np.ndarray, settings: Settings) -> Body:
    return (direct.SmallAllReduce if x.nbytes <= SLOT_BYTES else TwoStepAllReduce)(group, x, settings)


MPI_MESSAGES = Medium(
    MpiViews,
    # With Adasum, every rank gets all vectors and computes the whole tree.
    {**direct.BODIES, "all_reduce": all_reduce, "adasum": SmallAdasum},
    encode,  # objects travel without pickle: plain values and arrays only
    decode,
)
