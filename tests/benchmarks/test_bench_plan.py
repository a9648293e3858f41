"""`benchmarks plan`: its table and its JSON. No timing is asserted."""

from __future__ import annotations

import json
from functools import partial

import pytest

from benchmarks import plan
from simparallel.models import mlp
from simparallel.search.model_steps import KnownModel


@pytest.fixture(autouse=True)
def small_cases(monkeypatch):
    small = plan.Case(KnownModel(partial(mlp, (8, 16, 4)), (8,)), 4, 2.0)
    monkeypatch.setattr(plan, "CASES", {"MLP, 4": small})


def test_table_has_a_row_for_each_case(capsys):
    plan.main(rounds=2, measured=plan.measure)

    head, row, *_ = capsys.readouterr().out.splitlines()
    assert head.startswith("program, devices")
    assert row.startswith("MLP, 4")
    assert row.split()[2] == "5"  # Reshape, Linear, ReLU, Linear, CrossEntropy


def test_json_has_medians_of_the_rounds(capsys):
    times = iter([3.0, 1.0, 2.0])
    plan.main(rounds=3, as_json=True, measured=lambda name: {**plan.measure(name), "seconds": next(times)})

    found = json.loads(capsys.readouterr().out)["MLP, 4"]
    assert found["seconds"] == 2.0
    assert found["candidates"] > found["ops"] == 5
    assert found["step_time_s"] <= found["data_parallel_s"]


def test_chain_has_as_many_ops_as_it_says(monkeypatch):
    _, graph = plan.captured(plan.Case(plan.CHAIN, 2, 1.0))
    # And the loss.
    assert len(graph.nodes) == plan.CHAIN_OPS + 1
