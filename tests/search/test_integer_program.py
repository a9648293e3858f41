"""The integer program beside elimination and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import enumerate_all
from hypothesis import given, settings
from integer_program import solve_milp
from problems import filled, gap, problems, seeded, skips

from simparallel.search.elimination import eliminate
from simparallel.search.problem import Problem

HALF = settings.get_profile("default").max_examples // 2


@given(problems(max_nodes=5, max_candidates=4))
@settings(max_examples=HALF)
def test_integer_program_agrees_with_elimination(problem):
    best, found = eliminate(problem), solve_milp(problem)
    assert found.bound <= best.cost <= found.cost
    assert gap(found) < 1e-4  # of the largest cost, not of the optimum


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


@pytest.mark.parametrize("count", [0, 1])
def test_programs_without_edges(count):
    assert solve_milp(Problem((np.array([3, 2]),) * count, {})).choice == (1,) * count
