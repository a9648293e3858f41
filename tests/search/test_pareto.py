"""The front of cost against memory beside brute force."""

from __future__ import annotations

import numpy as np
from exhaustive import totals
from hypothesis import given, strategies as st
from problems import filled, gap, problems, seeded, skips

from simparallel.search.elimination import eliminate
from simparallel.search.pareto import pareto, priced


def brute_front(problem):
    """Return (memory, cost) of all choices that no other is below in both, by ascending memory."""
    costs, memory = (np.concatenate(column) for column in list(zip(*totals(problem), strict=True))[1:])
    front = []
    for point in sorted(zip(memory.tolist(), costs.tolist(), strict=True)):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def points_of(solutions):
    return [(solution.memory_bytes, solution.cost) for solution in solutions]


@given(problems())
def test_front_is_that_of_brute_force(problem):
    found = pareto(problem, points=10**6)
    assert points_of(found) == brute_front(problem)
    assert all(solution.is_exact and problem.cost(solution.choice) == solution.cost for solution in found)


@given(problems(), st.integers(0, 8))
def test_hull_is_between_bounds_and_the_front(problem, max_entries):
    front = brute_front(problem)
    found = pareto(problem, points=10**6, max_entries=max_entries)
    for solution in found:
        best = min(cost for memory, cost in front if memory <= solution.memory_bytes)
        assert solution.bound <= best <= solution.cost
    assert points_of(found) == sorted(set(points_of(found)))
    costs = [solution.cost for solution in found]
    assert costs == sorted(set(costs), reverse=True)


def test_corners_of_the_hull_are_on_the_front():
    """With tables that fit, but lists that do not, each point but the first is an optimum at its memory."""
    count = 0
    for seed in range(40):
        problem = seeded(seed, max_nodes=5)
        found = pareto(problem, max_entries=300)
        fits = eliminate(priced(problem, 1.0), max_entries=300).method == "elimination"
        if fits and "hull" in found[0].method:
            count += 1
            assert set(points_of(found)[1:]) <= set(brute_front(problem))
    assert count > 3


def test_long_front_is_thinned_evenly():
    problem = seeded(5)
    front = brute_front(problem)
    found = points_of(pareto(problem, points=3))
    assert len(found) == 3 < len(front)
    assert (found[0], found[-1]) == (front[0], front[-1])
    assert set(found) <= set(front)


def test_front_of_a_large_graph_meets_its_optima():
    problem = filled(np.random.default_rng(0), [10] * 60, skips(60), 10**9)
    found = pareto(problem, points=12, max_entries=10**6)
    assert found[0].method.startswith("Lagrange")
    free, least = eliminate(problem), eliminate(problem.memory_problem)
    assert (found[-1].cost, found[0].memory_bytes) == (free.cost, least.cost)
    assert len(found) > 5
    assert all(gap(solution) < 1e-7 for solution in found[1:])
