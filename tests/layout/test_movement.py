"""Movements in closed form equal the plans that are made rank by rank."""

from __future__ import annotations

from math import prod

from hypothesis import given, strategies as st

from simparallel.layout.layout import Layout
from simparallel.layout.movement import digits_of, movement
from simparallel.layout.redistribution import plan_redistribution
from simparallel.testing.strategies import layouts

DEVICES = {4: [(4,), (2, 2)], 8: [(8,), (2, 4), (4, 2), (2, 2, 2)], 12: [(12,), (3, 4), (2, 6), (2, 2, 3)]}


def layouts_of(device_num, ndim):
    matrices = st.sampled_from(DEVICES[device_num])
    return matrices.flatmap(lambda matrix: layouts((device_num**2,) * ndim, matrix, permuted=False))


@given(st.data(), st.sampled_from(sorted(DEVICES)), st.integers(1, 3))
def test_closed_form_equals_the_plan(data, device_num, ndim):
    source, target = data.draw(layouts_of(device_num, ndim)), data.draw(layouts_of(device_num, ndim))
    shape = (device_num**2,) * ndim
    found = movement(digits_of(source), digits_of(target))
    steps = plan_redistribution(source, target, shape).steps
    if found is None:
        return
    assert [step.kind for step in steps] == ([] if found.kind == "nothing" else [found.kind])
    if found.digits:
        (step,) = steps
        assert set(map(frozenset, step.groups)) == set(map(frozenset, found.groups(device_num)))
        have = prod(source.local_shape(shape))
        assert set(step.received) == {(found.group_size - 1) * have // found.kept}


@given(st.data(), st.integers(1, 3))
def test_equal_digits_are_equal_slices(data, ndim):
    a, b = data.draw(layouts_of(8, ndim)), data.draw(layouts_of(8, ndim))
    shape = (16,) * ndim
    same = all(a.slices(rank, shape) == b.slices(rank, shape) for rank in range(8))
    assert (digits_of(a) == digits_of(b)) <= same


def test_other_orders_of_ranks_have_no_digits():
    assert digits_of(Layout((2, 2), ("a", "b"), [0, 2, 1, 3])("a", "b")) is None
    # Axes of 2 x 3 and of 3 x 2 devices do not nest.
    a, b = Layout((2, 3), ("a", "b"))("a", "None"), Layout((3, 2), ("a", "b"))("None", "a")
    assert movement(digits_of(a), digits_of(b)) is None
