"""Wrong answers to the exercises on automatic parallelism: exercise -> a part of the text about the case -> answer."""

from __future__ import annotations

from itertools import product
from math import prod


def cuts(divides=True, part=True, powers=False):
    """Return an answer that forgets one of the rules."""

    def answer(sizes, devices):
        numbers = [c for c in range(1, devices + 1) if not powers or c & (c - 1) == 0]
        return [
            cut
            for cut in product(numbers, repeat=len(sizes))
            if (devices % prod(cut) == 0 if part else prod(cut) == devices)
            and (not divides or all(size % c == 0 for size, c in zip(sizes, cut, strict=True)))
        ]

    return answer


def cheapest_each(nodes, edges):
    return [min(range(len(own)), key=own.__getitem__) for own in nodes]


def from_left(nodes, edges):
    """Take the cheapest next strategy after the one just taken."""
    choice = cheapest_each(nodes[:1], edges)
    for own, table in zip(nodes[1:], edges, strict=True):
        choice.append(min(range(len(own)), key=lambda t, own=own, row=table[choice[-1]]: own[t] + row[t]))
    return choice


def ends_at_first(nodes, edges):
    """Go on from the cheapest way to each strategy, and take the first one at the end."""
    ways = [(price, [s]) for s, price in enumerate(nodes[0])]
    for prices, table in zip(nodes[1:], edges, strict=True):
        ways = [min((w + table[s][t] + p, [*c, t]) for s, (w, c) in enumerate(ways)) for t, p in enumerate(prices)]
    return ways[0][1]


def undominated(plans, strict):
    def dominates(a, b):
        return a[0] < b[0] and a[1] < b[1] if strict else a[0] <= b[0] and a[1] <= b[1] and a != b

    return [plan for plan in plans if not any(dominates(other, plan) for other in plans)]


WRONG = {
    "legal_cuts": {
        "sizes=(1,), devices=2: (2,) is not legal": cuts(divides=False),
        "sizes=(1,), devices=2: (1,) is missing": cuts(part=False),
        "sizes=(6,), devices=6: (3,) is missing": cuts(powers=True),
        "is there twice": lambda sizes, devices: cuts()(sizes, devices) * 2,
    },
    "chain_dp": {
        "ops=2, strategies=3, seed=0: [2, 2] costs 14, and 9 is possible": cheapest_each,
        "is possible": from_left,
        "ops=1, strategies=2": ends_at_first,
        "ops=1, strategies=1, seed=0: []": lambda nodes, edges: [],
    },
    "pareto": {
        "plans=((1, 2), (1, 3)): (1, 3) is dominated": lambda plans: sorted(undominated(plans, strict=True)),
        "plans=((1, 2), (1, 2)): (1, 2) is there twice": lambda plans: sorted(undominated(plans, strict=False)),
        "plans=((2, 1), (1, 2)): the fastest is not first": lambda plans: undominated(plans, strict=False),
        "(2, 2) is missing": lambda plans: sorted({min(plans), min(plans, key=lambda plan: plan[::-1])}),
    },
}
