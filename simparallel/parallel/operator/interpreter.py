"""Run ops on sharded tensors: each rank computes on its slices, and the rule gives the communication.

Nothing here is specific to an op. A call takes these steps:

    1. Decide the cuts of the op's named dims: by its strategy, or by the layouts of its inputs (`strategy`).
    2. Redistribute inputs with other layouts, as graph nodes (`layout.redistribution`, `redistribute`).
    3. Run forward on the slices, widened where windows reach beyond them (`halo`). Reductions that the op
       completes itself go through its context.
    4. Finish the sums over dims that are cut: at once if the op has a strategy, otherwise when another op
       needs the value.
    5. In backward, return the gradients of fetched borders to their owners, and sum the gradient of each input
       along the axes that cut dims which the input lacks.

Steps 1, 2 and the groups are worked out once for inputs of equal layouts, and kept in an `OpCall`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from simparallel import collectives
from simparallel.arrays.seam import arrays_of
from simparallel.autograd import Context, Op, Redistribute, Tensor, running_backward
from simparallel.autograd.interpreter import NamedInterpreter
from simparallel.autograd.tape import Node, Reversible, grad_mode, node_of
from simparallel.backend import Array, get_namespace, has_data, is_array
from simparallel.base.attributes import setting
from simparallel.base.callsite import user_line
from simparallel.clock.memory import ACTIVATIONS, PARAMETERS
from simparallel.clock.recorder import Recorder, current_recorder, observer_of
from simparallel.comm import Communicator, Group, current
from simparallel.errors import LayoutError
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh
from simparallel.layout.redistribution import Redistribution
from simparallel.layout.sharding import Placement, placement, unfinished
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.parallel.ddp.same_model import check_may_be_cut
from simparallel.parallel.operator.gradient_sums import Postponed
from simparallel.parallel.operator.halo import compile_halo
from simparallel.parallel.operator.op_call import OpCall, check_mixing, check_ranks, mode, plan_way, start_of, uncut
from simparallel.parallel.operator.pending_view import PendingView, pending_view
from simparallel.parallel.operator.redistribute import GroupCache, Move, compile_moves, reshaping


class Sharder:
    """The state of one rank: its groups, its redistributions, its calls.

    Args:
        communicator: the rank's.
        ranks: the ranks that run the ops, this one among them.
    """

    def __init__(self, communicator: Communicator, ranks: tuple[int, ...]) -> None:
        self.communicator, self.ranks = communicator, ranks
        self.rank, self.world_size = communicator.rank, len(ranks)
        self.groups = GroupCache(communicator, ranks)
        self._compiled_moves: dict[tuple[Placement, Placement, int], CompiledMove] = {}
        self.calls: dict[Any, Runner] = {}
        self.sums = Postponed()

    def move(self, source: Placement, target: Placement, itemsize: int) -> CompiledMove:
        """Return the redistribution between two placements. Collective: yes, the first time."""
        # Only quick plans depend on the element size.
        key = source, target, itemsize if mode.quick else 0
        found = self._compiled_moves.get(key)
        if found is None:
            for layout in (source.layout, target.layout):
                check_ranks(layout, self.communicator.world_size)
            found = self._compiled_moves[key] = CompiledMove(self, source, target, plan_way(source, target, itemsize))
        return found

    def carry(self, x: Array, source: Placement, target: Placement, phase: str = "forward") -> Array:
        """Return this rank's slice in the target layout. Collective: yes, if data moves."""
        return x if source is target else self.move(source, target, x.dtype.itemsize)(x, phase)


class CompiledMove(Reversible):
    """A redistribution, compiled for this rank; also the op of its node in the autograd graph, as it keeps no state."""

    sums_result = True

    def __init__(self, sharder: Sharder, source: Placement, target: Placement, plan: Redistribution) -> None:
        self._sharder, self._source, self._target = sharder, source, target
        self.finishes = bool(source.layout.partial)
        self._only_finishes = self.finishes and target is source.gradient
        self._moves = compile_moves(plan, sharder.rank, sharder.groups)
        if source.shape != target.shape:
            self._moves = reshaping(self._moves, plan, target, sharder.rank)
        # Finishing a sum is a collective without extra copies: record only steps that assemble parts.
        self._is_shown = any(step.exchange is not None for step in plan.steps)

    def __call__(self, x: Array, phase: str) -> Array:
        # NumPy turns the gradient of a 0-dim tensor into a scalar.
        if not is_array(x):
            x = get_namespace(x).asarray(x)
        recorder = current_recorder()
        start_ns = 0 if recorder is None else recorder.now_ns()
        for move in self._moves:
            x = move(x)
        # Without moves, no new array is made that would have to be recorded.
        if recorder is None or not self._moves:
            return x
        if self._is_shown:
            _show_copy(recorder, "Redistribute", phase, start_ns, x)
        recorder.memory.hold(x, ACTIVATIONS)
        return x

    def bring(self, x: Tensor) -> Tensor:
        """Redistribute x, as a graph node.

        If the redistribution only finishes a sum, x itself is updated, so that later ops find the sum finished.
        """
        # A finished sum needs no graph node: the gradient of an addend equals the gradient of the sum.
        data = self(x.data, "forward")
        if self._only_finishes:
            x.data, x.placement = data, self._target
            return x
        on_tape = grad_mode.enabled and x.requires_grad
        node = Node(self, SimpleNamespace(needs=(True,)), (x,)) if on_tape else None  # type: ignore[arg-type]
        return Tensor._result(data, node, None, self._target, SHARDED)

    def run_backward(self, ctx: Any, dy: Array) -> Sequence[Array | None]:
        lies = unfinished(self._target, running_backward().unfinished.pop(id(ctx), ()))
        return (self._sharder.carry(dy, lies, self._source.gradient, "backward"),)

    def __repr__(self) -> str:
        return f"Redistribute({self._source.layout!r} -> {self._target.layout!r})"


def _is_summed_by_its_op(node: Node) -> bool:
    """Return whether the op of a node will sum the gradient of its result, which has no other use in this backward."""
    if not node.op.sums_result or node.hooks is not None:
        return False
    running = running_backward()
    return running.uses[id(node)] == 1 and id(node) not in running.grads


def _show_copy(recorder: Recorder, name: str, phase: str, start_ns: int, x: Array) -> None:
    """Record the copies by which x is assembled from its parts; the collectives of the exchange record themselves."""
    itemsize = recorder.cluster.itemsize(x.dtype)
    recorder.work(name, phase, start_ns, 0, 2 * x.size * itemsize, itemsize)


def _exchange_halo(move: Move, x: Array, phase: str) -> Array:
    """Widen a slice, or narrow a gradient, and record it in the trace and in the memory account."""
    recorder = current_recorder()
    if recorder is None:
        return move(x)
    start_ns = recorder.now_ns()
    y = move(x)
    if y is not x:
        _show_copy(recorder, "Halo", phase, start_ns, y)
        recorder.memory.hold(y, ACTIVATIONS)
    return y


def sharder() -> Sharder:
    """Return the calling thread's `Sharder`."""
    # Stored with the communicator, so that its groups and plans end with the run.
    communicator = current()
    sharders: dict[Any, Sharder] = communicator.kept.setdefault(Sharder, {})
    found = sharders.get(mode.ranks)
    if found is None:
        found = sharders[mode.ranks] = Sharder(communicator, mode.ranks or communicator.world.ranks)
    return found


def implicit_replication(ranks: tuple[int, ...] | None = None) -> AbstractContextManager[None]:
    """Treat plain tensors among the inputs of an op as replicated inside the block, if others are sharded.

    Args:
        ranks: those that run the ops, over which strategies cut, this one among them, such as
            `mesh.group("tp", rank)`: other ranks have other values, as with data parallelism. None for those of a
            block around this one, or all.
    """
    return setting(mode, ranks=ranks or mode.ranks, replicating=True)


def group_along(mesh: Mesh, axes: Sequence[str]) -> Group | None:
    """Return this rank's group along axes of a mesh; None if it is alone in it. Collective: yes, the first time."""
    groups, communicator = mesh.groups(axes), current()
    if len(groups[0]) == 1 or communicator.rank not in mesh.ranks:
        return None
    # Other ranks, such as those of other stages, may have other parameters.
    with setting(mode, ranks=mesh.ranks if mesh.size < communicator.world_size else None):
        return sharder().groups.mine(groups)


# --- moving a tensor ----------------------------------------------------------------------------------


def move_tensor(x: Tensor, target: Placement, source: Placement | None = None) -> Tensor:
    """Redistribute x to `target`, differentiably. `source` is the placement of a plain x, whole on every rank."""
    if isinstance(x, PendingView):
        x = _start(x, target)
    origin = x.placement or source
    assert origin is not None
    if origin is target and x.placement is not None:
        return x
    own = sharder()
    move = own.move(origin, target, x.data.dtype.itemsize)
    with own.communicator.for_purpose(f"redistribution of {_maker(x)}"):
        return move.bring(x)


def _start(x: PendingView, target: Placement) -> Tensor:
    """Return the tensor to redistribute to `target`: the base that x is a view of, or x itself once settled."""
    assert x.placement is not None
    if start_of(x.placement, target) is x.placement.source:
        return x.pass_over()
    x.settle()
    return x


def _maker(x: Tensor) -> str:
    """Name the op that computed x, if it is known."""
    return x._node.op.purpose if x._node is not None and isinstance(x._node.op, Runner) else "a tensor"


# --- running an op -------------------------------------------------------------------------------------


class ShardContext(Context):
    """The context of an op that runs on slices: its reductions are collectives over the groups of the cut."""

    def __init__(self, runner: Runner, needs: tuple[bool, ...], arrays: Sequence[Array]) -> None:
        super().__init__(arrays_of(*arrays), needs, runner.plan)
        self._runner = runner

    def sum_over(self, dims: str, x: Array, group_size: int | None = None) -> Array:
        return self._runner.exchange(dims, x, "sum", group_size)

    def max_over(self, dims: str, x: Array) -> Array:
        return self._runner.exchange(dims, x, "max")

    def min_over(self, dims: str, x: Array) -> Array:
        return self._runner.exchange(dims, x, "min")

    def offset(self, dim: str) -> int:
        return self._runner.offset(dim)

    def size(self, dim: str) -> int:
        return self._runner.sizes[dim]

    def part(self, dim: str) -> tuple[int, int]:
        return self._runner.part(dim)

    def sizes(self, dims: str, group_size: int | None = None) -> int:
        if group_size is None:
            return super().sizes(dims)
        return self._runner.count(dims, group_size)


class Runner(Reversible):
    """An `OpCall` that this rank executes, with its groups."""

    def __init__(self, call: OpCall, sharder: Sharder) -> None:
        sharding = call.sharding
        # Cached, because ops ask in every step.
        self._axes, self.sizes = cache(sharding.axes), sharding.sizes
        self.offset = cache(lambda dim: sharding.span(dim, sharder.rank)[0])
        self.part = cache(lambda dim: (sharding.chunk(dim, sharder.rank), sharding.cut(dim)))
        self.count = cache(lambda dims, group_size: sharding.count(dims, sharder.rank, group_size))
        self.call, self.op, self.rank, self._sharder = call, call.op, sharder.rank, sharder
        self.plan = call.plan_of(self.rank)
        # By axes and group size.
        self._groups: dict[Any, Group | None] = {}
        # Redistributions of inputs, by input number and source placement: the same ones in every step.
        self._compiled_moves: dict[Any, CompiledMove] = {}
        all_axes = ((i, sharding.gradient_axes(i)) for i in range(len(call.inputs)))
        self._gradient_axes = [(i, axes) for i, axes in all_axes if axes]
        self._summed = [i for i, _ in self._gradient_axes]
        cut = call.window_cut
        self._halo = None if cut is None else compile_halo(cut, self.rank)
        self.kept_for, self.can_wait = call.op.kept_for, call.can_wait
        # Ranks compare this text at each collective. It omits the op's settings: a seed differs in every step.
        self.purpose = f"{call.op.name} {sharding.rule}"
        self._backward_purpose = f"backward of {self.purpose}"

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        if mode.noted is not None:
            mode.noted += self.call.implicit
        if mode.strict:
            self.call.refuse_implicit()
        # Errors of collectives name the op that asked for them.
        communicator = self._sharder.communicator
        before, communicator.purpose = communicator.purpose, self.purpose
        try:
            return self._run(inputs)
        finally:
            communicator.purpose = before

    def _run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        moved = inputs
        for x, target in zip(inputs, self.call.inputs, strict=True):
            # Most inputs have the right layout already; build a new tuple only if one has to move.
            if x.placement is not target and target is not None:
                moved = tuple([self._moved(i, x) for i, x in enumerate(inputs)])
                break
        arrays = [x.data for x in moved]
        halo = self._halo
        if halo is not None:
            arrays[halo.input] = _exchange_halo(halo.widen, arrays[halo.input], "forward")
        recording = grad_mode.enabled
        needs = tuple([recording and x.requires_grad for x in moved])
        ctx = ShardContext(self, needs, arrays)
        data = self.op.run_forward(ctx, arrays)
        node = None
        if True in needs:
            node = Node(self, ctx, moved)  # type: ignore[arg-type]
            ctx.summed = tuple([node.inputs[i] for i in self._summed])
        # Placements are compared with `is`: equal ones are one object.
        made, output = self.call.made, self.call.output
        if made is output:
            return Tensor._result(data, node, None, made, SHARDED)
        # Finish the sum in place if no other array shares the memory and backward does not keep it.
        if output is made.gradient:
            group = self.group(made.layout.partial)
            is_own = is_array(data) and data.base is None
            for kept in vars(ctx).values():
                is_own = is_own and kept is not data
            if not is_own:
                data = ctx.xp.array(data)
                observer_of(ctx.device).memory.hold(data, ACTIVATIONS)
            data = collectives.all_reduce(data, "sum", group)
            return Tensor._result(data, node, None, output, SHARDED)
        return move_tensor(Tensor._result(data, node, None, made, SHARDED), output)

    def _moved(self, i: int, x: Tensor) -> Tensor:
        target = self.call.inputs[i]
        if target is None:
            return x
        if isinstance(x, PendingView):
            x = _start(x, target)
        source = x.placement
        if source is target:
            return x
        # Cut a plain parameter once and for all, instead of in every step. A leaf of a recomputed part may be none.
        if source is None and x.is_leaf and x.requires_grad and not grad_mode.recomputing:
            return shard_parameter(x, target)
        # A plain tensor that is not a leaf is whole on every rank.
        move = self._compiled_moves.get((i, source))
        if move is None:
            whole = source or placement(uncut(target.layout.mesh, x.shape), x.shape)
            move = self._compiled_moves[i, source] = self._sharder.move(whole, target, x.data.dtype.itemsize)
        if not move.finishes:
            return move.bring(x)
        # The sum is due to the op that left it unfinished: name both ops in errors.
        with self._sharder.communicator.for_purpose(f"{self.purpose}, of {_maker(x)}"):
            return move.bring(x)

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        """Return the gradients of the inputs: halos returned to their owners, then summed along `_gradient_axes`.

        The gradient of a redistributed input is left unfinished: the way back sums and cuts it at once.
        """
        communicator = self._sharder.communicator
        before, communicator.purpose = communicator.purpose, self._backward_purpose
        try:
            return self._run_backward(ctx, dy)
        finally:
            communicator.purpose = before

    def _run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        grads = list(self.op.run_backward(ctx, dy))
        halo = self._halo
        if halo is not None and (gradient := grads[halo.input]) is not None:
            grads[halo.input] = _exchange_halo(halo.narrow, gradient, "backward")
        for (i, axes), x in zip(self._gradient_axes, ctx.summed, strict=True):
            gradient = grads[i]
            group = None if gradient is None else self.group(axes)
            if group is not None and gradient is not None:
                if isinstance(x, Node) and _is_summed_by_its_op(x):
                    running_backward().unfinished[id(x.ctx)] = axes
                    continue
                if gradient is dy or gradient.base is not None or not gradient.ndim:
                    # The all-reduce writes in place: copy views, dy itself and NumPy scalars.
                    gradient = ctx.xp.array(gradient)
                # A leaf's sum may wait until it shares a collective; any other op needs its gradient now.
                if not isinstance(x, Node) and self._sharder.sums.take(x, gradient, group):
                    grads[i] = None
                else:
                    grads[i] = collectives.all_reduce(gradient, "sum", group)
        return grads

    def exchange(self, dims: str, x: Array, op: str, group_size: int | None = None) -> Array:
        """Reduce `x` over the ranks among which any of `dims` is cut, or over runs of `group_size` of these ranks."""
        group = self.group(self._axes(dims), group_size)
        return x if group is None else collectives.all_reduce(get_namespace(x).array(x), op, group)

    def group(self, axes: tuple[str, ...], group_size: int | None = None) -> Group | None:
        """Return this rank's group along the axes; None if the rank is alone in it. Collective: yes, the first time."""
        key = axes, group_size
        if key not in self._groups:
            # Creating groups is a collective: every rank creates all of them.
            groups = self.call.sharding.groups(axes, group_size)
            self._groups[key] = self._sharder.groups.mine(groups) if len(groups[0]) > 1 else None
        return self._groups[key]

    def __repr__(self) -> str:
        return repr(self.op)


class ShardedInterpreter(NamedInterpreter):
    """The interpreter of ops with a sharded input; in automatic mode of all ops, which then shard plain inputs."""

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        """Run the op on the slices of this rank.

        Raises:
            StrategyError: the op's strategy is not legal for these inputs; or, in strict mode, an input has to move.
            LayoutError: a plain tensor meets a sharded one.

        Collective: yes, where data is exchanged.
        """
        if type(op) is Redistribute:
            return _redistribute(op, inputs[0])
        call = self.runner(op, inputs)
        # The op that reads the reshaped tensor may need another layout: move the elements once, to that one.
        if call.can_wait:
            y = pending_view(inputs[0], inputs[0].placement, call.call, partial(call, inputs), self)
            if y is not None:
                return y
        return call(inputs)

    def runner(self, op: Op, inputs: tuple[Tensor, ...]) -> Runner:
        """Return the Runner of the op for inputs of these layouts, the same one in every step. Raises as `run`."""
        own = sharder()
        if mode.calls is not None:
            numbers = [x.data.item() for x in inputs if x.placement is None and not x.shape and has_data(x.data)]
            mode.calls.append((op.name, user_line(), *(x.shape for x in inputs), *numbers))
        # Equal placements are one object (`placement` is cached), so the key is cheap to hash and compare.
        places = [x.placement or x.data.shape for x in inputs]
        # Automatic mode decides by which inputs are parameters, so the key includes that.
        fixed = tuple([x.requires_grad and x.is_leaf for x in inputs]) if mode.automatic else ()
        key = (op, mode.automatic, mode.quick, fixed, *places, *[x.dtype for x in inputs])
        call = own.calls.get(key)
        if call is None:
            check_mixing(op, inputs)
            call = own.calls[key] = Runner(OpCall(op, inputs, own.world_size, fixed, ranks=own.ranks), own)
        return call

    def slice_of(self, x: Array, target: Placement) -> Array:
        return sharder().carry(x, whole_place(target), target).copy()

    def slice_group(self, x: Tensor) -> Group | None:
        assert x.placement is not None
        return group_along(x.placement.layout.mesh, [axis for axes in x.placement.layout.axes_by_dim for axis in axes])

    def to_local(self, x: Tensor, grad_layout: Layout | None = None) -> Tensor:
        place = x.placement
        assert place is not None
        if mode.automatic:
            raise LayoutError(
                "to_local: inside of AutoParallel every rank holds the whole of a plain tensor, and a slice is not "
                "one. Call it outside, or shard this part with strategies: op.shard(...), shard(fn, ...)."
            )
        grad_place = place.gradient if grad_layout is None else placement(grad_layout, place.shape)
        # The gradient arrives in slices of `grad_layout`: they must have the shapes of x's slices.
        if grad_place is not place.gradient and grad_place.local_shapes != place.local_shapes:
            raise LayoutError(
                f"to_local: slices have shapes {place.shapes_text}, by grad_layout={grad_layout!r} their gradients "
                f"would have {grad_place.shapes_text}."
            )
        return relabelled(x, None, partial(sharder().carry, source=grad_place, target=place.gradient, phase="backward"))


SHARDED = ShardedInterpreter("SHARDED")


def relabelled(x: Tensor, place: Placement | None, carry: Callable[[Any], Any] | None) -> Tensor:
    """Return the memory of x as a slice of a sharded tensor; as a plain tensor, if `place` is None.

    `carry` takes the gradient back to the layout of x; None if it has that already.
    """
    node = None
    if grad_mode.enabled and x.requires_grad:
        node = node_of((x,), lambda ctx, dy: (dy if carry is None else carry(dy),))
    return Tensor._result(x.data, node, None, place, None if place is None else SHARDED)


def shard_parameter(x: Tensor, target: Placement) -> Tensor:
    """Replace a plain leaf, which every rank holds whole, by this rank's slice of it, in place."""
    check_may_be_cut(x, target, sharder().world_size)
    # A parameter without data draws this slice only; one with data keeps a copy, so that the whole can be freed.
    if is_deferred(x):
        materialize(x, target.layout.slices(sharder().rank, x.shape))
    else:
        x.data = sharder().carry(x.data, target.uncut, target).copy()
    x.placement, x.interpreter = target, SHARDED
    what = f"a slice of a parameter of shape {x.shape}"
    observer_of(None).memory.hold(x.data, PARAMETERS, move=True, what=what)
    return x


def whole_place(place: Placement) -> Placement:
    """Return the placement of the tensor replicated on every rank of the run, on its own mesh if that has all ranks."""
    ranks = sharder().ranks
    if len(place.layout.mesh.ranks) == len(ranks):
        return place.uncut
    return placement(uncut(Mesh((len(ranks),), ("rank",), ranks), place.shape), place.shape)


def _redistribute(op: Redistribute, x: Tensor) -> Tensor | None:
    if x.placement is None:
        return None
    if op.layout is not None:
        return move_tensor(x, placement(op.layout, x.shape))
    # Replicated on every rank, then relabelled as plain; the gradient is replicated, too.
    return relabelled(move_tensor(x, whole_place(x.placement)), None, None)
