"""Sum the gradients of parameters over the ranks, several of them in one all-reduce.

A network has many small parameters, and an all-reduce for each of them would cost mostly latency. So a backward pass
collects their gradients in buckets of `CAP_BYTES`, like `DistributedDataParallel`: the all-reduce of a full bucket
overlaps with the rest of backward, and those of the others start when the pass ends.
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

# Place among the callbacks at the end of backward: the others expect all gradients.
BEFORE_OTHERS = -1
# Size from which on a bucket is full, as in DistributedDataParallel.
CAP_BYTES = 25 << 20


class Filling:
    """Buckets of gradients, one of each kind, which are full at `CAP_BYTES`.

    Their contents depend only on the sizes of the gradients, so a plan predicts the collectives of a run.
    """

    def __init__(self) -> None:
        self._parts: dict[Hashable, list[Any]] = {}
        self._filled: dict[Hashable, int] = {}

    def add(self, kind: Hashable, what: Any, size_bytes: int) -> list[Any]:
        """Add one gradient; return the gradients of a bucket that is full now, else none."""
        part = self._parts.setdefault(kind, [])
        part.append(what)
        self._filled[kind] = self._filled.get(kind, 0) + size_bytes
        if self._filled[kind] < CAP_BYTES:
            return []
        del self._filled[kind]
        return self._parts.pop(kind)

    def rest(self) -> list[list[Any]]:
        """Return the contents of all buckets, and empty them."""
        parts = list(self._parts.values())
        self._parts, self._filled = {}, {}
        return parts


class GradientSums:
    """The postponed sums of one backward pass of this rank.

    Args:
        backward: the pass.
        active: the sums of all running passes; has this object until the pass ends.
    """

    def __init__(self, backward: Backward, active: list[GradientSums]) -> None:
        self.backward, self._active = backward, active
        active.append(self)
        self._filling = Filling()
        self._started: list[tuple[list[tuple[Tensor, Array]], Work]] = []
        backward.callbacks.append((BEFORE_OTHERS, self._finish))

    def add(self, leaf: Tensor, gradient: Array, group: Group) -> None:
        """Postpone one more sum; start the all-reduce of its bucket if that is full."""
        gradient = gradient.astype(leaf.dtype, copy=False)
        observer_of(None).memory.hold(gradient, GRADIENTS)
        kind = group.ranks, gradient.dtype, get_namespace(gradient)
        # Counted by the largest slice, so that the buckets of ranks with smaller slices are full at the same gradient.
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
        self._active.remove(self)
        while self._started:
            parts, work = self._started.pop(0)
            work.wait()
            for leaf, gradient in parts:
                self.backward.deliver(leaf, gradient)

    def drain(self) -> None:
        """Wait for the all-reduces that this pass started before it raised an error."""
        while self._started:
            self._started.pop()[1].wait()


class Postponed:
    """The postponed sums of all running backward passes of this rank: a pass may run inside another one."""

    def __init__(self) -> None:
        self._active: list[GradientSums] = []

    def take(self, leaf: Tensor, gradient: Array, group: Group) -> bool:
        """Postpone the sum of a leaf's gradient over the ranks, unless other uses of the leaf contribute to it.

        Args:
            leaf: a parameter.
            gradient: this rank's addend, in memory that nothing else uses; the sum overwrites it.
            group: the ranks that hold the addends.

        Returns:
            Whether it is postponed: the pass then delivers the gradient at its end. Otherwise the caller has to sum it.

        Collective: yes, when the all-reduce starts; all ranks traverse the same graph.
        """
        # `uses` counts the contributions to the leaf's gradient that this pass has not added yet, this one included.
        running = running_backward()
        if running.uses.get(id(leaf)) != 1 or id(leaf) in running.grads:
            return False
        self.add(leaf, gradient, group)
        return True

    def add(self, leaf: Tensor, gradient: Array, group: Group) -> None:
        """Postpone the sum of the whole gradient of a leaf. Arguments, and whether it is collective, as for `take`."""
        running = running_backward()
        sums = self._active[-1] if self._active else None
        if sums is None or sums.backward is not running:
            # Passes that raised an error may have unfinished all-reduces: wait for these before the first new one.
            for old in [sums for sums in self._active if sums.backward.is_over]:
                self._active.remove(old)
                old.drain()
            sums = GradientSums(running, self._active)
        sums.add(leaf, gradient, group)
