"""Schedules found by search: the least makespan under a memory limit, with a proven lower bound.

Micro-batches are alike, so each rank takes them in order. A state of the search holds the number of forwards (F), input
gradients (I) and weight gradients (W) that each rank has started, and the time until their results arrive. Actions are
added in the order of their starts, one in each layer. Three rules drop states without losing the optimum:

- A rank that lets an action wait runs another kind next: otherwise it would have waited for nothing.
- No gap of a rank is long enough for an action that it could run there (active schedules: Giffler and Thompson 1960).
- Of states that differ only in their clocks, the earliest stays. A state stays only if its lower bound is better than
  the best schedule so far.

A pass keeps only the most promising states of each layer; the next pass keeps more (beam search with growing widths:
Zhang 1998). A schedule that is as good as the least bound among all dropped states is optimal.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from simparallel.base.checks import check_integer
from simparallel.base.units import format_number_of
from simparallel.errors import InputError
from simparallel.parallel.pipeline.action import FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action
from simparallel.parallel.pipeline.rules import LOOP, RULES
from simparallel.parallel.pipeline.schedule import Schedule, pipeline_schedule
from simparallel.parallel.pipeline.timing import Cost, Time

Array = np.ndarray[Any, np.dtype[Any]]
# Kinds by number.
F, I, W = range(3)
KINDS = FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
RELEASES = {"input_gradient": I, "weight_gradient": W}
FIRST_WIDTH, GROWTH = 8, 4
# Sums of non-integer times differ in their last bits.
ROUNDING = 1e-9


@dataclass(frozen=True)
class FoundSchedule:
    """The result of a search.

    Attributes:
        schedule: the best schedule: a named one, or one that is better than all of them.
        cost: its cost with the times of the search.
        bound: no schedule within the limit has a smaller makespan.
        best_named: the best named schedule that fits the memory, with one stage on each rank; None if none fits.
        named_cost: the cost of `best_named`.
        memory: the limit, in micro-batches; None for no limit.
        states: number of states kept in the search; 0 if the bound proves a named schedule optimal.
    """

    schedule: Schedule
    cost: Cost
    bound: float
    best_named: Schedule | None
    named_cost: Cost | None
    memory: int | None
    states: int

    @property
    def makespan(self) -> float:
        """Makespan of the schedule."""
        return self.cost.makespan

    @property
    def gap(self) -> float:
        """Share of the makespan that a better schedule could save at most; 0 if the schedule is optimal."""
        return (self.makespan - self.bound) / self.makespan if self.makespan else 0.0

    @property
    def is_optimal(self) -> bool:
        """Whether no schedule within the limit is better."""
        return self.gap == 0

    def __str__(self) -> str:
        limit = "no limit of memory" if self.memory is None else f"memory {self.memory}"
        proof = "optimal" if self.is_optimal else f"bound {self.bound:g}, gap {self.gap:.1%}"
        named = "none fits"
        if self.best_named is not None and self.named_cost is not None:
            named = f"{self.best_named.name} {self.named_cost.makespan:g}"
        effort = format_number_of(self.states, "state")
        head = f"{self.schedule.title}, {limit}; makespan {self.makespan:g}, {proof}, {effort}; best named: {named}"
        # The grid has equal times, whatever those of the search are.
        return "\n".join([head, *self.schedule.grid()])


def search_schedule(
    ranks: int = 4, microbatches: int = 8, memory: int | None = None, times: tuple[Time, Time, Time] = (1, 1, 1),
    message: float = 0, *, released_by: str = "weight_gradient", states: int = 500_000,
) -> FoundSchedule:  # fmt: skip
    """Find the schedule of least makespan under a memory limit, with one stage on each rank and split backwards.

    Args:
        ranks, microbatches: their numbers.
        memory: most activations that a rank may hold, in micro-batches; None for no limit.
        times: of a forward, an input gradient and a weight gradient, in any unit; each a number, or a sequence with
            one for each stage.
        message: latency of a message between two ranks, in the unit of `times`.
        released_by: "weight_gradient" or "input_gradient", the action that releases an activation.
        states: the search ends after about so many states. If they suffice, the schedule is proven optimal; otherwise
            it is the best one of a beam search, with its gap.

    Returns:
        The schedule, never worse than the best named one that fits, and a lower bound of all makespans.

    Raises:
        InputError: numbers out of range, or times that are negative, not finite or not one for each stage. Fact:
            `field`.

    Cost:
        About 15 µs for each state, and a millisecond for each of the 3 x `ranks` x `microbatches` actions.

    Example:
        >>> found = sp.search_schedule(ranks=3, microbatches=4, memory=2)
        >>> found.makespan, found.is_optimal
        (17, True)
    """
    problem = _problem(ranks, microbatches, memory, times, message, released_by, states)
    best_named, named_cost = _best_named(problem, times)
    best, cost, used = best_named, named_cost, 0
    bound, budget = problem.bound, FIRST_WIDTH * problem.layers
    may_wait = False
    while cost is None or (bound < cost.makespan * (1 - ROUNDING) and budget):
        makespan = math.inf if cost is None else cost.makespan
        # The times in the states choose an order; the makespan is that of the clock.
        order, dropped, seen = problem.search(makespan * (1 - ROUNDING), budget, may_wait)
        used += seen
        if order:
            best = _schedule(order, ranks, microbatches)
            cost = best.cost(*times, message)
            makespan = cost.makespan
        bound = max(bound, min(dropped, makespan))
        # A pass that may use the whole rest of the budget is the last one.
        left = max(states - used, 0)
        budget, may_wait = min(GROWTH * budget, left) if budget < left else 0, True
    assert best is not None
    bound = cost.makespan if bound >= cost.makespan * (1 - ROUNDING) else bound
    return FoundSchedule(best, cost, bound, best_named, named_cost, memory, used)


def _problem(
    ranks: int, microbatches: int, memory: int | None, times: tuple[Time, Time, Time], message: float, released_by: str,
    states: int,
) -> _Problem:  # fmt: skip
    """Return the problem that the arguments of `search_schedule` describe; errors as there."""
    limit = microbatches if memory is None else memory
    numbers = {"ranks": ranks, "microbatches": microbatches, "memory": limit, "states": states}
    for option, value in numbers.items():
        check_integer("search_schedule", option, value, 1)
    if released_by not in RELEASES:
        options = " or ".join(map(repr, RELEASES))
        raise InputError(f"search_schedule: released_by={released_by!r} must be {options}.", field="released_by")
    if not isinstance(times, Sequence) or len(times) != 3:
        raise InputError(
            f"search_schedule: times={times!r} must be three: of a forward, an input gradient and a weight gradient.",
            field="times",
        )
    duration = pipeline_schedule("gpipe", ranks, microbatches).duration(*times, message)
    time = np.array([[duration(Action(rank, kind, 0)) for rank in range(ranks)] for kind in KINDS], float)
    if not np.isfinite([*time.flat, message]).all():
        raise InputError(f"search_schedule: times={times!r} and message={message!r} must be finite.", field="times")
    return _Problem(time, microbatches, min(limit, microbatches), message, RELEASES[released_by])


def _best_named(problem: _Problem, times: tuple[Time, Time, Time]) -> tuple[Schedule, Cost] | tuple[None, None]:
    """Return the named schedule of least makespan that fits the memory, and its cost."""
    fitting = []
    for name, rule in RULES.items():
        if rule.chunks == 1:
            schedule = pipeline_schedule(name, problem.ranks, problem.microbatches)
            cost = schedule.cost(*times, problem.message)
            peaks = {I: cost.peak_live_at_input_gradient, W: cost.peak_live_at_weight_gradient}
            if max(peaks[problem.release]) <= problem.limit:
                fitting.append((schedule, cost))
    return min(fitting, key=lambda each: each[1].makespan, default=(None, None))


def _schedule(order: Sequence[tuple[int, int]], ranks: int, microbatches: int) -> Schedule:
    """Return the schedule of actions (kind, rank) in the order of their starts."""
    rows: list[list[str]] = [[] for _ in range(ranks)]
    counts: Counter[tuple[int, int]] = Counter()
    for kind, rank in order:
        rows[rank].append(str(Action(rank, KINDS[kind], counts[kind, rank])))
        counts[kind, rank] += 1
    return Schedule("search", ranks, microbatches, 1, LOOP, tuple(map(tuple, rows)))


class _States:
    """States, a row for each. Times count from `clock`; the arrays behind it are views of `rows`.

    Attributes:
        rows: two states whose rows are equal differ in their clocks only.
        clock: start of the last action.
        done: (kind, rank) how many actions have started.
        free: (rank) end of the rank's newest action.
        arrivals: (F or I, rank, window) arrivals of the newest results that the rank needs, newest first; 0 if used.
        deadline: (rank) earliest time at which a waiting action could have ended in the rank's idle time.
        is_late: (kind, rank) whether the next action of the kind waits.
    """

    def __init__(self, rows: Array, clock: Array, ranks: int, window: int) -> None:
        self.rows, self.clock = rows, clock
        shapes = (3, ranks), (ranks,), (2, ranks, window), (ranks,), (3, ranks)
        ends = list(accumulate(map(math.prod, shapes)))
        parts = zip(np.split(rows, ends[:-1], axis=1), shapes, strict=True)
        views = [part.reshape(len(rows), *shape) for part, shape in parts]
        self.done, self.free, self.arrivals, self.deadline, self.is_late = views

    @staticmethod
    def width(ranks: int, window: int) -> int:
        return 8 * ranks + 2 * ranks * window


class _Problem:
    """A pipeline whose schedule is searched.

    Args:
        time: (kind, rank) of an action.
        microbatches: their number.
        limit: most live activations of a rank.
        message: latency.
        release: the kind that releases an activation.
    """

    def __init__(self, time: Array, microbatches: int, limit: int, message: float, release: int) -> None:
        self.time, self.microbatches, self.limit, self.message = time, microbatches, limit, message
        self.release, self.ranks = release, time.shape[1]
        self.layers = 3 * self.ranks * microbatches
        # Results before these have arrived when the newest action starts.
        shortest = time[:W].min()
        self._window = (
            min(microbatches, 1 + math.ceil(min(message / shortest, microbatches))) if shortest else microbatches
        )
        # From the start of a forward to the end of its input gradient on the same rank.
        self._turnaround = np.cumsum((time[F] + time[I] + 2 * message)[::-1])[::-1] - 2 * message
        # From the end of the last input gradient of a rank to the end of the step.
        self._drain = time[W].copy()
        for r in range(1, self.ranks):
            self._drain[r] = max(time[W, r], message + time[I, r - 1] + self._drain[r - 1])
        rows = np.zeros((1, _States.width(self.ranks, self._window)))
        self._root = _States(rows, np.zeros(1), self.ranks, self._window)
        self._root.deadline[:] = np.inf
        self.bound = float(self._bounds(self._root)[0][0])

    def search(self, target: float, budget: int, may_wait: bool) -> tuple[list[tuple[int, int]], float, int]:
        """Search once through all layers.

        Args:
            target: schedules that take as long or longer are of no use.
            budget: about how many states to keep in all layers together.
            may_wait: whether ranks may be idle although they could run an action. If not, a schedule is always found,
                unless the target forbids it.

        Returns:
            The actions (kind, rank) of the best schedule found, none if none is below the target; the least bound of
            the dropped states; and how many states were kept.
        """
        layer, seen = self._root, 0
        dropped = math.inf if may_wait else -math.inf
        history = []
        for left in range(self.layers, 0, -1):
            parent, kind, rank, layer = self._next(layer, may_wait)
            bound, guide = self._bounds(layer)
            useful = np.flatnonzero(bound < target)
            useful = useful[_earliest(layer.rows[useful], layer.clock[useful])]
            # The mean of the ranks' bounds also tells apart states whose slowest ranks are alike.
            useful = useful[np.argsort(guide[useful], kind="stable")]
            width = max(1, (budget - seen) // left)
            dropped = min([dropped, *bound[useful[width:]]])
            kept = useful[:width]
            layer = _States(layer.rows[kept], layer.clock[kept], self.ranks, self._window)
            history.append((parent[kept], kind[kept], rank[kept]))
            seen += len(kept)
            if not len(kept):
                return [], dropped, seen
        order, number = [], int(bound[kept].argmin())
        for parent, kind, rank in reversed(history):
            order.append((int(kind[number]), int(rank[number])))
            number = parent[number]
        return order[::-1], dropped, seen

    def _ahead(self, states: _States) -> Array:
        """Return (state, kind, rank): number of actions whose inputs are there, or come from started actions."""
        done = states.done
        ahead = np.empty_like(done)
        ahead[:, F, 0] = self.microbatches - done[:, F, 0]
        ahead[:, F, 1:] = done[:, F, :-1] - done[:, F, 1:]
        ahead[:, I, :-1] = done[:, I, 1:] - done[:, I, :-1]
        ahead[:, I, -1] = done[:, F, -1] - done[:, I, -1]
        ahead[:, W] = done[:, I] - done[:, W]
        return ahead

    def _arrival(self, states: _States, ahead: Array) -> Array:
        """Return (state, kind, rank): arrival of the next action's input; infinite if that is unknown."""
        arrival = np.where(ahead > 0, 0.0, np.inf)
        oldest = np.clip(ahead[:, :W, :, None] - 1, 0, self._window - 1).astype(int)
        newest = np.take_along_axis(states.arrivals, oldest, -1)[..., 0]
        is_open = (ahead[:, :W] > 0) & (ahead[:, :W] <= self._window)
        arrival[:, :W][is_open] = newest[is_open]
        return arrival

    def _next(self, states: _States, may_wait: bool) -> tuple[Array, Array, Array, _States]:
        """Return for each possible next action the index of its state, its kind and rank, and the state after it."""
        ahead = self._ahead(states)
        ready = np.maximum(self._arrival(states, ahead), states.free[:, None])
        ready[:, F][states.done[:, F] - states.done[:, self.release] >= self.limit] = np.inf
        parent, kind, rank = np.nonzero(np.isfinite(ready) & (states.is_late == 0))
        start, time = ready[parent, kind, rank], self.time[kind, rank]

        # Actions that could have started before now wait. Of those that start together, actions that take no time
        # come first, and then lower ranks.
        is_below = (np.arange(self.ranks) < rank[:, None]) & (time > 0)[:, None]
        waits = ready[parent] < start[:, None, None]
        waits |= (ready[parent] == start[:, None, None]) & is_below[:, None]
        ends = np.where(waits, ready[parent] + self.time, np.inf).min(1)
        deadline = np.minimum(states.deadline[parent], ends)
        alive = (deadline > start[:, None]).all(1) if may_wait else ~waits.any((1, 2))
        parent, kind, rank, start, time = parent[alive], kind[alive], rank[alive], start[alive], time[alive]
        after = _States(states.rows[parent], states.clock[parent] + start, self.ranks, self._window)
        after.deadline[:] = deadline[alive]
        after.is_late[:] = np.maximum(after.is_late, waits[alive])

        each, end = np.arange(len(parent)), start + time
        after.done[each, kind, rank] += 1
        after.free[each, rank] = end
        after.deadline[each, rank] = np.inf
        after.is_late[each, :, rank] = 0
        to = rank + np.where(kind == F, 1, -1)
        sends = np.flatnonzero((kind != W) & (to >= 0) & (to < self.ranks))
        box = sends, kind[sends], to[sends]
        after.arrivals[box] = np.roll(after.arrivals[box], 1, -1)
        after.arrivals[(*box, 0)] = end[sends] + self.message

        after.free[:] = np.maximum(after.free - start[:, None], 0)
        after.deadline[:] -= start[:, None]
        is_used = np.arange(self._window) >= self._ahead(after)[:, :W, :, None]
        after.arrivals[:] = np.where(is_used, 0, np.maximum(after.arrivals - start[:, None, None, None], 0))
        return parent, kind, rank, after

    def _bounds(self, states: _States) -> tuple[Array, Array]:
        """Return for each state a lower bound of the makespan, and the mean of the bounds of its ranks as a guide.

        For equal times and no action done, the bound of a rank is at least M (F + I + W) + (P - A) F + (P - 1 - r) I
        for M micro-batches, P ranks and at most A live activations.
        """
        f, i, w = self.time
        free, left = states.free, self.microbatches - states.done
        ahead = self._ahead(states)
        has_f, has_i, has_w = left[:, F] > 0, left[:, I] > 0, ahead[:, W] > 0
        forward, gradient = self._soonest(states, ahead, left)
        releases_late = self.release == W
        # Without a place in memory, the next F waits for the next release.
        places = self.limit - states.done[:, F] + states.done[:, self.release]
        release = np.where(has_w, free, gradient + i) + w if releases_late else gradient + i
        forward = np.where(places > 0, forward, np.maximum(forward, release))

        # The rank starts with what comes first, and does all that is left.
        start = np.minimum(np.where(has_f, forward, np.inf), np.where(has_i, gradient, np.inf))
        start = np.where(has_w | ~has_i, free, start)
        work = (left * self.time).sum(1)
        bound = start + work
        # Before its next I, it can do the W whose I are done, and the F that memory has places for.
        early = np.minimum(left[:, F], places + ahead[:, W] * releases_late)
        after_i = gradient + work - early * f - ahead[:, W] * w
        # The last I comes after all F, and after the W without which the last F has no place.
        needed = np.where(has_f & releases_late, np.maximum(self.microbatches - self.limit - states.done[:, W], 0), 0)
        gradients = left[:, I] * i
        last = np.maximum(
            start + left[:, F] * f + gradients + needed * w, gradient + (left[:, F] - early) * f + gradients
        )
        bound = np.where(has_i, np.maximum(bound, np.maximum(after_i, last + self._drain)), bound)
        # A place in memory is free again when a micro-batch has been to the last rank and back.
        rounds, rest = np.divmod(left[:, F] - 1, self.limit)
        first = np.where(rest < places, forward + rest * f, np.maximum(forward, release))
        trips = rounds * (self._turnaround + w * releases_late)
        bound = np.where(has_f, np.maximum(bound, first + trips + self._turnaround + self._drain), bound)
        # A rank that let an action wait has to start another one before its deadline.
        others = [np.where(places > 0, forward, np.inf), gradient, np.where(has_w, free, np.inf)]
        other = np.where((left > 0) & (states.is_late == 0), np.stack(others, 1), np.inf).min(1)
        bound = np.where(np.isfinite(states.deadline) & (other >= states.deadline), np.inf, bound)
        return states.clock + bound.max(1), states.clock + bound.mean(1)

    def _soonest(self, states: _States, ahead: Array, left: Array) -> tuple[Array, Array]:
        """Return (state, rank): the earliest starts of the next F and of the next I, apart from memory.

        An input that no action has begun to compute comes from the next action of the rank before.
        """
        (f, i, _), message, last = self.time, self.message, self.ranks - 1
        arrival = self._arrival(states, ahead)
        forward, gradient = np.empty_like(states.free), np.empty_like(states.free)

        def start(kind: int, rank: int, computed: Array) -> Array:
            input_ = np.where(ahead[:, kind, rank] > 0, arrival[:, kind, rank], computed)
            return np.maximum(states.free[:, rank], np.where(left[:, kind, rank] > 0, input_, 0))

        computed = np.zeros(len(states.free))
        for r in range(self.ranks):
            forward[:, r] = start(F, r, computed)
            computed = forward[:, r] + f[r] + (message if r < last else 0)
        for r in reversed(range(self.ranks)):
            gradient[:, r] = start(I, r, computed)
            computed = gradient[:, r] + i[r] + message
        return forward, gradient


def _earliest(rows: Array, clock: Array) -> Array:
    """Return the indices of the distinct rows; of equal ones, the index of the one with the earliest clock."""
    odd = np.random.default_rng(0).integers(0, 2**63, rows.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    key = ((rows + 0.0).view(np.uint64) * odd).sum(1)
    order = np.lexsort((clock, key))
    rows = rows[order]
    is_new = np.ones(len(rows), bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(1)
    return order[is_new]
