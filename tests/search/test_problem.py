"""The problem of the search: what is refused, sums, edge cases; brute force."""

from __future__ import annotations

import numpy as np
import pytest
from exhaustive import enumerate_all
from problems import seeded
from refusals import refused

from simparallel.errors import InputError
from simparallel.search.elimination import eliminate
from simparallel.search.problem import Problem, Solution

A, B = np.array([1, 2]), np.array([3, 4, 5])
TABLE = np.arange(6).reshape(2, 3)


def test_a_node_without_candidates_is_refused():
    with refused(InputError, node=1):
        Problem((A, A[:0]), {})


@pytest.mark.parametrize("arguments", [((A + 2**60, B + 2**60), {}), ((A, B), {(0, 1): TABLE + 2**61})], ids=range(2))
def test_sums_beyond_integers_are_refused(arguments):
    """Also of memory, once it takes the place of costs."""
    with refused(InputError):
        Problem(*arguments)
    memory = Problem((A, B), {}, *arguments)
    with refused(InputError):
        memory.memory_problem  # noqa: B018


def test_sums_of_a_choice():
    problem = Problem((A, B), {(0, 1): TABLE}, (A, B), {(0, 1): TABLE})
    assert problem.cost((1, 2)) == problem.memory_bytes((1, 2)) == 2 + 5 + 5
    assert Problem((A, B), {}).memory_bytes((1, 2)) == 0
    assert problem.least == 1 + 3 + 0
    assert problem.most == 2 + 5 + 5


@pytest.mark.parametrize("solve", [enumerate_all, eliminate])
def test_empty_and_single_problems(solve):
    assert solve(Problem((), {})) == Solution((), 0, 0, 0, solve(Problem((), {})).method)
    assert solve(Problem((B,), {})).choice == (0,)
    one = Problem((A[:1], B[:1]), {(0, 1): TABLE[:1, :1]})
    assert solve(one).cost == 1 + 3 + 0


def test_too_many_combinations_are_refused():
    problem = Problem((B,) * 4, {})
    with refused(InputError, combinations=81, limit=80):
        enumerate_all(problem, max_combinations=80)
    assert enumerate_all(problem, max_combinations=81).choice == (0, 0, 0, 0)


def test_brute_force_in_chunks_is_that_in_one(monkeypatch):
    problem = seeded(7)
    limit = (problem.memory_problem.least + enumerate_all(problem).memory_bytes) // 2 + 20
    whole = [enumerate_all(problem), enumerate_all(problem, memory_limit_bytes=limit)]
    monkeypatch.setattr("exhaustive._CHUNK", 7)
    assert [enumerate_all(problem), enumerate_all(problem, memory_limit_bytes=limit)] == whole
