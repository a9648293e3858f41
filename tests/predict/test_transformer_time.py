"""Closed forms of the time of a step: flops, parts that add up, what hides what."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from refusals import refused
from test_transformer_memory import plans

import simparallel as sp
from simparallel.errors import ClusterError, InputError
from simparallel.machine.cluster import PRESETS, describe
from simparallel.simulate.pipeline_time import Passes, PassTime, clocked
from simparallel.simulate.transformer import GPTShape, TrainingPlan
from simparallel.simulate.transformer_memory import MEGATRON_ADAM, MIXED_ADAM, looped_schedule
from simparallel.simulate.transformer_time import Efficiency, PricedStep, step_time

SHAPE = GPTShape(num_layers=12, width=768, num_heads=12, length=512, vocabulary=5000)


def cluster_of(plan):
    """Return described nodes with two devices each, or one node."""
    return describe(plan.world_size, "a100", nodes=max(1, plan.world_size // 2) if plan.world_size % 2 == 0 else 1)


def predict(plan, **settings):
    return step_time(plan, cluster_of(plan), **settings)


@given(*[st.integers(1, 100)] * 5)
def test_flops_are_the_published_formulas(batch, layers, length, heads, vocabulary):
    h = 4 * heads
    shape = GPTShape(layers, h, heads, length, vocabulary)
    base = batch * layers * length * h**2
    s, v = Fraction(length, h), Fraction(vocabulary, layers * h)
    assert shape.flops(batch) == 72 * base * (1 + s / 6 + v / 12)
    assert shape.flops(batch, "selective") == 72 * base * (1 + s / 3 + v / 12)
    assert shape.flops(batch, "full") == 96 * base * (1 + s / 6 + v / 16)


@given(plans())
def test_utilisation_is_flops_over_time(plan):
    time, peaks = predict(plan), plan.world_size * 312e12
    assert time.step_ps == sum(
        (time.compute_ps, time.tensor_ps, time.messages_ps, time.bubble_ps, time.data_ps, time.optimizer_ps)
    )
    assert time.mfu == pytest.approx(plan.shape.flops(plan.global_batch) / (time.step_s * peaks))
    assert time.hfu == pytest.approx(plan.shape.flops(plan.global_batch, plan.recompute) / (time.step_s * peaks))
    assert time.tensor_ps > 0 if plan.tensor > 1 and not plan.overlap_tensor else time.tensor_ps >= 0
    assert (time.messages_ps > 0, time.bubble_ps > 0) == (plan.pipeline > 1,) * 2
    assert time.data_ps >= 0
    assert (time.data_ps > 0) == (plan.world_size > 1)


@given(plans())
def test_half_as_fast_takes_twice_as_long(plan):
    cluster = cluster_of(plan)
    # The time of a tile that is not computing is no speed.
    cluster = replace(cluster, device=replace(cluster.device, matrix_units=None))

    def slower(link):
        return link and replace(link, latency_s=link.latency_s * 2)

    twice = replace(
        cluster,
        device=replace(cluster.device, launch_s=cluster.device.launch_s * 2),
        link=slower(cluster.link),
        node_link=slower(cluster.node_link),
    )
    fast = Efficiency(0.6, 0.3)
    slow = Efficiency(*(value / 2 for value in vars(fast).values()))
    # Each price is rounded to a picosecond.
    assert step_time(plan, twice, slow).step_s == pytest.approx(2 * step_time(plan, cluster, fast).step_s, rel=1e-5)


@given(plans(), st.sampled_from(["product", "attention", "memory", "link", "node_link"]))
def test_faster_hardware_is_not_slower(plan, part):
    slow = predict(plan, efficiency=replace(Efficiency(), **{part: 0.1}))
    assert slow.step_ps >= predict(plan).step_ps


# 174.6 billion parameters on 384 devices (Narayanan et al. 2021, table 2).
LARGE = TrainingPlan(
    GPTShape(96, 12288, 96, 2048, 51200), tensor=8, pipeline=12, data=4, num_micro_batches=384, recompute="full"
)


def test_presets_with_faster_devices_take_less_time():
    """In the same cluster: no other number decides, such as the peak of operations that are no products."""
    cluster = describe(LARGE.world_size, "dgx-a100", nodes=48)
    devices = {name: preset.device for name, preset in PRESETS.items() if preset.device.matrix_units}
    speed = {
        name: (device.peak(2) * device.matrix_units.product, device.memory_bandwidth_bytes_per_s, -device.launch_s)
        for name, device in devices.items()
    }
    step_ps = {name: step_time(LARGE, replace(cluster, device=device)).step_ps for name, device in devices.items()}
    pairs = [(a, b) for a in speed for b in speed if all(x <= y for x, y in zip(speed[a], speed[b], strict=True))]
    for slow, fast in pairs:
        assert (step_ps[fast] < step_ps[slow]) == (speed[fast] != speed[slow]), (slow, fast)
    assert ("dgx-a100", "dgx-h100") in pairs


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_reach_plausible_utilisation(preset):
    assert 0.15 < step_time(LARGE, describe(LARGE.world_size, preset, nodes=48)).mfu < 0.6


@given(plans())
def test_overlap_hides_time(plan):
    shown = predict(replace(plan, overlap_tensor=False, overlap_data=False))
    hidden = predict(replace(plan, overlap_tensor=True, overlap_data=True))
    assert hidden.tensor_ps <= shown.tensor_ps
    assert hidden.data_ps <= shown.data_ps
    assert (hidden.compute_ps, hidden.optimizer_ps) == (shown.compute_ps, shown.optimizer_ps)


@given(plans(chunks=1))
def test_chunks_divide_the_bubble(plan):
    shape = replace(plan.shape, num_layers=plan.shape.num_layers * 2)
    # The interleaved schedule needs a multiple of the stages.
    count = plan.num_micro_batches * plan.pipeline
    plan = replace(plan, shape=shape, num_micro_batches=count, sequence_parallel=False)
    one, two = (predict(replace(plan, chunks=chunks)) for chunks in (1, 2))
    assert two.messages_ps >= 2 * one.messages_ps
    # Messages are part of what a stage waits for.
    assert two.bubble_ps <= one.bubble_ps
    assert two.compute_ps == one.compute_ps


def test_bubble_of_equal_stages():
    """(p - 1)/m of the ideal time, divided by the chunks; table and head are small beside 48 blocks."""
    shape = replace(SHAPE, num_layers=48, vocabulary=1)
    for chunks, count, expected in ((1, 8, 3 / 8), (2, 8, 3 / 16), (2, 9, 3 / 18 + 3 / 18)):
        plan = TrainingPlan(shape, pipeline=4, chunks=chunks, num_micro_batches=count)
        time = predict(plan)
        assert time.bubble_ps / (time.compute_ps + time.messages_ps) == pytest.approx(expected, rel=0.1)


@given(st.sampled_from([2, 3, 4]), st.integers(1, 4), st.sampled_from([1, 2, 4]))
def test_bubble_is_that_of_the_schedule(ranks, rounds, chunks):
    """Table and head are small beside the blocks, so the parts of the model are nearly equal."""
    shape, count = replace(SHAPE, num_layers=480, vocabulary=1), rounds * ranks
    time = predict(TrainingPlan(shape, pipeline=ranks, chunks=chunks, num_micro_batches=count))
    schedule = sp.pipeline_schedule("1f1b" if chunks == 1 else "interleaved_1f1b", ranks, count, chunks=chunks)
    ideal = count * chunks * (1 + 2)

    assert time.bubble_ps / (time.compute_ps + time.messages_ps) == pytest.approx(
        schedule.cost(1, 2, 0).makespan / ideal - 1, rel=0.02
    )


TIMES = st.tuples(*[st.builds(PassTime.of, st.integers(1, 9), st.integers(0, 9))] * 3).map(lambda each: Passes(*each))


@given(st.data(), st.sampled_from(["gpipe", "1f1b", "zb_h1"]), st.integers(2, 4), st.integers(1, 4))
def test_clock_of_devices_is_that_of_the_schedule(data, name, ranks, rounds):
    chunks = 1 if name == "zb_h1" else data.draw(st.integers(1, 2))
    passes = data.draw(st.lists(TIMES, min_size=ranks * chunks, max_size=ranks * chunks))
    shape, message = replace(SHAPE, num_layers=48), data.draw(st.integers(0, 5))
    plan = TrainingPlan(shape, pipeline=ranks, chunks=chunks, num_micro_batches=rounds * ranks, overlap_messages=True)
    each = [[work.device_ps for work in kind] for kind in zip(*(part.each for part in passes), strict=True)]
    made = looped_schedule(name, ranks, rounds * ranks, chunks)
    alone = clocked(plan, name, passes, 2 * message)
    assert alone == made.cost(*each, message).makespan
    # With interpreters a step takes longer, at least as long as the busiest one.
    hosted = clocked(plan, name, passes, 2 * message, PassTime.of(3, 2))
    busy = (sum(work.host_ps for part in passes[rank::ranks] for work in part.each) for rank in range(ranks))
    assert hosted >= max(alone + 3, 2 + rounds * ranks * max(busy))
    # What is done once shows where nothing comes before it, or after it.
    first, last = passes[0]._replace(first=PassTime.of(7)), passes[0]._replace(last=PassTime.of(5))
    assert clocked(plan, name, [first, *passes[1:]], 2 * message) == alone + 7
    assert alone <= clocked(plan, name, [last, *passes[1:]], 2 * message) <= alone + 5


@given(plans(), st.booleans())
def test_no_step_is_faster_than_its_busiest_stage(plan, hosted):
    cluster = cluster_of(plan)
    device = replace(cluster.device, op_start_s=1e-5 * hosted)
    priced = PricedStep(plan, Efficiency().achieved(replace(cluster, device=device)), MIXED_ADAM, "1f1b")
    assert priced.least_ps <= priced.time().step_ps


def test_recomputation_adds_a_forward_pass():
    plan = TrainingPlan(replace(SHAPE, has_bias=False), tensor=2, micro_batch=2)
    none, full = (predict(replace(plan, recompute=recompute)) for recompute in ("none", "full"))
    # Six all-reduces of each block instead of four, and one of the table, one of the head; those of the loss are small.
    assert (full.tensor_ps - none.tensor_ps) * (4 * 12 + 2) == pytest.approx(none.tensor_ps * 2 * 12, rel=0.05)
    assert 1.25 < full.compute_ps / none.compute_ps < 1.45
    fused = replace(plan, fused_attention=True)
    assert predict(fused).compute_ps == predict(replace(fused, recompute="selective")).compute_ps


@given(plans(zero_stage=0))
def test_zero_shares_the_update(plan):
    assume(plan.data > 1)
    whole, shared = predict(plan).optimizer_ps, predict(replace(plan, zero_stage=1)).optimizer_ps
    launch = round(5e-6 * 1e12)
    assert (shared - launch) * plan.data == pytest.approx(whole - launch, abs=plan.data, rel=1e-2)


def test_one_device_only_computes():
    time = predict(TrainingPlan(SHAPE))
    assert time.step_ps == time.compute_ps + time.optimizer_ps
    assert time.mfu == time.hfu < 0.7


def test_cluster_of_another_size_is_refused():
    with refused(ClusterError):
        step_time(TrainingPlan(SHAPE, tensor=2), describe(4, "a100"))


@pytest.mark.parametrize("value", [0.0, 1.5, "half", float("nan")], ids=str)
def test_impossible_efficiency_is_refused(value):
    with refused(InputError):
        Efficiency(memory=value)


def test_float32_gradients_take_longer():
    plan = TrainingPlan(SHAPE, data=2)
    assert predict(plan, states=MEGATRON_ADAM).data_ps > predict(plan).data_ps


@settings(max_examples=4)
@given(st.integers(1, 6), st.integers(1, 3))
def test_interpreter_bounds_as_in_a_dry_run(layers, micro_batches):
    """Small steps take the interpreter's time: both count the same operations, but for tables and the optimizer."""
    cluster = describe(1, "dgx-a100")
    cluster = replace(cluster, device=replace(cluster.device, op_start_s=1e-3))

    def program():
        network = sp.models.gpt(256, 32, num_layers=layers, num_heads=4, width=64)
        optimizer, tokens = sp.optim.AdamW(network.parameters()), np.zeros((1, 32), np.int64)
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(micro_batches):
                sp.functions.cross_entropy(network(tokens).reshape(-1, 256), tokens.reshape(-1)).backward()
            optimizer.step()

    shape = GPTShape(layers, 64, 4, 32, 256)
    plan = TrainingPlan(shape, num_micro_batches=micro_batches, fused_attention=True, item_bytes=4)
    closed = step_time(plan, cluster)
    assert closed.host_ps > 0.9 * closed.step_ps
    dry = sp.dry_run(program, cluster=cluster, unknown=1.0)
    # Lookups of places, sums of embeddings, and the update.
    assert closed.step_s == pytest.approx(dry.step_time_s, abs=(3 * micro_batches + 2) * 1e-3)
    # Red control: without an interpreter.
    alone = step_time(plan, replace(cluster, device=replace(cluster.device, op_start_s=0.0)))
    assert alone.host_ps == 0 < alone.step_ps < closed.step_ps / 5
