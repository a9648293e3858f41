"""Elimination beside brute force: exact where tables fit, bounds where they do not."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from exhaustive import enumerate_all
from hypothesis import assume, given, strategies as st
from problems import chain, filled, gap, problems, seeded, skips

from simparallel.search import dominance, tables
from simparallel.search.elimination import eliminate
from simparallel.search.problem import Problem


def check(problem):
    """Compare with brute force: the cost, and the bound."""
    best, found = enumerate_all(problem), eliminate(problem)
    assert (problem.cost(found.choice), problem.memory_bytes(found.choice)) == (found.cost, found.memory_bytes)
    assert (found.cost, found.bound, found.is_exact) == (best.cost, best.cost, True)


@given(problems())
def test_optimum_is_that_of_brute_force(problem):
    check(problem)


def test_many_seeded_graphs():
    for seed in range(500):
        check(seeded(seed))


@given(problems(max_nodes=5), st.integers(0, 40))
def test_small_tables_keep_the_optimum_between(problem, max_entries):
    found = eliminate(problem, max_entries=max_entries)
    assert found.bound <= enumerate_all(problem).cost <= found.cost == problem.cost(found.choice)


def test_small_tables_leave_a_gap_somewhere():
    """The red control: these graphs do need mini-buckets, and some bounds are below the optimum."""
    found = [eliminate(seeded(seed), max_entries=1) for seed in range(50)]
    assert {solution.method for solution in found} == {"elimination", "elimination with mini-buckets"}
    assert any(gap(solution) > 0 for solution in found)


@given(problems(), st.randoms(use_true_random=False))
def test_order_and_names_do_not_matter(problem, random):
    count = len(problem)
    place = random.sample(range(count), count)  # node v becomes node place[v]
    turns = [np.array(random.sample(range(len(costs)), len(costs))) for costs in problem.nodes]

    def moved(pairs):
        found = {}
        for (u, v), table in random.sample([*pairs.items()], len(pairs)):
            a, b, turned = place[u], place[v], table[np.ix_(turns[u], turns[v])]
            found[min(a, b), max(a, b)] = turned if a < b else turned.T
        return found

    back = np.argsort(np.array(place, int))
    rows = [tuple(of[v][turns[v]] for v in back) for of in (problem.nodes, problem.memory)]
    other = Problem(rows[0], moved(problem.edges), rows[1], moved(problem.edge_memory))
    ours, theirs = eliminate(problem), eliminate(other)
    assert ours.cost == theirs.cost
    assert problem.cost([int(turns[v][theirs.choice[place[v]]]) for v in range(count)]) == ours.cost


@given(problems(), st.integers(1, 5))
def test_repeated_blocks_cost_as_written_out(block, count):
    """Copies of a graph that share arrays, in a chain, beside the same with arrays of their own."""
    assume(len(block))
    size = len(block)
    link = np.random.default_rng(0).integers(0, 9, (len(block.nodes[-1]), len(block.nodes[0])))
    edges = {(u + size * k, v + size * k): table for k in range(count) for (u, v), table in block.edges.items()}
    edges |= {(b - 1, b): link for _, b in pairwise(range(0, size * count, size))}
    shared = Problem(block.nodes * count, edges)
    own = Problem(tuple(x.copy() for x in shared.nodes), {edge: table.copy() for edge, table in edges.items()})
    found = eliminate(shared)
    assert (found.cost, found.cost) == (eliminate(own).cost, shared.cost(found.choice))


@pytest.mark.parametrize("tile", [1, 3, 16])
def test_tables_in_tiles_are_those_in_one_piece(monkeypatch, tile):
    monkeypatch.setattr(tables, "_TILE", tile)
    for seed in range(100):
        check(seeded(seed))


def test_dead_ends_go_and_equals_stay_once(monkeypatch):
    """Candidate 1 is worse than 0 by 1 at least, 2 is a copy of 0, and 3 is better beside a candidate of node 1."""
    monkeypatch.setattr(dominance, "_CHUNK", 1)
    nodes = {0: np.array([1, 2, 1, 3]), 1: np.array([0, 2])}
    edges = {(0, 1): np.array([[5, 5], [5, 6], [5, 5], [9, 0]])}
    kept = dominance.undominated([dominance.Criterion(nodes, edges)], [0, 1])
    assert kept[0].tolist() == [0, 3]
    # With memory as the second criterion, 1 stays where it holds less.
    memory = dominance.Criterion({0: np.array([7, 6, 7, 8]), 1: np.array([0, 0])}, {})
    assert dominance.undominated([dominance.Criterion(nodes, edges), memory], [0, 1])[0].tolist() == [0, 1, 3]


def test_long_chain_with_skips_is_exact():
    """Too large for brute force: the bound is the proof."""
    found = eliminate(filled(np.random.default_rng(1), [8] * 120, skips(120), 10**9))
    assert (found.is_exact, found.method) == (True, "elimination")


def test_chain_is_that_of_dynamic_programming():
    rng = np.random.default_rng(2)
    problem = filled(rng, [30] * 200, chain(200), 10**12)
    costs = problem.nodes[0]
    for v in range(1, 200):
        costs = (costs[:, None] + problem.edges[v - 1, v]).min(axis=0) + problem.nodes[v]
    assert eliminate(problem).cost == costs.min()


def test_shared_node_joins_many():
    """A parameter that many nodes use is a star: every ray is a leaf."""
    problem = filled(np.random.default_rng(3), [9] * 300, [(0, v) for v in range(1, 300)], 10**9)
    arms = sum((problem.edges[0, v] + problem.nodes[v]).min(axis=1) for v in range(1, 300))
    assert eliminate(problem).cost == (problem.nodes[0] + arms).min()


def test_progress_ends_at_one():
    seen = []
    eliminate(filled(np.random.default_rng(4), [5] * 9, skips(9), 9), progress=seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] <= seen[-1] == 1.0
