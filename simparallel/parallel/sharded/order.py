"""What the groups of a rank do one after the other: gathering ahead, and one reduction of gradients at a time."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

from simparallel.autograd import Backward, Tensor, running_backward
from simparallel.backend import Array
from simparallel.base.attributes import setting
from simparallel.clock.memory import GRADIENTS
from simparallel.clock.recorder import observer_of
from simparallel.comm import Work, current
from simparallel.errors import InputError
from simparallel.nn.hooks import is_reduced
from simparallel.optim.optimizer import optimizers_of
from simparallel.parallel.operator.gradient_sums import BEFORE_OTHERS
from simparallel.parallel.operator.interpreter import group_along, sharder
from simparallel.parallel.operator.op_call import mode
from simparallel.parallel.sharded.group import ShardedGroup


class _Reduction(NamedTuple):
    """Gradients under way, in the backward pass that delivers them; `unfinished` as in `UseOrder.reduce`."""

    group: ShardedGroup
    numbers: tuple[int, ...]
    unfinished: Mapping[int, tuple[str, ...]]
    work: Work
    backward: Backward


class UseOrder:
    """The groups of this rank in the order of their use.

    While one group computes, the one that followed it the last time is gathered. A backward pass reduces the gradients
    of one group while it computes those of the next.

    Attributes:
        depth: number of groups whose forward runs, one inside the other.
        groups: all of this rank.
    """

    def __init__(self) -> None:
        self.depth = 0
        # The phase and the group of the last use.
        self._last: tuple[str, weakref.ref[ShardedGroup]] | None = None
        self._reductions: list[_Reduction] = []
        self._finishing: Backward | None = None
        self.groups: weakref.WeakSet[ShardedGroup] = weakref.WeakSet()

    def syncs(self) -> dict[ShardedGroup, bool]:
        """Return which groups reduce the gradients of forward passes that begin now."""
        return {group: group.syncs for group in self.groups}

    @staticmethod
    @contextmanager
    def syncing(syncs: Mapping[ShardedGroup, bool]) -> Iterator[None]:
        """Let groups reduce gradients as they did at the time of `syncs()`, inside the block."""
        with ExitStack() as stack:
            for group, value in syncs.items():
                stack.enter_context(setting(group, syncs=value))
            yield

    def no_sync(self, groups: Iterable[ShardedGroup] | None = None) -> AbstractContextManager[None]:
        """Let gradients "P" wait for a later backward, for forwards inside the block.

        Args:
            groups: those that wait; None for all with other ranks.
        """
        chosen = [group for group in self.groups if group.axes.everyone] if groups is None else groups
        return setting(*(group for group in chosen if group.letters.gradient == "P"), syncs=False)

    def begin(self, group: ShardedGroup, phase: str, gathers: bool = True) -> None:
        """Note that a group is used, and gather the next one. Collective: yes.

        Args:
            group: the group.
            phase: "forward" or "backward".
            gathers: this use needs the parameters; else they were there, and it is no use to gather them ahead.
        """
        # The first group of a pass through the outermost module, or through a stage of a pipeline, follows none.
        last = None if phase == "forward" and not (self.depth or mode.weighted) else self._last
        before = last[1]() if last is not None and last[0] == phase else None
        if before is not None and before is not group:
            before.next.pop(phase, None)
            if gathers:
                before.next[phase] = weakref.ref(group)
        self._last = phase, weakref.ref(group)
        follower = group.next[phase]() if phase in group.next else None
        if follower is not None:
            follower.gather_ahead()

    def end_pass(self, phase: str) -> None:
        """Note that a pass is over, "forward" or "backward": the first group of another one follows none."""
        if self._last is not None and self._last[0] == phase:
            self._last = None

    def reduce(
        self, group: ShardedGroup, numbers: tuple[int, ...], by_rank: Array, unfinished: Mapping[int, tuple[str, ...]]
    ) -> None:
        """Start to reduce the gradients of a group; deliver them at the latest at the end of backward.

        Args:
            group: the group.
            numbers: of the parameters with a gradient.
            by_rank: their gradients.
            unfinished: number of a parameter -> axes of its layout along which its gradient is still to be summed.
        """
        # A part that is recomputed is a pass of its own, and must not wait for its reduction.
        running = running_backward(delivers=True)
        self._finish()
        if self._finishing is not running:
            self._check_others(group, running)
            self._finishing = running
            running.callbacks.append((BEFORE_OTHERS, self._end))
        if group.axes.everyone is None:
            self._deliver(group, numbers, unfinished, by_rank, running)
        else:
            self._reductions.append(_Reduction(group, numbers, unfinished, group.reduce(by_rank), running))

    def _end(self) -> None:
        """Finish the last reduction."""
        self._finish()
        self._finishing = None

    def _finish(self) -> None:
        while self._reductions:
            group, numbers, unfinished, work, backward = self._reductions.pop()
            own = work.wait()
            # The pass that wanted them was left by an error.
            if backward.is_over:
                continue
            among_replicas = group.reduce_replicas(own)
            own = own if among_replicas is None else among_replicas.wait()
            self._deliver(group, numbers, unfinished, own, backward)

    def _deliver(
        self,
        group: ShardedGroup,
        numbers: tuple[int, ...],
        unfinished: Mapping[int, tuple[str, ...]],
        own: Array,
        backward: Backward,
    ) -> None:
        own = own.astype(group.parameters[0].dtype, copy=False)
        observer_of(None).memory.hold(own, GRADIENTS)
        for i, gradient in zip(numbers, group.rows_of(numbers).own_chunks(own, group.axes.rank), strict=True):
            computed = group.computed[i]
            among = None if computed is None else group_along(computed.layout.mesh, unfinished.get(i, ()))
            if among is None:
                backward.deliver(group.parameters[i], gradient)
            else:
                # With those of other groups, and of parameters that no group has.
                with group.axes.running():
                    sharder().sums.add(group.parameters[i], gradient, among)

    def _check_others(self, group: ShardedGroup, running: Backward) -> None:
        """Refuse optimizers of parameters that the same loss depends on, and whose gradients nobody reduces.

        Raises:
            InputError: names them. Nothing was updated.
        """
        # A pipeline sums all other gradients.
        for optimizer in [] if mode.weighted else optimizers_of():
            trained = [p for p in optimizer.parameters if p.requires_grad and running.reaches(p)]
            # Along the axes of a layout, ops sum.
            left = [p for p in trained if not (is_reduced(p) or _is_everywhere(p))]
            if left:
                names = ", ".join(p.name or f"a tensor of shape {p.shape}" for p in left[:4])
                raise InputError(
                    f"fully_shard: the loss depends on the parameters of {group.name}, and on {names}, which "
                    f"{type(optimizer).__name__} updates and no group has: their gradients would be those of this "
                    "rank's batch alone. Call fully_shard for the whole model, too, after its parts."
                )


def _is_everywhere(p: Tensor) -> bool:
    return p.placement is not None and p.placement.layout.mesh.size == current().world_size


def order() -> UseOrder:
    """Return the order of this rank."""
    found: UseOrder = current().kept.setdefault(UseOrder, UseOrder())
    return found
