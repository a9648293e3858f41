"""Plan an op call on sharded tensors before it runs: cuts, layouts, the plan on slices. No communication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any

from simparallel.autograd import Op, Plan, Spec, Work
from simparallel.autograd.ops.shape import AbstractView
from simparallel.clock.notes import note_once
from simparallel.comm import current
from simparallel.errors import LayoutError, SimParallelError, StrategyError
from simparallel.layout import strategy, suggest
from simparallel.layout.fewest_waits import plan_quick_redistribution
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh
from simparallel.layout.redistribution import Redistribution, plan_redistribution
from simparallel.layout.reshaped import common_shape
from simparallel.layout.sharding import Placement, Sharding, layout_of, placement
from simparallel.parallel.operator.halo import window_cut
from simparallel.rank_local import RankLocal


class Mode(RankLocal):
    """Settings of this rank for op calls.

    Attributes:
        automatic: plain tensors are sharded as ops need them; an op without a strategy follows its inputs, or has the
            default strategy if no input is cut.
        replicating: plain tensors among the inputs of an op count as replicated, if others are sharded.
        strict: an implicit redistribution is an error.
        quick: small tensors are redistributed by the plan that takes the least time.
        noted: list that collects implicit redistributions, or None.
        ranks: the ranks that run the ops; None for all.
        weighted: each rank's loss is weighted by its share of the samples of the whole batch, so that gradients are
            summed over the ranks; else they are averaged.
        calls: list that collects the calls of ops, or None.
    """

    automatic = False
    replicating = False
    strict = False
    quick = False
    noted: list[Implicit] | None = None
    ranks: tuple[int, ...] | None = None
    weighted = False
    calls: list[Any] | None = None


mode = Mode()


def plan_way(source: Placement, target: Placement, itemsize: int) -> Redistribution:
    """Plan a redistribution, across a reshape if the shapes differ: of the fewest bytes, or by `mode.quick` fastest."""
    common = common_shape(source.layout, source.shape, target.layout, target.shape)
    # `start_of` has checked this.
    assert common is not None
    if mode.quick:
        return plan_quick_redistribution(*common, itemsize)
    return plan_redistribution(*common)


def start_of(place: Placement, target: Placement) -> Placement:
    """Return the placement to redistribute from: the one before a pending reshape if one plan leads to `target`."""
    before = place.source
    if before is None or place.settled is target or target.layout.partial:
        return place.settled
    is_direct = common_shape(before.layout, before.shape, target.layout, target.shape) is not None
    return before if is_direct else place.settled


class Implicit:
    """A redistribution that an op needs and the program does not ask for."""

    def __init__(self, op: Op, i: int, source: Placement, target: Placement, itemsize: int) -> None:
        self.op, self.input, self.source, self.target, self.itemsize = op, i, source, target, itemsize
        self.plan = plan_way(source, target, itemsize)

    @cached_property
    def size_bytes(self) -> int:
        """Bytes that a rank receives; the maximum over the ranks."""
        return max(self.plan.received_bytes(self.itemsize))

    def __str__(self) -> str:
        before = "" if self.source.shape == self.target.shape else f" of shape {self.source.shape}, reshaped"
        return (
            f"input {self.input} of {self.op!r}: {self.source.layout!r}{before} -> {self.target.layout!r}: "
            f"{self.plan}, {self.size_bytes} B/rank"
        )


class OpCall:
    """An op on inputs of given layouts: everything that does not change from step to step.

    Args:
        op: the op.
        inputs: Tensors, or objects with shape, dtype, placement and layout.
        device_num: number of devices.
        parameters: for each input whether it is a parameter; by default none is.
        sharding: the cuts of the op's dims, if they are known; None to decide them.
        ranks: the ranks that run the op; None for 0 … `device_num` - 1.

    Attributes:
        inputs: for each input the placement that the op needs; None for a plain scalar, which is used unchanged.
        whole: for each input its placement as a plain tensor, replicated on the mesh of the cuts.
        made: placement of forward's result; `output`: placement of the tensor that the call returns.
        window_cut: the regions that ranks read instead of their slices, if a cut dim has sliding windows; else None.
        implicit: the redistributions of inputs that the program does not ask for.
        can_wait: the op is a reshape whose input would have to move; the next op may know a better target.
        unsettled: indices of reshaped inputs that have to move before the call.

    Raises:
        StrategyError: the strategy is not legal for these inputs.
    """

    def __init__(
        self,
        op: Op,
        inputs: Sequence[Any],
        device_num: int,
        parameters: Sequence[bool] = (),
        sharding: Sharding | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.op = op
        # On whole shapes first: an error about shapes is then the op's own, and does not mention cuts.
        try:
            whole = op._make_plan(tuple((x.shape, x.dtype) for x in inputs))
        except SimParallelError as error:
            what = str(error).removeprefix(f"{op.named}: ")
            raise type(error)(f"{op.described}: {what}", **error.facts) from None
        # A linear op of addends gives addends, so their sum may wait.
        partial = _common_partial(op, inputs)
        if sharding is None:
            sharding = decide(op, inputs, device_num, parameters)
            # A strategy of numbers alone places the slices on the ranks from 0.
            if ranks is not None and not set(sharding.mesh.ranks) <= set(ranks):
                sharding = replace(sharding, mesh=Mesh(sharding.mesh.shape, sharding.mesh.axis_names, ranks))
        self.sharding = sharding
        self.inputs = [
            None if x.placement is None and not x.shape else placement(layout.with_partial(partial), x.shape)
            for x, layout in zip(inputs, sharding.input_layouts, strict=True)
        ]
        layout = sharding.output_layout
        self.made = placement(layout.with_partial((*layout.partial, *partial)), whole.output.shape)
        self.output = _output(op, self.made)
        self._whole_plan = whole
        _check_groups(op, whole, sharding)
        self.window_cut = window_cut(whole.windows, sharding)
        self.whole = [placement(uncut(sharding.mesh, x.shape), x.shape) for x in inputs]
        # A plain input counts as replicated.
        first = inputs[0].placement or self.whole[0]
        self.can_wait = isinstance(op, AbstractView) and self.inputs[0] not in (None, first)
        self.implicit: list[Implicit] = []
        self.unsettled: list[int] = []
        # Cutting a plain tensor moves no data, so only sharded inputs count.
        for i, (x, target) in enumerate(zip(inputs, self.inputs, strict=True)):
            if target is not None and x.placement is not None and x.placement is not target:
                # A pending reshape is skipped if one plan leads from the tensor before it to `target`.
                source = start_of(x.placement, target)
                if x.placement.source not in (None, source):
                    self.unsettled.append(i)
                if source is not target:
                    implicit = Implicit(op, i, source, target, x.dtype.itemsize)
                    self.implicit += [implicit] if implicit.plan.steps else []

    @cached_property
    def local(self) -> Plan:
        """The op's plan on the slices of the first rank; no other rank has larger slices."""
        return slice_plan(self._whole_plan, self.sharding, self.sharding.mesh.ranks[0])

    def plan_of(self, rank: int) -> Plan:
        """Return the op's plan on the rank's data. A rank outside the mesh gets the plan of the first rank."""
        ranks = self.sharding.mesh.ranks
        if rank not in ranks:
            return self.local
        local = self.local if rank == ranks[0] else slice_plan(self._whole_plan, self.sharding, rank)
        return local if self.window_cut is None else self.window_cut.local(local, rank)

    def refuse_implicit(self) -> None:
        """Raise StrategyError if an input has to be redistributed and data would move."""
        for implicit in self.implicit:
            if not implicit.plan.is_free:
                raise StrategyError(
                    f"{self.op.described}: strict mode, but {implicit}. Call redistribute() where you want it, or "
                    "give the ops strategies that fit together."
                )


def decide(op: Op, inputs: Sequence[Any], device_num: int, parameters: Sequence[bool] = ()) -> Sharding:
    """Decide the cuts of the op's dims: by its strategy, by its inputs, or by the default.

    Without a strategy an op follows the inputs that are cut. In automatic mode, if no input is cut, it uses the default
    strategy, or is computed whole if all inputs are parameters and plain tensors.
    """
    shapes = tuple(x.shape for x in inputs)
    op.check_count(len(shapes))
    # An op that `stays` keeps its input's layout, even one over only some of the ranks.
    stays = op.stays and op.in_strategy is None and inputs[0].layout is not None
    if not stays:
        _check_everywhere(op, inputs, device_num)
    rule = op.rule_for(*shapes)
    try:
        if op.in_strategy is not None:
            return strategy.from_strategy(
                rule, shapes, op.in_strategy, device_num, op.repeat, op.axis_order, op.out_strategy
            )
        layouts = [x.layout for x in inputs]
        is_cut = any(layout is not None and any(cut > 1 for cut in layout.cuts) for layout in layouts)
        is_plain = all(layout is None for layout in layouts)
        # Outside automatic mode the op also follows replicated inputs.
        if is_cut or stays or not (mode.automatic or is_plain):
            return strategy.follow(rule, shapes, layouts)
        # An op on parameters alone, such as a regularisation term, has no batch to cut.
        fixed = parameters or [False] * len(layouts)
        has_data = any(x is not None and not f for x, f in zip(layouts, fixed, strict=True))
        if mode.automatic and not has_data:
            return strategy.whole(rule, shapes, device_num)
        return strategy.default(rule, shapes, device_num)
    except SimParallelError as error:
        raise _explained(op, rule, device_num, error) from None


def _explained(op: Op, rule: str, device_num: int, error: SimParallelError) -> SimParallelError:
    """Return the error with the op, its strategy and its rule, and the nearest legal strategies."""
    text = f"{op.described}: {error}"
    if isinstance(error, StrategyError) and op.in_strategy is not None:
        legal = suggest.format_strategies(error.facts.get("nearest", ()))
        text = (
            f"{op.described}, strategy {op.in_strategy!r} on {device_num} devices: {error} Its dims: {rule}."
            f"{f' Nearest legal strategies: {legal}.' if legal else ''}"
        )
        return StrategyError(text, **{"op": op.name, "rule": rule, "nearest": [], **error.facts})
    return type(error)(text, **error.facts)


def _check_groups(op: Op, plan: Plan, sharding: Sharding) -> None:
    """Raise StrategyError if a `group_size` of the op does not divide the slices that it reduces over."""
    # Here, before the call, instead of in the op's forward, when data has moved already.
    asking = op.exchanges(plan)
    try:
        for asked in () if asking is None else asking.forward:
            sharding.groups(sharding.axes(asked.dims), asked.group_size)
    except StrategyError as error:
        raise StrategyError(f"{op.described}: {error}", **error.facts) from None


def finished_layout(op: Op, made: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the output layout of an op with a strategy: its out_strategy, else `made` with its sum finished."""
    if op.out_strategy is not None:
        return strategy.out_layout(op.out_strategy, made, shape, op.described)
    return made.with_partial(())


def _output(op: Op, made: Placement) -> Placement:
    """Return the placement of the output: finished if the op has a strategy or returns a scalar, else as `made`."""
    # A strategy states the output's layout. Otherwise the sum may wait until an op needs the value.
    if op.in_strategy is None and (made.shape or op.stays):
        return made
    return placement(finished_layout(op, made.layout, made.shape), made.shape)


def _common_partial(op: Op, inputs: Sequence[Any]) -> tuple[str, ...]:
    """Return the axes of an unfinished sum that passes through the op: it is linear and all inputs are such sums."""
    layouts = [x.layout for x in inputs]
    first = layouts[0]
    if not op.linear or op.in_strategy is not None or first is None or not first.partial:
        return ()
    # Addends along the same axes of one mesh; otherwise the inputs belong to different sums.
    same = all(x is not None and x.partial == first.partial and x.mesh == first.mesh for x in layouts)
    return first.partial if same else ()


def slice_plan(whole: Plan, sharding: Sharding, rank: int) -> Plan:
    """Return the op's plan on the rank's slices: their sizes and their share of the work."""
    spans = {name: sharding.span(name, rank) for name in sharding.cuts}
    sizes = sharding.sizes | {name: stop - start for name, (start, stop) in spans.items()}
    # Ops also ask for the product of all broadcast dims.
    sizes["..."] = prod(size for name, size in sizes.items() if name.startswith("...") and name != "...")
    inputs = tuple(
        Spec(sharding.local_shape(tensor, rank), spec.dtype)
        for tensor, spec in zip(sharding.inputs, whole.inputs, strict=True)
    )
    output = Spec(sharding.local_shape(sharding.output, rank), whole.output.dtype)
    own = Plan(inputs, output, sizes, whole.work, whole.windows, whole)
    num_own, num_all = (prod(each[name] for name in sharding.cuts) for each in (sizes, sharding.sizes))
    # Flops scale with the loop nest, bytes with the tensors.
    moved = whole.work.size_bytes * own.tensor_bytes // max(whole.tensor_bytes, 1)
    return replace(own, work=Work(whole.work.flops * num_own // num_all, moved))


@lru_cache(maxsize=4096)
def uncut(mesh: Mesh, shape: tuple[int, ...]) -> Layout:
    return layout_of(mesh)(*["None"] * len(shape))


def check_ranks(layout: Layout, world_size: int) -> None:
    """Raise LayoutError for ranks that are not in the run."""
    unknown = [rank for rank in layout.mesh.ranks if rank >= world_size]
    if unknown:
        raise LayoutError(f"{layout!r}: rank {unknown[0]} is not in this run, whose ranks are 0 … {world_size - 1}.")


def _check_everywhere(op: Op, inputs: Sequence[Any], device_num: int) -> None:
    """Raise LayoutError for an input that is placed on only some ranks: all ranks run the op."""
    for i, x in enumerate(inputs):
        if x.layout is not None and x.layout.mesh.size != device_num:
            raise LayoutError(
                f"{op.described}: input {i} is laid out over ranks {list(x.layout.mesh.ranks)} only, but all "
                f"{device_num} ranks run the op. Bring it there first: x.redistribute(layout over all ranks), or "
                "full_tensor()."
            )


def check_mixing(op: Op, inputs: Sequence[Any]) -> None:
    """Raise LayoutError if a plain tensor meets a sharded one and no mode gives its layout."""
    if mode.automatic or mode.replicating:
        return
    for i, x in enumerate(inputs):
        if x.placement is None and x.shape:
            raise LayoutError(
                f"{op.described}: input {i} of shape {x.shape} is a plain tensor, but another input is sharded. Lay "
                "it out with distribute_tensor(x, layout), or compute inside of implicit_replication() if every rank "
                "holds it whole."
            )


def refuse_plain(op: Op) -> None:
    """Raise StrategyError for an op with a strategy that several ranks call on plain tensors: nothing would be cut."""
    world_size = current().world_size
    if all(cut == 1 for entry in op.in_strategy or () for cut in getattr(entry, "cuts", entry) or ()):
        return
    if world_size == 1:
        note_once("ops with .shard(...) compute whole tensors here, because there is one rank.")
        return
    raise StrategyError(
        f"{op!r} ({op._place}): no input is sharded, so each of the {world_size} ranks would compute "
        "all of it. Run the step inside of AutoParallel(step), which cuts the tensors; or cut an input yourself with "
        "distribute_tensor(x, layout); or leave out .shard(...).",
        op=op.name,
    )
