"""The abstract problem of the search: a graph whose nodes have candidates, and whose costs add up.

A node stands for an op, a candidate for a way to cut it, an edge for the cost of moving data between two. The
solvers know none of this: they see integers. Costs are int64, so every sum is exact and every bound a real bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from simparallel.errors import InputError

Pairs = Mapping[tuple[int, int], np.ndarray]
Links = list[list[tuple[int, np.ndarray]]]
MOST = 1 << 61  # sums of costs, and of weighted memory, stay below it: two of them fit into an int64


@dataclass(frozen=True, eq=False)
class Problem:
    """Choose a candidate for each node: the cost is the sum of the costs of nodes and edges.

    Arrays are read, never copied or written. Give equal edges the same array: solvers then work on it only once.

    Args:
        nodes: costs [ps] of each node's candidates, int64, shape (S_v,), S_v > 0; none is negative.
        edges: (u, v) with u < v -> costs [ps] of each pair of candidates, int64, shape (S_u, S_v).
        memory: [bytes] of each node's candidates, as `nodes`; None: nodes hold nothing.
        edge_memory: [bytes] of pairs of candidates, as `edges`; the pairs of nodes may be others than in `edges`.

    Raises:
        InputError: a node without a candidate (fact: `node`), or sums beyond 2**61.
    """

    nodes: tuple[np.ndarray, ...]
    edges: Pairs
    memory: tuple[np.ndarray, ...] | None = None
    edge_memory: Pairs = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        for node, costs in enumerate(self.nodes):
            if not len(costs):
                raise InputError(f"Problem: nodes[{node}] has no candidate; every node needs one.", node=node)
        if self.most >= MOST:
            raise InputError(
                f"Problem: the largest nodes and edges add up to {self.most}, which is not below 2**61; use a coarser "
                "unit."
            )

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)

    def cost(self, choice: Sequence[int]) -> int:
        """Return the cost [ps] of a choice: one candidate's number for each node."""
        return _total(self.nodes, self.edges, choice)

    def memory_bytes(self, choice: Sequence[int]) -> int:
        """Return the memory [bytes] of a choice: one candidate's number for each node."""
        return _total(self.memory or (), self.edge_memory, choice)

    @cached_property
    def memory_problem(self) -> Problem:
        """The same graph with memory [bytes] in the place of costs."""
        return Problem(self.memory or tuple(np.zeros_like(costs) for costs in self.nodes), self.edge_memory)

    @cached_property
    def links(self) -> Links:
        """For each node, its neighbours with the edge's costs, shape (own candidates, neighbour's candidates)."""
        found: Links = [[] for _ in self.nodes]
        for (u, v), table in self.edges.items():
            found[u].append((v, table))
            found[v].append((u, table.T))
        return found

    def costs_at(self, node: int, choice: Sequence[int]) -> np.ndarray:
        """Return the cost of each candidate of a node, with its edges, given the choice of all other nodes."""
        costs = self.nodes[node].copy()
        for other, table in self.links[node]:
            costs += table[:, choice[other]]
        return costs

    @cached_property
    def least(self) -> int:
        """The sum of the least costs of all nodes and edges: a bound that takes no search."""
        return self._sum_of(np.min)

    @cached_property
    def most(self) -> int:
        """The sum of the largest costs of all nodes and edges."""
        return self._sum_of(np.max)

    def _sum_of(self, extreme: Callable[[np.ndarray], Any]) -> int:
        of_edge = {id(table): int(extreme(table)) for table in {id(x): x for x in self.edges.values()}.values()}
        return sum(int(extreme(x)) for x in self.nodes) + sum(of_edge[id(table)] for table in self.edges.values())


@dataclass(frozen=True)
class Solution:
    """A choice, and how good it is known to be.

    Attributes:
        choice: the candidate of each node.
        cost: of the choice [ps].
        bound: no choice (within the limit of memory, if there is one) costs less [ps].
        memory_bytes: of the choice.
        method: the solver, and how it came to its bound.
    """

    choice: tuple[int, ...]
    cost: int
    bound: int
    memory_bytes: int
    method: str

    @classmethod
    def of(cls, problem: Problem, choice: Iterable[int], bound: int, method: str) -> Solution:
        """Return the solution of this choice, with its cost and memory."""
        found = tuple(map(int, choice))
        return cls(found, problem.cost(found), bound, problem.memory_bytes(found), method)

    @property
    def is_exact(self) -> bool:
        """Whether the choice is proven to be optimal."""
        return self.cost == self.bound


def _total(nodes: Sequence[np.ndarray], edges: Pairs, choice: Sequence[int]) -> int:
    ends = sum(int(table[choice[u], choice[v]]) for (u, v), table in edges.items())
    return ends + sum(int(costs[candidate]) for costs, candidate in zip(nodes, choice, strict=False))
