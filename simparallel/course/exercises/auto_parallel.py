"""Exercises of lesson 7: automatic parallelism."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

from simparallel.course.exercises.exercise import Case, Values, call_case, exercise
from simparallel.course.exercises.remarks import Remark

# Sizes of an op's dims, the smallest first.
SIZES = ((1,), (4,), (6,), (2, 3), (4, 6), (8, 8, 8), (6, 5, 12))
# (time, memory) of plans.
PLANS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((3, 3),),
    ((1, 2), (2, 1)),
    ((2, 1), (1, 2)),
    ((1, 2), (2, 3)),
    ((1, 2), (1, 3)),
    ((1, 2), (3, 2)),
    ((1, 2), (1, 2)),
    ((4, 1), (1, 4), (3, 3), (2, 2)),
    ((5, 5), (1, 9), (9, 1), (5, 4), (2, 9), (4, 6), (4, 6)),
    (),
)


def _tuples(result: Iterable[Iterable[Any]]) -> list[tuple[int, ...]]:
    return [tuple(map(int, each)) for each in result]


def _unexpected(answers: list[Any], right: Sequence[Any], wrong: str) -> str | None:
    """Return a remark on the first answer that is wrong, by the template `wrong`, or is missing, or is there twice."""
    found = [Remark(wrong, each) for each in answers if each not in right]
    found += [Remark("{} is missing", each) for each in right if each not in answers]
    found += [Remark("{} is there twice", each) for each in right if answers.count(each) > 1]
    return found[0] if found else None


@exercise(lesson=7, sizes=SIZES, devices=(1, 2, 4, 6, 8))
def legal_cuts(sizes: tuple[int, ...], devices: int) -> Case:
    """Return all ways to cut the dims of an op over a number of devices."""
    cuts = [
        cut
        for cut in product(*(range(1, size + 1) for size in sizes))
        if devices % prod(cut) == 0 and all(size % c == 0 for size, c in zip(sizes, cut, strict=True))
    ]

    def judge(expected: Values, found: Values) -> str | None:
        return _unexpected(found["cuts"], cuts, "{} is not legal")

    return call_case({"sizes": sizes, "devices": devices}, {"cuts": cuts}, judge, form=_tuples)


@exercise(lesson=7, ops=(1, 2, 3, 4, 30), strategies=range(1, 4), seed=range(3))
def chain_dp(ops: int, strategies: int, seed: int) -> Case:
    """Return the cheapest choice for a chain of ops, given the cost of each strategy and of each pair of neighbours."""
    rng = np.random.default_rng(seed)
    nodes = rng.integers(0, 10, (ops, strategies)).tolist()
    edges = rng.integers(0, 10, (ops - 1, strategies, strategies)).tolist()

    def price(choice: list[int]) -> int:
        pairs = zip(edges, pairwise(choice), strict=True)
        return sum(own[s] for own, s in zip(nodes, choice, strict=True)) + sum(table[s][t] for table, (s, t) in pairs)

    # For each strategy of the current op: (price, choice) of the cheapest choices that end in it.
    cheapest_to = [(own, [s]) for s, own in enumerate(nodes[0])]
    for own, table in zip(nodes[1:], edges, strict=True):
        cheapest_to = [
            min((before + table[s][t] + own[t], [*choice, t]) for s, (before, choice) in enumerate(cheapest_to))
            for t in range(strategies)
        ]
    least, cheapest = min(cheapest_to)

    def judge(expected: Values, found: Values) -> str | None:
        choice = found["choice"]
        if len(choice) != ops or not set(choice) <= set(range(strategies)):
            return Remark("{} is no choice for {} ops with {} strategies each", choice, ops, strategies)
        return (
            None if price(choice) == least else Remark("{} costs {}, and {} is possible", choice, price(choice), least)
        )

    given = {f"op {i}": own for i, own in enumerate(nodes)} | {
        f"{i} to {i + 1}": table for i, table in enumerate(edges)
    }
    return call_case(
        given, {"choice": cheapest}, judge, calls=[(nodes, edges)], form=lambda choice: list(map(int, choice))
    )


@exercise(lesson=7, plans=PLANS)
def pareto(plans: tuple[tuple[int, int], ...]) -> Case:
    """Return the plans that no other one dominates in time and memory, the fastest first."""
    front = sorted(
        (time, memory)
        for time, memory in set(plans)
        if not any(t <= time and m <= memory and (t, m) != (time, memory) for t, m in plans)
    )

    def judge(expected: Values, found: Values) -> str | None:
        answers = found["front"]
        is_sorted = answers == sorted(answers)
        return _unexpected(answers, front, "{} is dominated, or no plan") or (
            None if is_sorted else Remark("the fastest is not first")
        )

    given = {"plans": [str(plan) for plan in plans]}
    return call_case(given, {"front": front}, judge, calls=[(list(plans),)], form=_tuples)
