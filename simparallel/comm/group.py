"""The collectives of one group, on shared memory: the algorithm called `direct`.

Every collective has the same life, see `call.py`; what differs is its body, which reads from the
peers' pages, and may write a part, mark its `phase`, wait for all and read the rest.

Small payloads lie in the group's slot, of which there are two: a rank that is in collective n+2
has seen everyone arrive at n+1, so everyone has finished n and its slot is free. That holds
because a rank arrives only after it has finished its previous collective of the group.
Larger payloads lie in staging memory, two again, or are read where they are if the array lives
in the arena; then its owner also waits for `done` of all before it returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np

from simparallel.comm import header as h
from simparallel.comm.call import PHASE, Body, Call, CallPlan
from simparallel.comm.reduction import reduce_arrays, reduce_into, reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.work import Lane, Work
from simparallel.events import Recorder

MAX_PLANS = 1024  # kept for calls that may come again


class Group:
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
        self._slot = slot
        self._seq = 0
        self._plans: dict[Any, CallPlan] = {}
        self._rows: dict[Any, np.ndarray] = {}  # views of all slots, and of the own one
        self._own_slots: dict[Any, np.ndarray] = {}
        self._staging: list[tuple[int, int]] = [(0, 0), (0, 0)]  # (offset, bytes) by parity
        if self.rank is not None:
            self._prepare()

    def _prepare(self) -> None:
        """Word numbers are planned once; a collective only reads them."""
        control, me = self.transport.segment.map, self.transport.rank
        peers = tuple(rank for rank in self.ranks if rank != me)
        self._peers = peers
        self._position = self.ranks.index(me)
        self._watched = [tuple(control.mark(self._slot, rank, which) for rank in peers) for which in range(3)]
        self._own_marks = [control.mark(self._slot, me, which) for which in range(3)]
        self._headers = [[control.header(self._slot, parity, r) for r in self.ranks] for parity in (0, 1)]
        self._slots = self.transport.arena.reserve_slots(self._slot)

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Itself: a copy of a model that has a group has the same one."""
        return self

    # --- the life of a collective --------------------------------------------------------------------

    def submit(
        self, op: str, key: tuple[Any, ...], make_header: Callable[[], array[int]],
        payload: np.ndarray | None, body: Callable[[Call], Body], traffic: tuple[int, int],
        kind: type[Call] | None = None,
    ) -> Work:  # fmt: skip
        """Queue one collective.

        Args:
            op: its name.
            key: everything the header and the price depend on; equal keys reuse them.
            make_header: makes it the first time.
            payload: what peers may read from us.
            body: reads from the peers, after the headers were found equal.
            traffic: (bytes of the vector that the network model prices, position of the root).
            kind: `Call`, or one whose payload travels otherwise.
        """
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = CallPlan(op, make_header(), *traffic)
        return self.lane.submit((kind or self.call_type)(self, plan, payload, body))

    def condition(self, which: int, seq: int) -> Condition:
        return Condition(self._watched[which], self._peers, seq)

    def mark(self, which: int, seq: int) -> None:
        index = self._own_marks[which]
        order()
        self.transport.words[index] = seq
        self.transport.notify(index)

    # --- bodies ------------------------------------------------------------------------------------

    def all_reduce(self, call: Call, x: np.ndarray, op: str) -> Body:
        rule = reduction(op, x.dtype)
        if x.nbytes <= SLOT_BYTES:
            if x.size:
                reduce_stack(rule, call.rows(x), x)
            return x
        mine = self.bounds(x.size, self._position)
        parts = [call.peer(position, (x.size,), x.dtype) for position in range(self.size)]
        own = parts[self._position]
        reduce_into(rule, [part[mine] for part in parts], own[mine])
        self.mark(PHASE, call.seq)
        yield self.condition(PHASE, call.seq)
        target = x.reshape(-1) if x.flags.c_contiguous else np.empty(x.size, x.dtype)
        for position, part in enumerate(parts):
            if not (call.zero_copy and position == self.rank):
                piece = self.bounds(x.size, position)
                target[piece] = part[piece]
        if not x.flags.c_contiguous:
            x[...] = target.reshape(x.shape)
        return x

    def reduce(self, call: Call, x: np.ndarray, op: str, root: int) -> Body:
        yield from ()  # a generator, like every body
        if self.rank == root:
            rule = reduction(op, x.dtype)
            parts = [call.peer(position, (x.size,), x.dtype) for position in range(self.size)]
            if x.flags.c_contiguous:
                reduce_into(rule, parts, x.reshape(-1))
            else:
                x[...] = reduce_arrays(rule, parts, x.dtype).reshape(x.shape)
        return x

    def broadcast(self, call: Call, x: np.ndarray, root: int) -> Body:
        yield from ()
        if self.rank != root:
            x[...] = call.peer(root, x.shape, x.dtype)
        return x

    def all_gather(self, call: Call, x: np.ndarray, dim: int) -> Body:
        yield from ()
        return np.concatenate([call.peer(p, x.shape, x.dtype) for p in range(self.size)], axis=dim)

    def reduce_scatter(self, call: Call, x: np.ndarray, dim: int, op: str) -> Body:
        yield from ()
        rule = reduction(op, x.dtype)
        size = x.shape[dim] // self.size
        start = size * (self._position)
        piece = (slice(None),) * dim + (slice(start, start + size),)
        parts = [call.peer(p, x.shape, x.dtype)[piece] for p in range(self.size)]
        if dim == 0 and x.ndim:
            out = np.empty(parts[0].shape, x.dtype)
            reduce_into(rule, [part.reshape(-1) for part in parts], out.reshape(-1))
            return out
        return reduce_arrays(rule, parts, x.dtype)

    def all_to_all(self, call: Call, x: np.ndarray, split_dim: int, concat_dim: int) -> Body:
        yield from ()
        size = x.shape[split_dim] // self.size
        start = size * (self._position)
        piece = (slice(None),) * split_dim + (slice(start, start + size),)
        parts = [call.peer(p, x.shape, x.dtype)[piece] for p in range(self.size)]
        return np.concatenate(parts, axis=concat_dim)

    def gather(self, call: Call, x: np.ndarray, root: int) -> Body:
        yield from ()
        if self.rank != root:
            return None
        return [call.peer(p, x.shape, x.dtype).copy() for p in range(self.size)]

    def scatter(self, call: Call, root: int) -> Body:
        yield from ()
        words = call.words_of(root)
        shape, dtype = h.decode_given(words)
        return call.peer(root, (self.size, *shape), dtype)[self._position, ...].copy()

    def nothing(self, call: Call) -> Body:
        yield from ()

    def own_slot(self, parity: int, x: np.ndarray) -> np.ndarray:
        """This rank's slot, in the shape and dtype of `x`."""
        key = parity, x.shape, x.dtype
        view = self._own_slots.get(key)
        if view is None:
            if len(self._own_slots) >= MAX_PLANS:
                self._own_slots.clear()
            segment = self.transport.segment
            view = segment.array(self.transport.rank, self._slots[parity], x.shape, x.dtype)
            self._own_slots[key] = view
        return view

    def slot_rows(self, parity: int, size: int, dtype: np.dtype) -> np.ndarray:
        """What lies in the members' slots, as rows (P, size); a view where the ranks are evenly spaced."""
        key = parity, size, dtype
        rows = self._rows.get(key)
        if rows is not None:
            return rows
        segment, offset = self.transport.segment, self._slots[parity]
        spacings = {b - a for a, b in zip(self.ranks, self.ranks[1:], strict=False)}
        if len(spacings) != 1:
            return np.stack([segment.array(rank, offset, (size,), dtype) for rank in self.ranks])
        first = segment.array(self.ranks[0], offset, (size,), dtype)
        strides = (spacings.pop() * segment.arena_bytes, dtype.itemsize)
        if len(self._rows) >= 256:
            self._rows.clear()
        rows = np.lib.stride_tricks.as_strided(first, (self.size, size), strides, writeable=False)
        self._rows[key] = rows
        return rows

    def release(self) -> None:
        """Give the staging memory back. Only when no rank can read it any more."""
        for offset, size_bytes in self._staging:
            if size_bytes:
                self.transport.arena.free(offset)
        self._staging = [(0, 0), (0, 0)]

    def bounds(self, size: int, position: int) -> slice:
        """The part of a vector that this position of the group reduces."""
        return slice(size * position // self.size, size * (position + 1) // self.size)
