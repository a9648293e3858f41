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
from simparallel.comm.call import ARRIVE, PHASE, Body, Call
from simparallel.comm.communicator import Communicator
from simparallel.comm.group import Group
from simparallel.comm.plain import decode, encode
from simparallel.comm.reduction import reduce_arrays, reduce_into, reduction
from simparallel.comm.segment import SLOT_BYTES

if TYPE_CHECKING:
    from simparallel.comm.mpi import MpiTransport

Shares = list[np.ndarray | None]  # by position in the group


class MpiCall(Call):
    """A collective whose payload goes with its header."""

    group: MpiGroup
    _own: np.ndarray | None = None

    def _life(self, body: Any) -> Any:
        result = yield from super()._life(body)
        self.group.forget(self.seq)
        return result

    def _expose(self) -> tuple[int, int]:
        """Nothing lies where peers could read it; the size is for the network model."""
        shares = self.group.shares(self)
        self._own = shares[self.group._position]
        self.group.given = shares
        return 0, 0 if self._payload is None else self._payload.nbytes

    def peer(self, position: int, shape: tuple[int, ...], dtype: np.dtype, which: int = ARRIVE) -> np.ndarray:
        """What a member gave to this rank."""
        if position == self.group._position and self._own is not None:
            return self._own.reshape(shape)
        if 0 in shape or dtype.itemsize == 0:
            return np.empty(shape, dtype)
        return self.group.parcel(position, which, self.seq).view(dtype).reshape(shape)


class MpiGroup(Group):
    """A group whose ranks send one another what they have to know."""

    call_type = MpiCall
    transport: MpiTransport
    given: Shares | None = None  # what the next mark takes along

    def mark(self, which: int, seq: int) -> None:
        index, given = self._own_marks[which], self.given
        self.given = None
        self.transport.words[index] = seq
        header = [(self._headers[seq & 1][self._position], h.USED)] if which == ARRIVE else []
        for position, rank in enumerate(self.ranks):
            if position != self._position:
                self.transport.tell(rank, index, seq, header, given[position] if given else None)

    def parcel(self, position: int, which: int, seq: int) -> np.ndarray:
        """What came with a mark of a member: bytes."""
        return self.transport.parcels[self._mark_of(position, which), seq]

    def forget(self, seq: int) -> None:
        """Drop what came with the marks of a collective that has ended."""
        for position in range(self.size):
            for which in (ARRIVE, PHASE):
                self.transport.parcels.pop((self._mark_of(position, which), seq), None)

    def _mark_of(self, position: int, which: int) -> int:
        return self.transport.segment.map.mark(self._slot, self.ranks[position], which)

    def shares(self, call: Call) -> Shares:
        """What this rank gives to each member at the beginning of a collective."""
        x, plan = call._payload, call.plan
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

    def all_reduce(self, call: Call, x: np.ndarray, op: str) -> Body:
        assert isinstance(call, MpiCall)
        rule, everyone = reduction(op, x.dtype), range(self.size)
        if x.nbytes <= SLOT_BYTES:
            parts = [call.peer(position, (x.size,), x.dtype) for position in everyone]
            total = np.empty(x.size, x.dtype)
            reduce_into(rule, parts, total)
            x[...] = total.reshape(x.shape)
            return x
        pieces = [self.bounds(x.size, position) for position in everyone]
        size = pieces[self._position].stop - pieces[self._position].start
        own = np.empty(size, x.dtype)
        reduce_into(rule, [call.peer(position, (size,), x.dtype) for position in everyone], own)
        self.given = [own] * self.size
        self.mark(PHASE, call.seq)
        yield self.condition(PHASE, call.seq)
        target = x.reshape(-1) if x.flags.c_contiguous else np.empty(x.size, x.dtype)
        call._own = own
        for position, piece in enumerate(pieces):
            target[piece] = call.peer(position, target[piece].shape, x.dtype, PHASE)
        if not x.flags.c_contiguous:
            x[...] = target.reshape(x.shape)
        return x

    def reduce_scatter(self, call: Call, x: np.ndarray, dim: int, op: str) -> Body:
        yield from ()
        shape = (*x.shape[:dim], x.shape[dim] // self.size, *x.shape[dim + 1 :])
        parts = [call.peer(position, shape, x.dtype) for position in range(self.size)]
        return reduce_arrays(reduction(op, x.dtype), parts, x.dtype)

    def all_to_all(self, call: Call, x: np.ndarray, split_dim: int, concat_dim: int) -> Body:
        yield from ()
        shape = (*x.shape[:split_dim], x.shape[split_dim] // self.size, *x.shape[split_dim + 1 :])
        parts = [call.peer(position, shape, x.dtype) for position in range(self.size)]
        return np.concatenate(parts, axis=concat_dim)

    def scatter(self, call: Call, root: int) -> Body:
        yield from ()
        shape, dtype = h.decode_given(call.words_of(root))
        return call.peer(root, shape, dtype).copy()


class MpiCommunicator(Communicator):
    """The contract over MPI. Objects travel without pickle: plain values and arrays only."""

    group_type = MpiGroup
    pack, unpack = staticmethod(encode), staticmethod(decode)
