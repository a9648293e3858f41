"""Slow ranks and jitter: durations that differ from the described device's."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import numpy as np

from simparallel.backend import random_uniform
from simparallel.errors import InputError
from simparallel.hardware.recorder import COMPUTE
from simparallel.simulate.task_graph import TaskGraph


def varied(
    graph: TaskGraph, stragglers: Mapping[int, float] | None = None, jitter: float = 0.0, seed: int = 0
) -> np.ndarray:
    """Return durations for either engine [ps], int64, shape (tasks,); only those of work on devices differ.

    The factor of an action is a pure function of the seed, the program's number, the key of the action, and how many
    actions of the program with this key come before. So it stays the same when other actions are added.

    Args:
        graph: the tasks.
        stragglers: number of a program -> factor on the time of its work.
        jitter: the largest fraction by which work takes longer; each action has its own, uniform in [0, jitter).
        seed: seed of these fractions.

    Raises:
        InputError: no such program, or a factor or `jitter` that is negative or not finite.

    Cost: 0.3 us an action; jitter 20 us for each program and key.
    """
    stragglers = stragglers or {}
    numbers, factors_given = range(len(graph.programs)), [*stragglers.values(), jitter]
    if not (stragglers.keys() <= set(numbers) and all(0 <= factor < math.inf for factor in factors_given)):
        raise InputError(
            f"stragglers={dict(stragglers)!r}, jitter={jitter!r}: factors must be finite and 0 or more, and the "
            f"numbers of programs below {len(numbers)}."
        )
    factors = np.ones(len(graph))
    for number, (program, tasks) in enumerate(zip(graph.programs, graph.tasks, strict=True)):
        if not jitter and number not in stragglers:
            continue
        of_key: dict[Hashable, list[int]] = {}
        for action, task in zip(program.actions, tasks.tolist(), strict=True):
            if action.stream == COMPUTE and action.duration_ps:
                of_key.setdefault(action.key, []).append(task)
        for key, own in of_key.items():
            parts = random_uniform(seed, f"jitter/{number}/{key}", 0, len(own)) if jitter else 0.0
            factors[own] = stragglers.get(number, 1.0) * (1 + jitter * parts)
    slowed = np.rint(graph.durations * factors).astype(np.int64)
    return np.where(factors == 1, graph.durations, slowed)
