"""Plans are data: printed, compared, edited, saved and loaded."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused
from training_programs import plan_of, slow_cluster, space_of, train

import simparallel as sp
from simparallel.errors import PlanError, StrategyError
from simparallel.search.elimination import eliminate
from simparallel.search.plan import Plan
from simparallel.search.planner import METHODS, SearchSettings, data_parallel, plan_graph
from simparallel.search.reasons import options_of


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
    known = replace(plan, step_time_ps=1, cost_ps=1, bound_ps=1, memory_bytes=1)
    edited = known.with_("up.Linear", ((1, 1), (4, 1), (4,))).with_("down.Linear", ((1, 4), (1, 4), (1,)))
    assert [name for name, _, _ in plan.diff(edited)] == ["up.Linear", "down.Linear"]
    assert edited == replace(edited, step_time_ps=None, cost_ps=None, bound_ps=None, memory_bytes=None)
    results = sp.launch(train, ("residual",), {"plan": edited}, world_size=4, transport="inline")
    assert results[0][0] == pytest.approx(train("residual", None)[0])


def test_text_names_every_op(plan):
    text = str(plan)
    assert text.startswith("9 ops on 4 devices; by hand")
    assert "up.Linear      8x8 16x8 16  ((4, 1), (1, 1), (1,))" in text


@settings(max_examples=10)
@given(st.data())
def test_explanations_are_differences_of_plans(data):
    name, exposed = (
        data.draw(st.sampled_from(["residual", "tokens", "checkpointed"])),
        data.draw(st.sampled_from([0, 1])),
    )
    space, _kept = space_of(name, slow_cluster(data.draw(st.sampled_from([1, 2, 4]))))
    choice = [data.draw(st.integers(0, len(choices) - 1)) for choices in space.choices]
    problem = space.problem(float(exposed))
    number = data.draw(st.integers(0, len(choice) - 1))
    options = options_of(space, problem, exposed, choice, number)
    strategies = [each.strategy for each in space.choices[number]]
    costs = []
    for option in options:
        other = [*choice[:number], strategies.index((option.in_strategy, option.out_strategy)), *choice[number + 1 :]]
        costs.append(problem.cost(other))
        assert costs[-1] - costs[0] == option.cost_ps - options[0].cost_ps
        assert min(option[2:]) >= 0
    assert strategies[choice[number]] == tuple(options[0][:2])
    assert costs[1:] == sorted(costs[1:])
    # No option that was left out is better.
    left = [problem.cost([*choice[:number], i, *choice[number + 1 :]]) for i in range(len(strategies))]
    assert costs[1:] == sorted(left[: choice[number]] + left[choice[number] + 1 :])[: len(options) - 1]


def test_plans_explain_their_ops(tmp_path):
    space, _kept = space_of("tokens", slow_cluster(4, 1e10))
    plan = plan_graph(space.graph, slow_cluster(4, 1e10))
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    for number, planned in enumerate(plan.ops):
        told = loaded.explain(number)
        assert told.chosen[:2] == planned[3:5]
        assert all(option.cost_ps >= told.chosen.cost_ps for option in told.options)
        assert str(told).startswith(f"{planned.name} on ")
        for move in told.moves:
            assert f"input {move.input}, from {move.source}: " in str(told)
    moved = {move.source for planned in plan.ops for move in planned.moves}
    assert moved <= {planned.name for planned in plan.ops} | {"argument", "parameter"}
    assert moved
    with refused(PlanError):
        plan.with_("Add", ((4, 1, 1), (4, 1, 1))).explain("Add")


def test_edits_are_checked(plan):
    with refused(PlanError):
        plan.with_("up.Linaer", ((1, 1), (1, 1), (1,)))
    with refused(PlanError):
        plan.with_("up.Linear", ((1, 1),))
    with refused(PlanError):
        plan.with_("up.Linear", ((1, 1.5), (1, 1), (1,)))


@pytest.mark.parametrize("number", [-1, 9])
def test_calls_have_numbers_from_0(plan, number):
    assert plan[8] is plan.ops[-1]
    with refused(PlanError):
        plan[number]


def test_illegal_strategies_are_refused_by_the_op(plan):
    with refused(StrategyError):
        train("residual", plan=Plan(1, plan.ops).with_("up.Linear", ((3, 1), (1, 1), (1,))))


PLAN = '{"format": 1, "device_num": 2, "ops": %s}'
DEEP = "[" * 999_999
OP = '[{"name": "a", "op": "Sum", "shapes": [[2]], "in_strategy": %s}]'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", PLAN % "[{}]", '{"format": 1, "ops": []}', PLAN % '[], "step_time_ps": "x"', PLAN % DEEP,
     PLAN % OP % '"x"', PLAN % OP % "[[0]]", PLAN % '[], "cost_ps": NaN'],
    ids=range(10),
)  # fmt: skip
def test_bad_files(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text(text)
    with refused(PlanError):
        Plan.load("plan.json")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["residual", "images", "tokens"])
def test_no_method_is_worse_than_data_parallelism(name, method):
    space, keep = space_of(name, slow_cluster(4))
    found = plan_graph(space.graph, slow_cluster(4), SearchSettings(method))
    assert found.step_time_ps <= found.data_parallel_ps
    assert found.cost_ps >= found.bound_ps
    assert keep


def test_exact_plan_is_the_cheapest():
    space, _ = space_of("tokens", slow_cluster(4))
    problem = space.problem()
    found = eliminate(problem)
    assert found.is_exact
    assert found.cost <= problem.cost(data_parallel(space))
