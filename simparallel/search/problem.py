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

from simparallel.base.checks import is_integer
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
        InputError: a node without a candidate; a wrong dtype, shape or pair of nodes; a negative number; sums beyond
            2**61. Facts: `node` or `edge`, and the `field`.
    """

    nodes: tuple[np.ndarray, ...]
    edges: Pairs
    memory: tuple[np.ndarray, ...] | None = None
    edge_memory: Pairs = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        most = {}  # field -> sum of the largest entries of its arrays
        for name, arrays in (("nodes", self.nodes), ("memory", self.memory or ())):
            if arrays and len(arrays) != len(self.nodes):
                raise InputError(
                    f"Problem: memory of {len(arrays)} nodes, but there are {len(self.nodes)}.", field=name
                )
            total = 0
            for node, array in enumerate(arrays):
                shape = (None,) if name == "nodes" else self.nodes[node].shape
                total += _most(name, "node", node, array, shape)
            most[name] = total
        for name, pairs in (("edges", self.edges), ("edge_memory", self.edge_memory)):
            seen: dict[tuple[int, tuple[int, ...]], int] = {}
            total = 0
            for edge, array in pairs.items():
                if not _is_pair(edge, len(self.nodes)):
                    raise InputError(
                        f"Problem: {name}[{edge!r}]: a key is a pair (u, v) of node numbers with "
                        f"0 <= u < v < {len(self.nodes)}.",
                        field=name,
                        edge=edge,
                    )
                shape = (len(self.nodes[edge[0]]), len(self.nodes[edge[1]]))
                key = id(array), shape
                if key not in seen:
                    seen[key] = _most(name, "edge", edge, array, shape)
                total += seen[key]
            most[name] = total
        for first, second, unit in (("nodes", "edges", "ps"), ("memory", "edge_memory", "bytes")):
            if (total := most[first] + most[second]) >= MOST:
                raise InputError(
                    f"Problem: the largest {first} and {second} add up to {total} {unit}, which is not below 2**61; "
                    "use a coarser unit.",
                    field=first,
                )

    def __len__(self) -> int:
        """Return the number of nodes."""
        return len(self.nodes)

    def cost(self, choice: Sequence[int]) -> int:
        """Return the cost [ps] of a choice: one candidate's number for each node."""
        self._check(choice)
        return _total(self.nodes, self.edges, choice)

    def memory_bytes(self, choice: Sequence[int]) -> int:
        """Return the memory [bytes] of a choice: one candidate's number for each node."""
        self._check(choice)
        return _total(self.memory or (), self.edge_memory, choice)

    def _check(self, choice: Sequence[int]) -> None:
        if len(choice) != len(self):
            raise InputError(f"choice: {len(choice)} candidates, but there are {len(self)} nodes.", nodes=len(self))
        for node, (candidate, costs) in enumerate(zip(choice, self.nodes, strict=True)):
            if not 0 <= candidate < len(costs):
                raise InputError(
                    f"choice: node {node} has candidates 0 to {len(costs) - 1}, not {candidate}.", node=node
                )

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
        """Return the solution of this choice; its cost and memory are computed anew."""
        found = tuple(map(int, choice))
        return cls(found, problem.cost(found), bound, problem.memory_bytes(found), method)

    @property
    def is_exact(self) -> bool:
        """Whether the choice is proven to be optimal."""
        return self.cost == self.bound


def _is_pair(edge: Any, count: int) -> bool:
    is_tuple = isinstance(edge, tuple) and len(edge) == 2 and all(map(is_integer, edge))
    return is_tuple and 0 <= edge[0] < edge[1] < count


def _most(name: str, what: str, where: Any, array: Any, shape: tuple[int | None, ...]) -> int:
    """Return the largest entry of an array of the problem, checked."""
    place = f"Problem: {name}[{where!r}]"
    facts = {"field": name, what: where}
    if not isinstance(array, np.ndarray) or array.dtype != np.int64:
        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
        raise InputError(f"{place} must be an array of int64, got {kind}.", **facts)
    if array.ndim != len(shape) or (array.shape != shape and shape != (None,)):
        expected = "(candidates,)" if shape == (None,) else shape
        raise InputError(f"{place} must have shape {expected}, got {array.shape}.", **facts)
    if array.size == 0:
        raise InputError(f"{place} has no candidate; every node needs one.", **facts)
    if (least := int(array.min())) < 0:
        raise InputError(f"{place} holds {least}; costs and bytes must not be negative.", **facts)
    return int(array.max())


def _total(nodes: Sequence[np.ndarray], edges: Pairs, choice: Sequence[int]) -> int:
    ends = sum(int(table[choice[u], choice[v]]) for (u, v), table in edges.items())
    return ends + sum(int(costs[candidate]) for costs, candidate in zip(nodes, choice, strict=False))
