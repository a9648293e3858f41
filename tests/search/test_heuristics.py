"""Propagation, coordinate descent and annealing: never below the optimum, and what each promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st
from problems import chain, filled, problems, seeded
from refusals import refused

from simparallel.errors import InputError, SearchError
from simparallel.search.annealing import anneal
from simparallel.search.exhaustive import enumerate_all
from simparallel.search.local import improve
from simparallel.search.problem import Problem
from simparallel.search.propagation import propagate


@given(problems(), st.integers(0, 9))
def test_heuristics_are_never_below_the_optimum(problem, seed):
    best = enumerate_all(problem).cost
    spread, walked = propagate(problem, {}), anneal(problem, seed=seed, steps=50)
    for found in (spread, walked):
        assert found.bound <= best <= found.cost == problem.cost(found.choice)
    assert best <= problem.cost(improve(problem, spread.choice)) <= spread.cost
    assert walked.cost <= spread.cost  # where the walk starts


@given(problems(), st.integers(0, 9))
def test_heuristics_keep_a_limit(problem, seed):
    smallest = enumerate_all(problem.memory_problem)
    limit = (smallest.cost + enumerate_all(problem).memory_bytes) // 2
    best = enumerate_all(problem, memory_limit_bytes=limit).cost
    descended = improve(problem, smallest.choice, limit)
    walked = anneal(problem, memory_limit_bytes=limit, seed=seed, steps=50, start=smallest.choice)
    for choice in (descended, walked.choice):
        assert problem.memory_bytes(choice) <= limit
        assert best <= problem.cost(choice) <= problem.cost(smallest.choice)


@given(problems())
def test_descent_ends_where_no_node_improves(problem):
    found = improve(problem, [0] * len(problem))
    for v, costs in enumerate(problem.nodes):
        for candidate in range(len(costs)):
            assert problem.cost(found) <= problem.cost([*found[:v], candidate, *found[v + 1 :]])


def test_long_walk_finds_most_optima():
    found = [anneal(seeded(seed), steps=3000).cost == enumerate_all(seeded(seed)).cost for seed in range(20)]
    assert sum(found) >= 18


def test_walk_depends_on_its_seed_alone():
    problem = filled(np.random.default_rng(0), [6] * 30, chain(30), 1000)
    walks = [anneal(problem, seed=seed, steps=300) for seed in (1, 1, 2)]
    assert walks[0] == walks[1]
    assert walks[0].choice != walks[2].choice


def test_walk_comes_down_to_the_limit():
    problem = filled(np.random.default_rng(1), [6] * 20, chain(20), 1000)
    limit = problem.memory_problem.least * 2
    start = [int(of.argmax()) for of in problem.memory]
    assert problem.memory_bytes(start) > limit
    assert anneal(problem, memory_limit_bytes=limit, steps=2000, start=start).memory_bytes <= limit


def test_walk_that_never_fits_is_refused():
    problem = Problem((np.array([1, 2]),), {}, (np.array([70, 50]),))
    with refused(SearchError, least_bytes=50, limit_bytes=49):
        anneal(problem, memory_limit_bytes=49, steps=10)


def test_progress_of_a_walk_ends_at_one():
    seen = []
    anneal(seeded(3), steps=3000, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


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


@pytest.mark.parametrize("fixed", [{4: 0}, {-1: 0}, {0: 2}, {0: -1}])
def test_bad_fixed_candidate_is_refused(fixed):
    problem = Problem((np.array([0, 0]),) * 4, {})
    with refused(InputError, node=next(iter(fixed))):
        propagate(problem, fixed)
