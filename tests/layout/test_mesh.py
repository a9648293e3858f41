"""Meshes: coordinates, ordered groups, bad arguments."""

from __future__ import annotations

import pickle
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.errors import LayoutError
from simparallel.layout.mesh import Mesh


@st.composite
def meshes(draw, max_axes=4, max_size=4):
    shape = tuple(draw(st.lists(st.integers(1, max_size), max_size=max_axes)))
    names = tuple(f"axis{i}" for i in range(len(shape)))
    ranks = None if draw(st.booleans()) else tuple(draw(st.permutations(range(prod(shape)))))
    return Mesh(shape, names, ranks)


@st.composite
def meshes_with_axes(draw):
    mesh = draw(meshes())
    axes = draw(st.permutations(mesh.axis_names))
    return mesh, tuple(axes[: draw(st.integers(0, len(axes)))])


@given(meshes())
def test_coordinates_are_row_major(mesh):
    table = np.array(mesh.ranks).reshape(mesh.shape)

    assert {mesh.coordinate(rank): rank for rank in mesh.ranks} == dict(np.ndenumerate(table))


@given(meshes_with_axes())
def test_groups_partition_the_ranks(mesh_axes):
    mesh, axes = mesh_axes
    groups = mesh.groups(axes)

    assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
    assert {len(group) for group in groups} == {prod(mesh.axis_size(axis) for axis in axes)}
    assert all(mesh.group(axes, rank) == group for group in groups for rank in group)


@given(meshes_with_axes())
def test_group_order_has_first_axis_outermost(mesh_axes):
    """The oracle: move the axes to the end in the given order, and read along them."""
    mesh, axes = mesh_axes
    indices = [mesh.axis_names.index(axis) for axis in axes]
    others = [i for i in range(len(mesh.shape)) if i not in indices]
    table = np.array(mesh.ranks).reshape(mesh.shape).transpose(others + indices)
    expected = table.reshape(-1, prod(mesh.axis_size(axis) for axis in axes))

    assert mesh.groups(axes) == tuple(map(tuple, expected.tolist()))


def test_groups_of_the_worked_example():
    mesh = Mesh((2, 4, 1), ("rows", "columns", "rest"))

    assert mesh.coordinate(5) == (1, 1, 0)
    assert mesh.groups("columns") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups("rows") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.group(("rows", "columns"), 0) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert mesh.group(("columns", "rows"), 0) == (0, 4, 1, 5, 2, 6, 3, 7)


def test_mesh_without_axes_is_one_rank():
    mesh = Mesh((), ())

    assert (mesh.size, mesh.coordinate(0), mesh.groups(())) == (1, (), ((0,),))


def test_mesh_is_a_value():
    mesh = Mesh((2, 2), ("dp", "mp"))

    assert mesh == Mesh((2, 2), ("dp", "mp"), (0, 1, 2, 3))
    assert hash(mesh) == hash(Mesh((2, 2), ("dp", "mp"), (0, 1, 2, 3)))
    assert mesh != Mesh((2, 2), ("dp", "mp"), (0, 1, 3, 2))
    assert mesh != Mesh((2, 2), ("mp", "dp"))
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert eval(repr(mesh)) == mesh
    assert eval(repr(Mesh((2,), ("dp",), (7, 3)))) == Mesh((2,), ("dp",), (7, 3))
    with pytest.raises(AttributeError):
        mesh.shape = (4,)  # type: ignore[misc]


SQUARE = Mesh((2, 3), ("dp", "mp"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Mesh([2, 2], ("dp", "mp")),
        lambda: Mesh((2, 2), ["dp", "mp"]),
        lambda: Mesh((2, 0), ("dp", "mp")),
        lambda: Mesh((-3,), ("dp",)),
        lambda: Mesh((2.0,), ("dp",)),
        lambda: Mesh((True,), ("dp",)),
        lambda: Mesh((2, 2), ("dp",)),
        lambda: Mesh((2, 2), ("dp", "dp")),
        lambda: Mesh((2, 2), ("dp", "")),
        lambda: Mesh((2, 2), ("dp", 3)),
        lambda: Mesh((2, 2), ("None", "dp")),
        lambda: Mesh((2,), ("dp",), [0, 1]),
        lambda: Mesh((2,), ("dp",), (0, 1, 2)),
        lambda: Mesh((2,), ("dp",), (5, 5)),
        lambda: Mesh((2,), ("dp",), (0, -1)),
        lambda: Mesh((2,), ("dp",), (0, "1")),
        lambda: SQUARE.coordinate(6),
        lambda: SQUARE.coordinate(-1),
        lambda: SQUARE.coordinate(True),
        lambda: SQUARE.axis_size("pp"),
        lambda: SQUARE.group("pp", 0),
        lambda: SQUARE.group("dp", 9),
        lambda: SQUARE.groups(("dp", "dp")),
    ],
)
def test_bad_arguments_name_the_offender(call):
    with refused(LayoutError):
        call()
