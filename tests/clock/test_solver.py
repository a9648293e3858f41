"""The solver: the recorder's times, contention, interference."""

from __future__ import annotations

from operator import ge

import numpy as np
import pytest
from hypothesis import given, strategies as st
from oracles_simulate import COLLECTIVE, COMPUTE, RECEIVE, SEND, WrittenProgram, clocks_of, programs_of, scripts
from refusals import refused

import simparallel as sp
from simparallel.clock.recorder import WorkPrice
from simparallel.clock.shared_links import Interference, LinkTransfer, fair_speeds
from simparallel.clock.solver import solve
from simparallel.clock.task_graph import ProgramGraph
from simparallel.errors import InputError
from simparallel.machine.cluster import describe, picoseconds


def graph_of(script, **settings):
    return ProgramGraph(programs_of(script, **settings))


def times_of(script, **settings):
    """Return the (start, end) of the actions that are work or calls, for each program."""
    programs = programs_of(script, **settings)
    graph = ProgramGraph(programs)
    times = solve(graph)
    starts = graph.shown(times)
    return [
        [(starts[tasks[i]], times.ends[tasks[i]]) for i in program.shown]
        for program, tasks in zip(programs, graph.tasks, strict=True)
    ]


@given(scripts(max_lines=60))
def test_solver_follows_the_recorders_rules(script):
    graph = graph_of(script)

    assert times_of(script) == clocks_of(script)
    assert solve(graph, links={}) == solve(graph)


ALL = "all_reduce"
NAMES = {COMPUTE: "work", COLLECTIVE: ALL, SEND: "send", RECEIVE: "recv"}


def ranks_of(script, line):
    """Return the ranks of a line's event."""
    if line.kind == COLLECTIVE:
        return script.groups[line.where]
    return {COMPUTE: (), SEND: (line.rank, line.where), RECEIVE: (line.where, line.rank)}[line.kind]


def run_script(script):
    """Run one rank's part of a script; return the times of its events: (name, ranks) -> [(start, end), ...]."""
    recorder, rank = sp.comm.current().recorder, sp.get_rank()
    groups = [sp.new_group(group) for group in script.groups]
    # As if the groups had taken no time.
    recorder.clock_ps, first = {"compute": 0}, len(recorder.events)
    works = []
    for kind, of, where, number, size in script.lines:
        if of != rank:
            continue
        x = np.zeros(size, np.uint8)
        if kind == COMPUTE:
            recorder.compute("work", "forward", 0, 0, WorkPrice(size, 0))
        elif kind == COLLECTIVE:
            works.append(sp.all_reduce(x, group=groups[where], async_op=True))
        elif kind == SEND:
            works.append(sp.isend(x, where))
        elif kind == RECEIVE:
            works.append(sp.irecv(x, where))
        else:
            works[number].wait()
    found = {}
    for event in recorder.events[first:]:
        found.setdefault((event.name, event.group), []).append((event.sim_start_ps, event.sim_end_ps))
    return {name: sorted(times) for name, times in found.items()}


def test_solver_gives_the_times_of_real_runs(inline):
    def check(script):
        cluster = describe(script.num_ranks)

        def price(line):
            size, ranks = line.size, ranks_of(script, line)
            is_message = line.kind == SEND
            return (cluster.message(size, *ranks) if is_message else cluster.collective(ALL, size, ranks)).time_ps

        times = [iter(own) for own in times_of(script, price=price)]
        expected = [{} for _ in range(script.num_ranks)]
        for line in script.lines:
            if line.kind in NAMES:
                key = NAMES[line.kind], ranks_of(script, line)
                expected[line.rank].setdefault(key, []).append(next(times[line.rank]))

        assert inline.run(script.num_ranks, run_script, script) == [
            {name: sorted(times) for name, times in own.items()} for own in expected
        ]

    inline.check(scripts(max_lines=40, max_size=10**6), check)


# --- links --------------------------------------------------------------------------------------------

SIZE = 10**6


def senders(*sizes, starts=(), latency_ps=0, duration_ps=None):
    """Return the graph of ranks that each send one message to themselves, at different times."""
    programs = [WrittenProgram() for _ in sizes]
    for rank, (program, size) in enumerate(zip(programs, sizes, strict=True)):
        program.compute(dict(enumerate(starts)).get(rank, 0))
        price_ps = latency_ps + size if duration_ps is None else duration_ps
        program.send(rank, 0, price_ps, size_bytes=size, latency_ps=latency_ps)
        program.wait(program.receive(rank, 0))
    return ProgramGraph(programs)


def ends_of(graph, **settings):
    """Return when each rank's program ends."""
    times = solve(graph, **settings)
    return [times.ends[tasks[-1]] for tasks in graph.tasks]


# A capacity of one byte per picosecond.
WIRE = {"wire": (1e12, 1.0)}


@given(st.floats(1e3, 1e12), st.integers(0, 10**9), st.floats(0, 1e-3))
def test_lone_transfer_takes_its_price(bandwidth, size, latency_s):
    price_ps = picoseconds(latency_s + size / bandwidth)
    graph = senders(size, latency_ps=picoseconds(latency_s), duration_ps=price_ps)

    assert ends_of(graph, links={0: {"wire": (bandwidth, 1.0)}}) == [price_ps]


@pytest.mark.parametrize(
    ("sizes", "starts", "expected"),
    [
        ((SIZE,), (), [SIZE]),
        ((SIZE, SIZE), (), [2 * SIZE, 2 * SIZE]),
        ((SIZE, SIZE, SIZE), (), [3 * SIZE] * 3),
        # The first one is alone for a fourth of its bytes, and then has half of the link, as the second one.
        ((SIZE, SIZE), (0, SIZE // 4), [SIZE * 7 // 4, 2 * SIZE]),
        ((SIZE, 2 * SIZE), (), [2 * SIZE, 3 * SIZE]),
        ((SIZE, SIZE), (0, SIZE), [SIZE, 2 * SIZE]),
        ((SIZE, 0), (), [SIZE, 0]),
    ],
)
def test_transfers_share_a_link(sizes, starts, expected):
    links = dict.fromkeys(range(len(sizes)), WIRE)

    assert ends_of(senders(*sizes, starts=starts), links=links) == expected


def test_latency_is_paid_before_a_link_is_used():
    links = {0: WIRE, 1: WIRE}

    assert ends_of(senders(SIZE, SIZE, latency_ps=70), links=links) == [2 * SIZE + 70] * 2


def test_narrow_link_makes_a_transfer_longer():
    assert ends_of(senders(SIZE), links={0: {"slow": (0.25e12, 1.0)}}) == [4 * SIZE]
    assert ends_of(senders(SIZE), links={0: {"twice": (1e12, 2.0)}}) == [2 * SIZE]


def test_idle_part_of_a_link_goes_to_others():
    """A transfer that another link slows down leaves the rest of the common link to the other transfer."""
    links = {0: {**WIRE, "slow": (0.25e12, 1.0)}, 1: WIRE}

    # For 4/3 of the time the second has 3/4 of the wire.
    assert ends_of(senders(3 * SIZE, 3 * SIZE), links=links) == [12 * SIZE, 4 * SIZE]


def test_ring_of_messages_costs_its_formula():
    """An all-reduce as 2(p - 1) messages around a ring takes its price; on one common wire, p times the transfers."""
    ranks, size = 4, 4 * SIZE
    cluster = describe(ranks)
    message = cluster.message(size // ranks, 0, 1).time_ps
    latency_ps = cluster.message(0, 0, 1).time_ps
    programs = [WrittenProgram() for rank in range(ranks)]
    for rank, program in enumerate(programs):
        for step in range(2 * (ranks - 1)):
            program.send(rank, step, message, size_bytes=size // ranks, latency_ps=latency_ps)
            program.wait(program.receive((rank - 1) % ranks, step))
    graph = ProgramGraph(programs)
    bandwidth = cluster.link.bandwidth_bytes_per_s
    own, common = ({rank: {name or rank: (bandwidth, 1.0)} for rank in range(ranks)} for name in ("", "wire"))

    price = cluster.collective("all_reduce", size, tuple(range(ranks)), algorithm="ring").time_ps
    slow = 2 * (ranks - 1) * (latency_ps + ranks * (message - latency_ps))

    assert abs(solve(graph).makespan - price) <= 2 * (ranks - 1)
    assert solve(graph, links=own).makespan == solve(graph).makespan
    assert solve(graph, links=common).makespan == slow


@st.composite
def transfers(draw):
    names = draw(st.integers(1, 4))
    fractions = st.dictionaries(st.integers(0, names - 1), st.sampled_from([0.25, 0.5, 1.0]), max_size=names)
    one = st.builds(
        LinkTransfer,
        st.sampled_from([1, 0.5]),
        st.sampled_from([0.5, 1.0, 3.0]),
        fractions.map(lambda d: tuple(d.items())),
    )
    return tuple(draw(st.lists(one, max_size=6)))


@given(transfers())
def test_speeds_are_max_min_fair(given_transfers):
    """No link is over its capacity, and every transfer has a reason not to be faster (Bertsekas and Gallager 6.5.2)."""
    speeds = fair_speeds(given_transfers)

    loads, highest = {}, {}
    for transfer, speed in zip(given_transfers, speeds, strict=True):
        for link, fraction in transfer.links:
            loads[link] = loads.get(link, 0) + speed * fraction
            highest[link] = max(highest.get(link, 0), speed * transfer.rate)
    assert all(load <= 1 + 1e-12 for load in loads.values())
    for transfer, speed in zip(given_transfers, speeds, strict=True):
        is_stopped = [
            loads[link] > 1 - 1e-12 and speed * transfer.rate > highest[link] - 1e-12 for link, _ in transfer.links
        ]
        assert speed == transfer.limit or any(is_stopped)


@given(scripts(max_size=10**6), st.data())
def test_shared_links_carry_all_bytes_in_time(script, data):
    """Nothing is earlier than without sharing; no link carries more than it can, and each carries every byte once."""
    shares = st.dictionaries(st.sampled_from("abc"), st.sampled_from([0.5, 1.0]))
    graph = graph_of(script, latency=lambda line: line.size // 3)
    keys = [*range(len(script.groups)), *script.channels()]
    capacity = {"a": 0.5e12, "b": 1e12, "c": 3e12}
    links = {key: {link: (capacity[link], share) for link, share in data.draw(shares).items()} for key in keys}

    times, free = solve(graph, links=links), solve(graph)

    assert all(map(ge, times.starts, free.starts))
    assert all(map(ge, times.ends, free.ends))
    calls = [action.call for action in graph.actions]
    for link in capacity:
        loads = times.loads.get(link, [])
        assert all(-1e-9 <= load <= 1 + 1e-9 for _, load in loads)
        carried = sum(load * (then - now) for (now, load), (then, _) in zip(loads, loads[1:], strict=False))
        moved = [
            picoseconds(links[call.group][link][1] * call.size_bytes / capacity[link])
            for call in calls
            if call is not None and call.size_bytes and link in links[call.group]
        ]
        # The start of a transfer may round its work by a picosecond, and its end too.
        assert abs(carried - sum(moved)) <= 2 * len(moved) + 1e-6
        assert not loads or abs(loads[-1][1]) < 1e-9


# --- computing and communicating at once ----------------------------------------------------------------


@given(
    st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([1.0, 1.25, 2.0]), st.sampled_from([1.0, 1.5, 4.0])
)
def test_overlap_slows_both(compute_ps, communication_ps, of_compute, of_communication):
    """They overlap for the shorter of both slowed times, and the rest of the longer one runs at full speed."""
    program = WrittenProgram()
    issued = program.collective("world", 0, communication_ps)
    program.compute(compute_ps)
    program.wait(issued)
    both = min(of_compute * compute_ps, of_communication * communication_ps)
    left = max(compute_ps - both / of_compute, communication_ps - both / of_communication)

    times = solve(ProgramGraph([program]), interference=Interference(of_compute, of_communication))

    assert abs(times.makespan - (both + left)) <= 1


@given(scripts(), st.sampled_from([1.0, 1.5]), st.sampled_from([1.0, 1.5]))
def test_interference_only_delays(script, of_compute, of_communication):
    graph = graph_of(script)

    slowed, free = solve(graph, interference=Interference(of_compute, of_communication)), solve(graph)

    assert all(map(ge, slowed.ends, free.ends))
    assert slowed.makespan <= max(of_compute, of_communication) * free.makespan + len(graph)


def test_factors_below_one_are_refused():
    with refused(InputError):
        solve(senders(1), interference=Interference(0.5, 1))
