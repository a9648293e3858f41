"""The time of a pipeline, by the clock of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import FORMULAS, looped_schedule


class PartTime(NamedTuple):
    """The time of a part of the model, or of all parts of a device, for one micro-batch [ps].

    Its parts are `forward_ps`, with the collectives, and `backward_ps`, without, of which `weights_ps` is a part.
    """

    compute_ps: int
    tensor_ps: int
    context_ps: int
    expert_ps: int
    messages_ps: int
    data_ps: int
    backward_ps: int
    weights_ps: int
    forward_ps: int

    @property
    def sum_ps(self) -> int:
        return sum(self[:-3])


def clocked(plan: TrainingPlan, name: str, parts: Sequence[PartTime], message_ps: int) -> int:
    """Return the time of a schedule by its own clock [ps].

    Of 1F1B the clock runs three rounds of as many micro-batches as there are stages; all further ones take as long as
    the third.

    Args:
        plan: the model, and how it is cut.
        name: of the schedule.
        parts: the times of the parts of the model.
        message_ps: a message between two parts, and its reply [ps].
    """
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    rest = 0
    if name == "1f1b" and v > 1 and m % max(1, m // p):
        # The interleaved schedule has equal rounds.
        rest, m = -m % p, m + -m % p
    forward = tuple([part.forward_ps for part in parts])
    weights = tuple([part.weights_ps for part in parts])
    inputs = tuple([part.sum_ps - part.messages_ps - part.forward_ps - part.weights_ps for part in parts])
    if v > 1 and name in FORMULAS and not plan.overlap_messages:
        forward, inputs = (tuple([time_ps + message_ps // 2 for time_ps in each]) for each in (forward, inputs))
        message_ps = 0

    def makespan(count: int) -> int:
        return _makespan(name, p, count, v, forward, inputs, weights, message_ps // 2)

    rounds = m // p - 3 if name == "1f1b" and (v == 1 or m % p == 0) else 0
    if rounds > 0:
        three_ps = makespan(m - rounds * p)
        time_ps = three_ps + rounds * (three_ps - makespan(m - (rounds + 1) * p))
    else:
        time_ps = makespan(m)
    return time_ps - rest * max(part.sum_ps - part.messages_ps for part in parts)


@lru_cache(maxsize=1024)
def _makespan(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    forward: tuple[int, ...],
    inputs: tuple[int, ...],
    weights: tuple[int, ...],
    message: int,
) -> int:
    return round(looped_schedule(name, ranks, microbatches, chunks).makespan(forward, inputs, weights, message))
