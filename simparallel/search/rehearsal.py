"""The memory of one step under a plan, counted as in a run.

The step is rehearsed on arrays without data, with the slices of one rank: by the ops, the tape and the memory account
that a run has. Exchanges only give arrays of the shapes of their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Backward, Op, Redistribute, Tensor, running_backward
from simparallel.autograd.tape import BackwardOp, Node, grad_mode, node_of
from simparallel.backend import Array, get_namespace, is_array
from simparallel.base.attributes import setting
from simparallel.base.dry_arrays import empty
from simparallel.clock.memory import ACTIVATIONS, GRADIENTS, PARAMETERS, TENSORS, owner_of
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.layout.sharding import Placement
from simparallel.machine.cluster import describe
from simparallel.nn.recompute import checkpoint
from simparallel.optim.optimizer import Optimizer
from simparallel.parallel.operator.explain import Rehearsal
from simparallel.parallel.operator.gradient_sums import BEFORE_OTHERS
from simparallel.parallel.operator.op_call import OpCall
from simparallel.search.graph import ARGUMENT, CONSTANT, NODE, PARAMETER, InputSource, without_effects
from simparallel.search.prices import Events, TimedCompute

if TYPE_CHECKING:
    from simparallel.search.space import Space


class StepRehearsal:
    """A step of a rank with the largest slices: forward, backward, and what the optimizers hold.

    Args:
        space: the program and its choices.
        choice: the number of the choice of each op.

    Attributes:
        peak_bytes: the most memory that the rank holds at one time.
        held_bytes: for each op those of its arrays that are held when backward begins, its result among them.
    """

    def __init__(self, space: Space, choice: Sequence[int]) -> None:
        self._space, self._choice, self._nodes = space, choice, space.graph.nodes
        self._chosen = [choices[number] for choices, number in zip(space.choices, choice, strict=True)]
        # Op -> the results that the program drops after it: its variables may hold them longer than ops read them.
        self._dropped: dict[int, list[InputSource]] = {}
        for number, node in enumerate(self._nodes):
            if node.last is not None and number not in space.graph.roots:
                self._dropped.setdefault(node.last, []).append(InputSource(NODE, number))
        self._late: dict[int, list[tuple[Tensor, Array]]] = {}
        self._makers: dict[int, int] = {}
        recorder = Recorder(0, describe(1), record="off")
        self._memory = recorder.memory
        # Many ops divide by zero here; only sizes matter.
        with without_effects(), use_recorder(recorder), setting(grad_mode, interpreter=None), np.errstate(all="ignore"):
            self._run()
        self.peak_bytes = self._memory.peak

    def _run(self) -> None:
        graph = self._space.graph
        results: dict[InputSource, Tensor] = {}
        leaves: dict[Tensor, Tensor] = {}
        # Input source -> a parameter or an argument.
        self._given: dict[InputSource, Tensor] = {}
        for number, place in enumerate(self._space.placements(self._choice)):
            tensor = graph.parameters[number].tensor
            x = Tensor._result(self._new(place.local_shape, tensor.dtype, PARAMETERS), placement=place)
            x.requires_grad, leaves[tensor] = True, x
            self._given[InputSource(PARAMETER, number)] = x
        # The state of the optimizers exists from the second step on.
        optimizers = [self._stepped(optimizer, leaves) for optimizer in self._space.optimizers]
        if graph.has_gradients:
            for x in leaves.values():
                x.grad = empty(x.data.shape, x.dtype)
        start = 0
        for part in (part for part in self._space.recomputed if part.begin in self._space.again):
            self._forward(range(start, part.begin), results)
            inside = range(part.begin, part.end)
            read = {source for number in inside for source in self._nodes[number].inputs}
            before = [source for source in read if source in results]
            run = partial(self._part, inside, before)
            results[InputSource(NODE, part.end - 1)] = checkpoint(run, *(results[source] for source in before))
            self._forget(results, part.end - 1)
            start = part.end
        self._forward(range(start, len(self._nodes)), results)
        self.held_bytes = [0] * len(self._nodes)
        for key, held in self._memory._held.items():
            if key in self._makers:
                self.held_bytes[self._makers[key]] += held.size_bytes
        roots = [results[source] for number in graph.roots if (source := InputSource(NODE, number)) in results]
        results.clear()
        if graph.num_micro_batches == 1:
            for x in leaves.values():
                x.grad = None
        self._backward([root for root in roots if root.requires_grad])
        optimizers.clear()

    def _stepped(self, optimizer: Optimizer, leaves: dict[Tensor, Tensor]) -> Optimizer:
        """Return a copy of an optimizer after a step on the rehearsed parameters: parameter -> rehearsed one."""
        copy = optimizer.restricted_to(leaves)
        for group in copy.param_groups:
            group["params"] = [leaves[param] for param in group["params"]]
        copy._step([empty(param.data.shape, param.dtype) for param in copy.parameters])
        return copy

    def _backward(self, roots: list[Tensor]) -> None:
        if roots:
            seeds = [(root.data.shape, root.dtype) for root in roots]
            entry = node_of(roots, lambda ctx, dy: [empty(*seed) for seed in seeds])
            loss = Tensor._result(empty(()), entry)
            roots.clear()
            loss.backward(empty(()))

    # --- forward --------------------------------------------------------------------------------------

    def _part(self, inside: range, before: list[InputSource], *inputs: Tensor) -> Tensor:
        results = dict(zip(before, inputs, strict=True))
        self._forward(inside, results)
        return results[InputSource(NODE, inside[-1])]

    def _forward(self, numbers: Iterable[int], results: dict[InputSource, Tensor]) -> None:
        for number in numbers:
            inputs = [self._input(number, i, results) for i in range(len(self._nodes[number].inputs))]
            results[InputSource(NODE, number)] = self._op(number, inputs)
            self._forget(results, number)

    def _forget(self, results: dict[InputSource, Tensor], number: int) -> None:
        """Drop the results that the program drops after this op."""
        for source in self._dropped.get(number, ()):
            results.pop(source, None)

    def _input(self, number: int, i: int, results: dict[InputSource, Tensor]) -> Tensor:
        """Return an input of an op, redistributed if it has to be."""
        node, target = self._nodes[number], self._chosen[number].inputs[i]
        source, spec = node.inputs[i], node.plan.inputs[i]
        if source.kind == CONSTANT:
            x = Tensor._result(_array(spec.shape, spec.dtype))
        else:
            x = results[source] if source.kind == NODE else self._given_to(source, spec.dtype)
        if target is None or x.placement is target:
            return x
        there, back = self._space.moves(self._choice, number, i)
        return self._moved(x, target, there, back, node.has_backward and node.needs[i])

    def _given_to(self, source: InputSource, dtype: np.dtype) -> Tensor:
        """Return a parameter or an argument. A micro-batch is a part of an argument."""
        if source not in self._given:
            graph = self._space.graph
            place = graph.arguments[source.number]
            whole = graph.whole.get(source.number)
            if whole is None:
                data = self._new(place.local_shape, dtype, TENSORS)
            else:
                data = self._given_to(InputSource(ARGUMENT, whole), dtype).data[: place.local_shape[0]]
            self._given[source] = Tensor._result(data, placement=place)
        return self._given[source]

    def _moved(self, x: Tensor, target: Placement, there: Events, back: Events, needed: bool) -> Tensor:
        carry = partial(self._carry, shape=x.data.shape, events=back)
        entry = node_of([x], lambda ctx, dy: [carry(dy)]) if needed else None
        return Tensor._result(self._carry(x.data, target.local_shape, there), entry, placement=target)

    def _carry(self, x: Array, shape: tuple[int, ...], events: Events) -> Array:
        """Return what a redistribution gives: a slice of the array, or a new array."""
        if not events:
            return x
        if all(isinstance(event, TimedCompute) for event in events):
            x = get_namespace(x).ascontiguousarray(x[tuple(slice(size) for size in shape)])
        else:
            x = _array(shape, x.dtype)
        return self._hold(x, ACTIVATIONS)

    def _op(self, number: int, inputs: list[Tensor]) -> Tensor:
        node, choice = self._nodes[number], self._chosen[number]
        if isinstance(node.op, Redistribute):
            return inputs[0]
        call, arrays = choice.call, [x.data for x in inputs]
        plan, halo = call.plan_of(call.sharding.mesh.ranks[0]), call.window_cut
        if halo is not None:
            arrays[halo.input] = self._new(*plan.inputs[halo.input], ACTIVATIONS)
        ctx = Rehearsal(tuple(node.has_backward and needed for needed in node.needs), plan, call.sharding)
        ctx.arrays = arrays_of(*arrays)
        ctx.xp = ctx.arrays.xp
        y = Tensor._result(node.op.run_forward(ctx, arrays), placement=call.made)
        kept = [x for x in vars(ctx).values() if is_array(x)]
        made = {id(owner_of(x)) for x in (y.data, *kept)} - {id(owner_of(x)) for x in arrays}
        self._makers |= dict.fromkeys(made, number)
        if True in ctx.needs:
            left = [self._space.is_left(self._choice, number, i) for i in range(len(inputs))]
            entry = Node(BackwardOp(partial(self._op_backward, node.op, call), ctx.needs), ctx, inputs)  # type: ignore[arg-type]
            ctx.summed = [
                (i, x) for i, x in enumerate(entry.inputs) if ctx.needs[i] and not left[i] and self._is_summed(call, i)
            ]
            y = Tensor._result(y.data, entry, placement=call.made)
        if call.made is not choice.output and choice.output is not call.made.gradient:
            finish = self._space.prices.finish(call)
            return self._moved(y, choice.output, finish, finish, y.requires_grad)
        # A sum is finished in place, unless something else has the array.
        if call.made is not choice.output and (y.data.base is not None or any(x is y.data for x in kept)):
            y._data = self._new(y.data.shape, y.dtype, ACTIVATIONS)
        y.placement = choice.output
        return y

    def _is_summed(self, call: OpCall, i: int) -> bool:
        axes = call.sharding.gradient_axes(i)
        return bool(axes) and len(call.sharding.groups(axes)[0]) > 1

    # --- backward -------------------------------------------------------------------------------------

    def _op_backward(self, op: Op, call: OpCall, ctx: Any, dy: Array) -> Sequence[Array | None]:
        grads = list(op.run_backward(ctx, dy))
        halo = call.window_cut
        if halo is not None and grads[halo.input] is not None:
            grads[halo.input] = self._new(*call.local.inputs[halo.input], ACTIVATIONS)
        for i, x in ctx.summed:
            gradient = grads[i]
            if gradient is dy or getattr(gradient, "base", None) is not None:
                gradient = gradient.copy()
            grads[i] = None if not isinstance(x, Node) and self._is_postponed(x, gradient) else gradient
        return grads

    def _is_postponed(self, leaf: Tensor, gradient: Array) -> bool:
        """Return whether the sum of a leaf's gradient waits for the end of backward, as in `gradient_sums`."""
        running = running_backward()
        if running.uses.get(id(leaf)) != 1 or id(leaf) in running.grads:
            return False
        self._memory.hold(gradient, GRADIENTS)
        if id(running) not in self._late:
            self._late[id(running)] = []
            running.callbacks.append((BEFORE_OTHERS, partial(self._deliver, running)))
        self._late[id(running)].append((leaf, gradient))
        return True

    def _deliver(self, running: Backward) -> None:
        for leaf, gradient in self._late.pop(id(running)):
            running.deliver(leaf, gradient)

    def _new(self, shape: tuple[int, ...], dtype: np.dtype, category: str) -> Array:
        return self._hold(_array(shape, dtype), category)

    def _hold(self, array: Array, category: str) -> Array:
        self._makers.pop(id(array), None)
        self._memory.hold(array, category)
        return array


def _array(shape: tuple[int, ...], dtype: np.dtype) -> Array:
    """Return an array without data; of zeros for integers, which ops may read, such as labels."""
    return empty(shape, dtype) if dtype.kind in "fc" else np.zeros(shape, dtype)
