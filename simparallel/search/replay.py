"""The time of one step under a plan, event by event, without a run: the same as by a dry run of the plan.

The events are those of `prices`, in the order in which the interpreter and the tape run them. Every rank has a clock,
every group a stream, and the sums of gradients share collectives and overlap with backward, as in `gradient_sums`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simparallel.layout.mesh import Group
from simparallel.parallel.operator.gradient_sums import Filling
from simparallel.search.prices import Event, Events, GradientSum, Prices, TimedCollective, TimedCompute, TimedMessages
from simparallel.search.space import Space


class BackwardSums(NamedTuple):
    """The sums of gradients of a backward pass: those that wait to fill a collective, and those that have started."""

    filling: Filling
    started: list[tuple[tuple[Group, ...], list[int]]]


class Clocks:
    """The clocks of all ranks, and of the streams of their groups.

    Attributes:
        now: the time [ps] of each rank.
        exposed_ps: waits for sums of gradients: the longest of any rank, added up over the backward passes.
    """

    def __init__(self, prices: Prices) -> None:
        self._prices = prices
        self.now = np.zeros(prices.device_num, np.int64)
        self._streams: dict[Group, int] = {}
        self._passes: list[BackwardSums] = []
        self.exposed_ps = 0

    @property
    def step_ps(self) -> int:
        """The time [ps] of the last rank."""
        return int(self.now.max(initial=0))

    def run(self, events: Events) -> None:
        for event in events:
            self._run(event)

    def _run(self, event: Event) -> None:
        if isinstance(event, TimedCompute):
            self.now += event.ps
        elif isinstance(event, TimedCollective):
            for group, end in zip(event.groups, self._start(event), strict=True):
                self.now[list(group)] = end
        elif isinstance(event, TimedMessages):
            sent = self.now.copy()
            for source, target, ps in event.each:
                arrives = sent[source] + ps
                # The sender, too, is busy until its message has arrived.
                for rank in (source, target):
                    self.now[rank] = max(self.now[rank], arrives)
        else:
            self._send(self._passes[-1].filling.add(event.kind, event, event.size_bytes))

    def _start(self, exchange: TimedCollective) -> list[int]:
        """Return the end of a collective in each group: it begins when all members and the stream are ready."""
        ends = []
        for group, ps in zip(exchange.groups, exchange.ps, strict=True):
            start = max(int(self.now[list(group)].max()), self._streams.get(group, 0))
            self._streams[group] = start + ps
            ends.append(start + ps)
        return ends

    def _send(self, part: list[GradientSum]) -> None:
        if part:
            groups = part[0].kind[0]
            exchange = self._prices.exchange("all_reduce", sum(each.size_bytes for each in part), groups)
            self._passes[-1].started.append((groups, self._start(exchange)))

    def begin_pass(self) -> None:
        """Begin a backward pass, possibly inside another one, for a recomputed part."""
        self._passes.append(BackwardSums(Filling(), []))

    def end_pass(self) -> None:
        """End a backward pass: start the sums that are left, and wait for all."""
        for part in self._passes[-1].filling.rest():
            self._send(part)
        before = self.now.copy()
        for groups, ends in self._passes.pop().started:
            for group, end in zip(groups, ends, strict=True):
                ranks = list(group)
                self.now[ranks] = np.maximum(self.now[ranks], end)
        self.exposed_ps += int((self.now - before).max(initial=0))


def replay(space: Space, choice: Sequence[int]) -> Clocks:
    """Return the clocks after one step: forward, backward, and the steps of the optimizers.

    Args:
        space: the choices.
        choice: the number of the choice of each op.
    """
    clocks, graph = Clocks(space.prices), space.graph
    chosen = [choices[number] for choices, number in zip(space.choices, choice, strict=True)]
    forwards: list[list[Event]] = []
    backwards: list[list[Events]] = []
    for number, (node, own) in enumerate(zip(graph.nodes, chosen, strict=True)):
        moves = [space.moves(choice, number, i) for i in range(len(node.inputs))]
        forwards.append([*(event for there, _ in moves for event in there), *own.forward])
        backwards.append([own.backward, *(back for _, back in reversed(moves))] if node.has_backward else [])
    parts = [part for part in space.recomputed if part.begin in space.again]
    ends = {part.end - 1: forwards[part.begin : part.end] for part in parts}
    begins = {part.begin for part in parts}
    for _ in range(graph.num_micro_batches):
        for forward in forwards:
            clocks.run(tuple(forward))
        for number in graph.results:
            clocks.run(space.gathering(number, choice[number]))
        clocks.begin_pass()
        for number in reversed(range(len(backwards))):
            # A part runs again as soon as backward reaches it, and has a pass of its own.
            if number in ends:
                for forward in ends[number]:
                    clocks.run(tuple(forward))
                clocks.begin_pass()
            for events in backwards[number]:
                clocks.run(events)
            if number in begins:
                clocks.end_pass()
        clocks.end_pass()
    clocks.run(space.steps(choice))
    return clocks
