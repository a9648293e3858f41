"""Transformers by name: their sizes, the parts of a step, and whether it fits."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.errors import ClusterError, InputError
from simparallel.machine.cluster import load_cluster
from simparallel.simulate.config import read_config, shipped
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_memory import MEGATRON_ADAM, activation_bytes, gathered_bytes, state_bytes

# As the publishers' checkpoints have them; DeepSeek-V3 without the 58 x 256 biases of its router, which no gradient
# changes.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}


@pytest.mark.parametrize("name", shipped())
def test_parameters_of_shipped_models(name):
    assert read_config(name).num_parameters == PARAMETERS[name]


@pytest.mark.parametrize("name", shipped())
def test_devices_hold_all_parameters(name):
    """On any division, slices and copies add up to the model."""
    shape = read_config(name)
    for tensor, pipeline, expert in ((1, 1, 1), (1, 3, 1), (1, 1, 8)):
        if expert > 1 and not shape.num_experts:
            continue
        plan = TrainingPlan(shape, tensor, pipeline, data=8, expert=expert)
        dense = sum(plan.stage_parameters(stage) for stage in range(pipeline))
        experts = sum(plan.stage_experts(stage) for stage in range(pipeline))
        second_table = shape.vocabulary * shape.width * (pipeline > 1 and shape.is_tied)
        assert dense + experts * expert == shape.num_parameters + second_table


def test_llama_takes_six_flops_for_each_parameter():
    """6N for each token, without the table of tokens that is only read, plus attention."""
    shape = read_config("llama-3.1-8b", length=4096)
    read = shape.vocabulary * shape.width + 65 * shape.width
    attention = 12 * 32 * 4096 * 4096
    assert shape.flops(1) == 4096 * (6 * (shape.num_parameters - read) + attention)


def test_sparse_blocks_count_active_experts():
    shape = read_config("mixtral-8x7b")
    one, two = (replace(shape, active_experts=count).flops(1) for count in (1, 2))
    assert two - one == 6 * shape.length * 32 * 3 * 4096 * 14336
    assert replace(shape, num_experts=16).num_parameters > shape.num_parameters


@st.composite
def settings(draw):
    """Draw a division of 16 devices, and how a step of 32 sequences runs on it."""
    sizes = [draw(st.sampled_from([1, 2, 4])) for _ in range(3)]
    while sizes[0] * sizes[1] * sizes[2] > 16:
        sizes[sizes.index(max(sizes))] //= 2
    tensor, pipeline, context = sizes
    return {
        "tensor": tensor, "pipeline": pipeline, "context": context,
        "chunks": draw(st.sampled_from([1, 2])) if pipeline > 1 else 1,
        "sharded": draw(st.sampled_from(["none", "state", "gradient", "parameter"])),
        "recompute": draw(st.sampled_from(["none", "selective", "full"])),
        "micro_batch": draw(st.sampled_from([1, 2])), "sequence_parallel": draw(st.booleans()),
        "dtype": draw(st.sampled_from(["bfloat16", "float16", "float32", "float8"])),
    }  # fmt: skip


SMALL = {
    "model_type": "llama", "num_hidden_layers": 16, "hidden_size": 1024, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 2816, "vocab_size": 32000,
}  # fmt: skip


def small(cluster="dgx-h100", **options):
    return sp.predict_transformer(SMALL, cluster, 16, **{"global_batch": 32, "length": 2048} | options)


@given(settings())
def test_causes_add_up_to_the_step(options):
    step = small(**options)
    assert sum(step.breakdown.values()) == pytest.approx(step.step_time_s)
    assert min(step.breakdown.values()) >= 0
    assert step.memory_bytes == sum(step.memory.values())
    assert 0 < step.mfu <= step.hfu < 1
    least, most = step.memory_range_bytes
    assert step.memory_bytes < least < most
    plan = step.plan
    assert plan.world_size == 16
    assert plan.global_batch == 32
    cuts = {"tensor": plan.tensor, "context": plan.context, "pipeline": plan.pipeline, "bubble": plan.pipeline}
    for cause, size in cuts.items():
        assert size > 1 or step.breakdown[cause] == 0


@given(settings())
def test_sharding_more_never_holds_more(options):
    held = [small(**options | {"sharded": name}) for name in ("none", "state", "gradient")]
    assert sorted(held, key=lambda step: -step.memory_bytes) == held
    states = [small(**options | {"sharded": name}).memory["states"] for name in ("gradient", "parameter")]
    assert states[1] <= states[0]


@given(settings())
def test_recomputation_trades_time_for_memory(options):
    none, full = (small(**options | {"recompute": name}) for name in ("none", "full"))
    assert full.memory["activations"] < none.memory["activations"]
    assert full.step_time_s > none.step_time_s
    assert full.mfu < none.mfu


def test_context_divides_activations():
    one, four = (
        sp.predict_transformer("llama-3.1-8b", world_size=16, context=context, recompute="full", global_batch=32)
        for context in (1, 4)
    )
    # What is recomputed delivers the gradients of a block's weights together, and these have no tokens.
    assert four.memory["activations"] < one.memory["activations"] < 4 * four.memory["activations"]
    # As many micro-batches of a quarter of the tokens for each of four times fewer replicas.
    assert four.breakdown["compute"] == pytest.approx(one.breakdown["compute"], rel=0.1)


def test_context_shows_what_attention_does_not_hide():
    slow = load_cluster("dgx-h100", 16)
    slow = replace(slow, link=slow.link.faster(1e-3))
    steps = [sp.predict_transformer(SMALL, each, 16, context=4, length=1 << 16) for each in ("dgx-h100", slow)]
    assert steps[0].breakdown["context"] == 0 < steps[1].breakdown["context"]


def test_experts_divide_parameters_and_exchange_tokens():
    one, eight = (sp.predict_transformer("mixtral-8x7b", world_size=8, expert=expert) for expert in (1, 8))
    assert one.breakdown["expert"] == 0 < eight.breakdown["expert"]
    per_parameter = 18
    experts = read_config("mixtral-8x7b").num_parameters - TrainingPlan(read_config("mixtral-8x7b")).stage_parameters(0)
    assert one.memory["states"] - eight.memory["states"] == experts * 7 / 8 * per_parameter


def test_split_backwards_fill_the_bubble():
    plain, split = (small(pipeline=4, schedule=name) for name in ("1f1b", "zb_h1"))
    assert split.breakdown["bubble"] < 0.6 * plain.breakdown["bubble"]
    # Apart, both gradients of a product start two kernels instead of one.
    assert plain.breakdown["compute"] < split.breakdown["compute"] < 1.05 * plain.breakdown["compute"]
    assert split.memory["activations"] >= plain.memory["activations"]


@pytest.mark.parametrize(("chunks", "schedule"), [(1, "1f1b"), (2, "interleaved_1f1b")])
def test_formula_is_the_clock_of_the_schedule(chunks, schedule):
    """The formula of 1F1B beside its own list of actions, for stages with tables and without."""
    plain = small(pipeline=4, chunks=chunks)
    clocked = small(pipeline=4, chunks=chunks, schedule="looped_bfs" if chunks > 1 else "zb_h2")
    if chunks > 1:
        # Gradients of inputs and of weights are one action, as in the formula.
        assert clocked.breakdown["compute"] == plain.breakdown["compute"]
        assert small(pipeline=4, chunks=chunks, schedule=schedule).step_time_s == pytest.approx(
            plain.step_time_s, rel=0.02
        )
    else:
        # Apart, both gradients of a product start two kernels instead of one.
        assert plain.breakdown["compute"] < clocked.breakdown["compute"] < 1.05 * plain.breakdown["compute"]


def test_uneven_stages_add_up():
    plan = TrainingPlan(GPTShape(7, 8, 2, 16, 10), pipeline=3)
    assert [plan.count_layers(stage) for stage in range(3)] == [(3, 0), (2, 0), (2, 0)]
    held = sum(plan.stage_parameters(stage) for stage in range(3))
    assert held == plan.shape.num_parameters + 80


def test_first_blocks_of_deepseek_are_dense():
    plan = TrainingPlan(read_config("deepseek-v3"), pipeline=16, data=8, expert=8)
    assert [plan.count_layers(stage) for stage in (0, 1, 12, 13, 15)] == [(3, 1), (0, 4), (0, 4), (0, 3), (0, 3)]
    assert {1: list(range(1, 13))}.items() <= plan.like_stages.items()


def test_gathered_blocks_of_zero3():
    plan = TrainingPlan(GPTShape(4, 8, 2, 16, 10), data=4, zero_stage=3)
    assert gathered_bytes(plan) == (12 * 64 + 13 * 8) * (2 + 2 + 2)
    assert gathered_bytes(replace(plan, zero_stage=2)) == 0
    with refused(InputError):
        gathered_bytes(plan, 1)


def test_verdicts_by_capacity():
    step = small()
    least, most = step.memory_range_bytes

    def verdict(capacity):
        device = replace(step.cluster.device, memory_bytes=capacity)
        other = sp.predict_transformer(SMALL, replace(step.cluster, device=device), 16, global_batch=32, length=2048)
        return other.verdict, other.fits

    assert verdict(most) == ("fits", True)
    assert verdict(most - 1) == verdict(least) == ("close", True)
    assert verdict(least - 1) == ("does not fit", False)


def test_text_has_the_verdict_and_the_causes():
    step = sp.predict_transformer("llama-3.1-70b", tensor=8, pipeline=2, sharded="state", global_batch=64)
    text = str(step)
    assert step.verdict in text
    assert all(cause in text for cause, part in step.breakdown.items() if part)


def test_config_from_a_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    assert read_config(path) == read_config(SMALL)
    assert read_config(str(path), length=64).length == 64


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", '{"model_type": "bert"}', "{}", '{"model_type": "llama"}', "[" * 10**5], ids=range(7)
)
def test_bad_config_is_refused(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with refused(InputError):
        read_config("config.json")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs os.mkfifo")
def test_config_that_is_no_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("config.json")
    with refused(InputError):
        read_config("config.json")


@pytest.mark.parametrize(
    "options",
    [
        {"config": "lama-3.1-8b"},
        {"config": SMALL | {"num_hidden_layers": 1.5}},
        {"config": SMALL | {"mlp_only_layers": [1], "model_type": "qwen3_moe"}},
        {"config": "gpt2", "length": 2048},
        {"dtype": "bfloat61"},
        {"sharded": "all"},
        {"schedule": "zbv", "pipeline": 2, "chunks": 2},
        {"schedule": "1f2b", "pipeline": 2},
        {"tensor": 3},
        {"tensor": 0},
        {"expert": 2},
        {"global_batch": 24},
        {"context": 16, "length": 100},
        {"pipeline": 16, "config": SMALL | {"num_hidden_layers": 8}},
        {"recompute": "some"},
    ],
    ids=lambda options: ",".join(f"{name}={str(value)[:20]}" for name, value in options.items()),
)
def test_impossible_request_is_refused(options):
    with refused(InputError):
        sp.predict_transformer(**{"config": SMALL, "world_size": 16, "global_batch": 32} | options)


def test_unknown_cluster_is_refused():
    with refused(ClusterError):
        sp.predict_transformer(SMALL, "dgx-h1000", 16)


def test_worst_stage_counts():
    step = sp.predict_transformer("llama-3.1-8b", world_size=32, pipeline=4, tensor=2, global_batch=64)
    held = [
        round(state_bytes(step.plan, stage, MEGATRON_ADAM))
        + round(activation_bytes(step.plan, stage, software="eager"))
        for stage in range(4)
    ]
    assert step.memory_bytes == max(held)
