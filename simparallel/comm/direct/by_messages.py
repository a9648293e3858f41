"""Collectives that run as messages: the bodies of the named algorithms.

The life of a collective is unchanged: publish the header, arrive, wait for all, compare. The algorithm runs after
that, so a mismatched call is found before any of its messages is sent. Messages of algorithms use the same mailboxes
as the user's, with tags that users cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms import PointToPoint, check_algorithm, find, name_of, number_of, offers
from simparallel.algorithms.ledger import Entry
from simparallel.algorithms.reduction import Combine
from simparallel.backend import get_namespace
from simparallel.clock.recorder import Recorder
from simparallel.comm.call import Body, Call, into
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.direct.direct import copies, given
from simparallel.comm.group import Algorithm, Factory, Group
from simparallel.comm.plan import CallPlan, Settings
from simparallel.comm.validate import native
from simparallel.comm.work import Steps, Work
from simparallel.errors import InputError
from simparallel.machine.cluster import Traffic, picoseconds

# The tag is FIRST_TAG + the group's number * SEQ_SPAN + the number of the collective in its group.
FIRST_TAG, SEQ_SPAN = 2**62, 2**40


class MessagePort(PointToPoint):
    """Sends and receives of one collective, through this rank's mailboxes."""

    def __init__(self, group: Group, call: Call) -> None:
        super().__init__(group.position, group.size)
        self._mailbox, self._ranks, self._site = group.mailbox, group.ranks, call.site
        # Two collectives may be in progress between the same two ranks, by different groups: their messages must not
        # match.
        self._tag = FIRST_TAG + group.slot * SEQ_SPAN + call.seq % SEQ_SPAN

    def start_send(self, x: np.ndarray, dst: int) -> Work:
        return self._mailbox.outbox(self._ranks[dst]).send(x, self._tag, self._site)

    def start_recv(self, x: np.ndarray, src: int) -> Work:
        return self._mailbox.inbox(self._ranks[src]).receive(x, self._tag, self._site)

    def until(self, begun: Work) -> Steps:
        return begun.steps()


class MessageBody(Body):
    """A collective whose payload travels in messages; it records its traffic.

    Bodies work on flat private copies, so a failure midway leaves the user's array unchanged.
    """

    group: Group
    by_messages = True

    def expose(self, call: Call) -> tuple[int, int]:
        """Expose nothing: peers read no memory. Returns (0, bytes); the size is for the network model."""
        return 0, call.plan.payload_bytes * call.plan.exposes

    def price(self, call: Call, recorder: Recorder) -> tuple[int, Traffic]:
        """Price the time by the algorithm's formula; take the bytes from the ledger, also for uneven chunks."""
        plan, group = call.plan, self.group
        # The formula prices the call on every rank alike; the ledger has this rank's own bytes.
        parity, algorithm = call.seq & 1, algorithm_of(plan)
        size_bytes = group.described(plan, parity, plan.vector_bytes)
        cost = recorder.cluster.collective(plan.op, size_bytes, group.ranks, algorithm=algorithm)
        entry: Entry = call.kept
        call.step_ps = self._step_times(call, recorder, cost.time_ps)
        sent_bytes = group.described(plan, parity, entry.total.sent_bytes)
        return size_bytes, Traffic(cost.time_ps, sent_bytes, algorithm)

    def _step_times(self, call: Call, recorder: Recorder, time_ps: int) -> tuple[int, ...]:
        """Return the duration of each step by this rank's own traffic, or () if they do not add up to the price.

        They do not if the rank is idle in a step that others wait for.
        """
        # A step takes as long as the larger of its two directions.
        link = recorder.cluster.link_of(self.group.ranks)
        entry: Entry = call.kept
        largest = [
            self.group.described(call.plan, call.seq & 1, max(step.sent_bytes, step.received_bytes))
            for step in entry.steps
        ]
        times = [picoseconds(link.latency_s + size / link.bandwidth_bytes_per_s) for size in largest]
        if len(times) < 2 or abs(sum(times) - time_ps) > len(times):  # each time is rounded
            return ()
        return (*times[:-1], time_ps - sum(times[:-1]))

    def exchange(self, call: Call, *arguments: Any) -> Steps:
        """Run the algorithm, and record its traffic."""
        group, op, algorithm = self.group, call.plan.op, algorithm_of(call.plan)
        port = (call.port_type or MessagePort)(group, call)
        yield from find(algorithm, op)(port, *arguments)
        call.kept = entry = Entry(group.ranks[port.rank], group.name, call.seq, op, algorithm, tuple(port.traffic))
        for ledger in call.ledgers:
            ledger.entries.append(entry)

    def combine(self, x: np.ndarray) -> Combine:
        return Combine(self.settings.op, x.dtype, self.group.size)


class _InPlace(MessageBody):
    """A collective that replaces x: the algorithm works on a flat copy of x."""

    def __init__(
        self, arguments: Callable[[_InPlace, np.ndarray], tuple[Any, ...]], group: Group, x: np.ndarray,
        settings: Settings,
    ) -> None:  # fmt: skip
        super().__init__(group, x, settings)
        self.arguments = arguments(self, x)  # of the algorithm, after x

    def run(self, call: Call) -> Steps:
        # The user's array is written only when the algorithm has succeeded.
        flat = call.x.copy().reshape(-1)
        yield from self.exchange(call, flat, *self.arguments)
        target = call.target
        if COLLECTIVES[call.plan.op].writes(self.position, self.settings.root):
            target[...] = flat.reshape(target.shape)
        return target


class _AllGather(MessageBody):
    def run(self, call: Call) -> Steps:
        parts = get_namespace(call.x).empty((self.group.size, *call.x.shape), call.x.dtype)
        # Each rank's part is at its position, so that the algorithm fills the gaps in place.
        parts[self.position] = call.x
        yield from self.exchange(call, parts.reshape(-1))
        return np.concatenate(parts, self.settings.dims[0], call.out)


class _ReduceScatter(MessageBody):
    def run(self, call: Call) -> Steps:
        x = call.x
        split = np.split(x, self.group.size, self.settings.dims[0])
        parts = get_namespace(x).array(split, x.dtype)  # keeps the byte order
        yield from self.exchange(call, parts.reshape(-1), self.combine(x))
        return into(call.out, parts[self.position].astype(native(x.dtype), copy=False))


class _AllToAll(MessageBody):
    def run(self, call: Call) -> Steps:
        split_dim, concat_dim = self.settings.dims
        given = np.split(call.x, self.group.size, split_dim)
        taken = [np.empty_like(part, order="C") for part in given]
        yield from self.exchange(call, given, taken)
        return np.concatenate(taken, concat_dim, call.out)


class _Gather(MessageBody):
    def run(self, call: Call) -> Steps:
        size, root = self.group.size, self.settings.root
        parts = [call.x.copy() for _ in range(size if self.is_root else 1)]
        # A rank that is not the root sends the entry at its own position; all its entries are the same array.
        yield from self.exchange(call, parts if self.is_root else parts * size, root)
        if not self.is_root:
            return None
        is_native = call.x.dtype.isnative
        return parts if call.out is None and is_native else copies(parts, call.out, is_native=is_native)


class _Scatter(MessageBody):
    has_note = True

    def run(self, call: Call) -> Steps:
        size, root = self.group.size, self.settings.root
        shape, dtype, _ = given(self.group, root, call.out, self.group.views.place_of(root, call.seq & 1))
        parts = [np.empty(shape, dtype) for _ in range(size)] if call.x is None else [part.copy() for part in call.x]
        yield from self.exchange(call, parts, root)
        return into(call.out, parts[self.position])


_BODIES: Mapping[str, Factory] = {
    "all_reduce": partial(_InPlace, lambda body, x: (body.combine(x),)),
    "adasum": partial(_InPlace, lambda body, x: (body.settings.sizes or (x.size,),)),
    "broadcast": partial(_InPlace, lambda body, x: (body.settings.root,)),
    "reduce": partial(_InPlace, lambda body, x: (body.settings.root, body.combine(x))),
    **{"all_gather": _AllGather, "reduce_scatter": _ReduceScatter, "all_to_all": _AllToAll},
    **{"gather": _Gather, "scatter": _Scatter},
}


def algorithm_of(plan: CallPlan) -> str:
    return name_of(plan.header[h.ALGORITHM])


def choose(group: Group, op: str, algorithm: str | None, default: str) -> Algorithm:
    """Return the algorithm that runs `op`: `algorithm` if given; else `default` if it implements `op`, else `direct`.

    Raises:
        InputError: no such algorithm, or it does not have this collective, or not for this number of ranks.
    """
    check_algorithm(op, algorithm or default, op if algorithm else None)
    # A default that does not have this collective gives way to `direct`; one that was asked for by name is an error.
    named, algorithm = algorithm, algorithm or default
    if not offers(algorithm, op):
        return group.direct
    if op == "adasum" and algorithm == "halving_doubling" and group.size & (group.size - 1):
        if named is None:
            return group.direct
        raise InputError(
            f"adasum: halving_doubling is published for powers of two, but {group.name} has {group.size} ranks; use "
            'algorithm="tree" or "direct", where a vector without a partner moves on to the next level.'
        )
    if algorithm not in group.algorithms:
        group.algorithms[algorithm] = Algorithm(group, _BODIES, number_of(algorithm))
    return group.algorithms[algorithm]
