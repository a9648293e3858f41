"""Elimination with lists instead of numbers: all pairs of cost and memory that no other pair dominates.

Where a table of `tables.py` has one number, the least cost, a table here has a list: the Pareto front of the costs and
memory of the eliminated nodes, as in TensorOpt's frontier tracking (Cai et al. 2020, arXiv 2004.10856).

Lists grow with the graph: where they would be longer than allowed, `pareto.hull` gives some points of the front.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from simparallel.search.dominance import Criterion, Cuts, undominated
from simparallel.search.problem import Problem
from simparallel.search.tables import Order, Scope

_ROW = 8  # a row of a list takes the memory of about eight entries of a table


class TooManyRows(Exception):
    """Lists would be longer than allowed."""


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


class Frontier:
    """The Pareto front of cost and memory of all choices.

    Args:
        problem: what to choose.
        max_entries: most entries of a table of `tables.py`; a table here has at most an eighth as many rows.

    Attributes:
        cost, memory: of the points, by ascending memory.

    Raises:
        TooManyRows: a table would have more.
    """

    def __init__(self, problem: Problem, max_entries: int) -> None:
        self.max_rows = max_entries // _ROW
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
        self.lists = [Frontiers(np.arange(x.size + 1), x.ravel(), y.ravel()) for x, y in zip(costs, held, strict=True)]
        for step in self.steps:
            self.lists.append(self._eliminated(step))
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
            if prod(self.sizes[u] for u in (v, *around)) > self.max_rows:
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

    def _eliminated(self, step: Elimination) -> Frontiers:
        """Return the lists that a node leaves to its neighbours."""
        near, size = step.near, self.sizes[step.node]
        shape = [self.sizes[u] for u in near]
        candidates, cells = np.divmod(np.arange(size * prod(shape)), prod(shape))
        axes = dict(zip(near, np.unravel_index(cells, shape) if near else (), strict=True))
        axes[step.node] = candidates
        pair, cost, memory, _ = self._joined(step.tables, self._places(step, axes), len(cells))
        cell = cells[pair]
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
