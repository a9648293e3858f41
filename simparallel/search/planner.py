"""Make a plan: capture the program, price its choices, search, and keep the fastest result by the simulated clock."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from simparallel.autograd import Tensor
from simparallel.autograd.tree_map import change_each
from simparallel.base.dry_arrays import DryArray
from simparallel.base.units import format_bytes
from simparallel.clock.recorder import current_recorder, observer_of
from simparallel.comm import current
from simparallel.errors import InputError, PlanError, SearchError
from simparallel.layout.sharding import Placement
from simparallel.machine.cluster import ClusterSpec, describe
from simparallel.nn.deferred import placeholder
from simparallel.parallel.operator.auto import AutoParallel, check_same_calls
from simparallel.search.elimination import eliminate
from simparallel.search.execute import Planned
from simparallel.search.following import data_parallel
from simparallel.search.graph import Graph, RecomputeSegment, capture, captures
from simparallel.search.pareto import hull, pareto
from simparallel.search.plan import Plan, PlannedOp
from simparallel.search.problem import Problem, Solution
from simparallel.search.propagation import propagate
from simparallel.search.reasons import moves_into, options_of
from simparallel.search.replay import Replay, replay
from simparallel.search.space import Space, fixed
from simparallel.search.tables import Progress
from simparallel.world.context import get_algo_parameters, get_cost_model_context

# Names of the searches. The first three are those of `AutoParallel(parallel_mode=...)`.
METHODS = ("auto", "sharding_propagation", "recursive_programming", "data_parallel")


# Most plans between the fastest and the one of least memory; the fastest that fits into a limit is taken.
_HULL_POINTS = 8
# Weights of the sums of gradients that differ by less are searched once.
_CLOSE = 0.05


@dataclass(frozen=True)
class SearchSettings:
    """How to search.

    Attributes:
        method: one of METHODS. "auto": exact elimination.
        fully: candidates are cut over all devices, or not at all (MindSpore's `fully_use_devices`).
        follow: elementwise ops have the strategy of the op before them (`elementwise_op_strategy_follow`).
        memory_limit_bytes: of each device; None for no limit.
        alpha, beta, gamma: weights of computing, of communication, and of sums of gradients, which overlap (MindSpore's
            cost model). gamma=None: as much of these sums as is exposed in a step.
    """

    method: str = "auto"
    fully: bool = False
    follow: bool = False
    memory_limit_bytes: int | None = None
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float | None = None


def graph_of(
    program: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], num_micro_batches: int = 1
) -> Graph:
    """Capture a program on arguments of global shape: without data for floats, else of this rank's values, repeated."""
    given: list[tuple[Tensor, Placement]] = []

    def whole(x: Any) -> Any:
        if not isinstance(x, Tensor) or x.placement is None:
            return x
        place, data = x.placement, x.data
        is_number = data.dtype.kind in "fc"
        new = Tensor._result(
            placeholder(place.shape, data.dtype).view(DryArray) if is_number else np.resize(data, place.shape)
        )
        new.requires_grad = x.requires_grad
        given.append((new, place))
        return new

    args, kwargs = change_each(list(args), whole), change_each(kwargs, whole)
    return capture(program, given, args, kwargs, num_micro_batches)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's collector of reference cycles in the block: a search makes many objects, and keeps them."""
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_on:
            gc.enable()


@_collector_paused()
def plan_graph(
    graph: Graph,
    cluster: ClusterSpec,
    settings: SearchSettings = SearchSettings(),
    progress: Progress = None,
    split: Sequence[Graph] = (),
) -> Plan:
    """Return the plan of a captured program.

    If the fastest plan exceeds the memory limit, the result is the fastest that fits of a set of others. They may
    recompute the parts that `nn.checkpoint` marks as optional, and split the batch if the program calls
    `parallel.micro_batches`. The set is the same for all limits: with more memory the result is never slower.

    Args:
        graph: the program.
        cluster: the described hardware.
        settings: how to search.
        progress: called with the share of a search that is done, 0 to 1.
        split: the program with 2, 4, and more micro-batches.

    Raises:
        InputError: unknown method.
        SearchError: no plan fits into the memory limit.
    """
    if settings.method not in METHODS:
        raise InputError(f"search: method={settings.method!r} is not one of {', '.join(METHODS)}.")
    plain = _space(graph, cluster, settings)
    start, limit = data_parallel(plain), settings.memory_limit_bytes
    best = _search(plain, settings, progress, start)
    if limit is not None and best.peak_bytes > limit:
        found = []
        spaces = list(_variants(plain, cluster, settings, split))
        for number, space in enumerate(spaces, 1):
            found += _points(space, settings, lambda problem, weights: hull(problem, _HULL_POINTS))
            if progress is not None:
                progress(number / len(spaces))
        fitting = [each for each in found if each.peak_bytes <= limit]
        if not fitting:
            least_bytes = min(each.peak_bytes for each in found)
            raise SearchError(
                f"search: no plan fits into {format_bytes(limit)} of memory on a device; the least that was found "
                f"needs {format_bytes(least_bytes)}. Raise the limit (memory_limit, --device-memory), take more "
                "devices, or let the program save memory: nn.checkpoint(part, x, optional=True), "
                "parallel.micro_batches(x, y).",
                least_bytes=least_bytes,
                limit_bytes=limit,
            )
        best = min(fitting, key=lambda each: each.replayed.step_ps)
    return best.plan(replay(plain, start).step_ps)


def pareto_plans(
    graph: Graph,
    cluster: ClusterSpec,
    settings: SearchSettings = SearchSettings(),
    progress: Progress = None,
    split: Sequence[Graph] = (),
    points: int = 16,
) -> list[Plan]:
    """Return the Pareto front of step time and memory: plans by ascending memory, each faster than those before.

    Args:
        graph, cluster, settings, progress, split: as for `plan_graph`; the method is the exact search.
        points: most plans to return; of a longer front plans at equal ratios of memory, with both ends.

    Raises:
        InputError: fewer than two points.
    """
    if points < 2:
        raise InputError(f"search: a front of {points!r} points has no ends; pass 2 or more.")
    plain = _space(graph, cluster, settings)
    exact = replace(settings, method="auto")
    found: list[Found] = []
    spaces = list(_variants(plain, cluster, settings, split))
    for number, space in enumerate(spaces, 1):
        found += _points(space, exact, lambda problem, weights: pareto(problem, points=max(2, points // weights)))
        if progress is not None:
            progress(number / len(spaces))
    limit = settings.memory_limit_bytes
    kept: list[Found] = []
    for each in sorted(found, key=lambda each: (each.peak_bytes, each.replayed.step_ps)):
        fits = limit is None or each.peak_bytes <= limit
        if fits and (not kept or each.replayed.step_ps < kept[-1].replayed.step_ps):
            kept.append(each)
    data_parallel_ps = replay(plain, data_parallel(plain)).step_ps
    return [each.plan(data_parallel_ps) for each in _spread(kept, points)]


def _points(space: Space, settings: SearchSettings, front: Callable[[Problem, int], list[Solution]]) -> list[Found]:
    """Return the fastest plan of a space, and those between it and the least memory.

    Args:
        front: returns solutions of a problem; its second argument is the number of problems.
    """
    start = data_parallel(space)
    free = _search(space, settings, start=start)
    if settings.method != "auto":
        known = Solution.of(space.problem(free.exposed), start, 0, "data parallelism")
        return [free, Found.of(space, known, free.exposed)]
    # Plans whose sums overlap with work are a front of their own: the model weighs all sums by one number.
    weights = [free.exposed, free.exposed if settings.gamma is not None else _exposed(space, free, start)]
    if abs(weights[1] - weights[0]) < _CLOSE:
        weights.pop()
    found = [free]
    for exposed in weights:
        problem = space.problem(exposed)
        known = Solution.of(problem, start, problem.least, "data parallelism")
        found += [Found.of(space, each, exposed) for each in (*front(problem, len(weights)), known)]
    return found


def _spread(front: list[Found], points: int) -> list[Found]:
    """Return at most `points` of a front, at equal ratios of memory, with both ends."""
    if len(front) <= points:
        return front
    sizes = np.log([each.peak_bytes for each in front])
    levels = np.linspace(sizes[0], sizes[-1], points)
    # At each level of memory, the fastest plan that fits.
    numbers = np.searchsorted(sizes, levels * (1 + 1e-12), side="right") - 1
    return [front[number] for number in dict.fromkeys(numbers.tolist())]


class Found(NamedTuple):
    """The result of a search at one weight of the sums of gradients, its step on a clock, and its memory."""

    space: Space
    solution: Solution
    replayed: Replay
    exposed: float

    @classmethod
    def of(cls, space: Space, solution: Solution, exposed: float) -> Found:
        return cls(space, solution, replay(space, solution.choice), exposed)

    @property
    def peak_bytes(self) -> int:
        """The peak [bytes] of a rank's memory in a step."""
        return self.space.peak_bytes(self.solution.choice)

    def plan(self, data_parallel_ps: int) -> Plan:
        space, solution = self.space, self.solution
        return Plan(
            device_num=space.device_num,
            ops=planned(space, solution.choice, self.exposed),
            method=solution.method,
            cluster=space.prices.cluster.name,
            step_time_ps=self.replayed.step_ps,
            data_parallel_ps=data_parallel_ps,
            cost_ps=solution.cost,
            bound_ps=solution.bound,
            memory_bytes=self.peak_bytes,
            notes=space.notes,
            recomputed=tuple(space.graph.nodes[part.begin].name for part in space.recomputed if part.is_optional),
            num_micro_batches=space.graph.num_micro_batches,
        )


def _space(graph: Graph, cluster: ClusterSpec, settings: SearchSettings, recomputed: Sequence[int] = ()) -> Space:
    return Space(
        graph, cluster, fully=settings.fully, follow=settings.follow, alpha=settings.alpha, beta=settings.beta,
        recomputed=recomputed,
    )  # fmt: skip


def _variants(plain: Space, cluster: ClusterSpec, settings: SearchSettings, split: Sequence[Graph]) -> Iterator[Space]:
    """Yield the spaces with none, half and all of the optional parts recomputed, for each number of micro-batches."""
    for graph in (plain.graph, *split):
        optional = [number for number, part in enumerate(graph.parts) if part.is_optional]
        # First the parts that save most memory for their work.
        optional.sort(key=lambda number: _work_per_byte(graph, graph.parts[number]))
        for count in sorted({0, (len(optional) + 1) // 2, len(optional)}):
            is_plain = graph is plain.graph and not count
            yield plain if is_plain else _space(graph, cluster, settings, optional[:count])


def _work_per_byte(graph: Graph, part: RecomputeSegment) -> float:
    nodes = graph.nodes[part.begin : part.end]
    return sum(node.plan.work.size_bytes for node in nodes) / max(sum(node.plan.output.size_bytes for node in nodes), 1)


def _search(
    space: Space, settings: SearchSettings, progress: Progress = None, start: tuple[int, ...] | None = None
) -> Found:
    """Return the fastest plan of a space. `start` is data parallelism, if it is known."""
    gamma, plain = settings.gamma, data_parallel(space) if start is None else start
    found = _solved(space, settings, 1.0 if gamma is None else gamma, plain, progress)
    # How much of the sums of gradients is exposed depends on the plan: the first search counts all of it.
    exposed = _exposed(space, found, plain)
    if gamma is not None or exposed >= 1 - _CLOSE or settings.method != "auto":
        return found
    return min(found, _solved(space, settings, exposed, plain, progress), key=lambda each: each.replayed.step_ps)


def _exposed(space: Space, found: Found, plain: tuple[int, ...]) -> float:
    """Return how much of the sums of gradients is exposed in a plan, or in data parallelism if the plan has none."""
    for choice, replayed in ((found.solution.choice, found.replayed), (plain, None)):
        if sums := space.sums_ps(choice):
            return min((replayed or replay(space, choice)).exposed_ps / sums, 1.0)
    return 1.0


def _solved(
    space: Space, settings: SearchSettings, exposed: float, plain: tuple[int, ...], progress: Progress
) -> Found:
    """Search at one weight of the sums of gradients."""
    problem = space.problem(exposed, with_memory=False)
    found = Found.of(space, _solve(problem, space, settings, progress), exposed)
    # By the clock data parallelism may be faster: the model weighs all sums of gradients by one number.
    others = Found.of(space, Solution.of(problem, plain, 0, "data parallelism"), exposed)
    if others.replayed.step_ps < found.replayed.step_ps:
        bound = min(found.solution.bound, others.solution.cost)
        return others._replace(solution=replace(others.solution, bound=bound))
    return found


def _solve(problem: Problem, space: Space, settings: SearchSettings, progress: Progress) -> Solution:
    if settings.method == "auto":
        return eliminate(problem, progress=progress)
    if settings.method == "sharding_propagation":
        return propagate(problem, dict.fromkeys(fixed(space), 0))
    choice = data_parallel(space) if settings.method == "data_parallel" else bisect(space, problem)
    return Solution.of(problem, choice, problem.least, settings.method)


def bisect(space: Space, problem: Problem) -> tuple[int, ...]:
    """Return the choices of a recursive bisection: MindSpore's "recursive_programming".

    Each round doubles the cuts (by the smallest prime factor of the devices that are left). Op by op, it cuts
    the dim that is cheapest, or none, for the op itself and the redistributions to its neighbours as cut so far.
    """
    chosen = [0] * len(space.choices)
    rest = space.device_num
    while rest > 1:
        factor = next(p for p in range(2, rest + 1) if rest % p == 0)
        rest //= factor
        for number, choices in enumerate(space.choices):
            further = [c for c in range(len(choices)) if _is_further(choices[chosen[number]], choices[c], factor)]

            def cost(candidate: int, number: int = number) -> int:
                links = sum(int(table[candidate, chosen[other]]) for other, table in problem.links[number])
                return int(problem.nodes[number][candidate]) + links

            chosen[number] = min([chosen[number], *further], key=cost)
    return tuple(chosen)


def _is_further(now: Any, then: Any, factor: int) -> bool:
    """Return whether `then` cuts one dim `factor` times as often, and all others as `now` does."""
    before, after = (getattr(choice.call, "sharding", None) for choice in (now, then))
    if before is None or after is None or then.strategy[1] is not None:
        return False
    names = {*before.cuts, *after.cuts}
    changed = [name for name in names if before.cut(name) != after.cut(name)]
    return len(changed) == 1 and after.cut(changed[0]) == factor * before.cut(changed[0])


def planned(space: Space, choice: Sequence[int], exposed: float = 1.0) -> tuple[PlannedOp, ...]:
    """Return the choices as strategies, with their costs at this weight of the sums of gradients."""
    problem, found = space.problem(exposed, with_memory=False), []
    for number, node in enumerate(space.graph.nodes):
        options = options_of(space, problem, exposed, choice, number)
        own, moves = options[0], tuple(moves_into(space, choice, number))
        found.append(
            PlannedOp(
                node.name, node.op.name, node.shapes, own.in_strategy, own.out_strategy, node.line, options, moves
            )
        )
    return tuple(found)


# --- for `AutoParallel` ------------------------------------------------------------------------------------


def read_plan(plan: Any) -> Plan:
    """Return a Plan unchanged, or load the file of a path. Raises InputError, PlanError."""
    if isinstance(plan, Plan):
        return plan
    if not isinstance(plan, (str, os.PathLike)):
        raise InputError(f"AutoParallel: plan={plan!r} must be a Plan, or the path of a file that Plan.save wrote.")
    return Plan.load(plan)


class _SearchWatch:
    """What `watch_searches` follows: the plans found, each once, and the function that shows the progress."""

    def __init__(self, progress: Progress) -> None:
        self.plans: list[Plan] = []
        self.progress = progress


_watches: list[_SearchWatch] = []


@contextmanager
def watch_searches(progress: Progress = None) -> Iterator[list[Plan]]:
    """Collect the plans that `AutoParallel` searches on any rank of this process inside the block, each once."""
    watch = _SearchWatch(progress)
    _watches.append(watch)
    try:
        yield watch.plans
    finally:
        _watches.remove(watch)


def interpreter(parallel: AutoParallel, args: list[Any], kwargs: dict[str, Any], plan: Plan | None) -> Planned:
    """Return the interpreter of the given plan, or of the plan that a search finds for this call.

    Every rank captures the program, and rank 0 searches for all. Collective: yes, without a given plan.

    Raises:
        PlanError: the plan is for another number of devices.
        SearchError: no plan fits into the memory limit.
        UnknownValueError: the program needs a value that is unknown without data.
    """
    communicator = current()
    if plan is None:
        graph, *split = captures(partial(graph_of, parallel.network, args, kwargs))
        check_same_calls([(node.op.name, node.line, *node.shapes) for node in graph.nodes])
        found = None
        if communicator.rank == 0:
            progress = _watches[-1].progress if _watches else None
            found = plan_graph(graph, _cluster(), _settings(parallel), progress, split).to_dict()
        with communicator.for_purpose("AutoParallel: the plan"):
            # As plain data, which holds no object of this process.
            shared = communicator.broadcast_object(found) if communicator.world_size > 1 else found
        plan = Plan.from_dict(json.loads(json.dumps(shared)))
        # Every rank has the same plan, and a folded run may begin several times.
        for watch in _watches:
            if plan not in watch.plans:
                watch.plans.append(plan)
    if plan.device_num != communicator.world_size:
        raise PlanError(
            f"AutoParallel: the plan is for {plan.device_num} devices, and the run has {communicator.world_size}. "
            "Search anew (plan=None), or start as many ranks."
        )
    return Planned(plan)


def _cluster() -> ClusterSpec:
    recorder = current_recorder()
    return describe(current().world_size) if recorder is None else recorder.cluster


def _settings(parallel: AutoParallel) -> SearchSettings:
    limit, model = parallel._memory_limit, get_cost_model_context
    if limit is None:
        of_run = observer_of(None).memory.limit_bytes
        limit = model("device_memory_capacity") or of_run or _cluster().device.memory_bytes
    return SearchSettings(
        method=parallel.parallel_mode,
        fully=bool(get_algo_parameters("fully_use_devices")),
        follow=bool(get_algo_parameters("elementwise_op_strategy_follow")),
        memory_limit_bytes=int(limit),
        alpha=model("costmodel_alpha"),
        beta=model("costmodel_beta"),
        gamma=model("costmodel_gamma"),
    )
