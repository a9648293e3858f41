"""Collectives over MPI: as `direct`, but what a rank would read from its peers' pages is sent to it.

The header of a collective takes along what its sender gives to the receiver, so most collectives are one
message between each two ranks, and nothing of a wrong one is used. A large all_reduce takes a second one:
each rank reduces a slice and gives it to all. Reductions run in the order of the group: all ranks get
the same bits, on every run, and the same as over shared memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.comm import header as h
from simparallel.comm.call import ARRIVE, NO_PAYLOADS, PHASE, Call, Payloads
from simparallel.comm.communicator import Communicator
from simparallel.comm.group import Group
from simparallel.comm.plain import decode, encode
from simparallel.comm.reduction import reduce_arrays, reduce_into, reduction
from simparallel.comm.segment import SLOT_BYTES
from simparallel.comm.work import Steps

if TYPE_CHECKING:
    from simparallel.comm.mpi import MpiTransport

Shares = list[np.ndarray | None]  # by position in the group


class MpiCall(Call):
    """A collective whose payload goes with its header."""

    group: MpiGroup
    own: np.ndarray | None = None  # what this rank would give to itself

    def _life(self) -> Steps:
        result = yield from super()._life()
        self.group.forget(self.seq)
        return result

    def _expose(self) -> tuple[int, int]:
        """Nothing lies where peers could read it; the size is for the network model."""
        shares = self.group.shares(self)
        self.own = shares[self.group.position]
        self.group.given = shares
        return 0, self.plan.payload[2] if self.plan.exposes else 0

    def payloads(self) -> Payloads:
        """What the members gave to this rank: whole payloads, None of those who gave nothing."""
        shape, dtype, _ = self.plan.payload
        if dtype is None:
            return NO_PAYLOADS
        arrays: list[Any] = [self.given(position, shape, dtype) for position in range(self.group.size)]
        if self.own is not None:
            arrays[self.group.position] = self.own.copy()  # the result may be written there
        flat: list[Any] = [None if array is None else array.reshape(-1) for array in arrays]
        return Payloads(arrays, flat, None)

    def given(
        self, position: int, shape: tuple[int, ...], dtype: np.dtype, which: int | None = None
    ) -> np.ndarray | None:
        """What a member gave to this rank with a mark (by default its arrival)."""
        if position == self.group.position and self.own is not None:
            return self.own.reshape(shape)
        if 0 in shape or dtype.itemsize == 0:
            return np.empty(shape, dtype)
        parcel = self.group.parcel(position, ARRIVE + (self.seq & 1) if which is None else which, self.seq)
        return None if parcel is None else parcel.view(dtype).reshape(shape)

    def all_given(self, shape: tuple[int, ...], dtype: np.dtype) -> list[Any]:
        """What each member gave to this rank."""
        return [self.given(position, shape, dtype) for position in range(self.group.size)]


class MpiGroup(Group):
    """A group whose ranks send one another what they have to know."""

    call_type = MpiCall
    transport: MpiTransport
    given: Shares | None = None  # what the next mark takes along

    def mark(self, which: int, seq: int) -> None:
        index, given = self._own_marks[which], self.given
        self.given = None
        self.transport.words[index] = seq
        header = []
        if which == ARRIVE + (seq & 1):
            note = self.notes[seq & 1][self.position]
            header = [(self._own_headers[seq & 1], h.COMPARED), (note, h.USED - h.COMPARED)]
        for position, rank in enumerate(self.ranks):
            if position != self.position:
                self.transport.tell(rank, index, seq, header, given[position] if given else None)

    def parcel(self, position: int, which: int, seq: int) -> np.ndarray | None:
        """What came with a mark of a member: bytes, or None for nothing."""
        return self.transport.parcels.get((self._mark_of(position, which), seq))

    def forget(self, seq: int) -> None:
        """Drop what came with the marks of a collective that has ended."""
        for position in range(self.size):
            for which in (ARRIVE + (seq & 1), PHASE):
                self.transport.parcels.pop((self._mark_of(position, which), seq), None)

    def _mark_of(self, position: int, which: int) -> int:
        return self.transport.segment.map.mark(self._slot, self.ranks[position], which)

    def shares(self, call: Call) -> Shares:
        """What this rank gives to each member at the beginning of a collective."""
        plan = call.plan
        x = call.x if plan.exposes else None
        op, everyone = h.OPS[plan.header[h.OP]], range(self.size)
        if x is None:
            return [None] * self.size
        if op in ("reduce", "gather"):
            return [x if position == plan.root else None for position in everyone]
        if op == "scatter":
            return [x[position, ...] for position in everyone]
        if op in ("reduce_scatter", "all_to_all"):
            return list(np.split(x, self.size, h.decode_dims(plan.header[h.DIMS])[0]))
        if op == "all_reduce" and x.nbytes > SLOT_BYTES:
            flat = x.reshape(-1)
            return [flat[self.bounds(x.size, position)] for position in everyone]
        return [x] * self.size

    # --- bodies that `direct` writes otherwise --------------------------------------------------------

    def all_reduce(self, x: np.ndarray, op: str) -> Any:
        if x.nbytes <= SLOT_BYTES:
            return super().all_reduce(x, op)
        rule, pieces = (
            reduction(op, x.dtype),
            [self.bounds(x.size, position) for position in range(self.size)],
        )

        def steps(call: MpiCall) -> Steps:
            x, size = call.x, pieces[self.position].stop - pieces[self.position].start
            own = np.empty(size, x.dtype)
            reduce_into(rule, call.all_given((size,), x.dtype), own)
            self.given = [own] * self.size
            self.mark(PHASE, call.seq)
            yield self.condition(PHASE, call.seq)
            target = x.reshape(-1)  # a copy where there are gaps
            call.own = own
            for position, piece in enumerate(pieces):
                target[piece] = call.given(position, target[piece].shape, x.dtype, PHASE)
            if not x.flags.c_contiguous:
                x[...] = target.reshape(x.shape)
            return x

        return steps

    def reduce_scatter(self, x: np.ndarray, dim: int, op: str) -> Any:
        rule, shape = reduction(op, x.dtype), (*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])

        def steps(call: MpiCall) -> Steps:
            yield from ()
            return reduce_arrays(rule, call.all_given(shape, call.x.dtype), call.x.dtype)

        return steps

    def all_to_all(self, x: np.ndarray, split_dim: int, concat_dim: int) -> Any:
        shape = (*x.shape[:split_dim], x.shape[split_dim] // self.size, *x.shape[split_dim + 1 :])

        def steps(call: MpiCall) -> Steps:
            yield from ()
            return np.concatenate(call.all_given(shape, call.x.dtype), axis=concat_dim)

        return steps

    def scatter(self, root: int) -> Any:
        def steps(call: MpiCall) -> Steps:
            yield from ()
            shape, dtype = h.decode_given(call.words_of(root))
            given = call.given(root, shape, dtype)
            assert given is not None
            return given.copy()

        return steps


class MpiCommunicator(Communicator):
    """The contract over MPI. Objects travel without pickle: plain values and arrays only."""

    group_type = MpiGroup
    pack, unpack = staticmethod(encode), staticmethod(decode)
