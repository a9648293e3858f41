"""The integer program beside elimination and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import enumerate_all
from hypothesis import given, settings, strategies as st
from integer_program import solve_milp
from problems import filled, gap, problems, seeded, skips
from refusals import refused

from simparallel.errors import SearchError
from simparallel.search.elimination import eliminate
from simparallel.search.problem import Problem

HALF = settings.get_profile("default").max_examples // 2


@given(problems(max_nodes=5, max_candidates=4), st.booleans())
@settings(max_examples=HALF)
def test_integer_program_agrees_with_elimination(problem, is_limited):
    limit = (enumerate_all(problem.memory_problem).cost + enumerate_all(problem).memory_bytes) // 2
    best = eliminate(problem, memory_limit_bytes=limit if is_limited else None)
    found = solve_milp(problem, memory_limit_bytes=limit if is_limited else None)
    assert found.bound <= best.cost <= found.cost
    assert gap(found) < 1e-4  # of the largest cost, not of the optimum
    assert not is_limited or found.memory_bytes <= limit


def test_small_integers_are_exact():
    for seed in range(25):
        problem = seeded(seed)
        found = solve_milp(problem)
        assert (found.cost, found.bound) == (enumerate_all(problem).cost,) * 2
        assert found.method.endswith("optimal")


def test_stopped_program_has_a_choice_and_a_bound():
    problem = filled(np.random.default_rng(0), [12] * 30, skips(30), 1000)
    best = eliminate(problem)
    found = solve_milp(problem, time_limit_s=0.0)
    assert found.method == "integer program, stopped"
    assert found.bound <= best.cost <= found.cost
    assert solve_milp(problem, time_limit_s=30.0).cost == best.cost


def test_limit_that_nothing_meets_is_refused():
    problem = Problem((np.array([1, 2]),), {}, (np.array([70, 50]),))
    with refused(SearchError, least_bytes=50, limit_bytes=49):
        solve_milp(problem, memory_limit_bytes=49)
    assert solve_milp(problem, memory_limit_bytes=50).choice == (1,)


@pytest.mark.parametrize("count", [0, 1])
def test_programs_without_edges(count):
    assert solve_milp(Problem((np.array([3, 2]),) * count, {})).choice == (1,) * count
