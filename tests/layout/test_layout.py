"""Layouts: slices, replicas, tuple strategies, bad arguments."""

from __future__ import annotations

import pickle
from math import prod

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.errors import LayoutError, StrategyError
from simparallel.layout.layout import INTERLEAVED, Layout
from simparallel.layout.strategy import layout_of_cuts
from simparallel.testing.strategies import layouts, shapes

CUBE = Layout((2, 2, 2), ("dp", "sp", "mp"))


LAYOUTS_WITH_SHAPES = shapes(max_size=9).flatmap(lambda shape: st.tuples(layouts(shape), st.just(shape)))


@given(LAYOUTS_WITH_SHAPES)
def test_one_rank_per_replica_group_tiles_the_tensor(case):
    layout, shape = case
    members = zip(*layout.replica_groups(), strict=True)
    for replica in members:
        times_held = np.zeros(shape, dtype=int)
        for rank in replica:
            times_held[layout.slices(rank, shape)] += 1

        np.testing.assert_array_equal(times_held, 1)


@given(LAYOUTS_WITH_SHAPES)
def test_replica_groups_partition_the_ranks(case):
    """The ranks of a replica group hold the same slice, and each rank is in one group."""
    layout, shape = case
    groups = layout.replica_groups()

    assert sorted(rank for group in groups for rank in group) == sorted(layout.rank_list)
    for group in groups:
        assert len({str(layout.slices(rank, shape)) for rank in group}) == 1


@given(LAYOUTS_WITH_SHAPES)
def test_shard_then_gather_is_the_identity(case):
    layout, shape = case
    whole = np.arange(prod(shape)).reshape(shape)
    gathered = np.full(shape, -1)
    for rank in layout.rank_list:
        part = whole[layout.slices(rank, shape)]
        assert part.shape == layout.local_shape(shape, rank)
        for dim, size in enumerate(layout.local_shape(shape)):  # the oracle: NumPy's slices stop at the end
            start = layout.chunk(rank, dim) * size
            expected = np.arange(shape[dim])[start : start + size]
            np.testing.assert_array_equal(np.arange(shape[dim])[layout.slices(rank, shape)[dim]], expected)
        gathered[layout.slices(rank, shape)] = part

    np.testing.assert_array_equal(gathered, whole)


@pytest.mark.parametrize(
    ("size", "lengths"), [(10, [3, 3, 3, 1]), (2, [1, 1, 0, 0]), (5, [2, 2, 1, 0]), (0, [0] * 4), (8, [2] * 4)]
)
@pytest.mark.parametrize("layout", [Layout((4,), ("a",))("a"), Layout((2, 2), ("a", "b"))(("a", "b"))])
def test_slices_match_torch_chunk(layout, size, lengths):
    assert [layout.local_shape((size,), rank)[0] for rank in range(4)] == lengths


@pytest.mark.parametrize(
    ("size", "lengths"), [(10, [3, 2, 3, 2]), (2, [1, 0, 1, 0]), (5, [2, 1, 1, 1]), (3, [1, 1, 1, 0]), (8, [2] * 4)]
)
@pytest.mark.parametrize("dim", [0, 1])
def test_slices_of_slices_match_torch_chunk(size, lengths, dim):
    """Each slice is cut by itself, also after a sum is left unfinished along another axis."""
    outer = Layout((2, 2, 3), ("a", "b", "c"))(*["a", "None"][:: 1 if dim == 0 else -1])
    layout = outer.cut_slices("b", dim).with_partial("c")
    shape = (size, 4)[:: 1 if dim == 0 else -1]
    assert [layout.local_shape(shape, rank)[dim] for rank in range(0, 12, 3)] == lengths
    assert eval(repr(layout), {"Layout": Layout}) == layout
    assert layout.local_shape(shape)[dim] == max(lengths)
    pairs = zip(range(0, 12, 6), (lengths[0] + lengths[1], lengths[2] + lengths[3]), strict=True)
    assert all(outer.local_shape(shape, rank)[dim] == both for rank, both in pairs)
    # A dim without another cut has no slices to cut.
    assert outer.cut_slices("b", 1 - dim) == outer(*["a", "b"][:: 1 if dim == 0 else -1])


@given(LAYOUTS_WITH_SHAPES)
def test_tensor_map_decodes_to_the_chunks(case):
    """The oracle reads `to_dict` alone: a mixed-radix number of coordinates counted from the right."""
    layout, shape = case
    told = layout.to_dict()
    matrix = told["device_matrix"]
    for position, rank in enumerate(told["rank_list"]):
        coordinate = np.unravel_index(position, matrix) if matrix else ()
        for dim, entry in enumerate(told["tensor_map"]):
            axes = entry if isinstance(entry, tuple) else () if entry == -1 else (entry,)
            number = 0
            for axis in axes:
                number = number * matrix[len(matrix) - 1 - axis] + coordinate[len(matrix) - 1 - axis]

            assert layout.chunk(rank, dim) == layout.chunk(rank, dim - len(shape)) == number


@given(LAYOUTS_WITH_SHAPES)
def test_layouts_survive_repr_and_pickle(case):
    layout, _ = case

    assert eval(repr(layout)) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout
    assert hash(eval(repr(layout))) == hash(layout)


@pytest.mark.parametrize(
    ("order", "columns"),
    [
        (("sp", "dp"), ["0:196", "0:196", "392:588", "392:588", "196:392", "196:392", "588:784", "588:784"]),
        (("dp", "sp"), ["0:196", "0:196", "196:392", "196:392", "392:588", "392:588", "588:784", "588:784"]),
    ],
)
def test_first_listed_axis_is_outermost(order, columns):
    x, w = CUBE("mp", order), CUBE(order, "None")
    rows = ["0:16", "16:32"] * 4
    x_lines, w_lines = x.table((32, 784)).splitlines(), w.table((784, 512), "w").splitlines()

    assert [line.split("  ")[-1].strip() for line in x_lines[1:]] == [
        f"x[{row}, {column}]" for row, column in zip(rows, columns, strict=True)
    ]
    assert [line.split("  ")[-1].strip() for line in w_lines[1:]] == [f"w[{column}, 0:512]" for column in columns]
    assert w.replica_groups() == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_table_of_one_matrix():
    assert Layout((1, 2), ("dp", "mp"), [4, 10])("mp").table((6,)) == (
        "rank  (dp, mp)  slice\n   4  (0, 0)    x[0:3]\n  10  (0, 1)    x[3:6]"
    )
    assert Layout((1,), ("dp",))().table((), "loss").splitlines()[1] == "   0  (0)   loss"


def test_table_shows_interleaved_pieces():
    layout = Layout((2, 2), ("dp", "interleaved_parallel"))
    assert layout(("dp", "interleaved_parallel"), "None").table((8, 3)) == (
        "rank  (dp)  interleaved pieces\n   0  (0)   x[0:2, 0:3] | x[2:4, 0:3]\n   1  (1)   x[4:6, 0:3] | x[6:8, 0:3]"
    )
    assert layout("dp", "None").table((8, 3)).splitlines()[::2] == ["rank  (dp)  slice", "   1  (1)   x[4:8, 0:3]"]


def test_row_blocks_of_three_axes():
    """A reduce-scatter over dp and sp has to order its groups as these row blocks."""
    output = CUBE(("mp", "sp", "dp"), "None")

    assert [output.slices(rank, (32, 8))[0].start for rank in range(8)] == [0, 16, 8, 24, 4, 20, 12, 28]
    assert output.mesh.groups(("sp", "dp")) == ((0, 4, 2, 6), (1, 5, 3, 7))


def test_to_dict_matches_mindspore():
    assert CUBE("mp", ("sp", "dp")).to_dict() == {
        "device_matrix": (2, 2, 2),
        "tensor_map": (0, (1, 2)),
        "interleaved_parallel": False,
        "alias_name": ("dp", "sp", "mp"),
        "rank_list": [0, 1, 2, 3, 4, 5, 6, 7],
    }


def test_call_returns_a_new_layout():
    """Calling a layout returns a new one and leaves the shared one unchanged."""
    before = repr(CUBE)
    first = CUBE("dp", "None")
    second = CUBE("None", "mp")

    assert (repr(CUBE), CUBE.tensor_map) == (before, None)
    assert (first.tensor_map, second.tensor_map) == ((2, -1), (-1, 0))
    assert first("None", "mp") == second


def test_redundant_axes_are_dropped():
    """ "None" in a tuple and axes of size 1 are dropped."""
    layout = Layout((2, 1, 4), ("dp", "one", "mp"))

    assert layout(("None", "dp"), "one").tensor_map == (2, -1)
    assert layout(("mp", "one"), ("None", "None")).tensor_map == (0, -1)
    assert layout(("mp", "one", "dp")).tensor_map == ((0, 2),)
    assert layout("dp", "one") == layout("dp", "None")


def test_partial_axes_are_kept_in_mesh_order():
    x = CUBE("mp", "None")
    partial = x.with_partial(("sp", "dp"))

    assert (x.partial, partial.partial) == ((), ("dp", "sp"))
    assert partial == x.with_partial(["dp", "sp"]) != x
    assert eval(repr(partial)) == partial
    assert partial.with_partial(()) == x
    assert partial.replica_groups() == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert Layout((1, 2), ("one", "mp"))("None").with_partial("one").partial == ()


def test_interleaved_axis_splits_each_slice():
    """The interleaved axis needs no devices; it cuts each rank's slice into pieces."""
    layout = Layout((2, 2, 3), ("dp", "mp", INTERLEAVED))
    x = layout(("dp", INTERLEAVED), "mp")

    assert layout.rank_list == (0, 1, 2, 3)
    assert x.tensor_map == ((2, 0), 1)
    assert x.to_dict()["interleaved_parallel"] is True
    assert (x.cuts, x.local_shape((12, 4))) == ((2, 2), (6, 2))
    assert x.slices(3, (12, 4)) == (slice(6, 12), slice(2, 4))
    assert [piece[0] for piece in x.pieces(3, (12, 4))] == [slice(6, 8), slice(8, 10), slice(10, 12)]
    assert layout("dp", "mp").pieces(0, (12, 4)) == (layout("dp", "mp").slices(0, (12, 4)),)
    with refused(LayoutError):
        x.local_shape((10, 4))


# --- tuple strategies ------------------------------------------------------------------------------


@st.composite
def strategies_on_devices(draw):
    exponents = draw(st.lists(st.integers(0, 2), max_size=3))
    cuts = tuple(2**e for e in exponents)
    return cuts, prod(cuts) * 2 ** draw(st.integers(0, 2)), draw(st.sampled_from(("right", "left")))


@given(strategies_on_devices())
def test_strategy_gives_cuts_and_repeats(case):
    """A layout from a strategy has its cuts, and repeats them on the given side."""
    cuts, device_num, repeat = case
    layout = layout_of_cuts(cuts, device_num, repeat)
    copies = device_num // prod(cuts)
    firsts = [layout.chunk(rank, 0) for rank in range(device_num)] if cuts else []

    assert layout.cuts == cuts
    assert prod(layout.device_matrix) == device_num
    assert {len(group) for group in layout.replica_groups()} == {copies}
    if repeat == "right":
        assert layout.replica_groups()[0] == tuple(range(copies))
    else:
        assert layout.replica_groups()[0] == tuple(range(0, device_num, prod(cuts)))
    assert firsts == [
        (rank // copies if repeat == "right" else rank % prod(cuts)) // prod(cuts[1:]) for rank in range(len(firsts))
    ]


def test_strategies_of_the_worked_examples():
    assert layout_of_cuts((2, 4), 16).tensor_map == (2, 1)
    assert layout_of_cuts((2, 4), 8).tensor_map == (1, 0)
    assert layout_of_cuts((2, 4), 16, "left").tensor_map == (1, 0)
    assert layout_of_cuts((1, 4), 4).tensor_map == (-1, 0)
    assert layout_of_cuts((3,), 24).cuts == (3,)  # 24 is not a power of 2, so 3 need not be one either
    assert layout_of_cuts((), 1).slices(0, ()) == ()
    assert layout_of_cuts((2, 4), 8, shape=(4, 8)).local_shape((4, 8)) == (2, 2)


# --- bad arguments -----------------------------------------------------------------------------------

PAIR = Layout((2, 4), ("dp", "mp"))


@pytest.mark.parametrize(
    "call",
    [
        lambda: Layout([2, 4], ("dp", "mp")),
        lambda: Layout((2, "4"), ("dp", "mp")),
        lambda: Layout((2, 0), ("dp", "mp")),
        lambda: Layout((2, 4), ["dp", "mp"]),
        lambda: Layout((2, 4), ("dp", 5)),
        lambda: Layout((2, 4), ("dp", "")),
        lambda: Layout((2, 4), ("None", "mp")),
        lambda: Layout((2, 4), ("dp", "dp")),
        lambda: Layout((2, 4), ("dp",)),
        lambda: Layout((2, 4), (INTERLEAVED, "mp")),
        lambda: Layout((2, 4), ("dp", "mp"), 8),
        lambda: Layout((2, 4), ("dp", "mp"), [0, 1, 2]),
        lambda: Layout((2,), ("dp",), [0, 0.5]),
        lambda: Layout((2,), ("dp",), [3, 3]),
        lambda: Layout((2, 2), ("dp", INTERLEAVED), [0, 1, 2, 3]),
        lambda: PAIR("pp", "mp"),
        lambda: PAIR("dp", "dp"),
        lambda: PAIR(("mp", "mp")),
        lambda: PAIR("dp", 3),
        lambda: PAIR("dp", ("mp", None)),
        lambda: Layout((2, 2), ("dp", INTERLEAVED))((INTERLEAVED, "dp")),
        lambda: PAIR("dp", "mp").local_shape((2, 4, 1)),
        lambda: PAIR("dp", "mp").local_shape([2, 4]),
        lambda: PAIR("mp", "None").check_divides((10, 64)),
        lambda: PAIR(("mp", "dp")).check_divides((12,)),
        lambda: Layout((2, 2), ("dp", INTERLEAVED))(("dp", INTERLEAVED)).slices(0, (6,)),
        lambda: PAIR("mp").slices(8, (8,)),
        lambda: PAIR("mp").chunk(0, 1),
        lambda: PAIR("mp").chunk(0, -2),
        lambda: PAIR.to_dict(),
        lambda: PAIR.slices(0, ()),
        lambda: PAIR.with_partial("dp"),
        lambda: PAIR("dp").with_partial("dp"),
        lambda: PAIR("dp").with_partial(("mp", "mp")),
        lambda: PAIR("dp").with_partial("pp"),
        lambda: Layout((2, 2), ("dp", INTERLEAVED))("dp").with_partial(INTERLEAVED),
    ],
)
def test_bad_arguments_name_the_offender(call):
    with refused(LayoutError):
        call()


@pytest.mark.parametrize(
    "call",
    [
        lambda: layout_of_cuts((2, 4, 1), 8, shape=(4, 4)),
        lambda: layout_of_cuts([2, 4], 8),
        lambda: layout_of_cuts((2, 0), 8),
        lambda: layout_of_cuts((2.0,), 8),
        lambda: layout_of_cuts((3, 1), 9, shape=(784, 1)),
        lambda: layout_of_cuts((7,), 8),
        lambda: layout_of_cuts((4, 4), 8),
        lambda: layout_of_cuts((5,), 24),
        lambda: layout_of_cuts((2,), 0),
    ],
)
def test_bad_cuts_are_refused(call):
    with refused(StrategyError):
        call()
