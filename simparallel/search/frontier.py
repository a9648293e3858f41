"""Lists instead of numbers: elimination with all pairs of cost and memory that no other pair is below.

Where a table of `tables.py` has one number, the least cost, a table here has a list: the Pareto front of the costs and
memory of what was eliminated, as in TensorOpt's frontier tracking (Cai et al. 2020, arXiv 2004.10856).

Lists grow, and a limit makes them short again. For any weights, an entry is worse than the best one of its place by
some excess, and all that it leads to is worse than the optimum of these weights by at least as much. So entries whose
excess is more than the gap between a known choice and a known bound lead to nothing better, and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import numpy as np

from simparallel.search.dominance import Criterion, Cuts, undominated
from simparallel.search.multiplier import Relaxed
from simparallel.search.problem import Problem, Solution
from simparallel.search.tables import Order, Scope, aligned, least

_BYTES_OF_ROW = 8  # a row of a list takes the memory of about eight entries of a table


class TooManyRows(Exception):
    """Lists would be longer than allowed."""


class Ray(NamedTuple):
    """Weights of cost and memory, and how far above their optimum a choice may be that is still wanted."""

    cost: float
    memory: float
    slack: float


class Lists(NamedTuple):
    """A table of lists: those of cell i are rows first[i] to first[i + 1].

    Attributes:
        scope: the nodes of the cells' axes.
        first: shape (cells + 1,).
        cost, memory: of each row.
        ideals: for each ray, the least weighted sum of each cell, in the table's shape.
    """

    scope: Scope
    first: np.ndarray
    cost: np.ndarray
    memory: np.ndarray
    ideals: list[np.ndarray]


def within_limit(problem: Problem, memory_limit_bytes: int, relaxed: Relaxed, max_entries: int) -> Solution:
    """Return the optimum within a limit of memory, given what its relaxation found.

    Raises:
        TooManyRows: lists would be longer than an eighth of `max_entries`.
    """
    best = relaxed.solution
    rounding = 1e-10 * (problem.most + relaxed.price * problem.memory_problem.most) + 1
    aim = best.cost - 1
    rays = [
        Ray(1.0, relaxed.price, aim + relaxed.price * memory_limit_bytes - relaxed.bound + rounding),
        Ray(1.0, 0.0, aim - relaxed.free_bound),
        Ray(0.0, 1.0, memory_limit_bytes - relaxed.least_bytes),
    ]
    fronts = Frontier(problem, rays, max_entries)
    inside = np.flatnonzero((fronts.memory <= memory_limit_bytes) & (fronts.cost <= aim))
    method = "elimination with Pareto lists"
    if len(inside) == 0:
        return Solution.of(problem, best.choice, best.cost, method)
    row = int(inside[fronts.cost[inside].argmin()])
    return Solution.of(problem, fronts.choice(row), int(fronts.cost[row]), method)


class Frontier:
    """The Pareto front of cost and memory of all choices that the rays allow.

    Attributes:
        cost, memory: of the points, by ascending memory.
    """

    def __init__(self, problem: Problem, rays: Sequence[Ray], max_entries: int) -> None:
        self.rays, self.max_rows, self.max_entries = rays, max_entries // _BYTES_OF_ROW, max_entries
        memory = problem.memory_problem
        nodes = range(len(problem))
        criteria = [Criterion(dict(enumerate(x.nodes)), x.edges) for x in (problem, memory)]
        self.kept = undominated(criteria, nodes)
        self.sizes = [len(self.kept[v]) for v in nodes]
        cuts = Cuts()
        self.at: list[list[Lists]] = [[] for _ in nodes]
        for v in nodes:
            self._add(self._of((v,), *(cuts.of(x.nodes[v], self.kept[v]) for x in (problem, memory))))
        for u, v in sorted({*problem.edges, *memory.edges}):
            blank = np.zeros((self.sizes[u], self.sizes[v]), np.int64)
            tables = [x.edges.get((u, v)) for x in (problem, memory)]
            self._add(
                self._of((u, v), *(blank if x is None else cuts.of(x, self.kept[u], self.kept[v]) for x in tables))
            )
        self.passed: list[tuple[int, Lists, list[Lists]]] = []
        self.ends: list[Lists] = []
        order = Order(self.sizes, {v: self._near(v) for v in nodes})
        while len(self.passed) < len(problem):
            self._eliminate(order.next()[0], order)
        # Parts of the graph that nothing joins each left a list without axes.
        self.cost, self.memory, self.rows = self._joined(self.ends, [np.zeros(1, np.int64)] * len(self.ends), 1)[1:]

    def _of(self, scope: Scope, cost: np.ndarray, memory: np.ndarray) -> Lists:
        ideals = [ray.cost * cost + ray.memory * memory for ray in self.rays]
        return Lists(scope, np.arange(cost.size + 1), cost.ravel(), memory.ravel(), ideals)

    def _add(self, lists: Lists) -> None:
        for u in lists.scope:
            self.at[u].append(lists)

    def _near(self, v: int) -> set[int]:
        return {u for lists in self.at[v] for u in lists.scope} - {v}

    def _eliminate(self, v: int, order: Order) -> None:
        factors, near = self.at[v], sorted(order.near[v])
        frame = (v, *near)
        shape = [self.sizes[u] for u in near]
        if prod(shape) > self.max_entries:
            raise TooManyRows
        for lists in factors:
            for u in lists.scope:
                self.at[u] = [other for other in self.at[u] if other is not lists]
        parts = [
            aligned([(x.scope, x.ideals[ray]) for x in factors], frame, self.sizes) for ray in range(len(self.rays))
        ]
        ideals = [least(tables) for tables in parts]
        # Where even the best of all lists is too far above the ideal of its cell, no list is looked at.
        found = []
        for s in range(self.sizes[v]):
            is_open = np.ones(shape, bool)
            for ray, tables, ideal in zip(self.rays, parts, ideals, strict=True):
                is_open &= reduce(np.add, [table[s] for table in tables]) - ideal <= ray.slack
            cells = np.flatnonzero(is_open)
            found.append((np.full(len(cells), s), cells))
            if sum(len(cells) for _, cells in found) > self.max_rows:
                raise TooManyRows
        candidates, cells = (np.concatenate(column) for column in zip(*found, strict=True))
        axes = dict(zip(near, np.unravel_index(cells, shape) if near else (), strict=True))
        axes[v] = candidates
        places = [self._cells(lists.scope, axes) for lists in factors]
        pair, cost, memory, _ = self._joined(factors, places, len(cells))
        is_open = np.ones(len(cost), bool)
        for ray, ideal in zip(self.rays, ideals, strict=True):
            is_open &= ray.cost * cost + ray.memory * memory - ideal.ravel()[cells[pair]] <= ray.slack
        cell, cost, memory = cells[pair[is_open]], cost[is_open], memory[is_open]
        kept = _front(cell, cost, memory)
        first = np.concatenate(([0], np.bincount(cell[kept], minlength=prod(shape)).cumsum()))
        message = Lists(tuple(near), first, cost[kept], memory[kept], ideals)
        if near:
            self._add(message)
        else:
            self.ends.append(message)
        self.passed.append((v, message, factors))
        order.eliminated(v, {u: self._near(u) for u in near})

    def _cells(self, scope: Scope, axes: dict[int, np.ndarray]) -> np.ndarray:
        sizes = [self.sizes[u] for u in scope]
        return np.ravel_multi_index([axes[u] for u in scope], sizes) if scope else np.zeros(1, np.int64)

    def _joined(
        self, factors: Sequence[Lists], places: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the front of all sums of rows, one of each factor, for each of `count` places.

        Returns: the place, cost and memory of each sum, and of each factor the rows that it comes from.
        """
        pair, cost = np.arange(count), np.zeros(count, np.int64)
        memory, rows = cost, list[np.ndarray]()
        for lists, place in zip(factors, places, strict=True):
            start = lists.first[place][pair]
            length = lists.first[place + 1][pair] - start
            total = int(length.sum())
            if total > self.max_rows:
                raise TooManyRows
            ends = length.cumsum()
            row = np.arange(total) + (start - (ends - length)).repeat(length)
            pair, cost, memory = (x.repeat(length) for x in (pair, cost, memory))
            rows = [x.repeat(length) for x in rows] + [row]
            cost, memory = cost + lists.cost[row], memory + lists.memory[row]
            if total > count:  # else no list has two rows, or few
                kept = _front(pair, cost, memory)
                pair, cost, memory = pair[kept], cost[kept], memory[kept]
                rows = [x[kept] for x in rows]
        return pair, cost, memory, rows

    def choice(self, point: int) -> tuple[int, ...]:
        """Return a choice with the cost and memory of this point."""
        target = {id(lists): int(rows[point]) for lists, rows in zip(self.ends, self.rows, strict=True)}
        found: dict[int, int] = {}
        for v, message, factors in reversed(self.passed):
            row = target[id(message)]
            axes = {u: np.full(self.sizes[v], found[u]) for u in message.scope}
            axes[v] = np.arange(self.sizes[v])
            places = [self._cells(lists.scope, axes) for lists in factors]
            candidate, cost, memory, rows = self._joined(factors, places, self.sizes[v])
            match = (cost == message.cost[row]) & (memory == message.memory[row])
            one = int(np.flatnonzero(match)[0])
            found[v] = int(candidate[one])
            target |= {id(lists): int(part[one]) for lists, part in zip(factors, rows, strict=True)}
        return tuple(int(self.kept[v][found[v]]) for v in range(len(self.sizes)))


def _front(cell: np.ndarray, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the rows that no other row of their cell is below in both, by cell and ascending memory."""
    order = np.lexsort((cost, memory, cell))
    if len(order) == 0:
        return order
    cell = cell[order]
    # A running minimum of the cost in each cell: ranks, less a step that no rank reaches, begin anew at each cell.
    ranks = np.unique(cost, return_inverse=True)[1][order].astype(np.int64)
    numbers = np.concatenate(([0], (np.diff(cell) != 0).cumsum()))
    stepped = ranks - numbers * len(order)
    lowest = np.minimum.accumulate(stepped)
    is_new = np.concatenate(([True], stepped[1:] < lowest[:-1]))
    return order[is_new]
