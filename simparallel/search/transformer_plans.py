"""The fastest ways to train a transformer on a cluster: every division of its devices, priced in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush, nsmallest
from math import gcd, inf

from simparallel.base.units import format_bytes
from simparallel.errors import InputError, SearchError
from simparallel.machine.cluster import ClusterSpec
from simparallel.simulate.prediction import (
    DTYPES,
    TransformerPrediction,
    achieved_by,
    predict_plan,
    predict_priced,
    range_bytes,
    worst_memory,
)
from simparallel.simulate.transformer import TrainingPlan, TransformerShape
from simparallel.simulate.transformer_time import PricedStep

# More chunks of a device than these are not tried, nor larger micro-batches.
_CHUNKS, _MICRO_BATCHES = (1, 2, 3, 4, 6, 8), (1, 2, 4, 8, 16)


def transformer_plans(
    shape: TransformerShape,
    cluster: ClusterSpec,
    global_batch: int,
    dtype: str = "bfloat16",
    count: int = 10,
    progress: Callable[[float], None] | None = None,
    adapt: Callable[[TrainingPlan, str], TrainingPlan | None] = lambda plan, _: plan,
) -> list[TransformerPrediction]:
    """Return the fastest plans whose memory fits, the best one first.

    All divisions into tensor (inside a node) × context × replicas × pipeline are tried, with experts over replicas and
    contexts, every kind of sharding, micro-batches and chunks; blocks are recomputed where nothing else fits. With a
    pipeline of one chunk, the best are tried with ZB-H1, too.

    Args:
        shape: the model, with the length of its sequences.
        cluster: the described hardware.
        global_batch: sequences of a step.
        dtype: see `predict_transformer`.
        count: number of plans.
        progress: is called with the finished part of the search, from 0 to 1.
        adapt: returns a plan to price in place of one that runs a schedule, or None to leave it out.

    Raises:
        InputError: the sequences and blocks cannot be divided over the devices.
        SearchError: no plan fits into the memory of a device. Facts: `least_bytes`, `limit_bytes`.
    """
    capacity, states, software = cluster.device.memory_bytes, DTYPES[dtype][1], cluster.device.software
    divisions = list(_divisions(shape, cluster, global_batch, DTYPES[dtype][0]))
    if not divisions:
        raise InputError(
            f"plan: {global_batch} sequences and {shape.num_layers} blocks cannot be divided over {cluster.world_size} "
            "devices; choose a global batch that is a multiple of them."
        )
    # By the least time of a step, and by their number: plans to come, those that may be the fastest first.
    queue: list[tuple[int, int, PricedStep]] = []
    achieved = achieved_by(cluster, dtype)
    for number, division in enumerate(divisions):
        if progress is not None:
            progress(number / len(divisions))
        for plan in filter(None, (adapt(plan, "1f1b") for plan in _plans(division, global_batch))):
            priced = PricedStep(plan, achieved, states, "1f1b")
            queue.append((priced.least_ps, len(queue), priced))
    if not queue:
        raise InputError("plan: none of the plans can be run.")
    heapify(queue)
    # The fastest plans that fit, and their numbers.
    best: list[tuple[tuple[float, int], int, TransformerPrediction]] = []
    least_bytes = inf
    while queue and not (len(best) == count and queue[0][0] > best[-1][-1].time.step_ps):
        _, number, priced = heappop(queue)
        plan = priced.plan
        most = range_bytes(plan, worst_memory(plan, "1f1b", states, software))[1]
        least_bytes = min(least_bytes, most)
        if most <= capacity:
            found = predict_priced(priced, cluster, dtype)
            best = sorted([*best, (_order(found), number, found)], key=lambda each: each[:2])[:count]
        elif plan.recompute == "none":
            # Selective recomputation repeats nothing beside a fused kernel.
            priced = PricedStep(replace(plan, recompute="full"), achieved, states, "1f1b")
            heappush(queue, (priced.least_ps, number, priced))
    if not best:
        raise SearchError(
            f"plan: no plan fits: the least memory is {format_bytes(least_bytes)}, and a device of {cluster.name} has "
            f"{format_bytes(capacity)}. Use more devices, or shorter sequences.",
            least_bytes=least_bytes,
            limit_bytes=capacity,
        )
    plans = [found for *_, found in best]
    split = [
        predict_plan(each.plan, cluster, "zb_h1", dtype)
        for each in plans
        if each.plan.pipeline > 1 and each.plan.chunks == 1 and adapt(each.plan, "zb_h1")
    ]
    return nsmallest(count, plans + [each for each in split if each.verdict == "fits"], key=_order)


def what_if(predicted: TransformerPrediction, *, links: float = 1, node_links: float = 1, device: float = 1) -> float:
    """Return the part of its time that a step loses on other hardware, such as 0.1 if it takes 10 % less.

    Args:
        predicted: the step.
        links, node_links: how many times the bandwidth inside of nodes and between them is.
        device: how many times the peaks and the memory bandwidth of the device are.
    """
    cluster, spec = predicted.cluster, predicted.cluster.device
    peaks = {size: peak * device for size, peak in spec.peak_flops_per_s.items()}
    spec = replace(
        spec, peak_flops_per_s=peaks, memory_bandwidth_bytes_per_s=spec.memory_bandwidth_bytes_per_s * device
    )
    between = cluster.node_link and cluster.node_link.faster(node_links)
    faster = replace(cluster, device=spec, link=cluster.link.faster(links), node_link=between)
    other = predict_plan(predicted.plan, faster, predicted.schedule, predicted.dtype)
    return 1 - other.step_time_s / predicted.step_time_s


def _divisions(
    shape: TransformerShape, cluster: ClusterSpec, global_batch: int, item_bytes: int
) -> Iterator[TrainingPlan]:
    """Yield every division of the devices that the sizes allow."""
    world, node = cluster.world_size, len(cluster.nodes[0])
    for tensor in _divisors(node):
        for pipeline in _divisors(world // tensor) if world % tensor == 0 else ():
            for context in _divisors(world // (tensor * pipeline)):
                data = world // (tensor * pipeline * context)
                if global_batch % data or shape.length % (context * tensor):
                    continue
                for expert in _divisors(data * context) if shape.num_experts else (1,):
                    try:
                        yield TrainingPlan(
                            shape, tensor, pipeline, data, sequence_parallel=tensor > 1, fused_attention=True,
                            overlap_data=True, context=context, expert=expert, item_bytes=item_bytes,
                        )  # fmt: skip
                    except InputError:
                        continue


def _plans(division: TrainingPlan, global_batch: int) -> Iterator[TrainingPlan]:
    """Yield the plans of a division: micro-batches, chunks, and what replicas share."""
    each = global_batch // division.data
    layers, stages = division.shape.num_layers, division.pipeline
    for micro_batch in _MICRO_BATCHES:
        # A context that shares as many sequences as it has devices does the work of replicas with one each.
        if each % micro_batch or gcd(micro_batch, division.context) > 1:
            continue
        count = each // micro_batch
        for chunks in _CHUNKS if stages > 1 else (1,):
            # The interleaved schedule runs groups of as many micro-batches as there are stages.
            if chunks > 1 and (layers % (stages * chunks) or count % stages):
                continue
            for zero_stage in range(4 if division.data * division.context > 1 else 1):
                yield replace(
                    division, micro_batch=micro_batch, num_micro_batches=count, chunks=chunks, zero_stage=zero_stage
                )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _order(predicted: TransformerPrediction) -> tuple[float, int]:
    return predicted.step_time_s, predicted.memory_bytes
