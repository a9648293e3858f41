"""One use of a group's parameters: what a forward pass reads, and what its backward needs again.

In the autograd graph a use is one op with the slices as inputs, and one op for each whole parameter:

    slices --gather--> one flat tensor --part i--> whole parameter i --> the ops of the module

Backward copies the gradient of each whole parameter to its place in one array, by rank, which is the gradient of the
flat tensor; the first op reduces it. Ops keep views of the parameters for backward. After forward these are replaced by
their places in the flat array, so that the array is freed; the op whose backward comes first gathers it again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from simparallel.autograd import Backward, Tensor, running_backward
from simparallel.autograd.tape import Node, Reversible, grad_mode, nodes_behind
from simparallel.autograd.tree_map import change_each, leaves
from simparallel.backend import Array, get_namespace, is_array
from simparallel.clock.memory import owner_of
from simparallel.comm import current
from simparallel.errors import InputError, UnusedParameterError
from simparallel.nn.deferred import placeholder
from simparallel.parallel.ddp.buckets import empty_like
from simparallel.parallel.operator.gradient_sums import BEFORE_OTHERS
from simparallel.parallel.operator.interpreter import SHARDED
from simparallel.parallel.sharded.group import ShardedGroup
from simparallel.parallel.sharded.order import UseOrder
from simparallel.parallel.sharded.stored import FREED


class Use:
    """The whole parameters in one forward pass, and in the backward pass of its results.

    Args:
        group: the parameters.
        order: of this rank.
    """

    def __init__(self, group: ShardedGroup, order: UseOrder) -> None:
        self.group, self.order = group, order
        self._start = next(grad_mode.numbers)
        self._flat: Array | None = group.gather()
        # After that: it takes over arrays that the program has assigned.
        self._stored = list(group.slices)
        # The running backward, and how many ops of the forward pass it has not reached.
        self._backward: Backward | None = None
        self._num_kept = self._num_left = 0
        self._own_nodes: list[Node] = []
        self.tensors = self._whole_tensors(self._flat)
        # Weak references: the tensors of the forward pass belong to the autograd graph, which refers to this object.
        self._known: list[weakref.ref[Tensor]] = []

    def _whole_tensors(self, flat: Array) -> list[Tensor]:
        """Return the tensors that the module computes with."""
        group, arrays = self.group, self.group.rows.tensors(flat)
        trained = [i for i, p in enumerate(group.parameters) if p.requires_grad] if grad_mode.enabled else []
        parts: dict[int, Node] = {}
        if trained:
            numbers = tuple(trained)
            gather = _WholeParameters(self, numbers, group.syncs)
            # The slices are kept, so that backward finds out if a step has changed them since forward.
            ctx = SimpleNamespace(needs=(True,) * len(trained), stored=tuple(self._stored[i] for i in trained))
            node = Node(gather, ctx, [group.parameters[i] for i in trained])  # type: ignore[arg-type]
            rows = group.rows_of(numbers)
            whole = Tensor._result(placeholder((rows.size * rows.ranks,), group.travel_dtype), node)
            for k, i in enumerate(trained):
                parts[i] = Node(_Part(gather, k), SimpleNamespace(needs=(True,)), (whole,))  # type: ignore[arg-type]
            self._own_nodes = [node, *parts.values()]
        return [group.tensor(i, array, parts.get(i)) for i, array in enumerate(arrays)]

    # --- forward ----------------------------------------------------------------------------------------

    @staticmethod
    @contextmanager
    def installed(group: ShardedGroup, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Let modules read these tensors in place of the parameters of a group, on its ranks, inside the block."""
        places = group.places
        before = [registry[name] for own in places for registry, name in own]
        for tensor, own in zip(tensors, places, strict=True):
            for registry, name in own:
                registry[name] = tensor
        try:
            with group.axes.running():
                yield
        finally:
            names = [place for own in places for place in own]
            for (registry, name), parameter in zip(names, before, strict=True):
                registry[name] = parameter

    def end_forward(self, results: Any, reshards: bool) -> None:
        """Find the ops that keep views of the parameters; with `reshards` drop these views, and so the parameters."""
        flat, tensors, self.tensors = self._flat, self.tensors, []
        assert flat is not None
        # As the youngest: backward then takes each gradient as soon as it is finished, before it goes on.
        for node in self._own_nodes:
            node.number = next(grad_mode.numbers)
        self._own_nodes = []
        self._known = [weakref.ref(x) for x in tensors]
        # A module may return a parameter itself.
        returned = set(map(id, leaves(results)))
        for tensor, p in zip(tensors, self.group.parameters, strict=True):
            if id(tensor) not in returned:
                _free(tensor, p)
        is_freed = flat is not self.group.kept
        for node in nodes_behind([x for x in leaves(results) if isinstance(x, Tensor)], self._start):
            found = _with_places(node.ctx, flat) if is_freed else {}
            if not (found or node.op.runs_modules):
                continue
            self._num_kept += 1
            if reshards:
                vars(node.ctx).update(found)
            node.op = _Kept(node.op, self, found if reshards else {})  # type: ignore[assignment]
        if reshards or not self._num_kept:
            self._flat = None

    # --- backward ---------------------------------------------------------------------------------------

    def flat(self) -> Array:
        """Return the whole parameters, by tensor; gather them if they were freed. Collective: yes, then."""
        running = running_backward(delivers=True)
        if self._backward is not running:
            self._backward, self._num_left = running, self._num_kept
            if gathers := self._flat is None:
                self._flat = self.group.gather(self._stored)
            running.callbacks.append((BEFORE_OTHERS, self._end_backward))
            self.order.begin(self.group, "backward", gathers)
        assert self._flat is not None
        return self._flat

    @contextmanager
    def installed_again(self, flat: Array, syncs: Mapping[ShardedGroup, bool]) -> Iterator[None]:
        """Let modules run as in forward, inside the block: with the same tensors as parameters, and with `syncs`."""
        tensors = []
        for i, (known, array) in enumerate(zip(self._known, self.group.rows.tensors(flat), strict=True)):
            x = known()
            tensors.append(self.group.tensor(i, array) if x is None else x)
            place = self.group.computed[i]
            tensors[-1]._data, tensors[-1].placement = array, place
            tensors[-1].interpreter = None if place is None else SHARDED
        with self.installed(self.group, tensors), self.order.syncing(syncs):
            yield
        for tensor, p in zip(tensors, self.group.parameters, strict=True):
            _free(tensor, p)

    def count(self) -> None:
        """Free the whole parameters after the last op that reads them."""
        self._num_left -= 1
        if not self._num_left:
            self.free()

    def _end_backward(self) -> None:
        # It may not have reached all ops of the forward pass.
        self.free()
        self.order.end_pass("backward")

    def free(self) -> None:
        """Free the whole parameters."""
        self._flat = None


def _free(tensor: Tensor, parameter: Tensor) -> None:
    """Let go the values of a whole parameter: from now on ops refuse it, and reading it is reading a slice."""
    tensor._data = placeholder(tensor._data.shape, tensor._data.dtype)
    tensor.placement, tensor.interpreter = parameter.placement, FREED


class _WholeParameters(Reversible):
    """The op that makes whole parameters of slices; backward reduces their gradients, with those that wait in `.grad`.

    Args:
        use: of which forward pass.
        numbers: of the parameters that need a gradient.
        syncs: False if the gradients wait; then backward does not reach this op.
    """

    def __init__(self, use: Use, numbers: tuple[int, ...], syncs: bool) -> None:
        self._use, self.numbers, self.syncs = use, numbers, syncs
        self.group, self.rows = use.group, use.group.rows_of(numbers)
        self.arrived: set[int] = set()
        # Number of a parameter -> axes of its layout along which ops have left its gradient unfinished.
        self.unfinished: dict[int, tuple[str, ...]] = {}

    def new_gradients(self, like: Array) -> Array:
        """Return an array for gradients by rank, which peers can read in place; `put` writes all of it."""
        return empty_like(like, self.rows.size * self.rows.ranks, current(), self.group.travel_dtype)

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        group, arrived, self.arrived = self.group, self.arrived, set()
        unfinished, self.unfinished = self.unfinished, {}
        late = {k: group.take_waiting(i) for k, i in enumerate(self.numbers) if k not in arrived}
        unused = [group.parameters[self.numbers[k]].name for k, waiting in late.items() if waiting is None]
        if unused:
            raise UnusedParameterError(
                f"fully_shard, rank {current().rank}: no gradient reached {', '.join(unused)}, and other "
                f"parameters of {group.name} have one. Use every parameter in the loss, or call "
                "requires_grad_(False) on those that stay fixed.",
                names=unused,
            )
        if any(group.take_waiting(i) is not None for i in range(len(group.parameters)) if i not in self.numbers):
            raise InputError(
                f"fully_shard: parameters of {group.name} were frozen or released since gradients were "
                "accumulated without synchronisation; reduce such gradients first. They were given up."
            )
        for k, waiting in late.items():
            self.rows.put(dy, k, waiting)
        self._use.order.reduce(group, self.numbers, dy, unfinished)
        return (None,) * len(self.numbers)

    def __repr__(self) -> str:
        return f"parameters of {self.group.name}"


class _Part(Reversible):
    """The op that takes one whole parameter out of the flat tensor."""

    accumulates = True

    def __init__(self, gather: _WholeParameters, k: int) -> None:
        self._gather, self._k = gather, k

    @property
    def sums_result(self) -> bool:  # type: ignore[override]
        # The group sums slices, once. Gradients that wait for further micro-batches are finished before.
        gather = self._gather
        return gather.syncs and not gather.group.is_waiting(gather.numbers[self._k])

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        gather = self._gather
        group, i = gather.group, gather.numbers[self._k]
        dy = group.axes.addend(dy)
        waiting = group.take_waiting(i)
        if waiting is not None:
            waiting += dy
            dy = waiting
        if not gather.syncs:
            group.wait(i, dy, waiting is not None)
            return (None,)
        by_rank = gather.new_gradients(dy) if ctx.accumulate_into is None else ctx.accumulate_into
        gather.rows.put(by_rank, self._k, dy)
        gather.arrived.add(self._k)
        if axes := running_backward().unfinished.pop(id(ctx), ()):
            gather.unfinished[i] = axes
        return (by_rank,)

    def __repr__(self) -> str:
        return repr(self._gather)


class _Kept(Reversible):
    """An op that keeps views of whole parameters for backward; its own context gets them back just before.

    They are kept here and not in `use`, to which the autograd graph refers: a cycle would delay that memory is freed.

    Args:
        op: the op.
        use: the parameters.
        kept: name -> value that the op keeps, with places in the flat array instead of views.
    """

    def __init__(self, op: Any, use: Use, kept: Mapping[str, Any]) -> None:
        self._op, self._use, self._kept = op, use, kept
        # Groups that run again gather anew; the place of the first run decides whether they reduce gradients.
        self._syncs = use.order.syncs() if op.runs_modules else {}
        self.accumulates, self.fills_grad_buffers = op.accumulates, op.fills_grad_buffers
        self.kept_for, self.runs_modules, self.consumed = op.kept_for, op.runs_modules, op.consumed

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        flat = self._use.flat()
        for name, value in self._kept.items():
            setattr(ctx, name, change_each(value, partial(_view, flat)))
        with self._use.installed_again(flat, self._syncs) if self._op.runs_modules else nullcontext():
            found: Sequence[Array | None] = self._op.run_backward(ctx, dy)
        self._use.count()
        return found

    def __repr__(self) -> str:
        return repr(self._op)


class _Place:
    """The place of a view in a flat array."""

    def __init__(self, view: Array, flat: Array) -> None:
        self.offset = (_address(view) - _address(flat)) // flat.itemsize
        self.shape, self.strides = view.shape, view.strides


def _view(flat: Array, value: Any) -> Any:
    """Return the view at a place in a flat array; any other value as it is."""
    if type(value) is not _Place:
        return value
    if isinstance(flat, np.ndarray):
        offset_bytes = value.offset * flat.itemsize
        return np.ndarray.__new__(type(flat), value.shape, flat.dtype, flat, offset_bytes, value.strides)
    return get_namespace(flat).lib.stride_tricks.as_strided(flat[value.offset :], value.shape, value.strides)


def _with_places(ctx: Any, flat: Array) -> dict[str, Any]:
    """Return name -> value that an op keeps, of those with views of the array, which places replace."""

    def is_view(x: Any) -> bool:
        return is_array(x) and owner_of(x) is flat

    found = {}
    for name, value in vars(ctx).items():
        if any(map(is_view, value if isinstance(value, tuple) else (value,))):
            found[name] = change_each(value, lambda x: _Place(x, flat) if is_view(x) else x)
    return found


def _address(array: Array) -> int:
    found: int = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return found
