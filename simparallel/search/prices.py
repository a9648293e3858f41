"""The prices of a strategy: the events of an op and of a redistribution on the described cluster.

Every number comes from where a run takes it: work from the op's plan on a slice, a collective from the cluster's model,
the order of both from `parallel.operator.interpreter`. So the events of a plan equal those of a dry run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.base.dry_arrays import empty
from simparallel.errors import ClusterError
from simparallel.layout.boxes import Transfer, boxes_of, shape_of
from simparallel.layout.mesh import Group
from simparallel.layout.movement import Digits, digits_of, movement
from simparallel.layout.redistribution import Step, plan_redistribution
from simparallel.layout.sharding import Placement
from simparallel.machine.cluster import ClusterSpec, picoseconds
from simparallel.machine.device import ISSUE, DeviceWork
from simparallel.parallel.operator.explain import asked_inside
from simparallel.parallel.operator.halo import WindowCut
from simparallel.parallel.operator.op_call import OpCall

# Up to this many devices, all groups of a collective are priced, and movements without a closed form are planned rank
# by rank. Above, the first and the last group stand for all, and such movements are not considered.
MOST_DEVICES = 64


class TimedCompute(NamedTuple):
    """Computing on every rank.

    Attributes:
        ps: its time [ps] on each rank; one number if it is the same on all.
        host_ps: the time [ps] that the interpreter of each rank takes to start it; 0 on devices without one.
    """

    ps: int | tuple[int, ...]
    host_ps: int | tuple[int, ...] = 0

    @property
    def longest_ps(self) -> int:
        """The longest time of a device [ps]: costs are sums, and leave to the clock what an interpreter hides."""
        return self.ps if isinstance(self.ps, int) else max(self.ps)


class TimedCollective(NamedTuple):
    """A collective that ranks wait for, in several groups at once. `ps`: its time [ps] in each group."""

    op: str
    groups: tuple[Group, ...]
    ps: tuple[int, ...]


class TimedMessages(NamedTuple):
    """Messages; senders and receivers wait until theirs have arrived. `ps`: the time [ps] of each message."""

    pairs: tuple[tuple[int, int], ...]
    ps: tuple[int, ...]


class GradientSum(NamedTuple):
    """The sum of a parameter's gradient, which may overlap with the rest of backward.

    Attributes:
        exchange: the sum by itself.
        kind: groups and dtype; sums of one kind share collectives.
        size_bytes: of a rank's slice.
    """

    exchange: TimedCollective
    kind: tuple[tuple[Group, ...], np.dtype]
    size_bytes: int


Event = TimedCompute | TimedCollective | TimedMessages | GradientSum
Events = tuple[Event, ...]


class Prices:
    """Prices of ops and redistributions on one cluster, all of whose ranks take part.

    Args:
        cluster: the described hardware.
        alpha, beta: weights of computing and of communication in the costs of a search; the events keep their times.
    """

    def __init__(self, cluster: ClusterSpec, alpha: float = 1.0, beta: float = 1.0) -> None:
        self.cluster, self.device_num = cluster, cluster.world_size
        self._alpha, self._beta = alpha, beta
        factors = [cluster.device_factor(rank) for rank in range(self.device_num)]
        self._factors: tuple[float, ...] = (factors[0],) if len(set(factors)) == 1 else tuple(factors)
        # The time that interpreters take to start a communication; None without interpreters.
        self.issue_ps = self._each(cluster.device.host_s(ISSUE)) if cluster.device.has_interpreter else None
        self._redistributions: dict[Any, tuple[Events, int]] = {}
        self._exchanges: dict[Any, TimedCollective] = {}
        self._known_facts: dict[tuple[int, int], tuple[Digits | None, int]] = {}
        self._kept: list[Placement] = []

    # --- ops -----------------------------------------------------------------------------------------

    def forward(self, call: OpCall) -> Events:
        """Return the events of an op's forward on inputs in the layouts that it needs.

        Raises:
            ClusterError: the cluster's rules forbid a group.
        """
        asked, _ = self._asked(call)
        return (*self._halo(call, "forward"), *asked, self._op(call), *self.finish(call))

    def backward(self, call: OpCall, needs: Sequence[bool], leaves: Sequence[bool], left: Sequence[int] = ()) -> Events:
        """Return the events of an op's backward.

        Args:
            call: the op.
            needs: for each input whether its gradient is wanted.
            leaves: for each input whether it is a parameter that no other op reads, so that its sum may overlap.
            left: indices of the inputs whose gradients the backward of their redistribution sums.
        """
        plan, itemsize = call.local, self.cluster.itemsize(call.local.output.dtype)
        events: list[Event] = []
        if call.output is not call.made.gradient:
            events += self.redistribution(call.output.gradient, call.made.gradient, itemsize)
        events += self._asked(call)[1]
        events.append(self._op(call, tuple(needs)))
        if call.window_cut is not None and needs[call.window_cut.input]:
            events += self._halo(call, "backward")
        for i, spec in enumerate(plan.inputs):
            axes = call.sharding.gradient_axes(i)
            groups = call.sharding.groups(axes) if axes and needs[i] and i not in left else ()
            if groups and len(groups[0]) > 1:
                size_bytes = spec.size_bytes
                exchange = self.gradient_sum(size_bytes, (groups, spec.dtype))
                events.append(GradientSum(exchange, (groups, spec.dtype), size_bytes) if leaves[i] else exchange)
        return tuple(events)

    def finish(self, call: OpCall) -> Events:
        """Return the events that finish the partial sum of an op's forward."""
        made, output, itemsize = call.made, call.output, self.cluster.itemsize(call.local.output.dtype)
        if made is output:
            return ()
        size_bytes = prod(made.local_shape) * itemsize
        kind = "all_reduce" if output is made.gradient else "reduce_scatter"
        return (self.exchange(kind, size_bytes, made.layout.mesh.groups(made.layout.partial)),)

    def optimizer(self, name: str, flops: int, size_bytes: int, itemsize: int, tensors: int) -> TimedCompute:
        """Return the event of an optimizer's step."""
        return self._work(self.cluster.update(DeviceWork(f"{name}.step", flops, size_bytes, itemsize, tensors)))

    def _asked(self, call: OpCall) -> list[Events]:
        """Return the collectives that the op itself calls, in forward and in backward."""
        sharding = call.sharding
        found: list[Events] = []
        for asked in asked_inside(call.op, call.plan_of(sharding.mesh.ranks[0]), sharding, empty):
            each = (
                (prod(a.shape) * self.cluster.itemsize(a.dtype), sharding.groups(sharding.axes(a.dims), a.group_size))
                for a in asked
            )
            found.append(
                tuple(self.exchange("all_reduce", size, groups) for size, groups in each if len(groups[0]) > 1)
            )
        return found

    def _halo(self, call: OpCall, phase: str) -> Events:
        """Return the events of a halo exchange, and of the copies before or after it."""
        cut = call.window_cut
        if cut is None:
            return ()
        itemsize = self.cluster.itemsize(call.local.inputs[cut.input].dtype)
        moves = _moves_of(cut)
        pairs = [(m.source, m.target) if phase == "forward" else (m.target, m.source) for m in moves]
        events = self._messages(pairs, [prod(shape_of(m.box)) * itemsize for m in moves])
        have = boxes_of(cut.halo.source, cut.halo.shape)
        # A rank that reads exactly its slice copies nothing in forward, and in backward only if gradients return to it.
        givers = {m.source for m in moves}
        copied = []
        for rank, need in sorted(cut.halo.needs.items()):
            is_idle = need == have[rank] and (phase == "forward" or rank not in givers)
            copied.append(0 if is_idle else prod(shape_of(need if phase == "forward" else have[rank])) * itemsize)
        return (*events, self._copies("Halo", copied, itemsize))

    # --- redistributions -----------------------------------------------------------------------------

    def redistribution(self, source: Placement, target: Placement, itemsize: int) -> Events:
        """Return the events of a redistribution."""
        return self._redistribution(source, target, itemsize)[0]

    def redistribution_ps(self, source: Placement, target: Placement, itemsize: int, messages: bool) -> int | None:
        """Return the cost [ps] of a redistribution, as `redistribution`.

        None if it is not considered: it needs messages and these are not allowed, or the cluster forbids a group.
        """
        try:
            return self._redistribution(source, target, itemsize, messages)[1]
        except ClusterError:
            return None

    def _redistribution(
        self, source: Placement, target: Placement, itemsize: int, messages: bool = True
    ) -> tuple[Events, int | None]:
        """Return the events of a redistribution, and their cost [ps]; None for messages that are not allowed."""
        (before, have), (after, new) = self._facts(source, itemsize), self._facts(target, itemsize)
        found = None if before is None or after is None else movement(before, after)
        if found is None and not messages:
            return (), None
        # Closed forms are shared by all placements with the same movement and sizes.
        key = (source, target, itemsize) if found is None else (found, have, new, itemsize)
        if key not in self._redistributions:
            events: Events = ()
            copy = self._copy("Redistribute", new, itemsize)
            if found is None:
                layout, steps = source.layout, plan_redistribution(source.layout, target.layout, source.shape).steps
                for step in steps:
                    held = prod(layout.local_shape(source.shape)) * itemsize
                    events, layout = (*events, *self._step(step, held, itemsize)), step.layout
                # A sum writes its result where it belongs; only parts that move are assembled.
                events += (copy,) if any(step.exchange is not None for step in steps) else ()
            elif found.kind == "slice":
                events = (copy,)
            elif found.kind != "nothing":
                vector = found.group_size * have // found.kept
                events = (self.exchange(found.kind, vector, found.groups(self.device_num)), copy)
            self._redistributions[key] = events, self.cost_ps(events)
        return self._redistributions[key]

    def _facts(self, place: Placement, itemsize: int) -> tuple[Digits | None, int]:
        """Return the digits that cut a placement, and the bytes of a rank's slice; cached, as a search asks often."""
        # Equal placements are one object; `_kept` keeps its id from being reused.
        key = id(place), itemsize
        found = self._known_facts.get(key)
        if found is None:
            found = digits_of(place.layout), prod(place.local_shape) * itemsize
            self._known_facts[key] = found
            self._kept.append(place)
        return found

    def cost_ps(self, events: Events) -> int:
        """Return the weighted time [ps] that a rank computes and waits in these events.

        Without sums of gradients: a search weighs separately how much of them is exposed. Costs are sums over ops and
        edges, as solvers need them; only the clock times a whole step.
        """
        computed = sum(event.longest_ps for event in events if isinstance(event, TimedCompute))
        waited = sum(max(event.ps) for event in events if isinstance(event, (TimedCollective, TimedMessages)))
        return round(self._alpha * computed + self._beta * waited)

    def _step(self, step: Step, have: int, itemsize: int) -> Events:
        """Return the events of one step of a plan made rank by rank."""
        if step.kind == "slice":
            return ()
        if step.exchange is None:
            return (self.exchange(step.kind, have, step.groups),)
        moves = [move for move in step.moves if move.source != move.target]
        sizes = [prod(shape_of(move.box)) * itemsize for move in moves]
        if step.kind == "messages":
            return self._messages([(move.source, move.target) for move in moves], sizes)
        size = len(step.groups[0])
        vector = {"broadcast": have, "all_gather": have * size, "all_to_all": sizes[0] * size}[step.kind]
        return (self.exchange(step.kind, vector, step.groups),)

    def exchange(self, op: str, size_bytes: int, groups: tuple[Group, ...]) -> TimedCollective:
        """Return a collective on a vector of `size_bytes` in all these groups."""
        key = op, size_bytes, groups
        if key not in self._exchanges:
            first, last = groups[0], groups[-1]
            priced = groups if self.device_num <= MOST_DEVICES else (first, last)
            times = [self.cluster.collective(op, size_bytes, group).time_ps for group in priced]
            ps = tuple(times) if priced is groups else (max(times),) * len(groups)
            self._exchanges[key] = TimedCollective(op, groups, ps)
        return self._exchanges[key]

    def gradient_sum(self, size_bytes: int, kind: tuple[tuple[Group, ...], np.dtype]) -> TimedCollective:
        """Return the sum of gradients, see `GradientSum`; of these bytes in memory here, from which buckets follow."""
        groups, dtype = kind
        return self.exchange("all_reduce", size_bytes * self.cluster.itemsize(dtype) // dtype.itemsize, groups)

    def _messages(self, pairs: Sequence[tuple[int, int]], sizes_bytes: Sequence[int]) -> Events:
        ps = [self.cluster.message(size, *pair).time_ps for pair, size in zip(pairs, sizes_bytes, strict=True)]
        return (TimedMessages(tuple(pairs), tuple(ps)),) if pairs else ()

    # --- work ----------------------------------------------------------------------------------------

    def _copy(self, name: str, size_bytes: int, itemsize: int) -> TimedCompute:
        return self._work(DeviceWork(name, 0, 2 * size_bytes, itemsize))

    def _copies(self, name: str, sizes_bytes: Sequence[int], itemsize: int) -> TimedCompute:
        """Return copies whose sizes may differ between ranks; 0 bytes are no copy."""
        copies = {size: self._copy(name, size, itemsize) if size else TimedCompute(0) for size in set(sizes_bytes)}
        if len(copies) == 1:
            return copies[sizes_bytes[0]]
        each = [copies[size] for size in sizes_bytes]
        return TimedCompute(
            *(
                tuple(ps if isinstance(ps, int) else ps[rank] for rank, ps in enumerate(column))
                for column in zip(*each, strict=True)
            )
        )

    def _op(self, call: OpCall, needs: tuple[bool, ...] | None = None) -> TimedCompute:
        device, dtype = self.cluster.device, self.cluster.dtype
        return self._work(call.op.cost(call.local, device.software, needs, dtype, device.memory_format))

    def _work(self, work: DeviceWork) -> TimedCompute:
        device = self.cluster.device
        return TimedCompute(self._each(device.device_s(work)), self._each(device.host_s(work)))

    def _each(self, seconds: float) -> int | tuple[int, ...]:
        """Return a time [ps] for each rank; one number if it is the same on all."""
        times = [picoseconds(seconds * factor) for factor in self._factors]
        return times[0] if len(times) == 1 else tuple(times)


@lru_cache(maxsize=64)
def _moves_of(cut: WindowCut) -> list[Transfer]:
    """Return the transfers between ranks; cached, as forward and backward both need them."""
    return [move for move in cut.halo.all() if move.source != move.target]
