"""Stages of a model whose children run one after the other: which child is in which stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf

from simparallel.base.units import format_number_of
from simparallel.errors import InputError
from simparallel.nn import Module

Stages = tuple[tuple[str, ...], ...]


def balanced(children: Mapping[str, Module], count: int) -> Stages:
    """Return stages, of one child or more, whose largest number of parameters is as small as possible.

    Raises:
        InputError: fewer children than stages.
    """
    names = list(children)
    if len(names) < count:
        raise InputError(
            f"Pipeline: a model of {format_number_of(len(names), 'part')} for {format_number_of(count, 'stage')}. Take "
            "fewer ranks or chunks, or a Sequential of smaller parts."
        )
    sizes = [sum(parameter.size for parameter in child.parameters()) for child in children.values()]
    sums = [0]
    for size in sizes:
        sums.append(sums[-1] + size)
    # best[i]: of the first i children in the stages so far, the largest stage, and where the last one begins.
    best: list[tuple[float, tuple[int, ...]]] = [(0, ())] + [(inf, ())] * len(names)
    for _ in range(count):
        best = [
            min(((max(best[j][0], sums[i] - sums[j]), (*best[j][1], j)) for j in range(i)), default=(inf, ()))
            for i in range(len(names) + 1)
        ]
    starts = (*best[-1][1], len(names))
    return tuple(tuple(names[a:b]) for a, b in zip(starts, starts[1:], strict=False))


def checked_stages(children: Mapping[str, Module], stages: Sequence[Sequence[str]], count: int) -> Stages:
    """Return the given stages.

    Raises:
        InputError: another number of stages, or not every child once, in the model's order.
    """
    found = tuple(tuple(map(str, stage)) for stage in stages)
    if len(found) != count:
        raise InputError(f"Pipeline: {format_number_of(len(found), 'stage')} given, and the schedule has {count}.")
    flat = [name for stage in found for name in stage]
    if flat != list(children):
        raise InputError(
            f"Pipeline: stages {found!r} must have every child once, in the model's order: {', '.join(children)}."
        )
    return found
