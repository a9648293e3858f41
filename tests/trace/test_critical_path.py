"""What connects events: the ends of communications, and the critical path against the solver'."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from test_trace import small_trace, traces

import simparallel as sp
from simparallel.clock.critical_path import communications, critical_path
from simparallel.trace import Trace


def exchange() -> None:
    """Two ranks compute, send, receive late and sum."""
    x, rank = np.ones(1 << 16, np.float32), sp.get_rank()
    w = sp.Tensor(np.zeros((64, 64), np.float32))
    for _ in range(1 + 3 * rank):
        w = w @ w
    if rank == 0:
        sp.send(x, 1)
        sp.recv(x, 1)
    else:
        sp.recv(x, 0)
        sp.send(x, 0)
    w = w @ w
    sp.all_reduce(x)
    sp.all_reduce(np.ones(4, np.float32))


@given(traces())
def test_members_of_a_communication_are_linked(trace: Trace) -> None:
    found = communications(trace.events)
    assert sorted(index for members in found for index in members) == [
        index for index, event in enumerate(trace.events) if event.seq >= 0
    ]
    for members in found:
        assert len({(trace.events[i].kind, trace.events[i].group, trace.events[i].seq) for i in members}) == 1
        assert len({trace.events[i].rank for i in members}) == len(members)


def test_both_ends_of_a_message_are_linked() -> None:
    trace = sp.launch(exchange, world_size=2, transport="inline").trace
    names = [sorted(trace.events[i].name for i in members) for members in communications(trace.events)]
    assert names.count(["recv", "send"]) == 2
    assert names.count(["all_reduce", "all_reduce"]) == 2


@given(traces())
def test_path_ends_with_the_trace(trace: Trace) -> None:
    path = [trace.events[i] for i in critical_path(trace.events)]
    assert trace.critical_path() == path
    assert len(set(path)) == len(path)
    if trace.events:
        assert path[-1].sim_end_ps == max(event.sim_end_ps for event in trace.events)
    # A red control: the order is that of time, except that a receive is shown from the start of its message.
    assert all(a.sim_end_ps <= b.sim_start_ps for a, b in pairwise(path))


def test_path_of_a_program_has_no_gap() -> None:
    """Without gaps, and as long as the makespan, of which a receive takes no time of its own."""
    prediction = sp.dry_run(exchange, world_size=2, fold=False)
    path = prediction.trace.critical_path()
    work = [event for event in path if event.name != "recv"]
    assert all(a.sim_end_ps == b.sim_start_ps for a, b in pairwise(work))
    assert sum(e.sim_end_ps - e.sim_start_ps for e in work) == prediction.trace.makespan_s * 1e12
    told = [event for event in prediction.critical_path() if event.name != "recv"]
    assert [(e.name, e.sim_start_ps, e.sim_end_ps) for e in work] == [
        (e.name, e.sim_start_ps, e.sim_end_ps) for e in told
    ]


def test_path_crosses_a_gap() -> None:
    """Steps that were not kept leave a time in which no event ended."""
    first = small_trace()
    later = [e._replace(sim_start_ps=e.sim_start_ps + 10**6, sim_end_ps=e.sim_end_ps + 10**6) for e in first.events]
    path = Trace(first.events + later, first.cluster).critical_path()
    assert {event.sim_start_ps >= 10**6 for event in path} == {False, True}
    assert path[-1].sim_end_ps == later[-1].sim_end_ps


def test_path_of_nothing_is_empty() -> None:
    assert critical_path([]) == []


def layered() -> None:
    model = sp.nn.Sequential(sp.nn.Linear(4, 8), sp.nn.ReLU(), sp.nn.Sequential(sp.nn.Linear(8, 2)))
    loss = model(sp.Tensor(np.ones((3, 4), np.float32))).sum()
    loss.backward()


def test_events_name_their_layer() -> None:
    """Of forward and backward, and none outside of modules."""
    events = sp.launch(layered, world_size=1, transport="inline").trace.events
    found = {(event.name, event.layer) for event in events}
    assert {"0", "1", "2.0", ""} == {event.layer for event in events}
    assert ("ReLU", "1") in found
    assert ("ReLU.backward", "1") in found
    assert all(event.layer == "" for event in events if event.name.startswith("Sum"))
