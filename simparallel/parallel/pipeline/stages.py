"""Stages of a model: which child is in which stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from simparallel.autograd import Op, Tensor, enable_grad
from simparallel.base.units import format_number_of
from simparallel.clock.recorder import current_recorder
from simparallel.errors import InputError
from simparallel.nn import Module, ModuleDict, ModuleList, Parameter, Sequential
from simparallel.parallel.pipeline.stage_forward import EVERYWHERE, ForwardCache, StageForward, Switch

# For each stage the names of its children, and of parameters that it uses besides.
Stages = tuple[tuple[str, ...], ...]
Counts = Sequence[int] | None
# The stage of a rank that runs none.
NO_STAGE = -2


def parts_of(model: Module, path: str = "", inside: Collection[str] = ()) -> Iterator[str]:
    """Yield the names of the parts to cut between: the children, or a container's entries; "" without children.

    A child with one of the names `inside` below it is replaced by its own children, as a container is.
    """
    if not model._modules:
        yield path
    for name, child in model._modules.items():
        below = f"{path}{name}."
        is_open = isinstance(child, (Sequential, ModuleList, ModuleDict)) or any(x.startswith(below) for x in inside)
        if is_open and child is not None and child._modules:
            yield from parts_of(child, below, inside)
        else:
            yield path + name


class _Trace(StageForward):
    """A forward pass without data, in which every child is a separate stage, numbered by its first call.

    Args:
        names: for each child its names in the model; a child in several places has one for each call.

    Attributes:
        order: the names in the order of the calls.
        costs: for each of them the simulated time [ps] of forward and backward; flops outside of a run.
        result_bytes: for each of them the bytes of the results of its ops, which backward needs.
    """

    def __init__(self, names: Mapping[Module, Sequence[str]]) -> None:
        self.switch = Switch(dict.fromkeys(names, ()))
        super().__init__(NO_STAGE, self.switch, None, ForwardCache())  # type: ignore[arg-type]
        self._names = names
        self.order: list[str] = []
        self.costs: list[float] = []
        self.result_bytes: list[int] = []

    def next_stage(self, module: Any) -> int:
        if module not in self._names:
            return EVERYWHERE
        names = self._names[module]
        name = names[min(self._calls[module], len(names) - 1)]
        if name not in self.order:
            self.order.append(name)
            self.costs.append(0)
            self.result_bytes.append(0)
        return self.order.index(name)

    def run(self, op: Op, inputs: tuple[Tensor, ...]) -> Tensor | None:
        y = super().run(op, inputs)
        if y is not None:
            self.costs[self.stage_of(y)] += _cost(op, inputs)
            self.result_bytes[self.stage_of(y)] += y.data.nbytes
        return y


def _cost(op: Op, inputs: Sequence[Tensor]) -> float:
    plan = op._plan(list(inputs))
    needs = tuple(x.dtype.kind == "f" for x in inputs)
    recorder = current_recorder()
    if recorder is None:
        return plan.work.flops + op.work_backward(needs, plan.work).flops
    # Of the device or of its interpreter, whichever takes longer.
    return sum(
        max(price.device_ps, price.host_ps)
        for price in (recorder.price_of(op, plan), recorder.price_of(op, plan, needs))
    )


class PartCost(NamedTuple):
    """The cost of a part.

    Attributes:
        cost: simulated time [ps] of forward and backward; flops outside of a run.
        state_bytes: its weights and their gradients.
        result_bytes: results of its ops for one micro-batch, which backward needs.
    """

    cost: float
    state_bytes: int
    result_bytes: int


def traced(
    model: Module,
    run: Callable[[], Any],
    cut: Callable[[Mapping[str, PartCost]], Stages],
    parts: Iterable[str] | None = None,
) -> Stages:
    """Return stages that follow from a run without data, with the parameters that each uses besides its children.

    Args:
        model: the model.
        run: computes the loss of a micro-batch, or the model's output.
        cut: returns the stages from the prices of the parts in the order of their calls, as `within` does.
        parts: names of the children to cut between; None for those of `parts_of`.
    """
    names: dict[Module, list[str]] = {}
    for name in parts_of(model) if parts is None else parts:
        names.setdefault(model.get_submodule(name), []).append(name)
    trace = _Trace(names)
    # With gradients enabled: the graph leads from values to their parameters.
    with trace.switch.installed(), enable_grad():
        trace.run_model(run)
    unused = [name for each in names.values() for name in each if name not in trace.order]
    measured = dict(zip(trace.order, zip(trace.costs, trace.result_bytes, strict=True), strict=True))
    prices = {}
    for name in (*trace.order, *unused):
        cost, result_bytes = measured.get(name, (0, 0))
        weight_bytes = sum(p.data.nbytes for p in model.get_submodule(name).parameters())
        prices[name] = PartCost(cost, 2 * weight_bytes, result_bytes)
    stages = cut(prices)
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage}
    known = owners(model, stages)
    found = [list(stage) for stage in stages]
    for name, parameter in model.named_parameters():
        users = {stage_of[trace.order[number]] for number in trace.used.get(id(parameter), ())}
        for stage in sorted(users - known.get(id(parameter), set())):
            found[stage].append(name)
    return tuple(map(tuple, found))


def within(limits: Sequence[tuple[float, int]], counts: Counts, prices: Mapping[str, PartCost]) -> Stages:
    """Return stages that fit into the memory, and whose slowest one is as fast as possible.

    Args:
        limits: for each stage its memory [bytes], and the most micro-batches whose activations it holds.
        counts, prices: of the parts; see `balanced`.

    Raises:
        InputError: as `balanced`.
    """
    each = list(prices.values())

    def fits(stage: int, first: int, last: int) -> bool:
        limit_bytes, live = limits[stage]
        return sum(part.state_bytes + live * part.result_bytes for part in each[first:last]) <= limit_bytes

    return balanced({name: price.cost for name, price in prices.items()}, len(limits), counts, fits)


def balanced(
    costs: Mapping[str, float], count: int, counts: Counts = None, fits: Callable[[int, int, int], bool] | None = None
) -> Stages:
    """Return stages of one or more consecutive children each, whose largest sum of costs is as small as possible.

    Of such stages these have the fewest without any cost, and then begin as early as possible.

    Args:
        costs: of each child.
        count: number of stages.
        counts: numbers of children of the stages, if they are given.
        fits: whether a stage has memory for the children `first` … `last` - 1; called with (stage, first, last).

    Raises:
        InputError: fewer children than stages, counts that are not those of all children, or no stages that fit.
    """
    names = list(costs)
    if counts is not None and (len(counts) != count or sum(counts) != len(names) or min(counts) < 1):
        raise InputError(
            f"Pipeline: balance={list(counts)!r} must be {format_number_of(count, 'number')} of 1 or more, and add up "
            f"to {len(names)}, the number of parts: {', '.join(names)}."
        )
    if len(names) < count:
        raise InputError(
            f"Pipeline: a model of {format_number_of(len(names), 'part')} cannot be cut into {count} stages. Use fewer "
            "ranks or chunks, or a model of smaller parts."
        )
    sums = list(accumulate(costs.values(), initial=0.0))
    starts = [] if counts is None else list(accumulate(counts, initial=0))

    def is_allowed(stage: int, first: int, last: int) -> bool:
        is_given = counts is None or (first, last) == (starts[stage], starts[stage + 1])
        return is_given and (fits is None or fits(stage, first, last))

    # best[i]: with the first i children in the stages so far, the cost of the largest, the number of stages without
    # cost, and the beginning of each.
    none: tuple[float, int, tuple[int, ...]] = inf, 0, ()
    best = [(0.0, 0, ()), *[none] * len(names)]
    for stage in range(count):
        best = [
            min(
                (
                    (max(best[j][0], sums[i] - sums[j]), best[j][1] + (sums[i] == sums[j]), (*best[j][2], j))
                    for j in range(i)
                    if is_allowed(stage, j, i)
                ),
                default=none,
            )
            for i in range(len(names) + 1)
        ]
    largest, _, found = best[-1]
    if largest == inf:
        raise InputError(
            f"Pipeline: no {format_number_of(count, 'stage')} fit into memory_limit, with their weights, gradients and "
            "activations. Use more ranks, more or smaller micro-batches, or a schedule with fewer live ones."
        )
    return tuple(tuple(names[a:b]) for a, b in pairwise((*found, len(names))))


def cut_at(names: Iterable[str], cuts: Mapping[str, bool]) -> Stages:
    """Return stages of these parts, in this order, cut at parts or at what contains them.

    Args:
        names: of the parts.
        cuts: name -> False to cut before it, True to cut after it.

    Raises:
        InputError: a name without a part, or a stage without one.
    """
    names, places = list(names), [0]
    for cut, is_behind in cuts.items():
        found = [number for number, name in enumerate(names) if f"{name}.".startswith(f"{cut}.")]
        if not found:
            raise InputError(f"pipeline: no child is called {cut!r}; there are {', '.join(names)}.")
        places.append(found[-1] + 1 if is_behind else found[0])
        if places[-1] in (*places[:-1], len(names)):
            raise InputError(f"pipeline: the cut at {cut!r} makes a stage without children.")
    places = [*sorted(places), len(names)]
    return tuple(tuple(names[a:b]) for a, b in pairwise(places))


def stages_by(
    model: Module, stage_of: Callable[[Module], int | None], name: str = "", around: int | None = None
) -> dict[str, int]:
    """Return name -> stage of the children with a stage; a child is split where children inside have one of their own.

    Args:
        model: the model.
        stage_of: returns the stage of a child, or None.
        name: of the model in an outer one; `around`: the stage that it inherits from there.
    """
    own = stage_of(model)
    own = around if own is None else own
    found: dict[str, int] = {}
    if any(stage_of(each) is not None for each in model.modules() if each is not model):
        for key, child in model.named_children():
            found |= stages_by(child, stage_of, f"{name}.{key}".removeprefix("."), own)
    elif own is not None:
        found[name] = own
    return found


def sizes_of(model: Module) -> dict[str, float]:
    """Return the number of parameters of each part."""
    return {name: sum(p.size for p in model.get_submodule(name).parameters()) for name in parts_of(model)}


def checked(model: Module, stages: Sequence[Sequence[str]], count: int) -> Stages:
    """Check the given stages; return them as tuples.

    Raises:
        InputError: another number of stages, a name that the model does not have, a child in two stages or inside of
            another one, or a parameter that is in no stage.
    """
    found = tuple(tuple(map(str, stage)) for stage in stages)
    if len(found) != count:
        raise InputError(f"Pipeline: {format_number_of(len(found), 'stage')} given, and the schedule has {count}.")
    names = [name for stage in found for name in stage]
    children = [name for name in names if isinstance(find(model, name), Module)]
    for i, name in enumerate(names):
        problem = ""
        if find(model, name) is None:
            problem = f"the model has no child or parameter of this name; its parts are {', '.join(parts_of(model))}"
        elif name in names[:i] and name in children:
            problem = "a child may be in only one stage"
        elif name in children and any(o != name and (not o or name.startswith(f"{o}.")) for o in children):
            problem = "it is inside another named child"
        if problem:
            raise InputError(f"Pipeline: stages name {name!r}: {problem}.")
    known = owners(model, found)
    for name, parameter in model.named_parameters():
        if id(parameter) not in known:
            raise InputError(
                f"Pipeline: {name!r} is in no stage. Name its module in a stage, or the parameter itself in each stage "
                "that uses it; or pass example=(inputs, labels), by which both are found."
            )
    return found


def find(model: Module, name: str) -> Module | Parameter | None:
    """Return the child or the parameter of a name; None if there is none."""
    if not name:
        return model
    above, _, last = name.rpartition(".")
    try:
        parent = model.get_submodule(above)
    except InputError:
        return None
    return {**parent._parameters, **parent._modules}.get(last)


def owners(model: Module, stages: Stages) -> dict[int, set[int]]:
    """Return id of a parameter -> the stages that have it."""
    found: dict[int, set[int]] = {}
    for stage, names in enumerate(stages):
        for each in (find(model, name) for name in names):
            for parameter in each.parameters() if isinstance(each, Module) else [each]:
                found.setdefault(id(parameter), set()).add(stage)
    return found


def tensors_of(model: Module, names: Sequence[str]) -> Iterator[Tensor]:
    """Yield the parameters and buffers that these names of a stage stand for."""
    for each in (find(model, name) for name in names):
        yield from (*each.parameters(), *each.buffers()) if isinstance(each, Module) else (each,)  # type: ignore[misc]


def calls(model: Module, stages: Stages) -> dict[Module, list[int]]:
    """Return for each child that stages name, the stages of its calls; a child may be in several places."""
    found: dict[Module, list[int]] = {}
    for stage, names in enumerate(stages):
        for each in (find(model, name) for name in names):
            if isinstance(each, Module):
                found.setdefault(each, []).append(stage)
    return found
