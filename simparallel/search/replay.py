"""The time of one step under a plan, event by event, without a run: the same as by a dry run of the plan.

The events are those of `prices`, in the order in which the interpreter and the tape run them. The sums of gradients
share collectives and overlap with backward, as in `gradient_sums`. A clock gives the times: `clock.lockstep`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from simparallel.clock.lockstep import Lockstep, Running
from simparallel.parallel.operator.gradient_sums import Filling
from simparallel.search.prices import Event, Events, GradientSum, Prices, TimedCollective, TimedCompute, TimedMessages
from simparallel.search.space import Space

# Longer than any step.
_AHEAD_PS = 1 << 62


class Replay:
    """A step on a clock.

    Attributes:
        clock: the times of all ranks.
        exposed_ps: waits for sums of gradients: the longest of any rank, added up over the backward passes.
    """

    def __init__(self, prices: Prices, clock: Lockstep) -> None:
        self._prices, self.clock, self.exposed_ps = prices, clock, 0
        # For each backward pass that runs, innermost last: sums that wait to fill a collective, and those that run.
        self._passes: list[tuple[Filling, list[Running]]] = []

    @property
    def step_ps(self) -> int:
        """The time [ps] of a step after many others: that of the last rank, or of the slowest interpreter.

        Nothing makes an interpreter wait, so it is ahead if it takes less time for a step than the devices do.
        """
        return max(int(self.clock.now.max()), self.clock.host_ps)

    def run(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, TimedCompute):
                self.clock.compute(event.ps, event.host_ps)
            elif isinstance(event, TimedCollective):
                self.clock.wait(self.clock.collective(event.groups, event.ps))
            elif isinstance(event, TimedMessages):
                self.clock.messages(event.pairs, event.ps)
            else:
                self._send(self._passes[-1][0].add(event.kind, event, event.size_bytes))

    def _send(self, part: list[GradientSum]) -> None:
        if part:
            size_bytes = sum(each.size_bytes for each in part)
            exchange = self._prices.gradient_sum(size_bytes, part[0].kind)
            self._passes[-1][1].extend(self.clock.collective(exchange.groups, exchange.ps))

    def begin_pass(self) -> None:
        """Begin a backward pass, possibly inside another one, for a recomputed part."""
        self._passes.append((Filling(), []))

    def end_pass(self) -> None:
        """End a backward pass: start the sums that are left, and wait for all."""
        for part in self._passes[-1][0].rest():
            self._send(part)
        before = self.clock.now.copy()
        self.clock.wait(self._passes.pop()[1])
        self.exposed_ps += int((self.clock.now - before).max())


def replay(space: Space, choice: Sequence[int], clock: Lockstep | None = None) -> Replay:
    """Run one step: forward, backward, and the steps of the optimizers.

    Args:
        space: the choices.
        choice: the number of the choice of each op.
        clock: what times the step; None for a new clock, whose interpreters are ahead.
    """
    graph = space.graph
    clock = Lockstep(space.device_num, space.prices.issue_ps, _AHEAD_PS) if clock is None else clock
    step = Replay(space.prices, clock)
    forwards: list[Events] = []
    backwards: list[Events] = []
    for number, node in enumerate(graph.nodes):
        own = space.choices[number][choice[number]]
        moves = [space.moves(choice, number, i) for i in range(len(node.inputs))]
        forwards.append((*chain(*(there for there, _ in moves)), *own.forward))
        back = chain(*(back for _, back in reversed(moves)))
        backwards.append((*space.backward(choice, number), *back) if node.has_backward else ())
    # Last op of a part that backward runs again -> its first op.
    again = {part.end - 1: part.begin for part in space.recomputed if part.begin in space.again}
    for _ in range(graph.num_micro_batches):
        step.run(chain(*forwards, *(space.gathering(number, choice[number]) for number in graph.results)))
        step.begin_pass()
        for number in reversed(range(len(backwards))):
            # A part runs again as soon as backward reaches it, and has a pass of its own.
            if number in again:
                step.run(chain(*forwards[again[number] : number + 1]))
                step.begin_pass()
            step.run(backwards[number])
            if number in again.values():
                step.end_pass()
        step.end_pass()
    step.run(space.steps(choice))
    return step
