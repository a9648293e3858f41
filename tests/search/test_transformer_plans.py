"""The ranking of a transformer's plans, beside every plan there is."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from refusals import refused

import simparallel as sp
from simparallel.errors import InputError, SearchError
from simparallel.machine.cluster import load_cluster
from simparallel.search.transformer_plans import transformer_plans, what_if
from simparallel.simulate.config import read_config

CONFIG = {
    "model_type": "llama", "num_hidden_layers": 8, "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32000,
}  # fmt: skip
SHAPE = read_config(CONFIG, 2048)


def every_plan(cluster):
    """Yield all plans that the arguments of `predict_transformer` can express."""
    sizes, sharded = (1, 2, 4), ("none", "state", "gradient", "parameter")
    for tensor, pipeline, context, share, recompute, micro_batch, chunks in product(
        sizes, sizes, sizes, sharded, ("none", "full"), sizes, (1, 2, 4)
    ):
        if tensor * pipeline * context > 4:
            continue
        schedules = ("1f1b", "zb_h1") if chunks == 1 and pipeline > 1 else ("1f1b",)
        for schedule in schedules:
            try:
                step = sp.predict_transformer(
                    CONFIG, cluster, 4, tensor=tensor, pipeline=pipeline, context=context, sharded=share,
                    micro_batch=micro_batch, global_batch=8, length=2048, chunks=chunks, schedule=schedule,
                    recompute=recompute, sequence_parallel=tensor > 1,
                )  # fmt: skip
            except InputError:
                continue
            if step.verdict == "fits" and (chunks == 1 or pipeline > 1):
                yield step


def test_first_plan_is_the_fastest_of_all():
    cluster = load_cluster("dgx-h100", 4)
    plans = transformer_plans(SHAPE, cluster, 8)
    everything = list(every_plan(cluster))
    assert len(everything) > 300
    assert plans[0].step_time_s == min(step.step_time_s for step in everything)
    times = [plan.step_time_s for plan in plans]
    assert times == sorted(times)
    assert len({(plan.plan, plan.schedule) for plan in plans}) == len(plans) == 10
    assert all(plan.verdict == "fits" and plan.plan.world_size == 4 and plan.plan.global_batch == 8 for plan in plans)


def test_small_memory_leads_to_other_plans():
    cluster = load_cluster("dgx-h100", 8)
    large = transformer_plans(SHAPE, cluster, 16, count=1)[0]
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=6 * 10**9))
    small = transformer_plans(SHAPE, tight, 16, count=1)[0]
    assert small.memory_range_bytes[1] <= 6 * 10**9 < large.memory_range_bytes[1]
    assert small.step_time_s >= large.step_time_s


def test_one_device_has_one_division():
    plans = transformer_plans(SHAPE, load_cluster("a100", 1), 4)
    assert {plan.plan.world_size for plan in plans} == {1}
    assert {plan.plan.zero_stage for plan in plans} == {0}


def test_experts_are_divided():
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 5632}
    shape = read_config(CONFIG | experts, 2048)
    plans = transformer_plans(shape, load_cluster("dgx-h100", 8), 8, count=100)
    assert {plan.plan.expert for plan in plans} >= {1, 2, 4, 8}
    assert all(plan.plan.data * plan.plan.context % plan.plan.expert == 0 for plan in plans)


def test_faster_hardware_takes_less():
    best = transformer_plans(SHAPE, load_cluster("dgx-h100", 16), 32, count=1)[0]
    assert 0 < what_if(best, device=2) <= 0.5
    assert 0 <= what_if(best, node_links=2) <= 0.5
    assert 0 <= what_if(best, links=2) <= 0.5
    assert what_if(best) == 0


def test_progress_rises_to_the_end():
    seen = []
    transformer_plans(SHAPE, load_cluster("dgx-h100", 4), 8, progress=seen.append)
    assert seen[0] == 0
    assert seen == sorted(seen)
    assert seen[-1] < 1


def test_too_large_a_model_is_refused():
    with refused(SearchError):
        transformer_plans(read_config("llama-3.1-405b"), load_cluster("dgx-h100", 8), 8)


@pytest.mark.parametrize("batch", [7, 1])
def test_batch_that_cannot_be_divided(batch):
    """Odd batches have plans with one replica; a world that no size divides has none."""
    assert all(
        plan.plan.data in (1, batch) for plan in transformer_plans(SHAPE, load_cluster("dgx-h100", 8), batch, count=3)
    )
    with refused(InputError):
        transformer_plans(replace(SHAPE, num_layers=2), load_cluster("dgx-h100", 104), batch)
