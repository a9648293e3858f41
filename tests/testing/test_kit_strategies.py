"""The Hypothesis strategies draw legal values, and shrink to the smallest."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import Phase, find, given, settings, strategies as st

import simparallel as sp
from simparallel.layout.mesh import Mesh
from simparallel.testing.strategies import (
    clusters,
    device_matrices,
    gradients,
    layouts,
    programs,
    shapes,
    strategies_for,
)

# Without the phase "explain", which takes longer than all others.
SMALL = settings(max_examples=20, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink))


@given(st.integers(1, 24).flatmap(lambda n: st.tuples(st.just(n), device_matrices(n))))
def test_device_matrices_have_all_devices(case):
    count, matrix = case
    assert Mesh(matrix, tuple("abc"[: len(matrix)])).size == count == prod(matrix)


@given(st.data(), shapes(1, 3, min_size=1, max_size=12), st.booleans())
def test_layouts_cover_the_tensor(data, shape, divides):
    layout = data.draw(layouts(shape, divides=divides))
    held = np.zeros(shape, bool)
    for rank in layout.rank_list:
        held[layout.slices(rank, shape)] = True

    assert held.all()
    if divides:
        assert len({layout.local_shape(shape, rank) for rank in layout.rank_list}) == 1


@pytest.mark.parametrize(
    ("op", "of"),
    [
        (sp.ops.MatMul(), [(4, 6), (6, 8)]),
        (sp.ops.Add(), [(4, 6), (1, 6)]),
        (sp.ops.Sum(0), [(4, 6)]),
        (sp.ops.Conv2d(), [(2, 4, 5, 5), (4, 4, 3, 3)]),
        (sp.ops.Softmax(), [(4, 6)]),
    ],
)
@given(data=st.data())
def test_strategies_are_legal(op, of, data):
    count = data.draw(st.sampled_from([1, 2, 4, 6]))
    strategy = data.draw(strategies_for(op, of, count))

    assert len(op.shard(strategy).plan(*of, device_num=count).layouts["inputs"]) == len(of)


@given(clusters(max_units=2))
def test_clusters_price_collectives(cluster):
    ranks = tuple(range(cluster.world_size))
    assert cluster.collective("all_reduce", 1 << 10, ranks).time_ps >= (cluster.world_size > 1)


@given(gradients())
def test_gradients_fit_each_other(each):
    assert len({tuple(x.shape for x in own) for own in each}) == 1
    found = sp.launch(lambda: sp.all_reduce(each[sp.get_rank()][0].copy()), world_size=len(each), transport="inline")
    for total in found:
        np.testing.assert_array_equal(total, sum(own[0] for own in each))


@pytest.mark.process
def test_programs_are_right_on_every_transport(world):
    @settings(max_examples=5)
    @given(programs(world_size=2))
    def check(program):
        inline = sp.launch(program, world_size=program.world_size, transport="inline")
        assert repr(world.run(program.world_size, program)) == repr(inline)

    check()


@given(programs())
def test_programs_reduce_as_numpy_does(program):
    each = sp.launch(program, world_size=program.world_size, transport="inline")
    for number, call in enumerate(program.calls):
        members = call.group or tuple(range(program.world_size))
        if call.name == "all_reduce":
            xs = [program.array(number, rank) for rank in members]
            expected = np.max(xs, axis=0) if call.op == "max" else np.sum(xs, axis=0)
            assert all(np.array_equal(each[rank][number], expected) for rank in members)


@pytest.mark.parametrize(
    ("drawn", "wanted", "smallest"),
    [
        (device_matrices(12), lambda matrix: True, (12,)),
        (device_matrices(), lambda matrix: prod(matrix) > 2, (3,)),
        (strategies_for(sp.ops.MatMul(), [(4, 4), (4, 4)], 4), lambda s: True, ((1, 1), (1, 1))),
        (layouts((4, 4)).map(lambda layout: layout.cuts), lambda cuts: max(cuts) > 1, (2, 1)),
        (gradients().map(lambda each: (len(each), *each[0][0].shape)), lambda x: True, (1,)),
        (programs().map(lambda p: (p.world_size, p.calls[0].name)), lambda p: True, (1, "all_reduce")),
    ],
)
def test_shrinks_to_the_smallest(drawn, wanted, smallest):
    assert find(drawn, wanted, settings=SMALL) == smallest
