"""Groups of ranks, and how a group runs its collectives.

A group has `Views` of its members' memory, and one `Algorithm` or more: a body for each collective, with the plans of
the calls made so far. `call` describes the life of a collective step by step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms import DIRECT
from simparallel.algorithms.reduction import reduction
from simparallel.arrays.captures import refuse, running
from simparallel.base.adasum import check_dtype
from simparallel.base.units import format_numbers
from simparallel.comm.call import Body, Call
from simparallel.comm.collective import ADASUM, Collective
from simparallel.comm.fast_call import run_at_once
from simparallel.comm.mailbox import Mailbox
from simparallel.comm.plan import CallPlan, Settings
from simparallel.comm.validate import check_array, check_dim, position_of
from simparallel.comm.views import Views
from simparallel.comm.work import Lane
from simparallel.errors import CollectiveMismatchError
from simparallel.machine.cluster import Traffic

# Limit of the plans kept for calls that may be repeated.
MAX_PLANS = 1024
# A class of bodies, or a function that chooses one.
Factory = Callable[["Group", Any, Settings], Body]


class Medium(NamedTuple):
    """How the payloads of collectives travel: through shared memory, or as MPI messages.

    Attributes:
        views: class of the members' views.
        bodies: the body of each collective, by name, for the algorithm "direct".
        call: class of a call.
        pack, unpack: encode an object as bytes, uint8 (n,), and decode it.
    """

    views: type[Views]
    bodies: Mapping[str, Factory]
    pack: Callable[[Any], np.ndarray]
    unpack: Callable[[np.ndarray], Any]
    call: type[Call] = Call


class Group:
    """An ordered list of ranks that communicate, made by `sp.new_group`; every `group=` argument takes one.

    Its order is the order of the chunks. The other attributes and methods serve the collectives.

    Attributes:
        ranks: global ranks, in the group's order.
        rank: this rank's position in it, or None if it is not a member.
        size: number of members.
        name: "world", or "group 1 (ranks 0, 2)".
        seq: number of the collective that ran last, or is running.
    """

    views: Views  # of members only

    def __repr__(self) -> str:
        return f"<{'world' if self.name == 'world' else 'group'} of ranks {format_numbers(self.ranks)}>"

    def __init__(self, mailbox: Mailbox, medium: Medium, slot: int, ranks: tuple[int, ...]) -> None:
        self.mailbox, self.medium, self.slot, self.ranks, self.size = mailbox, medium, slot, ranks, len(ranks)
        self.transport, self.recorder = mailbox.transport, mailbox.recorder
        self.name = "world" if slot == 0 else f"group {slot} (ranks {', '.join(map(str, ranks))})"
        self.stream = f"comm {'world' if slot == 0 else slot}"
        # The rank's lanes are shared by all its groups and messages: while one waits, the others advance.
        self.lane = Lane(self.transport, mailbox.lanes, self.recorder.join if self.recorder else None)
        self.direct = Algorithm(self, medium.bodies)
        self.algorithms = {DIRECT: self.direct}
        self.seq = 0
        self._prices: dict[Any, Traffic] = {}
        me = self.transport.rank
        self.rank = ranks.index(me) if me in ranks else None
        self.position = self.rank or 0
        if self.rank is not None:
            self.views = medium.views(self.transport, slot, ranks)
            # A body without waits runs unrolled where peers share the memory; injected faults need the steps one by
            # one.
            self.has_fast_calls = self.size > 1 and self.views.is_shared and medium.call is Call

    def __deepcopy__(self, memo: dict[int, Any]) -> Group:
        """Return the group itself: the copy of a model communicates in the same group."""
        return self

    def run(self, plan: CallPlan, x: Any, async_op: bool = False, out: Any = None, *, must_copy: bool = False) -> Any:
        """Run one collective with this rank's argument; return its result, or with `async_op` its `Work`.

        Args:
            plan: plan of the collective.
            x: this rank's argument.
            async_op: do not wait.
            out: array for the result; None for the default place.
            must_copy: peers and body need a copy of x, because `out` shares memory with x, or x would be written.
        """
        if running.step:
            refuse(
                f"calls the collective {plan.op}",
                "Call it after the step; for gradients, use DistributedGradReducer, not DistributedDataParallel.",
            )
        # While other communication of this rank is in progress, its generators have to be advanced meanwhile.
        if plan.at_once and not (async_op or self.mailbox.lanes):
            return run_at_once(self, plan, x, out, must_copy)
        call = (plan.body.call_type or self.medium.call)(self, plan, x, out, must_copy)
        self.lane.submit(call)
        return call if async_op else call.wait()

    def header_error(self, parity: int) -> CollectiveMismatchError:
        """Build the error for headers that differ; it lists every rank's call and call site."""
        transport = self.transport
        headers = {rank: transport.segment.call_of(self.slot, parity, rank) for rank in self.views.ranks}
        sites = {rank: transport.site_text(rank, words[h.SITE]) for rank, words in headers.items()}
        return h.mismatch_error(self.name, headers, sites, transport.rank)

    def described(self, plan: CallPlan, parity: int, size_bytes: int) -> int:
        """Return the bytes on the described devices of so many bytes of a call's arrays; -1 for all of the root's."""
        dtype = plan.dtype
        if dtype is None and plan.vector_bytes < 0:
            note = self.views.note_of(plan.root, parity)
            size_bytes = note[h.NBYTES - h.COMPARED] if size_bytes < 0 else size_bytes
            dtype = h.decode_given(*note[h.GIVEN_DTYPE - h.COMPARED :])[1]
        if dtype is None:
            return size_bytes
        assert self.recorder is not None
        return size_bytes * self.recorder.cluster.itemsize(dtype) // max(dtype.itemsize, 1)

    def price(self, plan: CallPlan, parity: int) -> tuple[int, Traffic]:
        """Return the bytes of the vector and the price of a call on the described network."""
        assert self.recorder is not None
        size_bytes = self.described(plan, parity, plan.vector_bytes)
        key = plan.op, size_bytes, plan.root
        cost = self._prices.get(key)
        if cost is None:
            cost = self._prices[key] = self.recorder.cluster.collective(
                plan.op, size_bytes, self.ranks, position=self.position, root=plan.root
            )
        # A size that only the root knows may differ from call to call, so its price is not kept.
        if plan.vector_bytes >= 0:
            plan.price = size_bytes, cost
        return size_bytes, cost

    def describe(self, plan: CallPlan, seq: int, site: int) -> str:
        """Describe a call in words, with its call site."""
        number = f"#{seq} " if seq >= 0 else ""
        place = self.transport.site_text(self.transport.rank, site)
        return f"{self.name}, collective {number}{h.describe(plan.header)} at {place}"

    def mismatch(self, text: str) -> CollectiveMismatchError:
        """Build the error for a difference that the body of the running collective finds; `text` follows the call."""
        call = self.describe_running()
        text = f"{call}{text} No data was changed."
        return CollectiveMismatchError(text, group=self.name, seq=self.seq, calls={self.transport.rank: call})

    def describe_running(self) -> str:
        """Describe this rank's call of the running collective."""
        parity = self.seq & 1
        plan, note = self.views.published[parity], self.views.note_of(self.position, parity)
        assert plan is not None
        return self.describe(plan, self.seq, note[h.SITE - h.COMPARED])


class Algorithm:
    """A way to run a group's collectives.

    Args:
        group: the group.
        bodies: the body of each collective, by name.
        number: number of the algorithm in headers.

    Attributes:
        plans: the plans of the calls made so far, by collective and arguments.
    """

    def __init__(self, group: Group, bodies: Mapping[str, Factory], number: int = 0) -> None:
        self.group, self.bodies, self.number = group, bodies, number
        self.plans: dict[Any, CallPlan] = {}

    def add_plan(
        self,
        key: tuple[Any, ...],
        header: array[int],
        settings: Settings,
        x: np.ndarray | None = None,
        vector_bytes: int = 0,
        purpose: str = "",
        body: str = "",
    ) -> CallPlan:
        """Plan a collective.

        Args:
            key: name of the collective, and everything else that the plan depends on; the key in `plans`.
            header: header of its calls.
            settings: arguments other than the array.
            x: an array like the payload that peers may read from this rank; None for no payload.
            vector_bytes: size that the network model prices; -1 if only the root knows it.
            purpose: name of the op or reducer that makes the call.
            body: key of the body, if not the collective's name.
        """
        # The header of new_group has its members in this word.
        header[h.ALGORITHM] = header[h.ALGORITHM] or self.number
        if purpose:
            h.encode_purpose(header, purpose)
        # Shapes that never repeat would fill the memory; a plan that was dropped is made again.
        if len(self.plans) >= MAX_PLANS:
            self.plans.clear()
        made = self.bodies[body or key[0]](self.group, x, settings)
        plan = self.plans[key] = CallPlan(key[0], header, made, x, vector_bytes)
        self.group.views.prepare(plan)
        plan.at_once = self.group.has_fast_calls and not made.waits()
        return plan

    def plan_array(self, what: Collective, key: tuple[Any, ...], x: np.ndarray, purpose: str) -> CallPlan:
        """Check the arguments that calls with this key share, and plan a collective of an array; see `Communicator`."""
        (name, op, root, dims, sizes, listed, *_), group = key, self.group
        if isinstance(x, np.ndarray):
            check_array(name, x)
        position = position_of(name, group, root) if what.root else 0
        if dims:
            parts = group.size if what.divides and sizes is None else 1
            dims = tuple(check_dim(name, x, dim, 1 if i else parts) for i, dim in enumerate(dims))
        if what is ADASUM:
            check_dtype("x", x.dtype)
        rule = None if op == "-" or what is ADASUM else reduction(op, x.dtype, name)
        shape, word = x.shape, h.encode_dims(*dims)
        if what.divides and sizes is not None:
            word = h.encode_splits(dims[0], sizes)
        elif sizes is not None:
            shape = tuple(sizes)
        header = h.encode(name, op, root or 0, x.dtype, shape, word, listed=listed)
        vector_bytes = x.nbytes * (group.size if what.carries == "all" else 1)
        plan = self.add_plan(key, header, Settings(op, position, dims, sizes, rule), x, vector_bytes, purpose)
        plan.writes = what.writes(group.position, position)
        return plan

    def plan_scatter(self, root: int, parts: Sequence[np.ndarray] | None, purpose: str) -> CallPlan:
        """Plan a scatter, or return the plan of earlier equal calls; only the root has parts."""
        kind = () if parts is None else (parts[0].dtype, parts[0].shape)
        key = "scatter", root, *kind, purpose
        if (plan := self.plans.get(key)) is None:
            header, x = h.encode("scatter", root=self.group.ranks[root]), None
            if parts is not None:
                h.encode_given(header, parts[0].shape, parts[0].dtype)
                x = np.broadcast_to(parts[0], (self.group.size, *parts[0].shape))
            # The receivers learn the size from the root, so the network model prices it at the end (-1).
            plan = self.add_plan(key, header, Settings(root=root), x, -1 if x is None else x.nbytes, purpose)
        return plan
