"""Traces: selection, and the summary against a brute-force grid."""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

from simparallel.clock.event import COMPUTE, Event
from simparallel.clock.recorder import Recorder, WorkPrice
from simparallel.errors import InputError
from simparallel.machine.cluster import describe
from simparallel.machine.device import DeviceWork
from simparallel.trace import Trace

NAMES = ("MatMul", "ReLU.backward", "SGD.step", 'quote " and \\', "Größe")


@st.composite
def traces(draw: st.DrawFn, max_duration: int = 10**9, min_actions: int = 0) -> Trace:
    """Draw runs played on real recorders: streams are serial, collectives join their group."""
    world_size = draw(st.integers(1, 4))
    cluster = describe(world_size, draw(st.sampled_from(["a100", "ascend910"])))
    recorders = [Recorder(rank, cluster) for rank in range(world_size)]
    walls = [draw(st.integers(0, 10**6))] * world_size
    seqs: dict[tuple[int, ...], int] = defaultdict(int)
    duration = st.integers(0, max_duration)
    for _ in range(draw(st.integers(min_actions, 15))):
        action = draw(st.sampled_from(["compute", "compute", "communicate", "step"]))
        if action == "step":
            for recorder in recorders:
                recorder.next_step()
            continue
        ranks = tuple(draw(st.lists(st.integers(0, world_size - 1), min_size=1, unique=True)))
        wall = draw(st.integers(0, 1000))
        if action == "compute":
            kind = draw(st.sampled_from(["forward", "backward", "optimizer"]))
            for rank in ranks:
                price = WorkPrice(draw(duration), work=DeviceWork("", draw(st.integers(0, 10**12)), 8))
                recorders[rank].compute(draw(st.sampled_from(NAMES)), kind, walls[rank], walls[rank] + wall, price)
                walls[rank] += wall
            continue
        stream = f"comm {'-'.join(map(str, ranks))}"
        start = max(max(recorders[r].now_ps, recorders[r].clock_ps.get(stream, 0)) for r in ranks)
        end = start + draw(duration)
        for rank in ranks:
            # Posted up to 50 ns ago: wall times of one stream may overlap, simulated times never.
            posted = walls[rank] - draw(st.integers(0, 50))
            recorders[rank].communicate(
                "all_reduce",
                draw(st.sampled_from(["collective", "p2p"])),
                stream,
                posted,
                walls[rank] + wall,
                start,
                end,
                64,
                draw(st.integers(0, 64)),
                ranks,
                seqs[ranks],
            )
            walls[rank] += wall
            if draw(st.booleans()):
                recorders[rank].join(end)
        seqs[ranks] += 1
    events = [event for recorder in recorders for event in recorder.events]
    return Trace(draw(st.permutations(events)), cluster, name=draw(st.sampled_from(["", "a run"])))


def small_trace() -> Trace:
    cluster = describe(2)
    events = []
    for rank in range(2):
        recorder = Recorder(rank, cluster)
        recorder.compute("MatMul", "forward", 0, 10, WorkPrice(4_000, work=DeviceWork("", 100, 8)))
        recorder.communicate("all_reduce", "collective", "comm world", 5, 20, 2_000, 7_000, 8, 8, (0, 1), 0)
        recorder.next_step()
        recorder.compute("SGD.step", "optimizer", 20, 25, WorkPrice(3_000, work=DeviceWork("", 10, 8)))
        events += recorder.events
    return Trace(events, cluster, name="small")


# Selection.


@given(traces())
def test_events_are_ordered_whatever_the_input_order(trace: Trace) -> None:
    assert Trace(reversed(trace.events), trace.cluster, name=trace.name) == trace
    keys = [(event.rank, event.device, event.sim_start_ps) for event in trace.events]
    assert keys == sorted(keys)
    assert trace.ranks == sorted({event.rank for event in trace.events})
    assert trace.steps == sorted({event.step for event in trace.events})
    for rank in trace.ranks:
        streams = trace.streams(rank)
        assert COMPUTE not in streams[1:]
        assert set(streams) == {event.stream for event in trace.events if event.rank == rank}


@given(traces(), st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
def test_select_filters(trace: Trace, steps: set[int], ranks: set[int]) -> None:
    chosen = trace.select(steps=steps, ranks=ranks, kinds=["forward", "p2p"])
    assert chosen.events == [
        e for e in trace.events if e.step in steps and e.rank in ranks and e.kind in ("forward", "p2p")
    ]
    assert trace.select() == trace
    numpy_zero: Any = np.int64(0)
    assert trace.select(steps=1).events == trace.select(steps=[1]).events
    assert trace.select(kinds="backward").events == trace.select(kinds={"backward"}).events
    with refused(InputError):
        trace.select(kinds=["forward", "foo"])
    assert trace.select(ranks=numpy_zero).events == trace.select(ranks=range(1)).events


def test_impossible_events_are_refused() -> None:
    event = small_trace().events[0]
    with refused(InputError):
        Trace([event._replace(sim_end_ps=event.sim_start_ps - 1)], describe(2))
    with refused(InputError):
        Trace([event._replace(wall_end_ns=event.wall_start_ns - 1)], describe(2))
    with refused(InputError):
        Trace([event._replace(rank=2)], describe(2))


def test_equality_and_repr() -> None:
    trace = small_trace()
    assert trace != "small"
    assert trace != Trace(trace.events, trace.cluster)
    assert "small" in repr(trace)
    assert "6 events of 2 ranks" in repr(trace)


# Summary.


def covered(events: list[Event], size: int, origin: int) -> np.ndarray:
    """Mark the picoseconds that are inside an event."""
    grid = np.zeros(size, bool)
    for event in events:
        grid[event.sim_start_ps - origin : event.sim_end_ps - origin] = True
    return grid


@given(traces(max_duration=20, min_actions=1))
def test_summary_against_a_grid(trace: Trace) -> None:
    rows = trace.summary()
    assert [row["rank"] for row in rows] == trace.ranks
    if not trace.events:
        return
    origin = min(event.sim_start_ps for event in trace.events)
    size = max(event.sim_end_ps for event in trace.events) - origin
    assert trace.makespan_s == size / 10**12
    for row in rows:
        events = trace.select(ranks=row["rank"]).events
        compute = covered([e for e in events if e.stream == COMPUTE], size, origin)
        comm = covered([e for e in events if e.stream != COMPUTE], size, origin)
        assert row["compute_time_s"] * 1e12 == pytest.approx(compute.sum())
        assert row["communication_time_s"] * 1e12 == pytest.approx(comm.sum())
        assert row["exposed_communication_s"] * 1e12 == pytest.approx((comm & ~compute).sum())
        assert row["idle_time_s"] * 1e12 == pytest.approx((~comm & ~compute).sum())
        assert row["sent_bytes"] == sum(e.sent_bytes for e in events)
        assert row["flops"] == sum(e.flops for e in events)
        assert row["steps"] == len({e.step for e in events if e.kind == "optimizer"})


def test_summary_of_a_known_run() -> None:
    row = small_trace().summary()[0]
    assert row == {
        "rank": 0,
        "device": 0,
        "steps": 1,
        "compute_time_s": 7e-9,
        "communication_time_s": 5e-9,
        "exposed_communication_s": 0.0,
        "idle_time_s": 0.0,
        "wall_compute_s": 15e-9,
        "wall_communication_s": 15e-9,
        "sent_bytes": 8,
        "flops": 110,
    }


@given(traces())
def test_table_is_aligned(trace: Trace) -> None:
    lines = trace.table().splitlines()
    if not trace.events:
        assert lines == [f'{trace.title}: no events: nothing was computed or communicated, or record="off"']
        return
    _, above, header, units, *rows, first, second = lines
    assert len({len(line) for line in (above, header, units, *rows)}) == 1
    assert len(rows) == len(trace.ranks)
    assert above.split() == ["wall", "wall"]
    assert header.split()[:6] == ["rank", "steps", "compute", "comm", "exposed", "idle"]
    simulated, wall = units.split()[:4], units.split()[4:6]
    assert len(set(simulated)) == len(set(wall)) == 1
    assert "idle: does neither" in first
    assert "measured" in second
    assert "modelled" in second


@pytest.mark.parametrize("scale", [10**3, 10**6, 10**12])
def test_table_fits_a_terminal(scale: int) -> None:
    trace = small_trace()
    events = [
        event._replace(sim_end_ps=event.sim_end_ps + scale, flops=event.flops * scale, size_bytes=scale)
        for event in trace.events
    ]
    assert max(map(len, Trace(events, trace.cluster).table().splitlines())) <= 80


def test_table_of_a_known_run() -> None:
    assert [line.split() for line in small_trace().table().splitlines()[4:6]] == [
        ["0", "1", "7.00", "5.00", "0.00", "0.00", "15.00", "15.00", "8", "110"],
        ["1", "1", "7.00", "5.00", "0.00", "0.00", "15.00", "15.00", "8", "110"],
    ]
