"""Candidates are exactly the legal strategies."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest

from simparallel.errors import StrategyError
from simparallel.layout.candidates import candidates
from simparallel.layout.strategy import from_tuples

CALLS = [
    ("... k, n k, n -> ... n", ((8, 12), (6, 12), (6,))),
    ("... m k, ... k n -> ... m n", ((4, 8), (8, 6))),
    ("..., ... -> ...", ((4, 6), (6,))),
    ("n [v], n -> ", ((8, 6), (8,))),
    ("... [e0], e0, e0 -> ... e0", ((4, 8), (8,), (8,))),
    ("d0 d1 d2 -> d0 (d1 d2)", ((4, 2, 6),)),
    ("d0 (d1_0=2 d1_1=4) -> d0 d1_0 d1_1", ((4, 8),)),
    ("n {h} -> n {h}", ((8, 8),)),
]


@pytest.mark.parametrize(("rule", "shapes"), CALLS)
@pytest.mark.parametrize("device_num", [1, 4, 6, 8])
def test_candidates_are_all_legal_strategies(rule, shapes, device_num):
    cuts = [c for c in range(1, device_num + 1) if device_num % c == 0]
    legal = set()
    for entries in product(*(product(cuts, repeat=len(shape)) for shape in shapes)):
        try:
            from_tuples(rule, shapes, entries, device_num, "right", (), None)
        except StrategyError:
            continue
        legal.add(entries)
    found = candidates(rule, shapes, device_num)
    assert {each.in_strategy for each in found} == legal
    assert found[0].in_strategy == tuple((1,) * len(shape) for shape in shapes)
    assert len({each[:2] for each in found}) == len(found)


def test_sums_may_be_scattered_over_the_output():
    found = candidates("m k, k n -> m n", ((8, 8), (8, 8)), 4)
    of = {each.out_strategy for each in found if each.in_strategy == ((1, 4), (4, 1))}
    assert of == {None, (4, 1), (1, 4)}


def test_new_dims_may_be_cut():
    found = candidates("n -> n v=8", ((8,),), 4)
    assert (((2,),), (2, 2)) in {each[:2] for each in found}


def test_restricted_candidates():
    rule, shapes = "..., ... -> ...", ((8, 8, 8), (8, 8, 8))
    every, few = candidates(rule, shapes, 8), candidates(rule, shapes, 8, most_dims=2, fully=True)
    assert {prod(map(each.sharding.cut, each.sharding.cuts)) for each in few} == {1, 8}
    assert all(sum(cut > 1 for cut in each.in_strategy[0]) <= 2 for each in few)
    assert {each[:2] for each in few} < {each[:2] for each in every}
