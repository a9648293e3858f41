"""The price of a plan is the time of its dry run, and that of its ranks' programs by the solver, to the picosecond."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from oracles_lockstep import LockstepPrograms
from training_programs import PROGRAMS, plan_of, slow_cluster, space_of, train

import simparallel as sp
from simparallel.clock.lockstep import Lockstep
from simparallel.machine.cluster import describe
from simparallel.machine.device import SOFTWARE
from simparallel.search.planner import data_parallel, plan_graph
from simparallel.search.replay import replay


def _step_ps(name, plan, cluster):
    """Return the time of the last step of a dry run: the first one cuts the parameters."""
    prediction = sp.dry_run(
        train, (name, "auto", 3), {"plan": plan}, world_size=plan.device_num, cluster=cluster, fold=False
    )
    return round(prediction.step_time_s * 1e12)


def _replayed_ps(space, choice):
    """Return the time of a step in lockstep, after comparing all ranks with the solver's times of their programs."""
    programs = LockstepPrograms(space.device_num, space.prices.issue_ps)
    replay(space, choice, programs)
    step = replay(space, choice, Lockstep(space.device_num, space.prices.issue_ps))
    assert step.clock.now.tolist() == programs.solved()
    return replay(space, choice).step_ps


@st.composite
def _plans(draw, name):
    """Draw a cluster, a space of a program on it, and a choice for each op."""
    cluster = slow_cluster(
        draw(st.sampled_from([1, 2, 4, 8])),
        draw(st.sampled_from([1e8, 1e10])),
        draw(st.sampled_from(SOFTWARE)),
        # Without an interpreter, or one that is faster or slower than all devices.
        draw(st.sampled_from([0.0, 1e-9, 1e-2])),
    )
    cluster = replace(cluster, dtype=draw(st.sampled_from(["float32", "bfloat16"])))
    saved: Any = {}
    if PROGRAMS[name].splits:
        saved["num_micro_batches"] = draw(st.sampled_from([1, 2, 4]))
        saved["recomputed"] = draw(st.sets(st.integers(0, 1)))
    # The optimizer has to be kept.
    space, kept = space_of(name, cluster, **saved)
    return cluster, space, [draw(st.integers(0, len(choices) - 1)) for choices in space.choices], kept


@pytest.mark.matrices
@pytest.mark.parametrize("name", sorted(PROGRAMS))
@given(st.data())
@settings(max_examples=12)
def test_replay_equals_dry_run(name, data):
    cluster, space, choice, _kept = data.draw(_plans(name))
    assert _replayed_ps(space, choice) == _step_ps(name, plan_of(space, choice), cluster)


@pytest.mark.parametrize("name", sorted(PROGRAMS))
@given(st.data())
def test_lockstep_equals_batch(name, data):
    _, space, choice, _kept = data.draw(_plans(name))
    _replayed_ps(space, choice)


@pytest.mark.parametrize(
    ("name", "preset", "dtype"), [("images", "dgx-h100", "float8"), ("tokens", "ascend910-8", "float32")]
)
def test_presets(name, preset, dtype):
    cluster = describe(8, preset, dtype=dtype)
    space, _kept = space_of(name, cluster)
    plan = plan_graph(space.graph, cluster)
    assert plan.step_time_ps == _step_ps(name, plan, cluster)
    choice = data_parallel(space)
    assert _replayed_ps(space, choice) == _step_ps(name, plan_of(space, choice), cluster)


def test_stragglers():
    spec = slow_cluster(4)
    cluster = type(spec)(**{**{f: getattr(spec, f) for f in spec.__dataclass_fields__}, "stragglers": {2: 3.0}})
    space, _kept = space_of("tokens", cluster)
    choice = data_parallel(space)
    assert _replayed_ps(space, choice) == _step_ps("tokens", plan_of(space, choice), cluster)
    plain, _other = space_of("tokens", spec)
    assert replay(space, choice).step_ps > replay(plain, choice).step_ps
