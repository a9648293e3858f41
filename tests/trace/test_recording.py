"""Recording: bounded, the same steps on every rank, and complete totals."""

import json
from pathlib import Path

import matplotlib
import pytest
from hypothesis import given, settings, strategies as st
from refusals import refused
from test_trace import traces

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np

import simparallel as sp
from simparallel.clock.recorder import Recorder, WorkPrice, use_recorder
from simparallel.clock.recording import Recorded, Recording, join
from simparallel.errors import InputError
from simparallel.machine.cluster import describe
from simparallel.machine.device import DeviceWork
from simparallel.trace import Trace
from simparallel.view.timeline import equal_ranks


def played(recorder: Recorder, events: list[tuple[str, int]]) -> None:
    """Play (what, duration) on a recorder: computing, overlapped communication, waiting, a step."""
    for number, (what, duration) in enumerate(events):
        wall = 10 * number
        if what == "compute":
            recorder.compute("MatMul", "forward", wall, wall + 7, WorkPrice(duration, work=DeviceWork("", 3, 8)))
        elif what == "communicate":
            start = max(recorder.now_ps, recorder.clock_ps.get("comm world", 0))
            recorder.communicate(
                "all_reduce", "collective", "comm world", wall, wall + 15, start, start + duration, 8, 5, (0, 1), 0
            )
        elif what == "wait":
            recorder.join(recorder.clock_ps.get("comm world", 0))
        else:
            recorder.compute("SGD.step", "optimizer", wall, wall + 1, WorkPrice(duration, work=DeviceWork("", 1, 8)))
            recorder.next_step()


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["compute", "communicate", "wait", "step"]), st.integers(0, 50)),
    min_size=40,
    max_size=400,
)


def recorded(events: list[tuple[str, int]], limit: int | None, rank: int = 0) -> Recorded:
    recorder = Recorder(rank, describe(2))
    recorder._recording = Recording(limit)
    recorder._rows, recorder._limit = recorder._recording.rows, recorder._recording.limit
    played(recorder, events)
    return recorder.recorded()


@settings(deadline=None)
@given(ACTIONS, st.integers(16, 60))
def test_totals_count_all_events(events: list[tuple[str, int]], limit: int) -> None:
    whole = joined(recorded(events, None))
    found = recorded(events, limit)
    thinned = joined(found)
    assert len(found.rows) <= limit
    assert thinned.summary() == whole.summary()
    assert thinned.makespan_s == whole.makespan_s
    assert set(thinned.events) <= set(whole.events)
    assert thinned.is_whole == (len(whole) < limit)
    if thinned.is_whole:
        assert thinned == whole


def joined(*found: Recorded) -> Trace:
    events, totals = join(found)
    return Trace(events, describe(2), totals=totals)


def steps(count: int, per_step: int) -> list[tuple[str, int]]:
    return ([("compute", 5)] * (per_step - 2) + [("communicate", 9), ("step", 3)]) * count


@pytest.mark.parametrize("per_step", [3, 7, 40, 500])
def test_whole_first_and_last_steps_are_kept(per_step: int) -> None:
    trace = joined(recorded(steps(300, per_step), 400))
    counts = {step: sum(event.step == step for event in trace.events) for step in trace.steps}
    assert {0, 299} <= counts.keys()
    if per_step <= 40:
        assert set(counts.values()) == {per_step}
    if per_step < 20:  # both ends are kept
        assert {0, 1, 2, 3, 297, 298} <= counts.keys()
    assert len(trace) <= 400
    assert trace.summary()[0]["steps"] == 300


def test_ranks_keep_the_same_steps() -> None:
    """Also if one rank has more events."""
    trace = joined(recorded(steps(300, 4), 400), recorded(steps(300, 9), 400, rank=1))
    kept = [set(trace.select(ranks=rank).steps) for rank in (0, 1)]
    assert kept[0] == kept[1]
    assert [row["flops"] for row in trace.summary()] == [300 * (2 * 3 + 1), 300 * (7 * 3 + 1)]
    assert trace.select(ranks=1).summary()[0]["flops"] == trace.summary()[1]["flops"]
    assert trace.select(steps=0).is_whole


def test_program_without_steps_keeps_both_ends() -> None:
    trace = joined(recorded([("compute", 2)] * 5000, 100))
    starts = [event.sim_start_ps for event in trace.events]
    assert starts[0] == 0
    assert trace.events[-1].sim_end_ps == 10_000
    assert len(trace) <= 100
    assert trace.summary()[0]["compute_time_s"] == 10_000 / 10**12


def test_thinned_trace_is_saved_and_drawn(tmp_path: Path) -> None:
    trace = joined(recorded(steps(2000, 4), 400))
    trace.save(tmp_path / "t.json")
    loaded = Trace.load(tmp_path / "t.json")
    assert loaded == trace
    assert loaded.summary() == trace.summary()
    assert "of 8,000 events are kept" in trace.table()
    assert "of 8,000 events" in repr(trace)
    trace.timeline()
    plt.close("all")


@given(traces())
def test_totals_survive_a_file_or_are_refused(trace: Trace) -> None:
    totals = trace.totals
    given_totals = Trace(trace.events, trace.cluster, name=trace.name, totals=totals)
    assert given_totals.summary() == trace.summary()


def program() -> int:
    weight = sp.nn.Parameter(np.ones((4, 4), np.float32))
    optimizer = sp.optim.SGD([weight], lr=0.1)
    for number in range(3):
        with sp.record_function(f"micro-batch {number}"), sp.record_function("forward"):
            loss = (weight * weight).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return sp.get_rank()


@pytest.mark.parametrize(("record", "has_events"), [("off", False), (False, False), ("summary", True), (True, True)])
def test_record_levels(record: bool | str, has_events: bool) -> None:
    trace = sp.launch(program, world_size=2, transport="inline", record=record).trace
    assert bool(trace.events) == has_events
    assert bool(trace.summary()) == has_events


def test_unknown_amount_of_recording() -> None:
    with refused(InputError):
        sp.Cluster(2, record="much")


def test_marks_have_lanes_and_count_as_no_work() -> None:
    trace = sp.launch(program, world_size=2, transport="inline").trace
    marks = trace.select(kinds="range", ranks=0).events
    assert [(e.name, e.stream, e.step) for e in sorted(marks, key=lambda e: (e.step, e.stream))] == [
        (name, stream, step)
        for step in range(3)
        for name, stream in ((f"micro-batch {step}", "range"), ("forward", "range 2"))
    ]
    plain = Trace([e for e in trace.events if e.kind != "range"], trace.cluster)
    assert trace.summary() == plain.summary()
    inside = [e for e in plain.events if e.rank == 0 and e.step == 1 and e.kind == "forward"]
    mark = next(e for e in marks if e.name == "micro-batch 1")
    assert mark.sim_start_ps == inside[0].sim_start_ps
    assert mark.sim_end_ps == inside[-1].sim_end_ps


def test_marks_outside_of_a_run_do_nothing() -> None:
    @sp.record_function("f")
    def f() -> int:
        return 3

    assert f() == 3


def test_mark_ends_when_its_block_fails() -> None:
    recorder = Recorder(0, describe(1))
    with use_recorder(recorder):
        with pytest.raises(ZeroDivisionError), sp.record_function("a"):
            raise ZeroDivisionError
        with sp.record_function("b"):
            pass
    assert [(e.name, e.stream) for e in recorder.events] == [("a", "range"), ("b", "range")]


def test_memory_on_events_matches_the_account() -> None:
    trace = sp.launch(program, world_size=1, transport="inline", record="full").trace
    computed = [event for event in trace.events if event.stream == "compute"]
    assert all(event.live_bytes[0] == 64 for event in computed)
    ax = trace.memory()
    assert "memory of rank 0" in ax.get_title(loc="left")
    with refused(InputError):
        trace.select(kinds="range").memory()
    plt.close("all")


def ring() -> None:
    sp.all_reduce(np.ones(64, np.float32), algorithm="ring")
    sp.all_reduce(np.ones(64, np.float32), algorithm="tree")
    sp.all_reduce(np.ones(64, np.float32))


def test_algorithm_steps_add_up_to_the_collective() -> None:
    trace = sp.launch(ring, world_size=4, transport="inline").trace
    events = trace.select(ranks=1).events
    assert [len(event.step_ps) for event in events] == [6, 0, 0]  # in the tree rank 1 waits for other ranks
    assert sum(events[0].step_ps) == events[0].sim_end_ps - events[0].sim_start_ps


def test_equal_ranks_are_drawn_as_one() -> None:
    trace = sp.launch(program, world_size=10, transport="inline").trace
    assert equal_ranks(trace.events) == {0: list(range(10))}
    assert "ranks\\ 0–9" in trace.timeline().get_yticklabels()[0].get_text()
    assert len(trace.timeline(collapse=False).get_yticks()) == 10 * len(trace.timeline().get_yticks())
    moved = [e._replace(sim_end_ps=e.sim_end_ps + (e.rank == 3)) for e in trace.events]
    assert equal_ranks(moved) == {0: [0, 1, 2, 4, 5, 6, 7, 8, 9], 3: [3]}
    plt.close("all")


def test_notebooks_show_tables() -> None:
    results = sp.launch(program, world_size=2, transport="inline")
    text = results._repr_html_()
    assert text.count("<table>") == 2
    assert results.trace._repr_html_() in text
    assert "<p>" in Trace([], describe(2))._repr_html_()


def test_small_file_of_very_many_ranks_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    Trace([], describe(1)).save(path)
    data = json.loads(path.read_text())
    data["otherData"]["cluster"] |= {"world_size": 10**9, "nodes": []}
    path.write_text(json.dumps(data))
    with refused(InputError):
        Trace.load(path)


def test_profiler_files_hold_every_event(tmp_path: Path) -> None:
    trace = sp.launch(program, world_size=2, transport="inline").trace
    trace = Trace([*trace.events, *joined(recorded(steps(2, 3), None, rank=1)).events], trace.cluster)
    for rank, path in enumerate(trace.save_profiler(tmp_path)):
        data = json.loads(path.read_text())
        assert data["distributedInfo"] == {"backend": "simparallel", "rank": rank, "world_size": 2}
        rows = data["traceEvents"]
        kernels = [row for row in rows if row.get("cat") == "kernel"]
        events = trace.select(ranks=rank).events
        marks = [event for event in events if event.kind == "range"]
        assert len(kernels) == len(events) - len(marks)
        assert sum(row["args"]["flops"] for row in kernels) == sum(event.flops for event in events)
        assert {row["name"] for row in kernels if row["name"].startswith("nccl")} == (
            {"ncclKernel:all_reduce"} if rank else set()
        )
        launches = {row["args"]["correlation"] for row in rows if row.get("cat") == "cuda_runtime"}
        assert launches == {row["args"]["correlation"] for row in kernels}
        annotations = [row["name"] for row in rows if row.get("cat") == "user_annotation"]
        assert sorted(annotations) == sorted(
            [event.name for event in marks] + [f"ProfilerStep#{n}" for n in {e.step for e in events}]
        )
