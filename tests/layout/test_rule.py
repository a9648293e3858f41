"""Rules: parsing, binding sizes, predicting shapes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from refusals import refused

from simparallel.errors import ShapeError
from simparallel.layout.rule import bind, broadcast, dim_names, output_shape, parse
from simparallel.testing.strategies import broadcastable_shapes


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "output"),
    [
        ("m k, k n -> m n", ((2, 3), (3, 4)), {"m": 2, "k": 3, "n": 4}, (2, 4)),
        ("... m k, ... k n -> ... m n", ((5, 1, 2, 3), (7, 3, 4)), {"...": 35, "...1": 7}, (5, 7, 2, 4)),
        ("..., ... -> ...", ((), ()), {"...": 1}, ()),
        ("n [v], n -> ", ((4, 9), (4,)), {"n": 4, "v": 9}, ()),
        ("n {h} -> n {h}", ((0, 2),), {"n": 0, "h": 2}, (0, 2)),
        ("n c h -> n (c h)", ((2, 3, 4),), {"c": 3, "h": 4}, (2, 12)),
        ("(c=3 h=4) -> c h", ((12,),), {"c": 3, "h": 4}, (3, 4)),
        ("1 c -> c 5", ((1, 7),), {"c": 7}, (7, 5)),
        ("n -> n v=5", ((3,),), {"n": 3}, (3, 5)),
        ("n c <h>, o c {k} -> n o <h>=6", ((2, 3, 8), (4, 3, 3)), {"h": 8, "o": 4, "k": 3}, (2, 4, 6)),
        (" -> ", ((),), {}, ()),
    ],
)  # fmt: skip
def test_rule_binds_sizes_and_predicts_shape(text, shapes, sizes, output):
    bound = bind(text, shapes)

    assert {name: bound[name] for name in sizes} == sizes
    assert output_shape(text, shapes) == output


def test_kinds_of_dims():
    (dims,), output = parse("... m [v] {h} (a=2 b=3) 1 <w> -> ... 4").inputs, parse("... 4 -> 4").output

    kinds = ["ellipsis", "plain", "completed", "whole", "factored", "fixed", "window"]
    assert [dim.kind for dim in dims] == kinds
    assert [dim.names for dim in dims] == [(), ("m",), ("v",), ("h",), ("a", "b"), (), ("w",)]
    assert (dims[4].sizes, dims[5].sizes, output[0].sizes) == ((2, 3), (1,), (4,))


@pytest.mark.parametrize("text", ["m k", "m $ -> m", "[m -> m"])
def test_malformed_rules_are_refused(text):
    with refused(ValueError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "shapes"),
    [
        ("m k, k n -> m n", ((2, 3),)),
        ("m k, k n -> m n", ((2, 3), (5, 4))),
        ("m k -> m", ((2,),)),
        ("m k -> m", ((2, 3, 4),)),
        ("... m k -> m", ((2,),)),
        ("(c=3 h=4) -> c h", ((11,),)),
        ("1 c -> c", ((2, 3),)),
        ("..., ... -> ...", ((2, 3), (2, 4))),
    ],
)
def test_shapes_that_break_a_rule_are_refused(text, shapes):
    with refused(ShapeError):
        output_shape(text, shapes)


@given(broadcastable_shapes(2))
def test_broadcast_matches_numpy(shapes):
    assert broadcast(*shapes) == np.broadcast_shapes(*shapes)


def test_dim_names():
    assert (dim_names(0), dim_names(3)) == ([], ["d0", "d1", "d2"])
