"""Pictures of bytes between ranks, of algorithms, redistributions, plans, overlap and scaling show their data."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from matplotlib.colors import to_rgb
from refusals import refused

import simparallel as sp
from simparallel.algorithms.watching import watch
from simparallel.errors import InputError
from simparallel.layout.redistribution import plan_redistribution
from simparallel.view import style


@pytest.fixture(autouse=True)
def _close_figures():
    yield
    plt.close("all")


def texts(ax):
    return [text.get_text() for text in ax.texts]


def test_matrix_picture_shows_bytes_and_nodes():
    matrix = np.array([[0, 2_000, 0], [0, 0, 500_000], [3, 0, 0]])
    ax = sp.view.plot_communication_matrix(matrix, nodes=[[0, 1], [2]])
    assert sorted(texts(ax)) == ["2", "500", "< 0.01"]
    assert ax.get_title(loc="left") == "502 kB in all"
    assert [(p.get_xy(), p.get_width()) for p in ax.patches] == [((-0.5, -0.5), 2), ((1.5, 1.5), 1)]
    assert ax.figure.axes[1].get_ylabel() == "sent [kB]"


def test_matrix_picture_of_no_bytes():
    assert texts(sp.view.plot_communication_matrix(np.zeros((2, 2)))) == []


@pytest.mark.parametrize("matrix", [np.zeros((2, 3)), np.zeros((0, 0)), [[-1.0]]])
def test_bad_matrix_is_refused(matrix):
    with refused(InputError):
        sp.view.plot_communication_matrix(matrix)


def test_algorithms_have_a_panel_for_each_step():
    figure = sp.view.plot_algorithms([watch("ring", num_ranks=3), watch("tree", num_ranks=3)])
    ring, tree = ([ax for ax in part.axes if ax.get_title()] for part in figure.subfigs)
    assert [ax.get_title() for ax in ring] == [*(f"step {n}" for n in range(1, 5)), "result"]
    assert figure.subfigs[0].get_suptitle() == "all_reduce, ring: 4 steps, time 4 α + 1.33333 n β"
    assert texts(tree[-1]) == ["3"] * 9
    # Three messages of a chunk, each an arrow.
    assert texts(ring[0]).count("") == 3


def test_animation_is_the_same_each_time(tmp_path):
    link = sp.cluster.LinkSpec(1e-6, 1e9)
    paths = []
    for name in ("a.gif", "b.gif"):
        animation = sp.view.animate_algorithms([watch("tree", num_ranks=2)], link, 1000, seconds=0.5)
        paths.append(sp.view.save_animation(animation, tmp_path / name, dpi=40))
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert one.startswith(b"GIF89a")


def test_animation_of_another_format_is_refused(tmp_path):
    animation = sp.view.animate_algorithms([watch("tree", num_ranks=2)], sp.cluster.LinkSpec(1e-6, 1e9), 1, seconds=0.5)
    with refused(InputError):
        sp.view.save_animation(animation, tmp_path / "a.mp4")
    # matplotlib warns of an animation that was never drawn.
    animation._draw_was_started = True


@pytest.mark.parametrize(
    "call",
    [
        lambda: sp.view.plot_algorithms([]),
        lambda: sp.view.animate_algorithms([], sp.cluster.LinkSpec(1e-6, 1e9), 1),
        lambda: sp.view.plot_overlap([]),
        lambda: sp.view.plot_scaling({"a": []}),
        lambda: sp.view.plot_scaling({"a": [(1, 0.0)]}),
        lambda: sp.view.plot_search_landscape({}),
        lambda: sp.view.plot_search_landscape({"front": [(0.0, 1.0)]}),
        lambda: sp.view.plot_redistribution(
            plan_redistribution(*[sp.Layout((32,), ("x",))("x"), sp.Layout((32,), ("x",))("None")], (32,))
        ),
    ],
)
def test_pictures_of_nothing_are_refused(call):
    with refused(InputError):
        call()


LINE = sp.Layout((4,), ("x",))
MESH = sp.Layout((2, 2), ("a", "b"))


@pytest.mark.parametrize(
    ("source", "target", "flows", "told"),
    [
        (LINE("x", "None"), LINE("None", "x"), 12, ["all_to_all\n48 B to each rank"]),
        (LINE("None", "None"), LINE("x", "None"), 0, ["slice\nno communication"]),
        (MESH("None", "None").with_partial(("a",)), MESH("a", "None"), 4, ["reduce_scatter\n128 B to each rank"]),
        (MESH("None", "None").with_partial(("a",)), MESH("None", "None"), 4, ["all_reduce\n256 B to each rank"]),
    ],
)
def test_redistribution_shows_flows_and_bytes(source, target, flows, told):
    from matplotlib.patches import PathPatch

    plan = plan_redistribution(source, target, (8, 8))
    ax = sp.view.plot_redistribution(plan, itemsize=4)
    assert sum(isinstance(patch, PathPatch) for patch in ax.patches) == flows
    assert [text for text in texts(ax) if "\n" in text and "partial" not in text] == told


def test_overlap_stacks_exposed_communication():
    times = {"compute_time_s": 3e-3, "communication_time_s": 2e-3, "exposed_communication_s": 0.5e-3}
    ax = sp.view.plot_overlap([("1 MB", times)])
    heights = [(patch.get_y(), patch.get_height()) for patch in ax.patches]
    assert heights == [(0, 3), (3, 0.5), (0, 0.5), (0.5, 1.5)]
    assert texts(ax) == ["3.5"]
    assert ax.get_ylabel().endswith("[ms]")


def test_scaling_marks_ranks_beyond_the_cores():
    rates = {"measured": [(1, 10.0), (2, 19.0), (4, 20.0)]}
    ax = sp.view.plot_scaling(rates, cores=2)
    _, curve = ax.lines
    assert curve.get_xydata().tolist() == [[1, 1], [2, 1.9], [4, 2]]
    (region,) = ax.patches
    assert 2 < region.get_x() < 4
    assert "2 cores" in ax.get_legend().get_texts()[0].get_text()
    assert not sp.view.plot_scaling(rates, cores=4).patches


def test_scaling_names_its_unit():
    assert sp.view.plot_scaling({"a": [(1, 5.0)]}).get_ylabel() == "speed, in units of one rank"
    ax = sp.view.plot_scaling({"a": [(2, 10.0), (4, 20.0)]})
    assert ax.lines[1].get_xydata().tolist() == [[2, 1], [4, 2]]
    assert ax.get_ylabel() == "speed, in units of 2 ranks"


def test_landscape_has_a_staircase_of_the_front():
    ax = sp.view.plot_search_landscape({"a": [(1e-3, 4e6), (3e-3, 1e6)], "b": [(2e-3, 2e6)]}, {"known": (2e-3, 5e6)})
    line = next(line for line in ax.lines if line.get_drawstyle() == "steps-pre")
    assert line.get_xydata().tolist() == [[3, 1], [2, 2], [1, 4]]
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels == ["a", "b", "known"]
    assert ax.get_xlabel().endswith("[ms]")
    assert ax.get_ylabel().endswith("[MB]")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12))
def test_rank_colours_differ(a, b):
    """The first fourteen ranks have colours of their own, and letters can be read on each."""
    one, two = style.rank_colour(a), style.rank_colour(b)
    assert (one == two) == (a == b)
    assert style.readable_on(one) in ("black", "white")
    assert style.readable_on(to_rgb("black")) == "white"
