"""The programs that a dry run notes: the solver gives them the times of the run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import programs
import pytest
from hypothesis import example, given, settings, strategies as st
from refusals import refused
from test_folding import data_parallel, sharded

import simparallel as sp
from simparallel.clock.event import COMPUTE
from simparallel.clock.program import LAUNCHER
from simparallel.clock.shared_links import NONE
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, describe
from simparallel.machine.device import COPY, READ, Curve, OpCost
from simparallel.machine.devices import Device
from simparallel.predict.prediction import Prediction
from simparallel.predict.programs import ProgramRecorder, contended, graph_of, retimed


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


def check_times(prediction: Prediction) -> None:
    """Assert that events have the times of the recorder, that links only delay, and that the path has no gap."""
    recorders = [prediction._recorders[rank] for rank in range(prediction.world_size)]
    graph = graph_of(recorders)
    times = solve(graph)
    assert solve(graph, links={}) == times
    for rank, events in retimed(recorders, graph, times).items():
        assert events == [event for event in recorders[rank].events if event.kind != "range"]
    path = prediction.critical_path()
    # Without a gap; a receive is shown from the start of its message, which is on the path, too.
    path = [event for event in path if event.name != "recv"]
    assert [event.sim_start_ps for event in path] == [0, *(event.sim_end_ps for event in path)][: len(path)]
    ends = [event.sim_end_ps for event in prediction.trace.events if event.kind != "range"]
    assert not path or path[-1].sim_end_ps == max(ends)
    shared = contended(recorders, prediction.cluster, NONE)
    for recorder in recorders:
        free = [event for event in recorder.events if event.kind != "range"]
        for slow, event in zip(shared[recorder.rank], free, strict=True):
            assert slow.sim_start_ps >= event.sim_start_ps
            assert slow.sim_end_ps >= event.sim_end_ps


@pytest.mark.parametrize("name", sorted(PROGRAMS))
@settings(max_examples=8)
@given(data=st.data())
def test_solver_gives_the_times_of_the_run(name: str, data: Any) -> None:
    program, arguments = PROGRAMS[name]
    world_size = data.draw(st.integers(1, 4))
    check_times(sp.dry_run(program, data.draw(arguments), world_size=world_size, fold=False))


@settings(max_examples=6)
@given(dp=st.sampled_from((1, 2, 3)), tp=st.sampled_from((2, 4)), hidden=st.integers(1, 9))
def test_solver_times_sharded_programs(dp: int, tp: int, hidden: int) -> None:
    prediction = sp.dry_run(sharded, (dp, tp, 4, hidden), world_size=dp * tp, nodes=dp, fold=False)
    check_times(prediction)


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


def test_folded_programs_are_not_timed_anew() -> None:
    with refused(InputError):
        sp.dry_run(data_parallel, (3, 1), world_size=3).contended()


# Each third program; the others with the whole matrix of programs.
EACH = [
    pytest.param(name, marks=pytest.mark.matrices if number % 3 else ())
    for number, name in enumerate(programs.PROGRAMS)
]


@pytest.mark.parametrize("name", EACH)
def test_solver_gives_the_times_of_program(name: str) -> None:
    function, args, world_size, described = programs.PROGRAMS[name]
    check_times(sp.dry_run(function, args, world_size=world_size, fold=False, **described))


# --- interpreters, several devices, any source, replies, shared cores ---------------------------------------

KINDS = ("work", "read", "move", "reduce", "wait", "message", "synchronous", "any source", "replicas")
# (kind, rank, other rank, which devices, whether it waits at once, size)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS),
        st.integers(0, 3),
        st.integers(0, 3),
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
        st.booleans(),
        st.integers(1, 300),
    ),
    max_size=10,
)


def drawn(steps: list[Any], num_devices: int) -> None:
    """Run steps in one order on all ranks; receives and waits that are not done at once are done at the end."""
    rank, num_ranks = sp.get_rank(), sp.get_world_size()
    # To be waited for by later steps; receives for the end; waits for after them.
    works: list[Any] = []
    receives: list[Callable[[], Any]] = []
    replies: list[Any] = []
    for number, (kind, one, other, devices, at_once, size) in enumerate(steps):
        src, dst = one % num_ranks, other % num_ranks
        here, there = (f"sim:{device % num_devices}" for device in devices)
        x = sp.nn.Parameter(np.ones((size, 8), np.float32)).to(here)
        if kind == "work" and rank == src:
            for _ in range(3):
                x = x * 2.0
            x.sum()
        elif kind == "read" and rank == src:
            x.sum().item()
        elif kind == "move" and rank == src:
            (x.to(there) * 2.0).sum()
        elif kind == "reduce":
            works.append(sp.all_reduce(x.detach(), async_op=True))
            if at_once:
                works.pop().wait()
        elif kind == "wait" and works:
            works.pop(0).wait()
        elif kind == "replicas" and num_devices > 1:
            model = sp.nn.Linear(8, 3)
            parts = sp.parallel.scatter((sp.Tensor(np.ones((size + 2, 8), np.float32)),), [0, 1])
            outputs = sp.parallel.parallel_apply(sp.parallel.replicate(model, [0, 1]), parts)
            sp.parallel.gather(outputs, 0).sum().backward()
        elif kind in ("message", "synchronous", "any source"):
            # A tag of its own: messages are not received in the order in which they were sent.
            senders = [each for each in range(num_ranks) if each != dst] if kind == "any source" else [src]
            if kind == "synchronous" and rank == src:
                (works if at_once else replies).append(sp.issend(x.detach(), dst, number))
            elif rank in senders:
                works.append(sp.isend(x.detach(), dst, number))
            for source in senders if rank == dst else ():
                receive = partial(sp.recv, x.detach(), None if kind == "any source" else source, number)
                if at_once:
                    receive()
                else:
                    receives.append(receive)
    for receive in receives:
        receive()
    for work in (*replies, *works):
        work.wait()
    # Shows what was waited for last.
    sp.nn.Parameter(np.ones(2)) * 2.0


def with_interpreters(num_ranks: int) -> ClusterSpec:
    """Return devices beside interpreters that are slower for some operations, and faster for others."""
    cluster = describe(num_ranks, "a100")
    device = replace(
        cluster.device,
        host_costs={"Mul": OpCost(9e-6), "Sum": OpCost(5e-5), READ: OpCost(2e-5), COPY: OpCost(3e-6)},
        op_costs={"Mul": OpCost(2e-5), "Sum": OpCost(1e-6)},
        host_waits=("Sum",),
    )
    return replace(cluster, device=device)


def started(num_ranks: int, op_start_s: float, **described: Any) -> ClusterSpec:
    """Return devices beside interpreters that take the same time to start each operation."""
    cluster = describe(num_ranks, "a100", **described)
    return replace(cluster, device=replace(cluster.device, op_start_s=op_start_s))


def with_starts(num_ranks: int) -> ClusterSpec:
    return started(num_ranks, 7e-6)


def with_starts_of_devices(num_ranks: int) -> ClusterSpec:
    return started(num_ranks, 7e-6, devices_per_rank=3)


def with_shared_cores(num_ranks: int) -> ClusterSpec:
    return replace(describe(num_ranks), sharing=Curve(((1, 1.0), (8, 0.2))))


def with_devices(num_ranks: int) -> ClusterSpec:
    return describe(num_ranks, devices_per_rank=3)


ALL_DESCRIBED = [with_interpreters, with_starts, with_starts_of_devices, with_shared_cores, with_devices]


@pytest.mark.parametrize("described", ALL_DESCRIBED)
@settings(max_examples=25)
@given(st.integers(1, 4), STEPS)
@example(2, [("reduce", 0, 0, (0, 0), False, 300), ("work", 0, 0, (0, 0), True, 300)])
@example(2, [("synchronous", 0, 1, (0, 0), False, 300), ("work", 1, 0, (0, 0), True, 300)])
def test_solver_gives_the_times_of_drawn_program(
    described: Callable[[int], ClusterSpec], num_ranks: int, steps: list[Any]
) -> None:
    cluster = described(num_ranks)
    num_devices = cluster.devices_per_rank or 1
    check_times(sp.dry_run(drawn, (steps, num_devices), world_size=num_ranks, cluster=cluster, fold=False, unknown=0.0))


# (what, device, other device, size)
ACTIONS = st.tuples(
    st.sampled_from(["compute", "copy", "read", "issue", "at once"]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(0, 9),
)
BLOCKS = st.lists(st.tuples(st.booleans(), st.lists(ACTIONS, max_size=6)), max_size=4)


@given(BLOCKS, st.booleans(), st.sampled_from((0.0, 1e-7, 59e-6)))
def test_devices_share_an_interpreter_as_recorded(blocks: list[Any], has_one: bool, op_start_s: float) -> None:
    """Work on three devices of a rank, copies between them, and blocks of one thread for each device."""
    recorder = ProgramRecorder(0, started(1, op_start_s, devices_per_rank=3), record="full")
    recorder.work("first", "forward", 0, 10**6, 0, 4)
    devices = [Device("sim", i) for i in range(1 if has_one else 3)]
    recorders = [recorder.of(each) for each in devices]
    for has_threads, actions in blocks:
        with recorder.threads(devices) if has_threads else nullcontext():
            for what, src, dst, size in actions:
                src, dst = (0, 0) if has_one else (src, dst)
                if what == "compute":
                    recorders[src].work("work", "forward", 0, size * 10**7, 0, 4)
                elif what == "read":
                    recorder.read(devices[src])
                elif what == "issue":
                    recorder.join(recorder.issue())
                elif what == "at once":
                    with recorder.at_once():
                        recorders[src].work("work", "forward", 0, size * 10**7, 0, 4)
                elif src != dst:
                    recorders[src].copy_to(recorders[dst], "copy", 0, 0, size)

    graph = ProgramGraph([recorder.program])
    times = solve(graph)
    assert retimed([recorder], graph, times)[0] == recorder.events
    # The end of the last action of each stream.
    clocks = {(each.device, each.stream): end for each, end in zip(graph.actions, times.ends, strict=True)}
    for i, each in enumerate(recorders):
        assert {name: clocks.get((i, name), 0) for name in each.clock_ps} == each.clock_ps
    if recorder.launcher is not None:
        assert clocks[0, LAUNCHER] == recorder.launcher.now_ps
    assert clocks[0, COMPUTE] == recorder.now_ps
