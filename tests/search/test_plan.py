"""Plans are data: printed, compared, edited, saved and loaded."""

from __future__ import annotations

import json

import pytest
from refusals import refused
from training_programs import plan_of, slow_cluster, space_of, train

import simparallel as sp
from simparallel.errors import PlanError, StrategyError
from simparallel.search.elimination import eliminate
from simparallel.search.plan import Plan
from simparallel.search.planner import METHODS, SearchSettings, data_parallel, plan_graph


@pytest.fixture(scope="module")
def plan():
    space, _ = space_of("residual", slow_cluster(4))
    return plan_of(space, data_parallel(space))


def test_plan_survives_a_file(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == plan
    assert json.loads(path.read_text())["ops"][0]["name"] == "up.Linear"


def test_edited_plan_runs(plan):
    edited = plan.with_("up.Linear", ((1, 1), (4, 1), (4,))).with_("down.Linear", ((1, 4), (1, 4), (1,)))
    assert [name for name, _, _ in plan.diff(edited)] == ["up.Linear", "down.Linear"]
    assert edited.step_time_ps is None
    results = sp.launch(train, ("residual",), {"plan": edited}, world_size=4, transport="inline")
    assert results[0][0] == pytest.approx(train("residual", None)[0])


def test_text_names_every_op(plan):
    text = str(plan)
    assert text.startswith("9 ops on 4 devices; by hand")
    assert "up.Linear      8x8 16x8 16  ((4, 1), (1, 1), (1,))" in text


def test_edits_are_checked(plan):
    with refused(PlanError):
        plan.with_("up.Linaer", ((1, 1), (1, 1), (1,)))
    with refused(PlanError):
        plan.with_("up.Linear", ((1, 1),))
    with refused(PlanError):
        plan.with_("up.Linear", ((1, 1.5), (1, 1), (1,)))


def test_illegal_strategies_are_refused_by_the_op(plan):
    with refused(StrategyError):
        train("residual", plan=Plan(1, plan.ops).with_("up.Linear", ((3, 1), (1, 1), (1,))))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1, "ops": [{}]}', '{"format": 1, "ops": []}'])
def test_bad_files(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    with refused(PlanError):
        Plan.load("plan.json")


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"exhaustive"}))
@pytest.mark.parametrize("name", ["residual", "images", "tokens"])
def test_no_method_is_worse_than_data_parallelism(name, method):
    pytest.importorskip("scipy")
    space, keep = space_of(name, slow_cluster(4))
    found = plan_graph(space.graph, slow_cluster(4), SearchSettings(method))
    assert found.step_time_ps <= found.data_parallel_ps
    assert found.cost_ps >= found.bound_ps
    assert keep


def test_exhaustive_search_agrees():
    space, _ = space_of("residual", slow_cluster(2), fully=True)
    settings = [SearchSettings(method, fully=True) for method in ("exhaustive", "auto")]
    if space.size > 10_000_000:
        pytest.skip("too many combinations")
    slow, fast = (plan_graph(space.graph, slow_cluster(2), each) for each in settings)
    assert slow.cost_ps == fast.cost_ps


def test_exact_plan_is_the_cheapest():
    space, _ = space_of("tokens", slow_cluster(4))
    problem = space.problem()
    found = eliminate(problem)
    assert found.is_exact
    assert found.cost <= problem.cost(data_parallel(space))
