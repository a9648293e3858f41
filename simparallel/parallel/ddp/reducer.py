"""The reducer: backward writes gradients into buckets, and the reduction of a bucket starts as soon as it is full.

A `SyncMark` in the autograd graph distinguishes a backward pass that reduces from one that does not.

The order of all communication of a group must be the same on every rank. Buckets start in the order of their numbers,
while backward traverses the graph. If every rank has the same graph, it is traversed in the same order on every rank,
so buckets also keep their places among the other communication (batch norm's statistics, buckets of another model).
If graphs may differ by rank (`find_unused_parameters`), and there is other communication, buckets wait for the end of
backward, and the buckets of several models then start model by model. A static graph may differ by rank, too: the end
of its first backward shows it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from numbers import Number
from typing import Any

import numpy as np

from simparallel import collectives
from simparallel.autograd import Backward, Tensor, running_backward
from simparallel.autograd.tape import Node, Reversible
from simparallel.autograd.tree_map import change_each
from simparallel.backend import Array, is_array
from simparallel.comm import Communicator, Group
from simparallel.errors import AutogradError, InputError, UnusedParameterError
from simparallel.machine.devices import FIRST
from simparallel.parallel.ddp.buckets import GradBucket
from simparallel.rank_local import RankLocal, per_rank

Hook = Callable[[Any, GradBucket], Any]

_numbers = count()


class _RankReducers(RankLocal):
    """The reducers of this rank."""

    outlasts_runs = True
    # Weak references: a discarded model takes no part in the order of reductions.
    reducers: weakref.WeakSet[Reducer] = per_rank(weakref.WeakSet)


_live = _RankReducers()


class Reducer:
    """The reduction of some parameters' gradients over the ranks, in every backward.

    Args:
        buckets: of the parameters.
        names: id of a parameter -> its name, for messages.
        communicator, group: of this rank, and the ranks that share the work.
        as_view: `.grad` is a part of the bucket; else the bucket is copied to `.grad`.
        find_unused: parameters may stay without a gradient; which ones may differ by rank and backward.
        static: every backward leaves the same parameters without a gradient as the first one.
        has_other_communication: backward also communicates for other purposes.
        reduce_dtype: dtype in which gradients are reduced; None for their own.
        purpose: name of this reducer in the errors of its collectives, the same on every rank.

    Attributes:
        attached: whether its hooks are still on the parameters.
        hook: the communication hook that reduces a bucket, and its state; None for the mean over the ranks.
        num_active: number of ranks that still have inputs, if it divides the sum; else None.
        is_due: the next backward that brings a gradient reduces, even without a sync mark.
    """

    def __init__(
        self,
        buckets: Sequence[GradBucket],
        names: dict[int, str],
        communicator: Communicator,
        group: Group | None,
        *,
        as_view: bool,
        find_unused: bool,
        static: bool,
        has_other_communication: bool,
        reduce_dtype: np.dtype | None = None,
        purpose: str = "",
    ) -> None:
        self.buckets = list(buckets)
        self.purpose = purpose
        self.attached = True
        self.hook: tuple[Hook, Any] | None = None
        self.num_active: int | None = None
        self.is_due = False
        self._names = names
        self.communicator, self._group = communicator, group
        self.as_view = as_view
        # A static graph finds its unused parameters once, so the vote of each step would be wasted.
        self._find_unused, self._static = find_unused and not static, static
        self._reduce_dtype = reduce_dtype
        self._has_other_communication, self._graphs_differ = has_other_communication, self._find_unused
        # Ranks construct their models in the same order, so at the end of backward the reducers of several models
        # finish in the same order on every rank.
        self._number = next(_numbers)
        self.backward: Backward | None = None
        # The last backward that reduced, if some of its reductions may still run.
        self._begun: Backward | None = None
        # Gradients that arrived in the backward `_early_in` before any sync mark.
        self._early: list[_Arrival] = []
        self._early_in: Backward | None = None
        self._next = 0
        self.may_start = True
        self._late: list[tuple[GradBucket, int, Array | None]] = []
        self._removers = []
        for bucket in self.buckets:
            for i, parameter in enumerate(bucket.tensors):
                # Two reducers on one parameter would reduce its gradient twice, so the newest wrapper takes it over.
                self._replace_others(parameter)
                self._removers.append(parameter.register_post_accumulate_grad_hook(_Arrival(self, bucket, i)))
                # Backward writes the gradient into the bucket, without a copy.
                parameter._room = bucket.views[i] if as_view else None
        _live.reducers.add(self)

    @staticmethod
    def _replace_others(parameter: Tensor) -> None:
        for hook in tuple(parameter._hooks or ()):
            if isinstance(hook.function, _Arrival):
                hook.function.reducer.detach()

    def detach(self) -> None:
        """Remove the hooks and the buffers from the parameters."""
        if self.attached:
            self.attached = False
            for remove in self._removers:
                remove()
            for bucket in self.buckets:
                for parameter in bucket.tensors:
                    parameter._room = None

    # --- during backward ----------------------------------------------------------------------------

    def postpone(self, arrival: _Arrival, running: Backward) -> None:
        """Remember a gradient that arrived before any sync mark of its backward."""
        if self._early_in is not running:
            self._early_in, self._early = running, []
        self._early.append(arrival)

    def begin(self, running: Backward) -> None:
        """Begin the reduction in a backward that has reached a sync mark of the model."""
        if self.backward is running:
            return
        self.settle()
        self.backward = self._begun = running
        running.callbacks.append((self._number, self._finish))
        self._prepare()
        if self._find_unused:
            for bucket in self.buckets:
                # Count only the parameters that this graph reaches, so that the bucket does not wait for unused ones.
                bucket.pending = sum(map(running.reaches, bucket.tensors))
        if self._static and self.buckets[0].expected is None:
            # The end of the first backward shows which parameters the graph uses.
            self.may_start = False
        elif self._graphs_differ:
            # The ranks traverse different graphs: a bucket that starts meanwhile would have another place among the
            # other communication on each rank.
            self.may_start = not (self._has_other_communication or any(self._others_reached(running)))
        if self.may_start:
            self.start_ready()
        early, self._early = self._early, []
        # They were not counted while no reduction had begun.
        if self._early_in is running:
            for arrival in early:
                arrival.arrive()
        self._early_in = None

    def settle(self) -> None:
        """Clean up after a backward that raised: wait for reductions already started, then discard their results.

        They arrive in the memory of the gradients, so the values from before are restored. Ranks with the same error
        need no further communication.
        """
        if self._begun is None or not self._begun.is_over:
            return
        # A backward that ran to its end has cleared `_begun` itself, so this one was left by an error.
        self._begun = self.backward = None
        under_way = [bucket for bucket in self.buckets if hasattr(bucket.work, "wait")]
        # Copy all values first: waiting for one reduction may also finish others.
        values = [bucket.flat.copy() for bucket in under_way]
        for bucket in under_way:
            bucket.work.wait()
        for bucket, before in zip(under_way, values, strict=True):
            bucket.flat[...] = before
        for bucket in self.buckets:
            bucket.work, bucket.used = None, bytearray(len(bucket.tensors))

    def _prepare(self) -> None:
        self._next = 0
        self.may_start = True
        self._late.clear()
        for bucket in self.buckets:
            bucket.work = None
            bucket.arrived = bytearray(len(bucket.tensors))
            bucket.pending = len(bucket.tensors) if bucket.expected is None else sum(bucket.expected)

    def _others_reached(self, running: Backward) -> Iterator[bool]:
        for other in _live.reducers:
            if other is not self and other.attached:
                yield any(running.reaches(p) for bucket in other.buckets for p in bucket.tensors)

    def start_ready(self, all_of_them: bool = False) -> None:
        """Start the reductions of full buckets, in their order; with `all_of_them` also those of incomplete ones."""
        while self._next < len(self.buckets):
            bucket = self.buckets[self._next]
            # Later buckets may be full already, but all ranks must start the buckets in one order.
            if bucket.pending > 0 and not all_of_them:
                return
            frozen = self._fill(bucket) if bucket.arrived.count(1) < len(bucket.arrived) else ""
            if bucket.device is not FIRST:
                # Only the first device communicates; on the simulated clock it waits for this one.
                collectives.wait_for(bucket.device)
            # Ranks compare this name, so another model, bucket or set of frozen parameters is an error and not a wrong
            # sum.
            with self.communicator.for_purpose(f"{self.purpose}, bucket {self._next}{frozen}"):
                if self._reduce_dtype is None:
                    bucket.work = self._start(bucket)
                else:
                    bucket.work = bucket.reduce_as(self._reduce_dtype, self._start)
            self._next += 1

    def _fill(self, bucket: GradBucket) -> str:
        """Copy `.grad` of the parameters that this backward did not reach into the bucket, or zeros without one.

        Returns a text with the names of parameters frozen since construction: ranks compare it, because ranks that
        differ in them would diverge.
        """
        pairs = zip(bucket.tensors, bucket.arrived, strict=True)
        frozen = [self._names[id(p)] for p, arrived in pairs if arrived != 1 and not p.requires_grad]
        for i, (parameter, view) in enumerate(zip(bucket.tensors, bucket.views, strict=True)):
            # Arrived (1), or frozen on a rank that only shadows (2).
            if bucket.arrived[i]:
                continue
            grad, saved = parameter.grad, None
            if grad is None:
                view[...] = 0
            elif grad.data is not view:
                view[...] = grad.data
            elif not bucket.used[i]:
                # `.grad` is the view itself, and the reduction overwrites it: restore it if no rank has a gradient.
                saved = view.copy()
            self._late.append((bucket, i, saved))
        return f", frozen: {', '.join(frozen)}" if frozen else ""

    def _start(self, bucket: GradBucket) -> Any:
        if self.hook is not None:
            hook, state = self.hook
            begun = hook(state, bucket)
            if not (hasattr(begun, "wait") or isinstance(begun, Tensor) or is_array(begun)):
                raise InputError(
                    f"register_comm_hook: {getattr(hook, '__name__', hook)} returned {type(begun).__name__} for bucket "
                    f"{bucket.index()}, expected a Work, or an array for the bucket. Return what all_reduce(…, "
                    "async_op=True) returns, or the reducer cannot wait for it."
                )
            return begun
        if self.num_active is None:
            return collectives.all_reduce(bucket.flat, "mean", group=self._group, async_op=True)
        # The mean divides by the number of ranks, but ranks without inputs contribute zeros and do not count.
        work = collectives.all_reduce(bucket.flat, "sum", group=self._group, async_op=True)
        return work.then(partial(_divided, self.num_active))

    # --- the end of backward --------------------------------------------------------------------------

    def _finish(self) -> None:
        self.backward, self.is_due = None, False
        if any(bucket.pending for bucket in self.buckets):
            self._check_unused()
        self._reduce_the_rest([bytes(bucket.used) for bucket in self.buckets])
        if self._late or not self.as_view:
            self._hand_out()
        for bucket in self.buckets:
            bucket.used = bytearray(len(bucket.tensors))
        self._begun = None

    def shadow(self) -> None:
        """Take part with zeros in the reductions of a backward that only other ranks run."""
        self._prepare()
        for bucket in self.buckets:
            for parameter, view in zip(bucket.tensors, bucket.views, strict=True):
                if parameter.grad is not None and parameter.grad.data is view:
                    parameter.grad.data = view.copy()
            # This rank has no gradients: zeros are its share of every bucket. The lines above save `.grad`.
            bucket.flat[...] = 0
            bucket.arrived = bytearray(1 if p.requires_grad else 2 for p in bucket.tensors)  # see `_fill`
        self._reduce_the_rest(None)

    def _reduce_the_rest(self, used: list[bytes] | None) -> None:
        """Start the remaining reductions, and wait for all of them.

        Args:
            used: for each bucket, which parameters this rank used; None if it ran no backward.
        """
        self.start_ready(all_of_them=True)
        exchange = None
        first_of_static = self._static and self.buckets[0].expected is None
        if self._find_unused or first_of_static:
            # Row 0: this rank did not use the parameter; row 1: it did. One maximum over the ranks then answers both
            # "did any rank use it?" and "did any rank not use it?". A rank without a backward votes for neither.
            votes = np.zeros((2, sum(len(bucket.tensors) for bucket in self.buckets)), np.uint8)
            if used is not None:
                votes[1] = np.frombuffer(b"".join(used), np.uint8)
                votes[0] = 1 - votes[1]
            with self.communicator.for_purpose(f"{self.purpose}, unused parameters"):
                exchange = collectives.all_reduce(votes, "max", group=self._group, async_op=True)
        for bucket in self.buckets:
            # A hook that has already waited returns the array itself.
            result = bucket.work.wait() if hasattr(bucket.work, "wait") else bucket.work
            bucket.work = None
            if bucket.device is not FIRST:
                collectives.go_on(bucket.device)
            if result is not bucket.flat:
                # A communication hook may return another array than the bucket's.
                bucket.set_buffer(result)
        if exchange is None:
            return
        not_by_all, by_any = exchange.wait()
        if first_of_static:
            # A parameter that one rank used and another did not: from now on buckets wait for the end of backward.
            self._graphs_differ = bool((not_by_all & by_any).any())
        used_by_any, start = by_any.tobytes(), 0
        for i, bucket in enumerate(self.buckets):
            bucket.used_by_any = used_by_any[start : start + len(bucket.tensors)]
            start += len(bucket.tensors)
            if first_of_static:
                # A rank that ran no backward does not know its own graph yet.
                bucket.expected = used[i] if used else bucket.used_by_any

    def _hand_out(self) -> None:
        """Set `.grad` to the reduced gradients; if no rank had one for a parameter, `.grad` keeps its value."""
        if self.as_view:
            for bucket, i, saved in self._late:
                if self._is_used(bucket, i):
                    _set_grad(bucket.tensors[i], bucket.views[i])
                elif saved is not None:
                    bucket.views[i][...] = saved
            self._late.clear()
            return
        for bucket in self.buckets:
            for i, (parameter, view) in enumerate(zip(bucket.tensors, bucket.views, strict=True)):
                if self._is_used(bucket, i):
                    # Without views, `.grad` keeps its own array, which the user may hold; only the first gradient makes
                    # one.
                    if parameter.grad is None:
                        _set_grad(parameter, view.copy())
                    else:
                        parameter.grad.data[...] = view
        self._late.clear()

    def _is_used(self, bucket: GradBucket, i: int) -> bool:
        return bool((bucket.used if bucket.used_by_any is None else bucket.used_by_any)[i])

    def _check_unused(self) -> None:
        """Raise UnusedParameterError for parameters that needed a gradient and got none."""
        if self._find_unused or (self._static and self.buckets[0].expected is None):
            return
        if self._static:
            raise self.graph_changed(
                "no gradient reached", *self._which(lambda b, i: b.expected[i] and not b.arrived[i])
            )
        unused = self._which(lambda b, i: b.tensors[i].requires_grad and not b.used[i])
        if unused:
            names = [self._names[id(parameter)] for parameter in unused]
            raise UnusedParameterError(
                f"DistributedDataParallel, rank {self.communicator.rank}: no gradient reached {', '.join(names)}, so "
                "its bucket can never be reduced. Use every parameter in the loss (several losses: add them up, for "
                "one backward), call requires_grad_(False) on those that stay fixed, or pass "
                "find_unused_parameters=True.",
                names=names,
            )

    def _which(self, wanted: Callable[[Any, int], Any]) -> list[Tensor]:
        """Return the parameters for which `wanted(bucket, position in it)` is true."""
        return [parameter for bucket in self.buckets for i, parameter in enumerate(bucket.tensors) if wanted(bucket, i)]

    def graph_changed(self, what: str, *parameters: Tensor) -> UnusedParameterError:
        """Return the error for a static graph that has changed."""
        names = [self._names[id(parameter)] for parameter in parameters]
        return UnusedParameterError(
            f"DistributedDataParallel, rank {self.communicator.rank}: static_graph=True, but {what} "
            f"{', '.join(names)}, unlike in the first backward. Use find_unused_parameters=True instead.",
            names=names,
        )


class _Arrival:
    """The hook of one parameter, which tells the reducer that its gradient is finished."""

    __slots__ = ("_bucket", "_i", "_view", "reducer")
    reduces = True  # see `nn.hooks.is_reduced`

    def __init__(self, reducer: Reducer, bucket: GradBucket, i: int) -> None:
        self.reducer, self._bucket, self._i, self._view = reducer, bucket, i, bucket.views[i]

    def __call__(self, parameter: Tensor) -> None:
        reducer = self.reducer
        # Also in a backward that does not reduce: the next reduction includes this gradient.
        self._bucket.used[self._i] = 1
        running = running_backward(delivers=True)
        if reducer.backward is not running:
            # No mark of this model was reached yet. If backward reaches one later, it collects this gradient.
            if not reducer.is_due:
                reducer.postpone(self, running)
                return
            reducer.begin(running)
        self.arrive()

    def arrive(self) -> None:
        """Take the finished gradient into the bucket; start the bucket if it is full."""
        reducer, bucket, i, view = self.reducer, self._bucket, self._i, self._view
        parameter = bucket.tensors[i]
        grad = parameter._grad
        assert grad is not None
        # Backward writes into the view only if `.grad` was None and the parameter is used once; otherwise the sum has
        # an array of its own.
        if grad._data is not view:
            view[...] = grad._data
            if reducer.as_view:
                grad.data = view
        if bucket.expected is not None and not bucket.expected[i]:
            raise reducer.graph_changed("a gradient reached", parameter)
        bucket.arrived[i] = 1
        bucket.pending -= 1
        if not bucket.pending and reducer.may_start:
            reducer.start_ready()
        # Reductions that were started advance only when this rank gives them time; do it once per gradient.
        if reducer.communicator.lanes:
            reducer.communicator.progress()


class SyncMark(Reversible):
    """A graph node directly after a wrapper's outputs; it is also its own op and context.

    Backward meets it before it reaches a parameter of the model, and the mark asks for the reduction. So the forward
    pass that made the graph decides, as `no_sync` promises: not the last one, and not one of the module without its
    wrapper.
    """

    needs = (True,)

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, y: Any) -> Any:
        """Return the outputs of a forward pass whose backward is to reduce, each passed through the mark."""
        if isinstance(y, Tensor):
            # Shares the data: the mark is a graph node that computes nothing.
            return y._like(y._data, Node(self, self, (y,))) if y._requires_grad else y  # type: ignore[arg-type]
        if isinstance(y, (tuple, list, dict)):
            return change_each(y, self)
        if not (y is None or isinstance(y, (str, bytes, Number)) or is_array(y)):
            # Opaque output: assume that the next backward reduces.
            self._reducer.is_due = True
        return y

    def run_backward(self, ctx: Any, dy: Array) -> list[Array]:
        reducer, running = self._reducer, running_backward(delivers=True)
        if not running.calls_hooks:
            raise AutogradError(
                f"DistributedDataParallel, rank {reducer.communicator.rank}: only loss.backward() reduces gradients; "
                "value_and_grad would return those of this rank alone. Call it inside of no_sync(), or on .module, and "
                "reduce with DistributedGradReducer."
            )
        if reducer.attached:
            reducer.begin(running)
        return [dy]

    def __repr__(self) -> str:
        return "DistributedDataParallel"


def _divided(count: int, x: Array) -> Array:
    """Divide x by count, in place."""
    x /= count
    return x


def _set_grad(parameter: Tensor, array: Array) -> None:
    if parameter.grad is None:
        parameter.grad = parameter._gradient(array)
    else:
        parameter.grad.data = array
