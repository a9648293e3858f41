"""Schedules found by search: published optima, every order of tiny pipelines, bounds, limits."""

from __future__ import annotations

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError, ScheduleError
from simparallel.parallel.pipeline import Schedule
from simparallel.parallel.pipeline.rules import RULES
from simparallel.parallel.pipeline.search import RELEASES, _problem

RELEASE = st.sampled_from(sorted(RELEASES))


@st.composite
def pipelines(draw, ranks=4, microbatches=5):
    """Draw arguments of a search: small numbers, times of each stage, also zeros, and latency."""
    ranks, microbatches = draw(st.integers(1, ranks)), draw(st.integers(1, microbatches))
    time = st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks) | st.integers(0, 4)
    return {
        "ranks": ranks, "microbatches": microbatches, "memory": draw(st.none() | st.integers(1, microbatches)),
        "times": tuple(draw(time) for _ in range(3)), "message": draw(st.sampled_from([0, 0, 1, 3])),
        "released_by": draw(RELEASE),
    }  # fmt: skip


def peaks(cost, released_by):
    return getattr(cost, f"peak_live_at_{released_by}")


def fits(cost, pipeline):
    return pipeline["memory"] is None or max(peaks(cost, pipeline["released_by"])) <= pipeline["memory"]


@pytest.mark.parametrize(
    ("ranks", "microbatches", "memory", "until_w", "until_i"),
    [
        (2, 4, 1, 20, 17), (2, 4, 2, 13, 13), (3, 4, 1, 28, 25), (3, 4, 2, 17, 15), (3, 4, 3, 14, 14),
        (3, 6, 2, 25, 21), (3, 6, 3, 20, 20), (4, 4, 1, 36, 33), (4, 4, 2, 21, 19), (4, 4, 3, 18, 17),
        (4, 4, 4, 15, 15), (4, 5, 2, 27, 25), (4, 5, 3, 21, 19), (4, 5, 4, 18, 18),
    ],
)  # fmt: skip
def test_known_optima(ranks, microbatches, memory, until_w, until_i):
    """Found by breadth-first search over the numbers of done actions."""
    for released_by, makespan in (("weight_gradient", until_w), ("input_gradient", until_i)):
        found = sp.search_schedule(ranks, microbatches, memory, released_by=released_by)
        assert (found.makespan, found.bound, found.gap) == (makespan, makespan, 0)
        assert found.is_optimal


def orders_of_a_rank(microbatches):
    """Every order of the actions of a rank, with the micro-batches of each kind in any order."""
    actions = list(product("FIW", range(microbatches)))
    for order in permutations(actions):
        place = {action: number for number, action in enumerate(order)}
        if all(place["F", m] < place["I", m] < place["W", m] for m in range(microbatches)):
            yield order


ORDERS = {m: list(orders_of_a_rank(m)) for m in (1, 2)}


@settings(max_examples=2 * settings.default.max_examples)
@given(pipelines(ranks=2, microbatches=2))
def test_no_order_of_actions_is_better(pipeline):
    costs = []
    for orders in product(ORDERS[pipeline["microbatches"]], repeat=pipeline["ranks"]):
        rows = [[f"{rank}{kind}{m}" for kind, m in order] for rank, order in enumerate(orders)]
        schedule = Schedule("any", pipeline["ranks"], pipeline["microbatches"], 1, "loop", rows)
        try:
            costs.append(schedule.cost(*pipeline["times"], pipeline["message"]))
        except ScheduleError:
            continue  # ranks that wait for each other
    found = sp.search_schedule(**pipeline)
    assert found.is_optimal
    assert found.makespan == min(cost.makespan for cost in costs if fits(cost, pipeline))


@settings(max_examples=4 * settings.default.max_examples)
@given(pipelines(), st.sampled_from([1, 300, 20_000]))
def test_found_schedule_is_legal_and_best(pipeline, states):
    found = sp.search_schedule(**pipeline, states=states)
    found.schedule.check(memory=pipeline["memory"] if pipeline["released_by"] == "weight_gradient" else None)
    assert found.cost == found.schedule.cost(*pipeline["times"], pipeline["message"])
    assert fits(found.cost, pipeline)
    assert found.bound <= found.makespan
    assert found.is_optimal == (found.bound == found.makespan)
    named = [sp.pipeline_schedule(name, found.schedule.ranks, found.schedule.microbatches) for name in RULES
             if RULES[name].chunks == 1]  # fmt: skip
    costs = [each.cost(*pipeline["times"], pipeline["message"]) for each in named]
    fitting = [cost.makespan for cost in costs if fits(cost, pipeline)]
    assert (found.best_named is None) == (not fitting)
    if fitting:
        assert found.makespan <= found.named_cost.makespan == min(fitting)


@settings(max_examples=3 * settings.default.max_examples)
@given(pipelines())
def test_exact_is_between_bound_and_beam(pipeline):
    exact, beam = sp.search_schedule(**pipeline), sp.search_schedule(**pipeline, states=1)
    assert exact.is_optimal
    assert _problem(**pipeline, states=1).bound <= beam.bound <= exact.makespan <= beam.makespan


@settings(max_examples=4 * settings.default.max_examples)
@given(st.integers(1, 8), st.integers(1, 12), st.data())
def test_bound_is_the_published_one_or_higher(ranks, microbatches, data):
    """M (TF + TI + TW) + max((P - 1) TF, max over r of (P - A) TF + (P - 1 - r) TI), for equal stages."""
    memory, times = data.draw(st.integers(1, microbatches)), data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    problem = _problem(ranks, microbatches, memory, times, 0, data.draw(RELEASE), 1)
    forward, gradient, _ = times
    waits = max((ranks - memory) * forward + (ranks - 1 - r) * gradient for r in range(ranks))
    assert problem.bound >= microbatches * sum(times) + max((ranks - 1) * forward, waits)


@settings(max_examples=2 * settings.default.max_examples)
@given(pipelines(), st.integers(2, 4))
def test_more_memory_is_no_slower_and_times_scale(pipeline, factor):
    makespan = sp.search_schedule(**pipeline).makespan
    scaled = [[factor * t for t in time] if isinstance(time, list) else factor * time for time in pipeline["times"]]
    larger = pipeline | {"times": tuple(scaled), "message": factor * pipeline["message"]}
    assert sp.search_schedule(**larger).makespan == factor * makespan
    if pipeline["memory"] is not None:
        roomier = pipeline | {"memory": pipeline["memory"] + 1}
        assert sp.search_schedule(**roomier).makespan <= makespan


@given(pipelines(), st.floats(0.01, 100))
def test_times_may_be_floats(pipeline, factor):
    found = sp.search_schedule(**pipeline)
    times = [[factor * t for t in time] if isinstance(time, list) else factor * time for time in pipeline["times"]]
    scaled = sp.search_schedule(**pipeline | {"times": tuple(times), "message": factor * pipeline["message"]})
    assert scaled.is_optimal
    assert scaled.makespan == pytest.approx(factor * found.makespan)


@pytest.mark.parametrize("memory", [4, 6])
def test_large_pipeline_ends_with_a_gap(memory):
    found = sp.search_schedule(8, 16, memory, states=3_000)
    assert found.states < 10_000
    assert 0 < found.gap < 0.5
    found.schedule.check(memory=memory)


def test_better_than_named_schedules():
    """With five places instead of four, slow messages cost less; no rule of a name gives this schedule."""
    found = sp.search_schedule(4, 8, 5, (3, 4, 2), 1)
    assert (found.makespan, found.best_named.name, found.named_cost.makespan) == (91, "zb_h1", 99)


@pytest.mark.parametrize(
    ("arguments", "makespan"),
    [((3, 2, 2, ((4, 3, 1), (3, 2, 1), (3, 3, 0)), 0), 24), ((3, 3, 2, ((3, 4, 3), (1, 4, 2), (2, 4, 1)), 2), 54)],
)
def test_idle_rank_may_wait_for_a_later_action(arguments, makespan):
    """If no rank were idle while it can run an action, these would take 25 and 56."""
    found = sp.search_schedule(*arguments)
    assert (found.makespan, found.is_optimal) == (makespan, True)


def test_named_schedule_that_is_optimal():
    found = sp.search_schedule(4, 8, 4)
    assert found.schedule == found.best_named == sp.pipeline_schedule("zb_h1", 4, 8)
    assert found.states == 0


def test_found_schedule_trains():
    def train(schedule):
        sp.set_seed(1)
        net = sp.nn.Sequential(*[sp.nn.Linear(4, 4, dtype=np.float64) for _ in range(3)])
        pipeline = sp.parallel.Pipeline(net, sp.nn.CrossEntropyLoss(), microbatches=5, schedule=schedule)
        loss = pipeline.step(np.arange(40.0).reshape(10, 4), np.arange(10) % 4)
        return loss.item(), [parameter.grad.numpy() for parameter in pipeline.parameters()]

    found = sp.search_schedule(3, 5, 2).schedule
    results = [sp.launch(train, (each,), world_size=3, transport="inline") for each in (found, "1f1b")]
    for (loss, gradients), (other_loss, others) in zip(*results, strict=True):
        assert loss == other_loss
        for gradient, other in zip(gradients, others, strict=True):
            np.testing.assert_array_equal(gradient, other)


def test_result_as_text():
    lines = str(sp.search_schedule(2, 2, 1)).splitlines()
    assert lines[0] == (
        "search: 2 ranks, 2 micro-batches, memory 1; makespan 10, optimal, 12 states; best named: none fits"
    )
    assert lines[1].split() == ["r0", "F0", ".", ".", "I0", "W0", "F1", ".", ".", "I1", "W1"]
    named = str(sp.search_schedule(2, 2))
    assert named.startswith("zb_h1: 2 ranks, 2 micro-batches, no limit of memory; makespan 7, optimal, 0 states")
    assert "memory 4; makespan 79, bound 71, gap 10.1%, " in str(sp.search_schedule(8, 16, 4, states=1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 0), ("microbatches", 2.5), ("memory", 0), ("states", 0), ("released_by", "backward"),
        ("times", (1, 1)), ("times", 1), ("times", (1, 1, float("inf"))), ("message", -1),
        ("weight_gradient", (1, 1, [1, 2])), ("forward", (-1, 1, 1)), ("forward", (float("nan"), 1, 1)),
        ("forward", ([1], 1, 1)),
    ],
)  # fmt: skip
def test_bad_arguments(field, value):
    option = "times" if field in ("forward", "weight_gradient") else field
    with refused(InputError, field=field):
        sp.search_schedule(**{option: value})
