"""Problems of the search: drawn by Hypothesis, or by a seed."""

from __future__ import annotations

from math import inf

import numpy as np
from hypothesis import strategies as st

from simparallel.search.problem import Problem


def seeded(seed, *, max_nodes=6, max_candidates=6, most=12):
    """Return a problem of random size and density; small numbers, so that many choices are equal."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, max_candidates + 1, rng.integers(0, max_nodes + 1))
    pairs = [(u, v) for v in range(len(sizes)) for u in range(v)]
    edges, edge_memory = ([pair for pair in pairs if rng.random() < density] for density in rng.random(2))
    return filled(rng, sizes, edges, most, edge_memory)


def filled(rng, sizes, edges, most, edge_memory=()):
    """Return a problem of these sizes and edges, with random costs and memory."""
    rows = [[rng.integers(0, most + 1, size) for size in sizes] for _ in range(2)]
    tables = [
        {(u, v): rng.integers(0, most + 1, (sizes[u], sizes[v])) for u, v in keys} for keys in (edges, edge_memory)
    ]
    return Problem(tuple(rows[0]), tables[0], tuple(rows[1]), tables[1])


def chain(count):
    return [(v, v + 1) for v in range(count - 1)]


def skips(count, length=3):
    return [*chain(count), *((v, v + length) for v in range(0, count - length, length))]


def clique(count):
    return [(u, v) for v in range(count) for u in range(v)]


@st.composite
def problems(draw, max_nodes=6, max_candidates=5):
    """Draw a problem: a chain, a chain with skips, a clique, or any edges, in several components or none."""
    count = draw(st.integers(0, max_nodes))
    kind = draw(st.sampled_from([chain, skips, clique, None]))
    edges = kind(count) if kind else [pair for pair in clique(count) if draw(st.booleans())]
    sizes = draw(st.lists(st.integers(1, max_candidates), min_size=count, max_size=count))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    most = draw(st.sampled_from([1, 5, 1000, 10**12]))
    held = edges if draw(st.booleans()) else ()
    return filled(rng, sizes, edges, most, held)


def gap(solution):
    """Return how far the cost may be from the optimum, as a fraction of the bound."""
    return 0.0 if solution.is_exact else (solution.cost - solution.bound) / solution.bound if solution.bound else inf
