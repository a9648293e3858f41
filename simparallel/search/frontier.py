"""Elimination with lists instead of numbers: all pairs of cost and memory that no other pair dominates.

Where a table of `tables.py` has one number, the least cost, a table here has a list: the Pareto front of the costs and
memory of the eliminated nodes, as in TensorOpt's frontier tracking (Cai et al. 2020, arXiv 2004.10856).

Lists grow, and a memory limit keeps them short: a wanted choice holds no more than the limit and costs less than the
best one known, which bounds cost + price * memory, too. Before any list is made, numbers are eliminated forwards and
backwards. This gives the least completion of each cell of each table: the least sum of all that the cell lacks. Entries
that exceed a bound even with the least completion are dropped.
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

_ROW = 8  # a row of a list takes the memory of about eight entries of a table


class TooManyRows(Exception):
    """Lists would be longer than allowed."""


class Ray(NamedTuple):
    """Weights of cost and memory, and the most that their sum may be."""

    cost: float
    memory: float
    most: float

    def of(self, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
        """Return the weighted sums."""
        return self.cost * cost + self.memory * memory


class Elimination(NamedTuple):
    """The elimination of a node: the node, its neighbours, and the numbers of the tables that it replaces by one."""

    node: int
    near: Scope
    tables: list[int]


class Frontiers(NamedTuple):
    """A table of lists: that of cell i is rows first[i]:first[i + 1]; the cells are all choices of some nodes."""

    first: np.ndarray
    cost: np.ndarray
    memory: np.ndarray


def within_limit(problem: Problem, memory_limit_bytes: int, relaxed: Relaxed, max_entries: int) -> Solution:
    """Return the optimum within a limit of memory, given the result of `multiplier.relax`.

    Raises:
        TooManyRows: lists would be longer than an eighth of `max_entries`, or a table larger than `max_entries`.
    """
    best, price = relaxed.solution, relaxed.price
    aim = best.cost - 1
    rays = [Ray(1.0, price, aim + price * memory_limit_bytes), Ray(0.0, 1.0, memory_limit_bytes)]
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
        self.max_rows, self.max_entries = max_entries // _ROW, max_entries
        memory = problem.memory_problem
        nodes = range(len(problem))
        criteria = [Criterion(dict(enumerate(x.nodes)), x.edges) for x in (problem, memory)]
        self.kept = undominated(criteria, nodes)
        self.sizes = [len(self.kept[v]) for v in nodes]
        edges = sorted({*problem.edges, *memory.edges})
        self.scopes: list[Scope] = [*((v,) for v in nodes), *edges]  # of all tables; steps append theirs
        costs, held = (self._tables(x, edges) for x in (problem, memory))
        self.steps = self._planned()
        self.ends = [number for number, scope in enumerate(self.scopes) if not scope]
        bounds = []
        for ray in rays:
            most = ray.most + 1e-10 * (ray.cost * problem.most + ray.memory * memory.most)  # for rounding errors
            tables = [ray.of(*pair) for pair in zip(costs, held, strict=True)]
            bounds.append((ray._replace(most=most), *self._completed(tables)))
        self.lists = [Frontiers(np.arange(x.size + 1), x.ravel(), y.ravel()) for x, y in zip(costs, held, strict=True)]
        for step in self.steps:
            self.lists.append(self._eliminated(step, bounds))
        # Each connected component of the graph has left one list.
        self.cost, self.memory, self.rows = self._joined(self.ends, [np.zeros(1, np.int64)] * len(self.ends), 1)[1:]

    def _tables(self, problem: Problem, edges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return costs, or memory, of the kept candidates: of all nodes, then of these edges."""
        cuts, found = Cuts(), [costs[self.kept[v]] for v, costs in enumerate(problem.nodes)]
        for u, v in edges:
            table = problem.edges.get((u, v))
            blank = np.zeros((self.sizes[u], self.sizes[v]), np.int64)
            found.append(blank if table is None else cuts.of(table, self.kept[u], self.kept[v]))
        return found

    def _planned(self) -> list[Elimination]:
        """Return the steps, and append the scope of the table that each makes; the order is that of `tables.py`."""
        at: list[set[int]] = [set() for _ in self.sizes]
        for number, scope in enumerate(self.scopes):
            for u in scope:
                at[u].add(number)

        def near(v: int) -> set[int]:
            return {u for number in at[v] for u in self.scopes[number]} - {v}

        order = Order(self.sizes, {v: near(v) for v in range(len(at))})
        steps: list[Elimination] = []
        while len(steps) < len(at):
            v = order.next()[0]
            around = tuple(sorted(order.near[v]))
            if prod(self.sizes[u] for u in around) > self.max_entries:
                raise TooManyRows
            steps.append(Elimination(v, around, sorted(at[v])))
            for number in steps[-1].tables:
                for u in self.scopes[number]:
                    at[u].discard(number)
            for u in around:
                at[u].add(len(self.scopes))
            self.scopes.append(around)
            order.eliminated(v, {u: near(u) for u in around})
        return steps

    def _parts(self, step: Elimination, tables: Sequence[np.ndarray]) -> list[np.ndarray]:
        factors = [(self.scopes[number], tables[number]) for number in step.tables]
        return [aligned([factor], (step.node, *step.near), self.sizes)[0] for factor in factors]

    def _completed(self, tables: list[np.ndarray]) -> tuple[list[np.ndarray], dict[int, np.ndarray]]:
        """Return all tables with their least sums, and for each table of a step the least completion of its cells.

        The forward pass is elimination; in the backward pass each step hands its completion on to the tables that it
        replaced: calibration of a junction tree (Shenoy and Shafer 1990).
        """
        first = len(tables)
        for step in self.steps:
            tables.append(least(sorted(self._parts(step, tables), key=lambda part: (part.shape[-1], part.size))))
        total = sum(tables[number] for number in self.ends)
        rest = {number: np.asarray(total - tables[number]) for number in self.ends}
        for made in range(len(tables) - 1, first - 1, -1):
            step = self.steps[made - first]
            parts = self._parts(step, tables)
            inner = [(number, part) for number, part in zip(step.tables, parts, strict=True) if number >= first]
            for number, _ in inner:
                rest[number] = np.empty(tables[number].shape)
            axes = {
                number: tuple(i for i, u in enumerate(step.near) if u not in self.scopes[number]) for number, _ in inner
            }
            for s in range(self.sizes[step.node]) if inner else ():
                sums = reduce(np.add, [part[s] for part in parts], rest[made])
                for number, _ in inner:
                    # Subtract the table's own part, which is constant along the axes of the minimum.
                    at = self.scopes[number].index(step.node)
                    own = tables[number].take(s, axis=at)
                    rest[number][(slice(None),) * at + (s,)] = sums.min(axis=axes[number]) - own
        return tables, rest

    def _eliminated(
        self, step: Elimination, bounds: Sequence[tuple[Ray, list[np.ndarray], dict[int, np.ndarray]]]
    ) -> Frontiers:
        """Return the lists that a node leaves to its neighbours."""
        made, near = len(self.lists), step.near
        shape = [self.sizes[u] for u in near]
        parts = [self._parts(step, tables) for _, tables, _ in bounds]
        # Join lists only where their least sum, with the least completion, is within all bounds.
        found, count = [], 0
        for s in range(self.sizes[step.node]):
            is_open = np.ones(shape, bool)
            for (ray, _, rest), tables in zip(bounds, parts, strict=True):
                is_open &= reduce(np.add, [table[s] for table in tables], rest[made]) <= ray.most
            cells = np.flatnonzero(is_open)
            found.append((np.full(len(cells), s), cells))
            if (count := count + len(cells)) > self.max_rows:
                raise TooManyRows
        candidates, cells = (np.concatenate(column) for column in zip(*found, strict=True))
        axes = dict(zip(near, np.unravel_index(cells, shape) if near else (), strict=True))
        axes[step.node] = candidates
        pair, cost, memory, _ = self._joined(step.tables, self._places(step, axes), len(cells))
        cell, is_open = cells[pair], np.ones(len(cost), bool)
        for ray, _, rest in bounds:
            is_open &= ray.of(cost, memory) + rest[made].ravel()[cell] <= ray.most
        cell, cost, memory = cell[is_open], cost[is_open], memory[is_open]
        kept = _front(cell, cost, memory)
        first = np.concatenate(([0], np.bincount(cell[kept], minlength=prod(shape)).cumsum()))
        return Frontiers(first, cost[kept], memory[kept])

    def _places(self, step: Elimination, axes: dict[int, np.ndarray]) -> list[np.ndarray]:
        """Return the cells of all tables of a step for the candidates `axes` of its nodes."""
        scopes = [self.scopes[number] for number in step.tables]
        return [np.ravel_multi_index([axes[u] for u in scope], [self.sizes[u] for u in scope]) for scope in scopes]

    def _joined(
        self, tables: Sequence[int], places: Sequence[np.ndarray], count: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Return the front of all sums of rows, one of each table, for each of `count` places.

        Returns: the place, cost and memory of each sum, and of each table the row that it comes from.
        """
        pair, cost = np.arange(count), np.zeros(count, np.int64)
        memory, rows = cost, list[np.ndarray]()
        for number, place in zip(tables, places, strict=True):
            lists = self.lists[number]
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
            if total > count:  # else few lists have two rows, or none has
                kept = _front(pair, cost, memory)
                pair, cost, memory = pair[kept], cost[kept], memory[kept]
                rows = [x[kept] for x in rows]
        return pair, cost, memory, rows

    def choice(self, point: int) -> tuple[int, ...]:
        """Return a choice with the cost and memory of this point."""
        target = {number: int(rows[point]) for number, rows in zip(self.ends, self.rows, strict=True)}
        found: dict[int, int] = {}
        for made, step in reversed([*enumerate(self.steps, len(self.lists) - len(self.steps))]):
            axes = {u: np.full(self.sizes[step.node], found[u]) for u in step.near}
            axes[step.node] = np.arange(self.sizes[step.node])
            places = self._places(step, axes)
            candidate, cost, memory, rows = self._joined(step.tables, places, self.sizes[step.node])
            message, row = self.lists[made], target[made]
            one = int(np.flatnonzero((cost == message.cost[row]) & (memory == message.memory[row]))[0])
            found[step.node] = int(candidate[one])
            target |= {number: int(part[one]) for number, part in zip(step.tables, rows, strict=True)}
        return tuple(int(self.kept[v][found[v]]) for v in range(len(self.sizes)))


def _front(cell: np.ndarray, cost: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Return the rows that no other row of their cell dominates, by cell and ascending memory."""
    order = np.lexsort((cost, memory, cell))
    if len(order) == 0:
        return order
    # A running minimum of the cost in each cell: costs become ranks, and each cell subtracts more than any rank.
    ranks = np.empty(len(order), np.int64)
    ranks[cost[order].argsort(kind="stable")] = np.arange(len(order))
    stepped = ranks - (np.diff(cell[order], prepend=cell[order[0]]) != 0).cumsum() * len(order)
    return order[np.concatenate(([True], stepped[1:] < np.minimum.accumulate(stepped)[:-1]))]
