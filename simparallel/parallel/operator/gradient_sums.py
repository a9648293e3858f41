"""Gradients of parameters that still need a sum over ranks: several of them in one collective.

A network has many small parameters, and a collective for each of them would cost mostly latency. So the sums of a
backward pass wait until they fill a collective, or until the pass ends, and overlap with the rest of backward, as the
buckets of `DistributedDataParallel` do.
"""

from __future__ import annotations

from collections.abc import Hashable
from math import prod
from typing import Any

from simparallel import collectives
from simparallel.autograd import Backward, Tensor, running_backward
from simparallel.backend import Array, get_namespace
from simparallel.clock.memory import GRADIENTS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Group, Work, current

# Priority among the callbacks at the end of backward: later ones expect all gradients.
BEFORE_OTHERS = -1
# Size of one collective; buckets of DistributedDataParallel have the same limit.
CAP_BYTES = 25 << 20


class Filling:
    """Gradients of each kind, collected until they fill a collective of `CAP_BYTES` or more.

    The groups depend only on the sizes of the gradients, so a plan predicts the collectives of a run.
    """

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[Any]] = {}
        self._filled: dict[Hashable, int] = {}

    def add(self, kind: Hashable, what: Any, size_bytes: int) -> list[Any]:
        """Add one gradient; return the gradients to reduce now, usually none."""
        part = self._parts.setdefault(kind, [])
        part.append(what)
        self._filled[kind] = self._filled.get(kind, 0) + size_bytes
        if self._filled[kind] < CAP_BYTES:
            return []
        # Full: its sum runs while backward computes the rest.
        del self._filled[kind]
        return self._parts.pop(kind)

    def rest(self) -> list[list[Any]]:
        """Return the gradients that are left, by kind."""
        parts = list(self._parts.values())
        self._parts, self._filled = {}, {}
        return parts


class GradientSums:
    """The postponed sums of one backward pass of this rank; `open_ones` lists the objects of all running passes."""

    def __init__(self, backward: Backward, open_ones: list[GradientSums]) -> None:
        self.backward, self._open = backward, open_ones
        open_ones.append(self)
        self._filling = Filling()
        self._started: list[tuple[list[tuple[Tensor, Array]], Work]] = []
        backward.callbacks.append((BEFORE_OTHERS, self._finish))

    def add(self, leaf: Tensor, gradient: Array, group: Group) -> None:
        """Postpone one more sum; start a collective if it is full."""
        gradient = gradient.astype(leaf.dtype, copy=False)
        observer_of(None).memory.hold(gradient, GRADIENTS)
        kind = group.ranks, gradient.dtype, get_namespace(gradient)
        # The size of the largest slice, so that ranks with smaller ones start the same sums at the same time.
        shape = gradient.shape if leaf.placement is None else leaf.placement.local_shape
        self._start(self._filling.add(kind, (leaf, gradient, group), prod(shape) * gradient.itemsize))

    def _start(self, part: list[tuple[Tensor, Array, Group]]) -> None:
        if part:
            arrays, group = [gradient for _, gradient, _ in part], part[0][2]
            with current().for_purpose("gradients of parameters"):
                work = collectives.all_reduce(arrays, "sum", group, async_op=True)
            self._started.append(([(leaf, gradient) for leaf, gradient, _ in part], work))

    def _finish(self) -> None:
        # Start all before waiting for any.
        for part in self._filling.rest():
            self._start(part)
        self._open.remove(self)
        while self._started:
            parts, work = self._started.pop(0)
            work.wait()
            for leaf, gradient in parts:
                self.backward.deliver(leaf, gradient)

    def drain(self) -> None:
        """Wait for the collectives that a backward had started before it raised."""
        while self._started:
            self._started.pop()[1].wait()


class Postponed:
    """The postponed sums of all running backward passes of this rank: a pass may run inside another."""

    def __init__(self) -> None:
        self._open: list[GradientSums] = []

    def take(self, leaf: Tensor, gradient: Array, group: Group) -> bool:
        """Postpone the sum of a leaf's gradient and deliver it at the end; return False if it has to be summed now.

        It has to be summed now if other uses of the leaf contribute to its gradient.

        Args:
            leaf: a parameter.
            gradient: this rank's addend, in memory of its own; the sum overwrites it.
            group: the ranks that hold the addends.

        Collective: yes, when the sum is started; all ranks traverse the same graph.
        """
        # `uses` counts the contributions that the leaf still gets in this pass, this one included.
        running = running_backward()
        if running.uses.get(id(leaf)) != 1 or id(leaf) in running.grads:
            return False
        self.add(leaf, gradient, group)
        return True

    def add(self, leaf: Tensor, gradient: Array, group: Group) -> None:
        """Postpone the sum of the whole gradient of a leaf; arguments as for `take`. Collective: yes, then."""
        running = running_backward()
        sums = self._open[-1] if self._open else None
        if sums is None or sums.backward is not running:
            # Earlier passes that raised have left collectives: wait for them before a new pass starts its own.
            for old in [sums for sums in self._open if sums.backward.is_over]:
                self._open.remove(old)
                old.drain()
            sums = GradientSums(running, self._open)
        sums.add(leaf, gradient, group)
