"""The tape and its backward pass.

The tape is the chain of `Node`s behind a Tensor: the op, its context, and the nodes that made its inputs. So a
value is kept only if an op saves it for backward. Backward walks them from the youngest to the oldest; a leaf's
gradient is finished when its last use has been visited, and then its hooks are called. DistributedDataParallel uses
such hooks to send a bucket of gradients while the rest of backward still runs.
"""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import add, iadd, itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from simparallel.arrays.seam import arrays_of
from simparallel.autograd.grad_mode import grad_mode
from simparallel.backend import Array, get_namespace, is_array
from simparallel.clock.memory import GRADIENTS, owner_of
from simparallel.clock.recorder import observer_of
from simparallel.errors import AutogradError
from simparallel.rank_local import RankLocal

if TYPE_CHECKING:
    from simparallel.autograd.op import Context, Op
    from simparallel.autograd.tensor import Tensor
    from simparallel.machine.devices import Device


# The node that made an input of an op, or the input itself, which is a leaf.
Source: TypeAlias = "Node | Tensor"


class Reversible:
    """An entry of the tape: `run_backward(ctx, dy)` returns the gradients of its inputs, in order.

    Attributes:
        accumulates: it has one input, contributes to a part of its gradient, and uses `ctx.accumulate_into`.
        fills_grad_buffers: it uses `ctx.gradient` or `ctx.grad_buffers`.
        kept_for: name of a value of the context -> number of the input whose gradient alone reads it.
        sums_result: it has one input, and sums the gradient of its result along the axes of `Backward.unfinished`.
        runs_modules: its backward runs code of modules again.
        consumed: what to say where backward arrives a second time.
    """

    accumulates = False
    fills_grad_buffers = False
    kept_for: Mapping[str, int] = MappingProxyType({})
    sums_result = False
    runs_modules = False
    consumed = (
        "the graph behind {op!r} was consumed by an earlier backward; run the forward pass again, or pass "
        "retain_graph=True the first time."
    )


class FlatSlice(Reversible):
    """The op of a slice of a flat tensor: adds its gradient to the slice of the flat gradient, in place.

    Args:
        text: the op in errors.
        start: first element of the slice.
        size: number of elements of the flat tensor.
    """

    accumulates = True

    def __init__(self, text: str, start: int, size: int) -> None:
        self._text, self._start, self._size = text, start, size

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        # The gradient that other slices have contributed so far; None for the first.
        whole = get_namespace(dy).zeros(self._size, dy.dtype) if ctx.accumulate_into is None else ctx.accumulate_into
        whole[self._start : self._start + dy.size] += dy.reshape(-1)
        return (whole,)

    def __repr__(self) -> str:
        return self._text


class BackwardOp(Reversible):
    """An op whose backward is a function, and the context of this op.

    Args:
        run_backward: takes the context and the gradient of the result; returns those of the inputs.
        needs: for each input whether it needs a gradient.
    """

    def __init__(self, run_backward: Callable[[Any, Array], Sequence[Array | None]], needs: tuple[bool, ...]) -> None:
        self.run_backward, self.needs = run_backward, needs


def node_of(
    inputs: Sequence[Tensor], run_backward: Callable[[Any, Array], Sequence[Array | None]], needs: Sequence[bool] = ()
) -> Node:
    """Return a node of these inputs whose backward is a function, see `BackwardOp`; by default all need a gradient."""
    op: Any = BackwardOp(run_backward, tuple(needs) or (True,) * len(inputs))
    return Node(op, op, inputs)


class Node:
    """One operation on the tape, which knows of its result only what backward needs.

    Args:
        op: runs its backward.
        ctx: what the op keeps for backward; None once that has run.
        inputs: of the op.

    Attributes:
        inputs: for each input the node that made it, or a leaf itself.
        number: its place in the order of all nodes.
        shape, dtype, device: of the result.
        hooks: called with the finished gradient of the result; returns the one to go on with.
    """

    __slots__ = ("ctx", "device", "dtype", "hooks", "inputs", "number", "op", "shape")
    is_leaf = False  # as of a Tensor
    # Set with the result.
    shape: tuple[int, ...]
    dtype: np.dtype
    device: Device | None

    def __init__(self, op: Op, ctx: Context, inputs: Sequence[Tensor]) -> None:
        self.op = op
        self.ctx: Context | None = ctx
        sources: list[Source] = []
        for x in inputs:  # a comprehension takes longer
            sources.append(x._node or x)
        self.inputs: Sequence[Source] = sources
        self.number = next(grad_mode.numbers)
        self.hooks: Callable[[Array], Array] | None = None
        if grad_mode.read is not None:
            grad_mode.read.update({id(x): x for x in inputs})


@dataclass(slots=True, eq=False)
class Backward:
    """A backward pass that is running.

    Attributes:
        uses: id of each node and leaf that it reaches -> number of uses left to visit.
        grads: id of a node or leaf -> its unfinished gradient. Gradients in memory that
            nothing else uses grow in place.
        deliver: gives a leaf its gradient. An op that finishes a gradient itself calls it, and returns None.
        outer: the pass that this one runs inside of, to recompute a checkpointed part; or None.
        calls_hooks: gradients go to `.grad`, and hooks of the leaves are called.
        callbacks: (place, function) to call once it has delivered its last gradient; in the order of the places, and
            for equal ones of registration.
        unfinished: id of the context of a node -> mesh axes over which the gradient of its result is still to be
            summed, by the op of the node.
        is_over: it has ended, possibly with an error.
    """

    uses: dict[int, int]
    grads: dict[int, Array]
    deliver: Callable[[Tensor, Array], None]
    outer: Backward | None
    calls_hooks: bool
    callbacks: list[tuple[int, Callable[[], None]]] = field(default_factory=list)
    unfinished: dict[int, tuple[str, ...]] = field(default_factory=dict)
    is_over: bool = False
    # Keys of the gradients in memory that nothing else uses.
    _own: set[int] = field(default_factory=set)

    def reaches(self, leaf: Tensor) -> bool:
        """Return whether this leaf may get a gradient; it gets none if no use of it contributes."""
        return id(leaf) in self.uses

    def growing(self, source: Source) -> Array | None:
        """Return the gradient of an input so far, if it may be written to; else None."""
        return self.grads[id(source)] if id(source) in self._own else None

    def add(self, source: Source, gradient: Array, is_new: bool) -> None:
        """Add the contribution of one use of an input to its gradient.

        Args:
            source: the input of a node.
            gradient: the contribution.
            is_new: nothing else uses the array `gradient`.
        """
        key = id(source)
        before = self.grads.get(key)
        if is_leaf := not isinstance(source, Node):
            dtype, device = source._data.dtype, source._device
        else:
            dtype, device = source.dtype, source.device
        if gradient.dtype != dtype:  # dtypes were mixed in forward
            gradient, is_new = gradient.astype(dtype), True
        elif before is None and not is_new and is_leaf:
            # Copied, because two leaves must not share one array.
            gradient, is_new = gradient.copy(), True
        if before is None:
            total = gradient
        else:
            pair = (gradient, before) if is_new and key not in self._own else (before, gradient)
            total = arrays_of(*pair).elementwise(iadd if is_new or key in self._own else add, *pair)
        if is_new or before is not None:
            self._own.add(key)
        self.grads[key] = total
        if type(total) is np.ndarray or is_array(total):  # not a scalar
            observer_of(device).memory.hold(total, GRADIENTS)


class _RunningBackward(RankLocal):
    backward: Backward | None = None


_running = _RunningBackward()


def running_backward(*, delivers: bool = False) -> Backward:
    """Return the innermost backward pass of this thread.

    Args:
        delivers: inside a checkpointed part, return the outer pass, which gives leaves their gradients.

    Raises:
        AutogradError: none is running.
    """
    running = _running.backward
    if running is None:
        raise AutogradError(
            "running_backward: no backward pass is running; call it in a gradient hook, or in the backward of an op."
        )
    while delivers and running.outer is not None and not running.calls_hooks:
        running = running.outer
    return running


def run_backward(
    root: Tensor,
    seed: Array,
    deliver: Callable[[Tensor, Array], None],
    *,
    retain_graph: bool = False,
    calls_hooks: bool = False,
) -> None:
    """Walk the tape behind `root`; call `deliver(leaf, gradient)` as soon as the gradient of a leaf is finished.

    Args:
        root: the tensor to differentiate.
        seed: its gradient, with the shape and dtype of its data.
        deliver: gets a new array or the leaf's buffer; no other leaf gets the same memory.
        retain_graph: keep the values that forward saved, for another backward.
        calls_hooks: `deliver` sets `.grad` and calls the leaves' hooks. Ops may then write gradients into the leaves'
            buffers.

    Raises:
        AutogradError: the graph was consumed, or a tensor that it needs was changed. Nothing was delivered.
    """
    # The youngest node first: all uses of its result are younger, so its gradient is finished when it is popped.
    heap = [(-root._node.number, root._node)] if root._node else []
    outer = _running.backward
    running = Backward(_count_uses(root), {id(root._node or root): seed}, deliver, outer, calls_hooks)
    uses, grads = running.uses, running.grads
    _running.backward = running
    try:
        if root._node is None:
            # A copy, because the leaf keeps its gradient and the seed belongs to the caller.
            deliver(root, seed.copy())
        while heap:
            node = heapq.heappop(heap)[1]
            op, inputs, dy = node.op, node.inputs, grads.pop(id(node))
            assert node.ctx is not None  # _count_uses has checked it
            if node.hooks is not None:
                dy = node.hooks(dy)
            needs = node.ctx.needs
            accumulate_into: Array | None = None
            grad_buffers: list[Array | None] = []
            if op.accumulates:
                # Only an array that nothing else uses may grow in place.
                node.ctx.accumulate_into = accumulate_into = running.growing(inputs[0])
            if op.fills_grad_buffers:
                # The buffer is free if the leaf has no gradient yet and this is its last use.
                grad_buffers = [
                    x._room
                    if calls_hooks and not isinstance(x, Node) and x._grad is None and uses.get(id(x)) == 1
                    else None
                    for x in inputs
                ]
                node.ctx.grad_buffers = grad_buffers
            input_grads = op.run_backward(node.ctx, dy)
            # Free activations as soon as they are used, even while the loss is kept.
            if not retain_graph:
                node.ctx, node.inputs = None, ()
            elif op.accumulates:
                # A leaf may own this array from now on.
                node.ctx.accumulate_into = None
            for source, needed, gradient in zip(inputs, needs, input_grads, strict=True):
                if not needed:
                    continue
                key = id(source)
                # Without a gradient, this use contributes nothing; that in `accumulate_into` has grown in place.
                if gradient is not None and accumulate_into is None:
                    # An array with a base is a view, and dy may be the gradient of another input: neither may be
                    # written.
                    is_new = gradient is not dy and (gradient.base is None or op.accumulates)
                    running.add(source, gradient, is_new or any(gradient is array for array in grad_buffers))
                # Counted also without a contribution: the leaf is finished when its last use has been visited.
                uses[key] -= 1
                if uses[key] == 0 and key in grads:
                    if isinstance(source, Node):
                        heapq.heappush(heap, (-source.number, source))
                    else:
                        deliver(source, grads.pop(key))
        # A callback that delivers a gradient may register further callbacks.
        while running.callbacks:
            running.callbacks.remove(first := min(running.callbacks, key=itemgetter(0)))
            first[1]()
    finally:
        _running.backward, running.is_over = outer, True


def _count_uses(root: Tensor) -> dict[int, int]:
    """Return id -> number of uses of each node and leaf behind `root`. Raise AutogradError, see `run_backward`."""
    if root._node is None:
        return {id(root): 1}
    uses: dict[int, int] = {}
    stack = [root._node]
    while stack:
        node = stack.pop()
        if node.ctx is None:
            raise AutogradError(f"backward: {node.op.consumed.format(op=node.op)}")
        # Check only if some memory has been written since the node was made.
        if _newest > node.number:
            _check_unchanged(node)
        for source, needed in zip(node.inputs, node.ctx.needs, strict=True):
            if not needed:
                continue
            key = id(source)
            # The first visit adds the node to the walk; later ones only count.
            if key in uses:
                uses[key] += 1
            else:
                uses[key] = 1
                if isinstance(source, Node):
                    stack.append(source)
    return uses


def nodes_behind(results: Iterable[Tensor], start: int = 0, ends: dict[int, Source] | None = None) -> list[Node]:
    """Return the nodes that lead to these results, without consumed ones and inputs that need no gradient.

    Args:
        results: Tensors.
        start: the walk ends at leaves, and at nodes with numbers below this.
        ends: gets these leaves and nodes, by id.
    """
    found: list[Node] = []
    stack: list[Source] = [x._node or x for x in results]
    seen = set(map(id, stack))
    if len(seen) < len(stack):
        stack = list({id(x): x for x in stack}.values())
    while stack:
        source = stack.pop()
        if not isinstance(source, Node) or source.number < start:
            if ends is not None:
                ends[id(source)] = source
        elif source.ctx is not None:
            found.append(source)
            for x, needed in zip(source.inputs, source.ctx.needs, strict=True):
                if needed and id(x) not in seen:
                    # A leaf may be pushed again.
                    if isinstance(x, Node):
                        seen.add(id(x))
                    stack.append(x)
    return found


def may_run_backward(root: Tensor) -> bool:
    """Return whether `run_backward` accepts this tensor: its graph is not consumed, and what it needs not changed."""
    try:
        return bool(_count_uses(root))
    except AutogradError:
        return False


# --- versions: which memory was written in place, and when ---------------------------------------------------------
#
# A graph keeps arrays that backward reads. A write into one of them, through any Tensor or view, makes the gradient
# wrong, so versions belong to the memory and not to the Tensor. Times are the numbers of the tape's nodes.

# At most this many parts of one memory are tracked separately, such as the batches of a dataset.
_MAX_PARTS = 4096


class _Memory(weakref.ref):
    """A reference to an array that owns written memory; its entry is removed when the array is freed."""

    __slots__ = ("key", "parts")
    key: int  # id of the array
    # (first, past the end) addresses of a part, or None for all of the memory -> time of its last write.
    parts: dict[tuple[int, int] | None, int]


_memories: dict[int, _Memory] = {}
# Time of the last write to any memory.
_newest = 0


def mark_changed(tensors: Iterable[Tensor]) -> None:
    """Record that these tensors were changed in place: backward through a graph that kept them becomes an error."""
    global _newest
    now = next(grad_mode.numbers)
    for tensor in tensors:
        array = tensor._data
        owner = array if array.base is None else owner_of(array)
        memory = _memories.get(id(owner))
        if memory is None:
            memory = _Memory(owner, _forget)
            # The entry refers to the memory weakly, so tracking a write keeps no array alive.
            memory.key, memory.parts = id(owner), {}
            _memories[memory.key] = memory
        part = None if owner is array else _addresses(array)
        # Beyond the limit, a write counts for all of the memory: that may raise needlessly, but misses no write.
        memory.parts[part if part in memory.parts or len(memory.parts) < _MAX_PARTS else None] = _newest = now


def written_since(arrays: Iterable[Array], when: int) -> list[Array]:
    """Return the arrays that own their memory and were written after the time `when`."""
    return [array for array in arrays if array.base is None and is_written_since(array, when)]


def is_written_since(array: Array, when: int) -> bool:
    """Return whether any of the array's memory was written after the time `when`."""
    memory = _memories.get(id(owner_of(array)))
    if memory is None:
        return False
    late = [part for part, written in tuple(memory.parts.items()) if written > when]
    return bool(late) and (None in late or any(_overlap(part, _addresses(array)) for part in late))


def _forget(memory: _Memory) -> None:
    if _memories.get(memory.key) is memory:
        del _memories[memory.key]


def _addresses(array: Array) -> tuple[int, int] | None:
    """Return the first address of an array and the one past its end; None if they are unknown."""
    # Arrays on a GPU have none.
    interface = getattr(array, "__array_interface__", None)
    if interface is None:
        return None
    first = last = interface["data"][0]
    # A negative stride reaches back from the first element.
    for size, stride in zip(array.shape, array.strides, strict=True):
        step = (size - 1) * stride
        first, last = first + min(step, 0), last + max(step, 0)
    return first, last + array.itemsize


def _overlap(a: Any, b: Any) -> bool:
    return a is None or b is None or (a[0] < b[1] and b[0] < a[1])


def _check_unchanged(node: Node) -> None:
    """Raise AutogradError if memory that the node keeps for backward was written since forward."""
    assert node.ctx is not None
    needs, kept_for = node.ctx.needs, node.op.kept_for
    kept = [
        x
        for name, value in vars(node.ctx).items()
        if name not in kept_for or needs[kept_for[name]]
        for x in (value if isinstance(value, tuple) else (value,))
    ]
    for value in kept:
        if not (is_array(value) and is_written_since(value, node.number)):
            continue
        leaf = next((x for x in node.inputs if not isinstance(x, Node) and _may_overlap(x._data, value)), None)
        what = f"an array of shape {value.shape} that {node.op!r} keeps"
        if leaf is not None:
            what = f"{leaf.name or 'a tensor'} of shape {leaf.shape}, which {node.op!r} used,"
        raise AutogradError(
            f"backward: {what} has changed since forward: an optimizer's step, a load, x += y, x[i] = y or a "
            "collective in place came in between. The gradients would match neither the old nor the new values. Call "
            "backward before that, run forward again, or change a detach().clone()."
        )


def _may_overlap(a: Array, b: Array) -> bool:
    spans = _addresses(a), _addresses(b)
    return a is b or None not in spans and _overlap(*spans)
