"""Plans for tensors so small that waits cost more than bytes.

The direct plan receives the fewest bytes, but takes several messages where parts of unequal size go to some of the
ranks, or a reduction followed by a movement. For a small tensor, one collective that moves more than necessary can
be faster. The estimate per rank is

    seconds = collectives x COLLECTIVE_S + messages x MESSAGE_S + received bytes x BYTE_S

The constants were measured between processes on shared memory, by `python -m benchmarks redistribution`; only their
ratios matter. The chosen plans were up to six times as fast there as the direct plan, and never slower (4 and 8 ranks
on two cores, float32 tensors of 256 B to 256 KB). The constants are the same for every rank and every run, so all
ranks choose the same plan every time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

from simparallel.layout.boxes import shape_of
from simparallel.layout.layout import Layout
from simparallel.layout.redistribution import Redistribution, Step, plan_redistribution, plan_with_whole_sums

COLLECTIVE_S = 13e-6
# To send or to receive a message.
MESSAGE_S = 35e-6
BYTE_S = 0.45e-9
# The most bytes that a rank may receive in a plan other than the direct one.
TINY_BYTES = 64 * 1024


@lru_cache(maxsize=16384)
def plan_quick_redistribution(source: Layout, target: Layout, shape: tuple[int, ...], itemsize: int) -> Redistribution:
    """Return the plan that takes the least time by the estimate above; on a tie, the direct plan.

    Args:
        source, target, shape: see `plan_redistribution`.
        itemsize: bytes of an element.

    Raises:
        LayoutError: as `plan_redistribution`.

    Cost: at most the direct plan's estimate. A rank may receive more bytes, but then at most TINY_BYTES.
    """
    direct = plan_redistribution(source, target, shape)
    whole = plan_with_whole_sums(source, target, shape)
    others = [gathering(direct), whole, gathering(whole)]
    tiny = [plan for plan in others if max(plan.received_bytes(itemsize), default=0) <= TINY_BYTES]
    return min([direct, *tiny], key=lambda plan: estimate_s(plan, itemsize))


def estimate_s(plan: Redistribution, itemsize: int) -> float:
    """Estimate how long a rank is busy with the plan, on average [s]."""
    total_s = 0.0
    for step in plan.steps:
        if step.kind == "slice":
            continue
        if step.kind == "messages":
            assert step.exchange is not None
            # A message takes time at its sender and at its receiver.
            parts = sum(step.exchange.num_sources(rank) for rank in plan.ranks)
            total_s += 2 * parts / len(plan.ranks) * MESSAGE_S
        else:
            total_s += COLLECTIVE_S
        total_s += sum(step.received_bytes(itemsize)) / len(plan.ranks) * BYTE_S
    return total_s


def gathering(plan: Redistribution) -> Redistribution:
    """Replace messages by all-gathers: each rank receives the whole slices of its peers and keeps the part it needs."""
    return replace(plan, steps=tuple(_gathered(step, plan) for step in plan.steps))


def _gathered(step: Step, plan: Redistribution) -> Step:
    is_everywhere = set(plan.source.mesh.ranks) == set(plan.target.mesh.ranks)
    if step.kind != "messages" or step.exchange is None or not is_everywhere:
        return step
    held = step.exchange.num_elements
    if any(prod(shape_of(step.exchange.have(rank) or ())) != held for group in step.groups for rank in group):
        # An all-gather needs slices of equal size.
        return step
    counts = {rank: held * (len(group) - 1) for group in step.groups for rank in group}
    return replace(step, kind="all_gather", received=tuple(counts.get(rank, 0) for rank in plan.ranks))
