"""Dead-end elimination: drop candidates that another one of the same node replaces at no cost, in any choice."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simparallel.search.problem import Pairs

_CHUNK = 1 << 20  # entries compared at once


class Criterion(NamedTuple):
    """One quantity to minimise, cost or memory: of nodes and of pairs of nodes."""

    nodes: Mapping[int, np.ndarray]
    edges: Pairs


def undominated(criteria: Sequence[Criterion], nodes: Iterable[int]) -> dict[int, np.ndarray]:
    """Return the candidates that Goldstein's criterion keeps (Biophys. J. 66, 1994): some optimum needs no others.

    Candidate s of node v, with cost U[s] and row R[s] of each edge, is dropped if some s' has U[s'] - U[s] + sum over
    edges of max_t(R[s', t] - R[s, t]) <= 0: replacing s by s' never costs more. With several criteria s' must be at
    least as good by each. Of equal candidates the first stays. A drop at one node may allow drops at its neighbours, so
    this repeats until nothing changes.

    Args:
        criteria: cost alone for one optimum; cost and memory for all points of their Pareto front.
        nodes: the nodes that may lose candidates; all edges are between them.

    Cost: S_v**2 for each node and edge, S_v being the number of candidates, and S_u times that for the pairs of
        candidates that a sample of columns does not rule out. Identical arrays are compared only once.
    """
    kept = {v: np.arange(len(criteria[0].nodes[v])) for v in nodes}
    near: dict[int, set[int]] = {v: set() for v in kept}
    for criterion in criteria:
        for u, v in criterion.edges:
            near[u].add(v)
            near[v].add(u)
    cuts = Cuts()
    known: dict[tuple[int, ...], np.ndarray] = {}
    queue = deque(kept)
    while queue:
        v = queue.popleft()
        sides = []
        for criterion in criteria:
            tables = [cuts.of(criterion.nodes[v], kept[v])]
            for u in sorted(near[v]):
                pair, axes = ((u, v), (u, v)) if u < v else ((v, u), (v, u))
                if pair in criterion.edges:
                    table = cuts.of(criterion.edges[pair], *(kept[axis] for axis in axes))
                    tables.append(cuts.turned(table) if u < v else table)
            sides.append(tables)
        key = tuple(id(table) for tables in sides for table in (*tables, None))
        if key not in known:
            known[key] = _best(sides)
        if not known[key].all():
            kept[v] = kept[v][known[key]]
            queue.extend(sorted(near[v] - set(queue)))
    return kept


class Cuts:
    """Subarrays by the numbers of the kept candidates; equal parts of one array are one object."""

    def __init__(self) -> None:
        self._found: dict[tuple[object, ...], tuple[np.ndarray, np.ndarray]] = {}

    def of(self, table: np.ndarray, *kept: np.ndarray) -> np.ndarray:
        """Return the entries of these candidates along each axis; the array itself if that is all."""
        if table.shape == tuple(map(len, kept)):
            return table
        key = (id(table), *(part.tobytes() for part in kept))
        if key not in self._found:
            self._found[key] = table, table[np.ix_(*kept)]  # the reference to `table` keeps its id from being reused
        return self._found[key][1]

    def turned(self, table: np.ndarray) -> np.ndarray:
        """Return the transpose."""
        key = (id(table), "turned")
        if key not in self._found:
            self._found[key] = table, np.ascontiguousarray(table.T)
        return self._found[key][1]


def _best(sides: list[list[np.ndarray]]) -> np.ndarray:
    """Return a mask of the candidates that stay; each side is (U, R of edge 1, R of edge 2, ...)."""
    count = len(sides[0][0])
    may = ~np.eye(count, dtype=bool)
    for unary, *tables in sides:  # a sample of two columns rules out most pairs
        worse = unary[:, None] - unary
        for table in tables:
            first, last = table[:, 0], table[:, -1]
            worse += np.maximum(first[:, None] - first, last[:, None] - last)
        may &= worse <= 0
    better, other = np.nonzero(may)
    for stride in (16, 1):
        for unary, *tables in sides:
            worse = unary[better] - unary[other]
            for table in tables:
                part = np.ascontiguousarray(table[:, ::stride])
                step = max(1, _CHUNK // part.shape[1])
                for start in range(0, len(better), step):
                    rows = slice(start, start + step)
                    worse[rows] += (part[better[rows]] - part[other[rows]]).max(axis=1)
            better, other = better[worse <= 0], other[worse <= 0]
    wins = np.zeros((count, count), bool)
    wins[better, other] = True
    # Dominance is transitive, so drop all dominated ones at once; of two that dominate each other the first stays.
    wins &= np.triu(wins) | ~wins.T
    return np.logical_not(wins.any(axis=0))
