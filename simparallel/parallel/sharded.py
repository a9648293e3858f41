"""Runs ops on sharded tensors: each rank works on its slices, and the rule says what is exchanged.

Nothing here knows an op. A call goes like this:

    1. cuts of the op's named dims: by its strategy, or by how its inputs lie (`strategy`);
    2. inputs that lie otherwise are redistributed (`plan`, `mover`), on the tape;
    3. forward runs on the slices; what the op completes itself goes through its context;
    4. sums that cut dims left unfinished are finished: at once where the op has a strategy, and
       otherwise when somebody needs the value;
    5. in backward, the gradient of an input is summed along the axes that cut dims which it lacks.

Steps 1, 2 and the groups are worked out once for inputs that lie alike, and kept in a `Call`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from simparallel import collectives, strategy
from simparallel.autograd import Context, Op, Plan, Redistribute, Spec, Tensor, Work
from simparallel.autograd.tape import Node, grad_mode
from simparallel.backend import Array, get_namespace
from simparallel.comm import Communicator, Group, current
from simparallel.errors import LayoutError, SimParallelError, StrategyError
from simparallel.events import current_recorder
from simparallel.layout import Layout
from simparallel.memory import PARAMETERS
from simparallel.mesh import Mesh
from simparallel.nn.deferred import is_deferred, materialize
from simparallel.parallel.mover import Groups, Move, compile_moves
from simparallel.plan import Redistribution, plan_redistribution
from simparallel.sharding import Placement, Sharding, placement


class Sharder:
    """What one rank remembers: its groups, its moves, its calls."""

    def __init__(self, communicator: Communicator) -> None:
        self.rank, self.world_size = communicator.rank, communicator.world_size
        self.groups = Groups(communicator)
        self._moves: dict[tuple[Placement, Placement], tuple[Redistribution, list[Move]]] = {}
        self.calls: dict[Any, Call] = {}

    def moves(self, source: Placement, target: Placement) -> tuple[Redistribution, list[Move]]:
        """The way from one placement to another: the plan, and what this rank does."""
        found = self._moves.get((source, target))
        if found is None:
            plan = plan_redistribution(source.layout, target.layout, source.shape)
            found = self._moves[source, target] = plan, compile_moves(plan, self.rank, self.groups)
        return found


_sharders: WeakKeyDictionary[Communicator, Sharder] = WeakKeyDictionary()


def sharder() -> Sharder:
    """That of the rank which the calling thread plays."""
    communicator = current()
    found = _sharders.get(communicator)
    if found is None:
        found = _sharders[communicator] = Sharder(communicator)
    return found


class Mode(threading.local):
    """How calls are read on this thread.

    Attributes:
        automatic: plain tensors are sharded as ops need them, and ops without strategy have the default one.
        strict: a redistribution that nobody asked for is an error.
        noted: where implicit redistributions are noted, or None.
    """

    automatic = False
    strict = False
    noted: list[Implicit] | None = None


mode = Mode()


class Implicit:
    """A redistribution that an op needed and nobody wrote down."""

    def __init__(self, op: Op, i: int, plan: Redistribution, itemsize: int) -> None:
        self.op, self.input, self.plan, self.itemsize = op, i, plan, itemsize

    def __str__(self) -> str:
        size = max(self.plan.received_bytes(self.itemsize))
        return (
            f"input {self.input} of {self.op!r}: {self.plan.source!r} -> {self.plan.target!r}: {self.plan}, "
            f"{size} B/rank"
        )


# --- moving a tensor ----------------------------------------------------------------------------------


class _Way:
    """On the tape: a redistribution, and its way back."""

    def __init__(self, source: Placement, target: Placement, as_plain: bool = False) -> None:
        self.source, self.target = source, target

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (carry(dy, self.target.gradient, self.source.gradient),)

    def __repr__(self) -> str:
        return f"Redistribute({self.source.layout!r} -> {self.target.layout!r})"


class _Needs:
    """The context of a way: backward wants the one gradient."""

    needs = (True,)


def carry(x: Array, source: Placement, target: Placement) -> Array:
    """This rank's slice, laid out otherwise. Collective: yes, where anything moves."""
    if source is target:
        return x
    for move in sharder().moves(source, target)[1]:
        x = move(x)
    return x


def move_tensor(x: Tensor, target: Placement, source: Placement | None = None) -> Tensor:
    """x laid out as `target`, on the tape. `source` is for a plain x, which every rank holds whole."""
    origin = x.placement or source
    assert origin is not None
    if origin is target and x.placement is not None:
        return x
    if origin.layout.partial and target is origin.gradient:
        return finish(x)
    data = carry(x.data, origin, target)
    on_tape = grad_mode.enabled and x.requires_grad
    node = Node(_Way(origin, target), _Needs(), (x,)) if on_tape else None  # type: ignore[arg-type]
    return Tensor._slice(data, target, node)


def finish(x: Tensor) -> Tensor:
    """Finish the sum of x, in place: the tensor stays the same, and whoever uses it next finds it whole."""
    source = x.placement
    assert source is not None
    x.data = carry(x.data, source, source.gradient)
    x.placement = source.gradient
    return x


# --- running an op -------------------------------------------------------------------------------------


class ShardContext(Context):
    """What an op may ask while it works on slices: the exchanges are collectives over the cut's groups."""

    def __init__(self, call: Call, needs: tuple[bool, ...], array: Array) -> None:
        super().__init__(get_namespace(array), needs, call.local)
        self._call = call

    def sum_over(self, dims: str, x: Array) -> Array:
        return self._call.exchange(dims, x, "sum")

    def max_over(self, dims: str, x: Array) -> Array:
        return self._call.exchange(dims, x, "max")

    def offset(self, dim: str) -> int:
        call = self._call
        return call.sharding.chunk(dim, call.rank) * self.plan.sizes[dim]

    def size(self, dim: str) -> int:
        return self.plan.sizes[dim] * self._call.sharding.cut(dim)


class Call:
    """An op on inputs that lie in a certain way: all that does not change from step to step.

    Attributes:
        inputs: for each input where it has to lie; None for one that is whole everywhere as it is.
        made: where the output lies as forward leaves it; `output`: as the call hands it out.
        local: the plan of the op on this rank's slices.
    """

    def __init__(self, op: Op, inputs: Sequence[Tensor], sharder: Sharder) -> None:
        self.op, self.rank, self._sharder = op, sharder.rank, sharder
        whole = op._make_plan(tuple((x.shape, x.dtype) for x in inputs))
        partial = _common_partial(op, inputs)
        self.sharding = sharding = decide(op, inputs, sharder.world_size)
        self.inputs = [
            None if x.placement is None and not x.shape else placement(layout.with_partial(partial), x.shape)
            for x, layout in zip(inputs, sharding.input_layouts, strict=True)
        ]
        layout = sharding.output_layout
        self.made = placement(layout.with_partial((*layout.partial, *partial)), whole.output.shape)
        self.output = _output(op, self.made)
        self.local = slice_plan(whole, sharding)
        self._groups: dict[str, Group | None] = {}
        self._gradient_groups = [self._group(sharding.gradient_axes(i)) for i in range(len(inputs))]
        source = sharding.mesh
        self.whole = [placement(uncut(source, x.shape), x.shape) for x in inputs]

    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        moved = tuple([self._moved(i, x) for i, x in enumerate(inputs)])
        arrays = [x.data for x in moved]
        recording = grad_mode.enabled
        needs = tuple([recording and x.requires_grad for x in moved])
        ctx = ShardContext(self, needs, arrays[0])
        data = self.op.run_forward(ctx, arrays)
        node = Node(self, ctx, moved) if True in needs else None  # type: ignore[arg-type]
        y = Tensor._slice(data, self.made, node)
        return y if self.made is self.output else move_tensor(y, self.output)

    def _moved(self, i: int, x: Tensor) -> Tensor:
        target = self.inputs[i]
        if target is None or x.placement is target:
            return x
        if x.placement is None and x.is_leaf and x.requires_grad:
            return _shard_parameter(x, target)
        return move_tensor(x, target, self.whole[i])

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        """Gradients of the inputs, summed along the axes that cut dims which they lack."""
        grads = list(self.op.run_backward(ctx, dy))
        for i, group in enumerate(self._gradient_groups):
            gradient = grads[i]
            if group is not None and gradient is not None:
                if gradient is dy or gradient.base is not None or not gradient.ndim:
                    gradient = ctx.xp.array(
                        gradient
                    )  # somebody else's memory, or NumPy's scalar of its own kind
                grads[i] = collectives.all_reduce(gradient, "sum", group)
        return grads

    def exchange(self, dims: str, x: Array, op: str) -> Array:
        """`x` reduced over the ranks among which any of `dims` is cut."""
        if dims not in self._groups:
            self._groups[dims] = self._group(self.sharding.axes(dims))
        group = self._groups[dims]
        return x if group is None else collectives.all_reduce(get_namespace(x).array(x), op, group)

    def _group(self, axes: tuple[str, ...]) -> Group | None:
        mesh = self.sharding.mesh
        if prod(mesh.axis_size(axis) for axis in axes) == 1:
            return None
        return self._sharder.groups.mine(mesh.groups(axes))

    def __repr__(self) -> str:
        return repr(self.op)


def interpret(op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
    """Run the op if any input is sharded, or if plain ones shall be; None otherwise.

    Raises:
        StrategyError: the op's strategy is not legal for these inputs.
        LayoutError: a plain tensor meets a sharded one; or, in strict mode, an input has to be redistributed.

    Collective: yes, where anything is exchanged.
    """
    if not mode.automatic:
        for x in inputs:
            if x.placement is not None:
                break
        else:
            for x in inputs:
                if is_deferred(x):  # no strategy asks for a slice of it: it is needed whole
                    materialize(x)
            return None
    if type(op) is Redistribute:
        return _redistribute(op, inputs[0])
    own = sharder()
    key = (
        op,
        mode.automatic,
        *[x.placement or x.data.shape for x in inputs],
        *[x.data.dtype for x in inputs],
    )
    call = own.calls.get(key)
    if call is None:
        _check_mixing(op, inputs)
        call = Call(op, inputs, own)
        _note(op, inputs, call)
        own.calls[key] = call
    elif mode.strict or mode.noted is not None:
        _note(op, inputs, call)
    return call(inputs)


Op.interpreter = interpret


def decide(op: Op, inputs: Sequence[Any], device_num: int) -> Sharding:
    """The cuts of the op's dims: by its strategy, by how its inputs lie, or the default."""
    shapes = tuple(x.shape for x in inputs)
    rule = op.rule_for(*shapes)
    try:
        if op.in_strategy is not None:
            return strategy.from_strategy(rule, shapes, op.in_strategy, device_num, op.repeat)
        if mode.automatic:
            return strategy.default(rule, shapes, device_num)
        return strategy.follow(rule, shapes, [x.layout for x in inputs])
    except SimParallelError as error:
        raise _explained(op, rule, device_num, error) from None


def _explained(op: Op, rule: str, device_num: int, error: SimParallelError) -> SimParallelError:
    """The error with who, which strategy, which rule, and what would be legal."""
    text = f"{op.described}: {error}"
    if isinstance(error, StrategyError) and op.in_strategy is not None:
        nearest = " or ".join(map(str, error.facts.get("nearest", ())))
        text = (
            f"{op.described}, strategy {op.in_strategy!r} on {device_num} devices: {error} Its dims: {rule}."
            f"{f' Nearest legal strategies: {nearest}.' if nearest else ''}"
        )
        return StrategyError(text, **{"op": op.name, "rule": rule, "nearest": [], **error.facts})
    return type(error)(text, **error.facts)


def finished_layout(op: Op, made: Layout, shape: tuple[int, ...]) -> Layout:
    """How the output of an op with a strategy is handed out: as the strategy says, else with its sum finished."""
    if op.out_strategy is not None:
        return strategy.out_layout(op.out_strategy, made, shape, op.described)
    return made.with_partial(())


def _output(op: Op, made: Placement) -> Placement:
    """Where the output goes: finished, if the op has a strategy or it is a scalar; else it may wait."""
    if op.in_strategy is None and made.shape:
        return made
    return placement(finished_layout(op, made.layout, made.shape), made.shape)


def _common_partial(op: Op, inputs: Sequence[Tensor]) -> tuple[str, ...]:
    """The axes of an unfinished sum that may pass through the op: it is linear, and all inputs are such sums."""
    layouts = [x.layout for x in inputs]
    first = layouts[0]
    if not op.linear or op.in_strategy is not None or first is None or not first.partial:
        return ()
    same = all(x is not None and x.partial == first.partial and x.mesh == first.mesh for x in layouts)
    return first.partial if same else ()


def slice_plan(whole: Plan, sharding: Sharding) -> Plan:
    """The plan of the op on slices: sizes divided by the cuts, and the work by all of them."""
    sizes = {name: size // sharding.cut(name) for name, size in whole.sizes.items() if name != "..."}
    sizes["..."] = prod(size for name, size in sizes.items() if name.startswith("..."))
    inputs = tuple(
        Spec(sharding.local_shape(tensor), spec.dtype)
        for tensor, spec in zip(sharding.inputs, whole.inputs, strict=True)
    )
    output = Spec(sharding.local_shape(sharding.output), whole.output.dtype)
    all_bytes = sum(spec.size_bytes for spec in (*whole.inputs, whole.output))
    own_bytes = sum(spec.size_bytes for spec in (*inputs, output))
    parts = prod(sharding.cut(name) for name in sharding.cuts)
    work = Work(whole.work.flops // parts, whole.work.size_bytes * own_bytes // max(all_bytes, 1))
    return Plan(inputs, output, sizes, work)


def uncut(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return Layout(mesh.shape, mesh.axis_names, list(mesh.ranks))(*["None"] * len(shape))


def _shard_parameter(x: Tensor, target: Placement) -> Tensor:
    """A plain leaf that every rank holds whole keeps its slice from now on."""
    if is_deferred(x):
        materialize(x, target.layout.slices(sharder().rank, x.shape))
    else:
        whole = placement(uncut(target.layout.mesh, x.shape), x.shape)
        x.data = carry(x.data, whole, target).copy()
    x.placement = target
    recorder = current_recorder()
    if recorder is not None:
        recorder.memory.hold(x.data, PARAMETERS, move=True)
        recorder.memory.make_room(0, f"a slice of a parameter of shape {x.shape}")
    return x


def _redistribute(op: Redistribute, x: Tensor) -> Tensor:
    if x.placement is None:
        if op.layout is None:
            return x
        raise LayoutError(
            f"redistribute: this tensor of shape {x.shape} is a plain one; use distribute_tensor(x, layout)."
        )
    if op.layout is not None:
        return move_tensor(x, placement(op.layout, x.shape))
    y = move_tensor(x, placement(uncut(x.placement.layout.mesh, x.shape), x.shape))
    on_tape = grad_mode.enabled and y.requires_grad
    node = Node(_Plain(), _Needs(), (y,)) if on_tape else None  # type: ignore[arg-type]
    return Tensor._result(y.data, node)


class _Plain:
    """On the tape: a whole sharded tensor becomes a plain one."""

    def run_backward(self, ctx: Context, dy: Array) -> Sequence[Array | None]:
        return (dy,)


def _check_mixing(op: Op, inputs: Sequence[Tensor]) -> None:
    if mode.automatic:
        return
    for i, x in enumerate(inputs):
        if x.placement is None and x.shape:
            raise LayoutError(
                f"{op.described}: input {i} of shape {x.shape} is a plain tensor, but another input is sharded. Say "
                "how it lies: distribute_tensor(x, layout), or Layout(...)('None', ...) if every rank holds it whole."
            )


def _note(op: Op, inputs: Sequence[Tensor], call: Call) -> None:
    """Note, or in strict mode refuse, what has to be redistributed."""
    if not mode.strict and mode.noted is None:
        return
    for i, (x, target) in enumerate(zip(inputs, call.inputs, strict=True)):
        if target is None or x.placement is None or x.placement is target:
            continue
        plan = plan_redistribution(x.placement.layout, target.layout, x.shape)
        implicit = Implicit(op, i, plan, x.dtype.itemsize)
        if mode.noted is not None:
            mode.noted.append(implicit)
        if mode.strict and not plan.is_free:
            raise StrategyError(
                f"{op.described}: strict mode, but {implicit}. Call redistribute() where you want it, or give the ops "
                "strategies that fit together."
            )
