"""Closed forms of memory: parameters, model states and activations of each device."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_memory import (
    FLOAT32_ADAM,
    MEGATRON_ADAM,
    MIXED_ADAM,
    activation_bytes,
    layer_activation_bytes,
    layers_in_flight,
    state_bytes,
)

sizes = st.integers(1, 6)


@st.composite
def plans(draw, **settings):
    """Draw a plan whose sizes can be divided evenly."""
    tensor, pipeline, data = (draw(st.integers(1, 4)) for _ in range(3))
    chunks = settings.get("chunks") or draw(st.integers(1, 4))
    shape = GPTShape(
        num_layers=pipeline * chunks * draw(sizes),
        width=tensor * draw(sizes) * 4,
        num_heads=tensor,
        length=tensor * draw(sizes),
        vocabulary=draw(st.integers(1, 50)),
    )
    options = {
        "chunks": chunks,
        "micro_batch": draw(sizes),
        "num_micro_batches": draw(sizes),
        "sequence_parallel": draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "fused_attention": draw(st.booleans()),
        "zero_stage": draw(st.integers(0, 3)),
        "overlap_tensor": draw(st.booleans()),
        "overlap_data": draw(st.booleans()),
    }
    return TrainingPlan(shape, tensor, pipeline, data, **options | settings)


@given(layers=sizes, heads=sizes, features=sizes, length=sizes, vocabulary=sizes)
def test_parameters_are_those_of_the_model(layers, heads, features, length, vocabulary):
    model = sp.models.GPT(vocabulary, length, num_layers=layers, num_heads=heads, width=heads * features)
    shape = GPTShape(layers, heads * features, heads, length, vocabulary)
    assert shape.num_parameters == sum(parameter.size for parameter in model.parameters())


@given(plans())
def test_devices_hold_every_parameter(plan):
    """All devices hold the model, norms and positions on each tensor rank, and the token table on two stages."""
    shape, t = plan.shape, plan.tensor
    held = t * sum(plan.stage_parameters(stage) for stage in range(plan.pipeline))
    replicated = (6 * shape.num_layers + shape.length + 2) * shape.width
    second_table = shape.vocabulary * shape.width * (plan.pipeline > 1)
    assert held == shape.num_parameters + (t - 1) * replicated + second_table


@given(st.integers(1, 10**6))
def test_bytes_of_model_states(d):
    stages = [MIXED_ADAM.bytes_per_parameter(stage, d) for stage in range(4)]
    assert stages == [16, 4 + Fraction(12, d), 2 + Fraction(14, d), Fraction(16, d)]
    assert MEGATRON_ADAM.bytes_per_parameter() == 18
    assert MEGATRON_ADAM.bytes_per_parameter(1, d) == 6 + Fraction(12, d)
    assert FLOAT32_ADAM.bytes_per_parameter() == 16


@given(plans())
def test_states_are_parameters_times_bytes(plan):
    for stage in range(plan.pipeline):
        each = MIXED_ADAM.bytes_per_parameter(plan.zero_stage, plan.data)
        assert state_bytes(plan, stage) == plan.stage_parameters(stage) * each


@given(plans(fused_attention=False))
def test_activations_of_a_block(plan):
    """Korthikanti et al. 2022, table 2, term by term."""
    t, a, s, h = plan.tensor, plan.shape.num_heads, plan.shape.length, plan.shape.width
    sbh = s * plan.micro_batch * h
    whole = t if plan.sequence_parallel else 1
    known = {
        "none": sbh * (Fraction(10, whole) + Fraction(24, t) + Fraction(5 * a * s, h * t)),
        "selective": sbh * (Fraction(10, whole) + Fraction(24, t)),
        "full": Fraction(2 * sbh, whole),
    }
    assert layer_activation_bytes(plan) == known[plan.recompute]


def test_fused_attention_keeps_a_number_for_each_row():
    plan = TrainingPlan(GPTShape(1, 8, 2, 16, 10), micro_batch=3, fused_attention=True)
    assert layer_activation_bytes(plan) == 16 * 3 * 8 * 34 + 4 * 2 * 16 * 3


@given(plans())
def test_layers_in_flight(plan):
    p, v, m, layers = plan.pipeline, plan.chunks, plan.num_micro_batches, plan.shape.num_layers
    stages = [layers_in_flight(plan, stage) for stage in range(p)]
    gpipe = layers_in_flight(plan, schedule="gpipe")
    assert gpipe == m * Fraction(layers, p)
    assert sorted(stages, reverse=True) == stages
    assert stages[0] <= gpipe
    if v == 1:
        assert stages == [Fraction(min(m, p - stage) * layers, p) for stage in range(p)]
    elif m >= 2 * p:
        assert stages[0] == layers * (1 + Fraction(p - 1, p * v))


@given(plans(sequence_parallel=True))
def test_memory_beside_the_blocks(plan):
    """Korthikanti et al. 2022, section 4.3: sbhL/t (p/L + 4/L (1 + V/h)) on one stage."""
    plan = TrainingPlan(plan.shape, plan.tensor, micro_batch=plan.micro_batch, sequence_parallel=True)
    shape, layers = plan.shape, plan.shape.num_layers
    factor = Fraction(shape.length * plan.micro_batch * shape.width * layers, plan.tensor)
    beside = factor * (Fraction(1, layers) + Fraction(4, layers) * (1 + Fraction(shape.vocabulary, shape.width)))
    assert activation_bytes(plan) == layers * layer_activation_bytes(plan) + beside


def test_middle_stages_hold_blocks_alone():
    plan = TrainingPlan(GPTShape(6, 8, 2, 16, 10), pipeline=3, num_micro_batches=5)
    held = [activation_bytes(plan, stage) - (3 - stage) * 2 * layer_activation_bytes(plan) for stage in range(3)]
    assert held == [16 * 8 * 3, 0, 4 * 16 * (8 + 10)]
    assert activation_bytes(plan, 0, "gpipe") == 16 * 8 * 5 + 5 * 2 * layer_activation_bytes(plan)


SHAPE = GPTShape(num_layers=12, width=8, num_heads=2, length=16, vocabulary=10)


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline": 13},
        {"pipeline": 4, "chunks": 2},
        {"tensor": 4},
        {"zero_stage": 4},
        {"recompute": "some"},
        {"data": 0},
        {"tensor": True},
    ],
    ids=str,
)
def test_plan_that_cannot_be_cut_is_refused(settings):
    with refused(InputError):
        TrainingPlan(SHAPE, **settings)


def test_sequence_is_divided_evenly():
    shape = GPTShape(2, 8, 2, 15, 10)
    assert TrainingPlan(shape, tensor=2).world_size == 2
    with refused(InputError):
        TrainingPlan(shape, tensor=2, sequence_parallel=True)


@pytest.mark.parametrize("sizes", [(1, 8, 3, 16, 10), (0, 8, 2, 16, 10), (1, 8, 2, 1.5, 10)], ids=str)
def test_impossible_shape_is_refused(sizes):
    with refused(InputError):
        GPTShape(*sizes)


@pytest.mark.parametrize(
    "call",
    [
        lambda plan: layers_in_flight(plan, 2),
        lambda plan: layers_in_flight(plan, schedule="zero"),
        lambda plan: state_bytes(plan, -1),
        lambda plan: MIXED_ADAM.bytes_per_parameter(4),
        lambda plan: MIXED_ADAM.bytes_per_parameter(1, 0),
        lambda plan: plan.shape.flops(1, "half"),
    ],
    ids=["stage", "schedule", "negative", "zero_stage", "replicas", "recompute"],
)
def test_unknown_stage_is_refused(call):
    with refused(InputError):
        call(TrainingPlan(SHAPE, pipeline=2))
