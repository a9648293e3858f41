"""The collectives of one group, on shared memory: the algorithm called `direct`.

Every collective has the same life:

    expose the payload -> publish the header -> `arrive` -> wait for all -> compare headers
    -> read from the peers' pages -> (write a part, `phase`, wait for all, read the rest) -> `done`

Small payloads lie in the group's slot, of which there are two: a rank that is in collective n+2
has seen everyone arrive at n+1, so everyone has finished n and its slot is free. That holds
because a rank arrives only after it has finished its previous collective of the group.
Larger payloads lie in staging memory, two again, or are read where they are if the array lives
in the arena; then its owner also waits for `done` of all before it returns.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from simparallel.cluster import Traffic
from simparallel.comm import header as h
from simparallel.comm.reduction import reduce_arrays, reduce_into, reduce_stack, reduction
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.comm.work import Lane, Steps, Work
from simparallel.events import Recorder

ARRIVE, PHASE, DONE_MARK = 0, 1, 2
MAX_PLANS = 1024  # kept for calls that may come again
Body = Generator[Condition, None, Any]


class Group:
    """An ordered list of ranks that communicate; its order is the chunk order.

    Attributes:
        ranks: global ranks, in the group's order.
        rank: this rank's position in the group, or None if it is not a member.
        size: number of members.
    """

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

    # --- the life of a collective --------------------------------------------------------------------

    def submit(
        self, op: str, key: tuple[Any, ...], make_header: Callable[[], array[int]],
        payload: np.ndarray | None, body: Callable[[Call], Body], traffic: tuple[int, int],
    ) -> Work:  # fmt: skip
        """Queue one collective.

        Args:
            op: its name.
            key: everything the header and the price depend on; equal keys reuse them.
            make_header: makes it the first time.
            payload: what peers may read from us.
            body: reads from the peers, after the headers were found equal.
            traffic: (bytes of the vector that the network model prices, position of the root).
        """
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = CallPlan(op, make_header(), *traffic)
        return self.lane.submit(Call(self, plan, payload, body))

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


class CallPlan:
    """What calls with the same arguments share: the header, and the price once it is known."""

    __slots__ = ("cost", "header", "op", "root", "vector_bytes")

    def __init__(self, op: str, header: array[int], vector_bytes: int, root: int) -> None:
        self.op = op
        self.header = header
        self.vector_bytes = vector_bytes  # -1 where only the root knows it
        self.root = root
        self.cost: Traffic | None = None


class Call(Work):
    """One collective of one rank, from its header to its end."""

    def __init__(
        self, group: Group, plan: CallPlan, payload: np.ndarray | None, body: Callable[[Call], Body]
    ) -> None:
        super().__init__(group.lane, self._life(body), self.describe)
        self.group = group
        self.plan = plan
        self.seq = -1
        self.zero_copy = False
        self._site = group.transport.call_site()
        self._issued_ps = group.recorder.now_ps if group.recorder else 0
        self._payload = payload

    def _life(self, body: Callable[[Call], Body]) -> Steps:
        group, recorder = self.group, self.group.recorder
        start_ns = perf_counter_ns()
        seq = self.seq = group._seq = group._seq + 1
        self._publish()
        alone = group.size == 1
        if not alone:
            group.mark(ARRIVE, seq)
            yield group.condition(ARRIVE, seq)
            order()
        sim_start_ps, someone_zero_copy = self._compare()
        result = yield from body(self)
        if someone_zero_copy and not alone:
            group.mark(DONE_MARK, seq)
            if self.zero_copy:
                yield group.condition(DONE_MARK, seq)
        self._payload = None
        if recorder is not None:
            size_bytes, cost = self._price(recorder)
            self.sim_end_ps = sim_start_ps + cost.time_ps
            recorder.communicate(
                self.plan.op, "collective", group.stream, start_ns, perf_counter_ns(),
                sim_start_ps, self.sim_end_ps, size_bytes, cost.sent_bytes, group.ranks, seq,
            )  # fmt: skip
        return result

    def _price(self, recorder: Recorder) -> tuple[int, Traffic]:
        """Bytes of the vector, and what the described network takes for it."""
        plan, group = self.plan, self.group
        if plan.cost is not None:
            return plan.vector_bytes, plan.cost
        size_bytes = plan.vector_bytes
        if size_bytes < 0:
            size_bytes = self.words_of(plan.root)[h.NBYTES]
        cost = recorder.cluster.collective(
            plan.op, size_bytes, group.ranks, position=group._position, root=plan.root
        )
        if plan.vector_bytes >= 0:
            plan.cost = cost
        return size_bytes, cost

    def _publish(self) -> None:
        group, words = self.group, self.plan.header
        offset, size_bytes = self._expose()
        sim_ps = self._issued_ps
        if group.recorder is not None:
            sim_ps = max(sim_ps, group.recorder.clock_ps.get(group.stream, 0))
        words[h.SEQ] = self.seq
        words[h.SITE] = self._site
        words[h.SIM_PS] = sim_ps
        words[h.OFFSET] = offset
        words[h.NBYTES] = size_bytes
        words[h.ZERO_COPY] = self.zero_copy
        start = group._headers[self.seq & 1][group._position]
        group.transport.words[start : start + h.USED] = words

    def _expose(self) -> tuple[int, int]:
        """Put the payload where peers can read it: (offset in the arena, bytes)."""
        x, group, parity = self._payload, self.group, self.seq & 1
        if x is None:
            return 0, 0
        size_bytes = x.nbytes
        if size_bytes == 0 or group.size == 1:  # a group of one reads its own array
            return 0, size_bytes
        if size_bytes <= SLOT_BYTES:
            group.own_slot(parity, x)[...] = x
            return group._slots[parity], size_bytes
        arena = group.transport.arena
        in_place = arena.offset_of(x)
        if in_place is not None:
            self.zero_copy = True
            return in_place, size_bytes
        offset, room = group._staging[parity]
        if room < size_bytes:
            if room:
                arena.free(offset)
                group._staging[parity] = (0, 0)
            offset = arena.allocate(size_bytes)
            group._staging[parity] = (offset, size_bytes)
        arena.segment.array(group.transport.rank, offset, x.shape, x.dtype)[...] = x
        return offset, size_bytes

    def _compare(self) -> tuple[int, bool]:
        """All headers equal? Returns the simulated start, when the last rank was ready, and
        whether someone's own array is read.

        Raises:
            CollectiveMismatchError: with every rank's call and place.
        """
        group, words = self.group, self.group.transport.words
        starts = group._headers[self.seq & 1]
        own_start = starts[group._position]
        compared = group.transport.compared
        own = words[own_start : own_start + compared]
        sim_start_ps, zero_copy = words[own_start + h.SIM_PS], self.zero_copy
        for start in starts:
            if start == own_start:
                continue
            if words[start : start + compared] != own:
                raise self._mismatch()
            ready_ps = words[start + h.SIM_PS]
            if ready_ps > sim_start_ps:
                sim_start_ps = ready_ps
            if words[start + h.ZERO_COPY]:
                zero_copy = True
        return sim_start_ps, zero_copy

    def _mismatch(self) -> Exception:
        group = self.group
        headers = {rank: list(self.words_of(p)) for p, rank in enumerate(group.ranks)}
        sites = {rank: group.transport.site_text(rank, words[h.SITE]) for rank, words in headers.items()}
        return h.mismatch_error(group.name, headers, sites, group.transport.rank)

    # --- what bodies read --------------------------------------------------------------------------

    def words_of(self, position: int) -> Sequence[int]:
        """The header of a member, valid until this collective ends."""
        start = self.group._headers[self.seq & 1][position]
        return self.group.transport.words[start : start + h.USED]

    def peer(self, position: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """The payload of a member, where it lies."""
        group = self.group
        if group.size == 1 and self._payload is not None:
            return self._payload.reshape(shape)
        offset = group.transport.words[group._headers[self.seq & 1][position] + h.OFFSET]
        return group.transport.segment.array(group.ranks[position], offset, shape, dtype)

    def rows(self, x: np.ndarray) -> np.ndarray:
        """All members' payloads of a small collective, as rows: (P, n)."""
        if self.group.size == 1:
            return x.reshape(1, -1)
        return self.group.slot_rows(self.seq & 1, x.size, x.dtype)

    def describe(self) -> str:
        group, transport = self.group, self.group.transport
        number = f"#{self.seq} " if self.seq >= 0 else ""
        site = transport.site_text(transport.rank, self._site)
        return f"{group.name}, collective {number}{h.describe(self.plan.header)} at {site}"
