"""The time of a pipeline on devices and their interpreters, by the clock of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple

from simparallel.clock.solver import solve
from simparallel.parallel.pipeline.timing import ScheduleGraph
from simparallel.simulate.transformer import TrainingPlan
from simparallel.simulate.transformer_memory import FORMULAS, looped_schedule


class PassTime(NamedTuple):
    """The time of work that an interpreter starts op by op, while the device runs behind it [ps].

    Attributes:
        device_ps, host_ps: the time that each takes alone.
        late_ps: from the start of the interpreter to the end of the device, if this had nothing else to do.
    """

    device_ps: int = 0
    host_ps: int = 0
    late_ps: int = 0

    @classmethod
    def of(cls, device_ps: int, host_ps: int = 0) -> PassTime:
        """Return that of one operation."""
        return cls(device_ps, host_ps, device_ps)

    def then(self, other: PassTime) -> PassTime:
        late_ps = max(self.late_ps + other.device_ps, self.host_ps + other.late_ps)
        return PassTime(self.device_ps + other.device_ps, self.host_ps + other.host_ps, late_ps)

    def repeated(self, count: int) -> PassTime:
        device_ps, host_ps, late_ps = self
        return PassTime(count * device_ps, count * host_ps, late_ps + (count - 1) * max(device_ps, host_ps))


# Forward, gradients of inputs, and those of weights if they are computed apart.
Passes = tuple[PassTime, PassTime, PassTime]


def clocked(
    plan: TrainingPlan, name: str, passes: Sequence[Passes], message_ps: int, begin: PassTime | None = None
) -> int:
    """Return the time of a schedule by its own clock [ps].

    Of 1F1B the clock runs three rounds of as many micro-batches as there are stages; all further ones take as long as
    the third.

    Args:
        plan: the model, and how it is cut.
        name: of the schedule.
        passes: those of each part of the model, over one micro-batch.
        message_ps: a message between two parts, and its reply [ps].
        begin: what devices and interpreters do before; None for devices alone.
    """
    p, v, m = plan.pipeline, plan.chunks, plan.num_micro_batches
    if p == 1:
        forward, inputs, weights = passes[0]
        whole = forward.then(inputs).then(weights).repeated(m)
        return max(begin.then(whole)) if begin else whole.device_ps
    rest_ps = 0
    if name == "1f1b" and v > 1 and m % max(1, m // p):
        # The interleaved schedule has equal rounds.
        rest_ps = -m % p * max(sum(each.device_ps for each in part) for part in passes)
        m += -m % p
    if v > 1 and name in FORMULAS and not plan.overlap_messages:
        message = PassTime.of(message_ps // 2)
        passes = [(forward.then(message), inputs.then(message), weights) for forward, inputs, weights in passes]
        message_ps = 0

    def makespan(count: int) -> int:
        return _makespan(name, p, count, v, tuple(passes), message_ps // 2, begin)

    rounds = m // p - 3 if name == "1f1b" and (v == 1 or m % p == 0) else 0
    if rounds > 0:
        three_ps = makespan(m - rounds * p)
        time_ps = three_ps + rounds * (three_ps - makespan(m - (rounds + 1) * p))
    else:
        time_ps = makespan(m)
    return time_ps - rest_ps


@lru_cache(maxsize=1024)
def _makespan(
    name: str,
    ranks: int,
    microbatches: int,
    chunks: int,
    passes: tuple[Passes, ...],
    message_ps: int,
    begin: PassTime | None,
) -> int:
    graph = copy(_tasks(name, ranks, microbatches, chunks, begin is not None))
    kinds = [
        {"F": forward, "I": inputs, "W": weights, "B": inputs.then(weights)} for forward, inputs, weights in passes
    ]
    each = [kinds[action.stage][action.kind] for _, _, action in graph.each]
    hosts = []
    if begin is not None:
        hosts = [begin.device_ps, *[begin.host_ps] * ranks]
        hosts += [ps for work in each for ps in (work.late_ps - work.device_ps, work.host_ps)]
    devices = [work.device_ps for work in each]
    graph.durations = devices + [message_ps] * (len(graph) - len(devices) - len(hosts)) + hosts
    return solve(graph).makespan


@lru_cache(maxsize=64)
def _tasks(name: str, ranks: int, microbatches: int, chunks: int, has_hosts: bool) -> ScheduleGraph:
    """Return the tasks of a schedule without their times, and after them those of its interpreters."""
    graph = looped_schedule(name, ranks, microbatches, chunks).graph()
    if has_hosts:
        device, *hosts = (graph.add(0, []) for _ in range(1 + ranks))
        for task, (rank, _, _) in enumerate(graph.each):
            # The device ends no earlier than `late_ps` after the interpreter began.
            graph.before[task] += [device, graph.add(0, [hosts[rank]])]
            hosts[rank] = graph.add(0, [hosts[rank]])
    _ = graph.after  # copies share it
    return graph
