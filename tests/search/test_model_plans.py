"""Searches for plans of the models of `simparallel plan`."""

from __future__ import annotations

import pytest
from exhaustive import enumerate_all
from integer_program import solve_milp

from simparallel.machine.cluster import describe
from simparallel.search.elimination import eliminate
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.space import Space


def _problem(name, device_num):
    step = ModelStep(MODELS[name])
    return Space(step.graph(8 * device_num, device_num), describe(device_num, "dgx-h100"), fully=True).problem()


@pytest.mark.parametrize("device_num", [2, 4])
def test_optimum_of_a_model_is_that_of_brute_force(device_num):
    problem = _problem("mlp", device_num)
    found = eliminate(problem)
    assert found.is_exact
    assert found.cost == enumerate_all(problem).cost


@pytest.mark.matrices
@pytest.mark.parametrize("device_num", [2, 4])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_integer_program_finds_the_same_cost(name, device_num):
    problem = _problem(name, device_num)
    assert eliminate(problem).cost == solve_milp(problem).cost
