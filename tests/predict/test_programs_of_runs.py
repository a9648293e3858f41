"""The programs that a dry run notes: the engines give them the times of the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused
from test_folding import data_parallel, sharded

import simparallel as sp
from simparallel.clock.solver import solve
from simparallel.errors import InputError
from simparallel.machine.cluster import describe
from simparallel.predict.prediction import Prediction
from simparallel.predict.programs import graph_of, retimed


def messages(rounds: int, size: int) -> None:
    """Pass arrays around a ring while computing, with receives that are issued early."""
    rank, world_size = sp.get_rank(), sp.get_world_size()
    x = sp.Tensor(np.ones((4, 4), np.float32), requires_grad=True)
    for _ in range(rounds):
        got = np.empty(size)
        receive = sp.irecv(got, (rank - 1) % world_size)
        sent = sp.isend(np.full(size, float(rank)), (rank + 1) % world_size)
        (x @ x).sum().backward()
        receive.wait()
        sent.wait()
        sp.all_reduce(got)


PROGRAMS = {
    "data parallel": (data_parallel, st.tuples(st.integers(1, 30), st.integers(1, 3))),
    "messages": (messages, st.tuples(st.integers(1, 3), st.integers(1, 1000))),
}


def check_solver(prediction: Prediction) -> None:
    """Assert that both engines give every event the time that the recorder gave it."""
    recorders = [prediction._recorders[rank] for rank in range(prediction.world_size)]
    graph = graph_of(recorders)
    times = solve(graph)
    assert solve(graph, links={}) == times
    for rank, events in retimed(recorders, graph, times).items():
        assert events == [event for event in recorders[rank].events if event.kind != "range"]
    assert times.makespan == round(prediction.makespan_s * 10**12)
    path = prediction.critical_path()
    for before, after in pairwise(path):
        assert before.sim_end_ps <= after.sim_end_ps
    assert [path[0].sim_start_ps, path[-1].sim_end_ps] == [0, times.makespan]
    # A receive is shown from the start of its message, which is on the path, too.
    spent = sum(event.sim_end_ps - event.sim_start_ps for event in path if event.name != "recv")
    assert spent == times.makespan


@pytest.mark.parametrize("name", sorted(PROGRAMS))
@settings(max_examples=8)
@given(data=st.data())
def test_solver_gives_the_times_of_the_run(name: str, data: Any) -> None:
    program, arguments = PROGRAMS[name]
    world_size = data.draw(st.integers(1, 4))
    check_solver(sp.dry_run(program, data.draw(arguments), world_size=world_size, fold=False))


@settings(max_examples=6)
@given(dp=st.sampled_from((1, 2, 3)), tp=st.sampled_from((2, 4)), hidden=st.integers(1, 9))
def test_solver_times_sharded_programs(dp: int, tp: int, hidden: int) -> None:
    prediction = sp.dry_run(sharded, (dp, tp, 4, hidden), world_size=dp * tp, nodes=dp, fold=False)
    check_solver(prediction)
    assert prediction.contended().makespan_s >= prediction.makespan_s


def two_groups(size: int) -> None:
    """All-reduce in two groups at once, each of one rank of both nodes."""
    groups = [sp.new_group(ranks) for ranks in ((0, 2), (1, 3))]
    sp.all_reduce(np.ones(size, np.float32), group=groups[sp.get_rank() % 2])


def test_groups_on_one_port_take_turns_of_bytes() -> None:
    """Two ranks of a node share its only network port, so that both transfers take twice as long."""
    port = sp.LinkSpec(1e-6, 1e9, ports=1)
    cluster = describe(4, "a100", nodes=2, node_link=port)
    prediction = sp.dry_run(two_groups, (10**6,), world_size=4, cluster=cluster, fold=False)
    alone = max(
        event.sim_end_ps - event.sim_start_ps for event in prediction.trace.events if event.name == "all_reduce"
    )
    shared = [e.sim_end_ps - e.sim_start_ps for e in prediction.contended().events if e.name == "all_reduce"]
    assert all(1.8 < time_ps / alone < 2.2 for time_ps in shared)
    wide = describe(4, "a100", nodes=2, node_link=sp.LinkSpec(1e-6, 1e9))
    free = sp.dry_run(two_groups, (10**6,), world_size=4, cluster=wide, fold=False)
    assert free.contended().makespan_s == free.makespan_s


def test_programs_without_engines_are_refused() -> None:
    def late_reply() -> None:
        if sp.get_rank() == 1:
            (sp.Tensor(np.ones((8, 8))) @ np.ones((8, 8))).sum()
            sp.recv(np.empty(1), 0)
        elif sp.get_rank() == 0:
            sp.ssend(np.ones(1), 1)

    def two_devices() -> None:
        x = sp.Tensor(np.ones((8, 8))) * 2
        (x.to("sim:1") * 2).sum()

    def any_source() -> None:
        if sp.get_rank() == 2:
            sp.send(np.ones(1), 0)
        elif sp.get_rank() == 0:
            sp.recv(np.empty(1))

    with refused(InputError):
        sp.dry_run(data_parallel, (3, 1), world_size=3).contended()
    for program in (late_reply, two_devices, any_source):
        with refused(InputError):
            sp.dry_run(program, world_size=3, fold=False, devices_per_rank=2).contended()
