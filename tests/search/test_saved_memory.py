"""Where memory is short, plans recompute parts and split the batch."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings, strategies as st
from refusals import refused
from training_programs import graph_of, slow_cluster, train

import simparallel as sp
from simparallel import nn
from simparallel.errors import PlanError, SearchError
from simparallel.machine.cluster import describe
from simparallel.parallel import micro_batches
from simparallel.search.following import data_parallel
from simparallel.search.model_steps import MODELS, ModelStep
from simparallel.search.plan import Plan
from simparallel.search.planner import SearchSettings, pareto_plans, plan_graph
from simparallel.search.replay import replay
from simparallel.search.space import Space


def _graphs(device_num):
    each = [graph_of("saving", device_num, count) for count in (1, 2, 4)]
    return [graph for graph, _ in each], each


@cache
def _free_plan(device_num):
    """Return the plan without a limit."""
    (graph, *split), _kept = _graphs(device_num)
    return plan_graph(graph, slow_cluster(device_num), split=split)


@cache
def _front():
    """Return plans of two devices, of each memory the fastest."""
    (graph, *split), _kept = _graphs(2)
    return pareto_plans(graph, slow_cluster(2), split=split, points=8)


def _step_ps(plan, cluster):
    prediction = sp.dry_run(
        train, ("saving", "auto", 3), {"plan": plan}, world_size=plan.device_num, cluster=cluster, fold=False
    )
    return round(prediction.step_time_s * 1e12)


def test_the_front_runs_as_priced():
    cluster = slow_cluster(2)
    (graph, *split), _kept = _graphs(2)
    plans = _front()
    assert len(plans) > 3
    for before, after in zip(plans, plans[1:], strict=False):
        assert before.memory_bytes < after.memory_bytes
        assert before.step_time_ps > after.step_time_ps
    assert plans[-1].step_time_ps <= plan_graph(graph, cluster, split=split).step_time_ps
    assert {plan.num_micro_batches for plan in plans} == {1, 2, 4}
    assert {len(plan.recomputed) for plan in plans} >= {0, 1}
    for plan in plans:
        assert _step_ps(plan, cluster) == plan.step_time_ps


@pytest.mark.parametrize("device_num", [2, 8])
def test_front_is_no_worse_than_data_parallelism(device_num):
    """Its sums of gradients overlap with work, and the fastest plan has none to measure the overlap by."""
    cluster = describe(device_num, "dgx-h100")
    graph, *_ = ModelStep(MODELS["lenet5"]).graphs(16, device_num)
    space = Space(graph, cluster)
    known = data_parallel(space)
    fitting = [plan for plan in pareto_plans(graph, cluster) if plan.memory_bytes <= space.peak_bytes(known)]
    assert min(plan.step_time_ps for plan in fitting) <= replay(space, known).step_ps


@pytest.mark.matrices
@settings(max_examples=6)
@given(st.sampled_from([1, 2, 4]), st.floats(0.05, 1.2))
@example(4, 0.3125)  # the plan that holds the least has more gradients on their way than others
@example(4, 0.32)
def test_plans_fit_into_the_limit(device_num, share):
    cluster = slow_cluster(device_num)
    (graph, *split), _kept = _graphs(device_num)
    free = _free_plan(device_num)
    limit = int(share * free.memory_bytes)
    try:
        plan = plan_graph(graph, cluster, SearchSettings(memory_limit_bytes=limit), split=split)
    except SearchError as refusal:
        # With the memory that the error names there is a plan.
        refused, limit = limit, refusal.least_bytes
        plan = plan_graph(graph, cluster, SearchSettings(memory_limit_bytes=limit), split=split)
        assert refused < limit
    assert plan.memory_bytes <= limit
    assert plan.step_time_ps >= free.step_time_ps
    assert _step_ps(plan, cluster) == plan.step_time_ps


def test_more_memory_is_never_slower():
    """Eight devices have plans that hold little from forward to backward, and have a high peak all the same."""
    graph, _kept = graph_of("saving", 8)
    cluster = slow_cluster(8)
    free = plan_graph(graph, cluster)
    limits = [int(share * free.memory_bytes) for share in (0.87, 0.89, 0.93, 1)]
    plans = [plan_graph(graph, cluster, SearchSettings(memory_limit_bytes=limit)) for limit in limits]
    times = [plan.step_time_ps for plan in plans]
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1] == free.step_time_ps
    assert all(plan.memory_bytes <= limit for plan, limit in zip(plans, limits, strict=True))


def test_ranks_find_the_plan_and_run_it():
    """With a limit that nothing else meets, the values are those of one device."""
    limit = _front()[0].memory_bytes
    results = sp.launch(
        train, ("saving",), {"memory_limit": limit}, world_size=2, transport="inline",
        device=slow_cluster(2).device, link=sp.LinkSpec(1e-6, 1e9),
    )  # fmt: skip
    losses, parameters, _ = train("saving", None)
    for found, whole, plan in results:
        assert found == pytest.approx(losses, rel=1e-12)
        for a, b in zip(whole, parameters, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        assert plan.num_micro_batches == 4
        assert plan.memory_bytes <= limit


def test_the_limit_below_all_plans_is_an_error():
    (graph, *split), _kept = _graphs(1)
    with refused(SearchError):
        plan_graph(graph, slow_cluster(1), SearchSettings(memory_limit_bytes=1000), split=split)
    with refused(SearchError):
        plan_graph(graph, slow_cluster(1), SearchSettings("data_parallel", memory_limit_bytes=1000))


def test_batches_that_cannot_be_split_are_an_error():
    layer = nn.Linear(2, 2)
    step = sp.AutoParallel(lambda x: [layer(y).sum().backward() for (y,) in micro_batches(x)], "auto")
    step(sp.Tensor([[1.0, 2.0]] * 4))
    plan = step.plan
    odd = Plan(**{**vars(plan), "num_micro_batches": 3})
    again = sp.AutoParallel(step.network, "auto", plan=odd)
    with refused(PlanError):
        again(sp.Tensor([[1.0, 2.0]] * 4))


def test_without_a_plan_nothing_is_split_or_recomputed():
    assert micro_batches(1, 2) == [(1, 2)]
    layer = nn.Linear(2, 2)
    x = sp.Tensor([[1.0, 2.0]])
    plain, kept = layer(x).sum(), nn.checkpoint(layer, x, optional=True).sum()
    assert type(plain._node.inputs[0].op) is type(kept._node.inputs[0].op)
    assert pytest.approx(plain.item()) == kept.item()
