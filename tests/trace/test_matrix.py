"""The communication matrix: rows add up to what is counted as sent, receivers are those of the algorithm."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import simparallel as sp

N = 4


def sent(trace: sp.Trace) -> list[int]:
    return [sum(event.sent_bytes for event in trace.events if event.rank == rank) for rank in trace.ranks]


def matrix(program, **settings):
    """Return the matrix of a program on four ranks, after checking the sums of its rows."""
    trace = sp.launch(program, world_size=N, transport="inline", **settings).trace
    found = trace.communication_matrix()
    assert found.sum(axis=1) == pytest.approx(sent(trace))
    assert not found.diagonal().any()
    return found.tolist()


RING = np.roll(np.eye(N), 1, axis=1)


@pytest.mark.parametrize("op", ["all_reduce", "all_gather"])
def test_ring_sends_to_the_next_rank(op):
    found = matrix(lambda: getattr(sp, op)(np.ones(8)))
    assert found == (RING * (96 if op == "all_reduce" else 192)).tolist()


def test_tree_sends_to_its_parents_and_back():
    found = matrix(lambda: sp.all_reduce(np.ones(8), algorithm="tree"))
    assert found == [[0, 64, 64, 0], [64, 0, 0, 0], [64, 0, 0, 64], [0, 0, 64, 0]]


def test_halving_sends_most_to_the_far_half():
    found = matrix(lambda: sp.all_reduce(np.ones(8), algorithm="halving_doubling"))
    assert found == [[0, 32, 64, 0], [32, 0, 0, 64], [64, 0, 0, 32], [0, 64, 32, 0]]


@pytest.mark.parametrize("root", range(N))
def test_rooted_collectives_find_their_root(root):
    def broadcast():
        sp.broadcast(np.ones(8), root)

    def reduce():
        sp.reduce(np.ones(8), root)

    chain = np.roll(np.eye(N), 1, axis=1) * 64
    chain[root - 1] = 0
    assert matrix(broadcast) == chain.tolist()
    back = np.roll(np.eye(N), -1, axis=1) * 64
    back[root] = 0
    assert matrix(reduce) == back.tolist()


@pytest.mark.parametrize("root", range(N))
def test_naive_reduce_sends_to_its_root(root):
    """The root has the times of the steps, and sends nothing."""
    found = matrix(lambda: sp.reduce(np.ones(8), root, algorithm="naive"))
    expected = np.zeros((N, N))
    expected[:, root] = 64
    expected[root, root] = 0
    assert found == expected.tolist()


def test_messages_and_exchanges_have_their_receivers():
    def program():
        if sp.get_rank() == 1:
            sp.send(np.ones(2), 3)
        if sp.get_rank() == 3:
            sp.recv(np.ones(2), 1)
        sp.all_to_all(np.ones((N, 1)))

    expected = 8 * (1 - np.eye(N))
    expected[1, 3] += 16
    assert matrix(program) == expected.tolist()


@settings(max_examples=15, deadline=None)
@given(st.sampled_from(["ring", "tree", "halving_doubling", "naive"]), st.integers(1, 64), st.integers(0, 1))
def test_matrix_rows_are_bytes_sent(algorithm, size, pairs):
    """Also in groups of some ranks."""

    def program():
        group = sp.new_group([2, 0, 3]) if pairs else None
        if group is None or sp.get_rank() != 1:
            sp.all_reduce(np.ones(size), group=group, algorithm=algorithm)

    found = np.array(matrix(program))
    if pairs:
        assert not found[1].any()
        assert not found[:, 1].any()


def test_from_zero_moves_all_events_alike():
    trace = sp.launch(lambda: [sp.all_reduce(np.ones(8)) for _ in range(2)], world_size=2, transport="inline").trace
    later = sp.Trace(
        [e._replace(sim_start_ps=e.sim_start_ps + 5, sim_end_ps=e.sim_end_ps + 5) for e in trace.events], trace.cluster
    )
    assert later.from_zero().events == trace.from_zero().events
    assert min(event.sim_start_ps for event in later.from_zero().events) == 0
    assert len(sp.Trace([], trace.cluster).from_zero()) == 0
