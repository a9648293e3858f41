"""Propagation and coordinate descent: never below the optimum, and what each promises."""

from __future__ import annotations

import numpy as np
from exhaustive import enumerate_all
from hypothesis import given, strategies as st
from problems import problems

from simparallel.search.local import improve
from simparallel.search.problem import Problem
from simparallel.search.propagation import propagate


@given(problems())
def test_heuristics_are_never_below_the_optimum(problem):
    best, found = enumerate_all(problem).cost, propagate(problem, {})
    assert found.bound <= best <= found.cost == problem.cost(found.choice)
    assert best <= problem.cost(improve(problem, found.choice)) <= found.cost


@given(problems())
def test_descent_keeps_a_limit(problem):
    smallest = enumerate_all(problem.memory_problem)
    limit = (smallest.cost + enumerate_all(problem).memory_bytes) // 2
    best = enumerate_all(problem, memory_limit_bytes=limit).cost
    choice = improve(problem, smallest.choice, limit)
    assert problem.memory_bytes(choice) <= limit
    assert best <= problem.cost(choice) <= problem.cost(smallest.choice)


@given(problems())
def test_descent_ends_where_no_node_improves(problem):
    found = improve(problem, [0] * len(problem))
    for v, costs in enumerate(problem.nodes):
        for candidate in range(len(costs)):
            assert problem.cost(found) <= problem.cost([*found[:v], candidate, *found[v + 1 :]])


@given(problems(), st.data())
def test_propagation_keeps_what_is_fixed(problem, data):
    nodes = data.draw(st.sets(st.integers(0, max(0, len(problem) - 1)), max_size=len(problem)))
    fixed = {v: data.draw(st.integers(0, len(problem.nodes[v]) - 1)) for v in nodes if len(problem)}
    found = propagate(problem, fixed)
    assert {v: found.choice[v] for v in fixed} == fixed


def test_propagation_follows_edges_then_nodes():
    """0 is fixed; 1 follows the edge although it costs more; 2 has equal edges and takes its cheapest; 3 is apart."""
    nodes = tuple(map(np.array, ([0, 0], [1, 9], [5, 3], [8, 7, 7])))
    edges = {(0, 1): np.array([[0, 1], [1, 0]]), (1, 2): np.array([[4, 4], [4, 4]])}
    assert propagate(Problem(nodes, edges), {0: 1}).choice == (1, 1, 1, 1)
    # Without a fixed node the costliest one of each part starts with its cheapest candidate: 2, then 1, then 0.
    assert propagate(Problem(nodes, edges), {}).choice == (0, 0, 1, 1)
