"""The price of a plan is the time of its dry run, to the picosecond."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from training_programs import PROGRAMS, plan_of, slow_cluster, space_of, train

import simparallel as sp
from simparallel.machine.cluster import describe
from simparallel.search.planner import data_parallel, plan_graph
from simparallel.search.replay import replay


def _step_ps(name, plan, cluster):
    """Return the time of the last step of a dry run: the first one cuts the parameters."""
    prediction = sp.dry_run(
        train, (name, "auto", 3), {"plan": plan}, world_size=plan.device_num, cluster=cluster, fold=False
    )
    return round(prediction.step_time_s * 1e12)


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(PROGRAMS))
@given(st.data())
@settings(max_examples=12)
def test_replay_equals_dry_run(name, data):
    cluster = slow_cluster(data.draw(st.sampled_from([1, 2, 4, 8])), data.draw(st.sampled_from([1e8, 1e10])))
    saved: Any = {}
    if PROGRAMS[name].splits:
        saved["num_micro_batches"] = data.draw(st.sampled_from([1, 2, 4]))
        saved["recomputed"] = data.draw(st.sets(st.integers(0, 1)))
    space, _kept = space_of(name, cluster, **saved)
    choice = [data.draw(st.integers(0, len(choices) - 1)) for choices in space.choices]
    assert replay(space, choice).step_ps == _step_ps(name, plan_of(space, choice), cluster)


@pytest.mark.parametrize("preset", ["dgx-h100", "ascend910-8"])
@pytest.mark.parametrize("name", ["images", "tokens"])
def test_presets(name, preset):
    cluster = describe(8, preset)
    space, _kept = space_of(name, cluster)
    plan = plan_graph(space.graph, cluster)
    assert plan.step_time_ps == _step_ps(name, plan, cluster)
    choice = data_parallel(space)
    assert replay(space, choice).step_ps == _step_ps(name, plan_of(space, choice), cluster)


def test_stragglers():
    spec = slow_cluster(4)
    cluster = type(spec)(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "stragglers": {2: 3.0}})
    space, _kept = space_of("tokens", cluster)
    choice = data_parallel(space)
    assert replay(space, choice).step_ps == _step_ps("tokens", plan_of(space, choice), cluster)
    plain, _other = space_of("tokens", spec)
    assert replay(space, choice).step_ps > replay(plain, choice).step_ps
