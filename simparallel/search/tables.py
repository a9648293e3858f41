"""Min-plus variable elimination: nodes leave the graph one by one, and each leaves a table of its least cost.

Eliminating a node v writes, for each choice of its neighbours, the least sum of its own cost and its edges. That table
is then a cost of the neighbours. The last table is the optimum; the choices follow in reverse order. The order decides
how many neighbours a table has: one on chains and trees, two on chains with skips.

Tables are remembered by the identity of the arrays that they come from, so the blocks of a network that repeat are
eliminated once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush
from math import log2, prod
from typing import Any, NamedTuple

import numpy as np

from simparallel.search.dominance import Criterion, Cuts, undominated
from simparallel.search.problem import Problem

Scope = tuple[int, ...]  # nodes of a table's axes, ascending
Progress = Callable[[float], None] | None
Factor = tuple[Scope, np.ndarray]
Passed = tuple[int, np.ndarray, list[Factor]]  # a node, its own costs and its tables
_TILE = 1 << 16  # entries of a table computed at once: they stay in the cache


class BoundedChoice(NamedTuple):
    """A choice that a pass found, and a bound that no choice is below; exact if the choice reaches it."""

    choice: tuple[int, ...]
    bound: int
    is_exact: bool


def minimise(problem: Problem, max_entries: int, progress: Progress = None) -> BoundedChoice:
    """Return the optimum of the costs alone, or a bound and a good choice where a table would be too large.

    Nodes go in min-weight order (product of the neighbours' candidates, ties by fill; Dechter 1999, "Bucket
    elimination"). A table of more than `max_entries` is replaced by several of fewer neighbours, each minimised by
    itself: mini-bucket elimination (Dechter and Rish 2003, J. ACM 50). Then the result is only a lower bound, and
    the choice that follows from the tables may cost more.

    Args:
        problem: its memory is ignored.
        max_entries: most entries of a table, 8 bytes each.
        progress: called with the share of the nodes that are done, 0 to 1.

    Cost: for each node its candidates times the entries of its table, about 1 ns each.
    """
    return _Elimination(problem, max_entries).run(progress)


class Order:
    """The order of elimination: first nodes whose table joins no two neighbours, then those with the smallest table."""

    def __init__(self, sizes: list[int], near: dict[int, set[int]]) -> None:
        self.sizes, self.near = sizes, near
        self._keys = {v: self._key(v) for v in near}
        self._heap = list(self._keys.values())
        heapify(self._heap)

    def _key(self, v: int) -> tuple[float, ...]:
        near = sorted(self.near[v])
        if len(near) <= 1 or self.sizes[v] == 1:
            return 0, 0, 0, v
        weight = sum(log2(self.sizes[u]) for u in near)
        fill = sum(b not in self.near[a] for i, a in enumerate(near) for b in near[:i]) if len(near) < 16 else 0
        return min(len(near), 3), round(weight, 6), fill, v

    def next(self) -> tuple[int, bool]:
        """Return the node to eliminate next, and whether it has at most one neighbour, or a single candidate."""
        while True:
            key = self._heap[0]
            v = int(key[-1])
            if self._keys.get(v) == key:
                return v, key[0] == 0
            heappop(self._heap)

    def eliminated(self, v: int, near: dict[int, set[int]]) -> None:
        """Remove a node; `near` has the new neighbours of its neighbours."""
        del self._keys[v], self.near[v]
        self.near |= near
        for u in near:
            self._keys[u] = self._key(u)
            heappush(self._heap, self._keys[u])


class _Elimination:
    """The tables of one pass."""

    def __init__(self, problem: Problem, max_entries: int) -> None:
        self.max_entries = max_entries
        self.constant, self.is_exact = 0, True
        self._made: dict[Any, tuple[Any, np.ndarray]] = {}
        self._rows: dict[bytes, np.ndarray] = {}
        self.unary = [self._row(costs) for costs in problem.nodes]
        self.at: list[dict[Scope, np.ndarray]] = [{} for _ in problem.nodes]
        for edge in sorted(problem.edges):
            self._add(edge, problem.edges[edge])
        self.kept: dict[int, np.ndarray] = {}
        self.pruned = 0  # number of nodes eliminated before the dead ends were dropped
        self.passed: list[Passed] = []

    def run(self, progress: Progress) -> BoundedChoice:
        count = len(self.unary)
        order, is_pruned = self._order(range(count)), False
        while len(self.passed) < count:
            v, is_leaf = order.next()
            if not is_leaf and not is_pruned:
                # Only now: the leaves are gone, at S**2 each, and a search for their dead ends would cost as much.
                self._prune(left := sorted(order.near))
                order, is_pruned = self._order(left), True
                continue
            self._eliminate(v, order)
            if progress is not None:
                progress(len(self.passed) / count)
        return BoundedChoice(self._choice(), self.constant, self.is_exact)

    def _order(self, nodes: Sequence[int]) -> Order:
        return Order([len(costs) for costs in self.unary], {v: self._near(v) for v in nodes})

    def _near(self, v: int) -> set[int]:
        return {u for scope in self.at[v] for u in scope} - {v}

    def _prune(self, nodes: list[int]) -> None:
        pairs = {scope: table for v in nodes for scope, table in self.at[v].items()}
        edges = {(scope[0], scope[1]): table for scope, table in pairs.items()}
        self.pruned = len(self.passed)
        self.kept = undominated([Criterion({v: self.unary[v] for v in nodes}, edges)], nodes)
        cuts = Cuts()
        for v in nodes:
            self.unary[v] = self._row(self.unary[v][self.kept[v]])
            self.at[v].clear()
        for scope, table in edges.items():
            self._add(scope, cuts.of(table, *(self.kept[v] for v in scope)))

    def _eliminate(self, v: int, order: Order) -> None:
        factors = sorted(self.at[v].items(), key=lambda factor: factor[0])
        around = order.near[v]
        for scope, _ in factors:
            for u in scope:
                del self.at[u][scope]
        self.passed.append((v, self.unary[v], factors))
        unary: np.ndarray | None = self.unary[v]
        for bucket in self._buckets(v, factors):
            self._add(*self._minimised(v, unary, bucket))
            unary = None
        order.eliminated(v, {u: self._near(u) for u in around})

    def _buckets(self, v: int, factors: list[Factor]) -> list[list[Factor]]:
        """Partition the tables of a node so that the minimum over each part is a table within `max_entries`."""
        if len(self.unary[v]) == 1:  # no choice: the minimum of a sum is the sum of the minima
            return [[factor] for factor in factors] or [[]]
        buckets: list[tuple[set[int], list[Factor]]] = []
        for factor in sorted(factors, key=lambda factor: -factor[1].size):
            for scope, bucket in buckets:
                if prod(len(self.unary[u]) for u in {*scope, *factor[0]} - {v}) <= self.max_entries:
                    scope.update(factor[0])
                    bucket.append(factor)
                    break
            else:
                buckets.append((set(factor[0]), [factor]))
        self.is_exact &= len(buckets) < 2
        return [sorted(bucket, key=lambda factor: factor[0]) for _, bucket in buckets] or [[]]

    def _minimised(self, v: int, unary: np.ndarray | None, bucket: list[Factor]) -> tuple[Scope, np.ndarray]:
        """Return the minimum over v of the sum of these tables, and the nodes of its axes."""
        scope = tuple(sorted({u for nodes, _ in bucket for u in nodes} - {v}))
        frame = v, *scope
        # The positions of the axes, without the nodes' numbers: the same in blocks that repeat.
        places = tuple(tuple(map(frame.index, nodes)) for nodes, _ in bucket)
        inputs = (unary, *(table for _, table in bucket))
        key = (places, *map(id, inputs))
        if key not in self._made:
            sizes = {u: len(self.unary[u]) for u in frame}
            factors = bucket if unary is None else [((v,), unary), *bucket]
            self._made[key] = inputs, _least(_aligned(factors, frame, sizes))
        return scope, self._made[key][1]

    def _add(self, scope: Scope, table: np.ndarray) -> None:
        """Add a table to the costs of its nodes."""
        if not scope:
            self.constant += int(table)
        elif len(scope) == 1:
            self.unary[scope[0]] = self._row(self.unary[scope[0]] + table)
        else:
            if (old := self.at[scope[0]].get(scope)) is not None:
                key = ("sum", id(old), id(table))
                if key not in self._made:
                    self._made[key] = (old, table), old + table
                table = self._made[key][1]
            for u in scope:
                self.at[u][scope] = table

    def _row(self, costs: np.ndarray) -> np.ndarray:
        """Return one array for all rows of the same numbers."""
        return self._rows.setdefault(costs.tobytes(), costs)

    def _choice(self) -> tuple[int, ...]:
        found = self._backwards(self.passed[self.pruned :], {})
        # Tables made before the dead ends were dropped number the candidates as the problem does.
        found = {v: int(self.kept[v][candidate]) for v, candidate in found.items()} if self.kept else found
        found = self._backwards(self.passed[: self.pruned], found)
        return tuple(found[v] for v in range(len(self.unary)))

    def _backwards(self, passed: list[Passed], found: dict[int, int]) -> dict[int, int]:
        for v, unary, factors in reversed(passed):
            costs = unary
            for scope, table in factors:
                costs = costs + table[tuple(slice(None) if u == v else found[u] for u in scope)]
            found[v] = int(costs.argmin())
        return found


def _aligned(factors: Sequence[Factor], frame: Scope, sizes: Mapping[int, int] | Sequence[int]) -> list[np.ndarray]:
    """Return tables that broadcast to the axes of `frame`; those that lack its last axis come first."""
    parts = []
    for scope, table in factors:
        turned = np.ascontiguousarray(table.transpose(sorted(range(len(scope)), key=lambda i: frame.index(scope[i]))))
        parts.append(turned.reshape([sizes[u] if u in scope else 1 for u in frame]))
    return sorted(parts, key=lambda part: (part.shape[-1], part.size))


def _least(parts: list[np.ndarray]) -> np.ndarray:
    """Return the minimum over the first axis of the sum of aligned tables."""
    shape = np.broadcast_shapes(*(part.shape for part in parts))
    if len(parts) > 1 and parts[0].size == shape[0]:  # the node's own costs
        parts = [parts[0] + parts[1], *parts[2:]]
    if len(parts) == 1:
        return np.asarray(parts[0].min(axis=0))
    out = np.empty(shape[1:], parts[0].dtype)
    _fill(parts, out)
    return out


def _fill(parts: list[np.ndarray], out: np.ndarray) -> None:
    """Write the minimum over axis 0 of the sum of `parts`, which broadcast to (candidates, *out.shape)."""
    if out.size > _TILE:
        rows = max(1, _TILE // prod(out.shape[1:]))
        for first in range(0, len(out), rows):
            tile = slice(first, first + rows)
            inner = [part if part.shape[1] == 1 else part[:, tile] for part in parts]
            if rows == 1 and out.ndim > 1:
                _fill([part[:, 0] for part in inner], out[first])
            else:
                _fill(inner, out[tile])
    elif out.size * len(parts[0]) <= _TILE:
        np.min(reduce(np.add, parts), axis=0, out=out)
    else:
        buffer = np.empty_like(out)
        for s in range(len(parts[0])):
            rest = reduce(np.add, [part[s] for part in parts[:-1]])
            if s == 0:
                np.add(rest, parts[-1][s], out=out)
            else:
                np.add(rest, parts[-1][s], out=buffer)
                np.minimum(out, buffer, out=out)
