"""The life of one collective of one rank, on shared memory.

    expose the payload -> publish the header -> `arrive` -> wait for all -> compare headers
    -> the body, which reads from the peers' pages -> `done`, and the event

What a collective computes is its body, in `group.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Sequence
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.cluster import Traffic
from simparallel.comm import header as h
from simparallel.comm.segment import SLOT_BYTES, order
from simparallel.comm.transport import Condition
from simparallel.comm.work import Steps, Work
from simparallel.events import Recorder

if TYPE_CHECKING:
    from simparallel.comm.group import Group

ARRIVE, PHASE, DONE_MARK = 0, 1, 2  # the marks of a rank: numbers of the collectives it got to
Body = Generator[Condition, None, Any]


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
