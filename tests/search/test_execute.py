"""Every plan runs, and equals one device."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused
from training_programs import PROGRAMS, plan_of, slow_cluster, space_of, train

import simparallel as sp
from simparallel import nn
from simparallel.errors import InputError, PlanError, SearchError
from simparallel.search.plan import Plan, PlannedOp


def _check(name, results):
    losses, parameters, _ = train(name, None)
    for found, whole, _ in results:
        np.testing.assert_allclose(found, losses, rtol=1e-12)
        for a, b in zip(whole, parameters, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(PROGRAMS))
@given(st.data())
@settings(max_examples=8)
def test_any_plan_equals_one_device(name, data):
    device_num = data.draw(st.sampled_from([1, 2, 4, 6, 8]))
    saved = {}
    if PROGRAMS[name].splits:
        saved["num_micro_batches"] = data.draw(st.sampled_from([1, 2, 4]))
        saved["recomputed"] = data.draw(st.sets(st.integers(0, 1)))
    space, _ = space_of(name, slow_cluster(device_num), **saved)
    choice = [data.draw(st.integers(0, len(choices) - 1)) for choices in space.choices]
    plan = plan_of(space, choice)
    _check(name, sp.launch(train, (name,), {"plan": plan}, world_size=device_num, transport="inline"))


@pytest.mark.parametrize("mode", ["auto", "sharding_propagation", "recursive_programming"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_searched_plans_equal_one_device(name, mode):
    results = sp.launch(
        train,
        (name, mode),
        world_size=4,
        transport="inline",
        device=slow_cluster(4).device,
        link=sp.LinkSpec(1e-6, 1e9),
    )
    _check(name, results)
    plans = [plan for _, _, plan in results]
    assert all(plan == plans[0] for plan in plans)
    assert plans[0].step_time_ps <= plans[0].data_parallel_ps


def test_search_leaves_statistics_and_random_numbers():
    """Also its rehearsals of memory, which only rank 0 makes."""

    def program():
        sp.set_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        step = sp.AutoParallel(lambda x: net(x).sum(), "auto", memory_limit="1MB")
        step(sp.Tensor(np.ones((8, 4), np.float32)))
        return int(net[1].num_batches_tracked.numpy()), sp.nn.init.normal_(sp.Tensor(np.zeros(3))).tolist()

    first, second = sp.launch(program, world_size=2, transport="inline")
    assert first == second
    assert first[0] == 1


@pytest.mark.process
def test_processes():
    results = sp.launch(train, ("tokens",), world_size=4, device=slow_cluster(4).device, link=sp.LinkSpec(1e-6, 1e9))
    _check("tokens", results)


def test_micro_batches_begin_the_plan_anew():
    def program(mode):
        sp.set_seed(1)
        layer = nn.Linear(4, 8, dtype=np.float64)
        optimizer = sp.optim.SGD(layer.parameters(), 0.1)

        def step(batches):
            optimizer.zero_grad()
            for batch in batches:
                (layer(batch) ** 2).sum().backward()
            sp.optim.clip_grad_norm_(layer.parameters(), 1.0)
            optimizer.step()

        batches = [np.ones((8, 4)), np.full((8, 4), 2.0)]
        if mode is None:
            step([sp.Tensor(b) for b in batches])
            return layer.weight.numpy()
        parallel = sp.AutoParallel(step, mode)
        parallel(batches)
        assert len(parallel.plan) == 3
        return layer.weight.full_tensor().numpy() if layer.weight.placement is not None else layer.weight.numpy()

    expected = program(None)
    for found in sp.launch(
        program, ("auto",), world_size=2, transport="inline", device=slow_cluster(2).device, link=sp.LinkSpec(1e-6, 1e9)
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_users_strategies_stay():
    def program():
        sp.set_seed(1)
        product = sp.ops.MatMul().shard(((2, 2), (2, 1)))
        w = nn.Parameter(np.ones((8, 8)))
        parallel = sp.AutoParallel(lambda x: product(x, w).sum().backward(), "auto")
        parallel(np.ones((8, 8)))
        assert parallel.plan["MatMul"].in_strategy is None
        return w.layout.cuts

    assert set(sp.launch(program, world_size=4, transport="inline")) == {(2, 1)}


def test_evaluation_has_a_plan_of_its_own():
    def program():
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        parallel = sp.AutoParallel(net, "auto")
        names = []
        for training in (True, False, True):
            net.train(training)
            parallel(np.ones((4, 4), np.float32))
            names.append(len(parallel.plan))
        return names

    assert sp.launch(program, world_size=2, transport="inline")[0] == [2, 1, 2]


OTHER = Plan(1, (PlannedOp("Sum", "Sum", ((8, 8),), ((1, 1),)),))


@pytest.mark.parametrize(
    ("plan", "error"),
    [(OTHER, PlanError), (Plan(2, OTHER.ops), PlanError), (3, InputError), ("missing.json", PlanError)],
)
def test_plans_that_do_not_fit(plan, error):
    with refused(error):
        train("residual", plan=plan)


def test_bad_settings():
    with refused(InputError):
        sp.AutoParallel(lambda x: x, "fast")
    with refused(InputError):
        sp.AutoParallel(lambda x: x, plan=OTHER)


def test_nothing_fits_into_the_memory():
    with refused(SearchError):
        train("residual", memory_limit="1kB")
