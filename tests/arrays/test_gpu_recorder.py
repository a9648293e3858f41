"""The wall times of a rank on a GPU come from its events, which are read later, without a wait, and reused."""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import array_backends
import numpy as np
import pytest
from gpu_facts import needs_cupy, own_names
from hypothesis import given, strategies as st
from stand_in import strict, strict_cuda

import simparallel as sp
from simparallel.arrays.captures import running
from simparallel.arrays.cuda import recorder as gpu_recorder
from simparallel.arrays.cuda.device import Gpu, Moment
from simparallel.clock.recorder import Recorder, current_recorder

ON_GPU: dict[str, Any] = {"world_size": 1, "transport": "inline", "array": "cupy"}
DEVICE_KINDS = {"forward", "backward", "optimizer", "range"}


def is_timed_by_gpu(event: Any) -> bool:
    """Return whether an event has times of the GPU; exchanges of objects at the start of a run do not."""
    return event.kind in DEVICE_KINDS or event.name in ("all_reduce", "broadcast")


def train(num_steps: int = 2) -> dict[str, Any]:
    model = sp.parallel.DistributedDataParallel(
        sp.nn.Sequential(sp.nn.Linear(64, 16), sp.nn.ReLU(), sp.nn.Linear(16, 10))
    )
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    images, labels = sp.data.digits("train")[:32]
    for i in range(num_steps):
        with sp.record_function(f"step {i}"):
            loss = sp.functions.cross_entropy(model(sp.Tensor(images)), labels)
            optimizer.zero_grad()
            loss.backward(check_finite=False)
            optimizer.step()
    return model.state_dict()


@pytest.fixture
def numbered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let the n-th recorded event pass n seconds after the start; return the events."""
    recorded: list[Any] = []
    record = strict_cuda.Event.record

    def counted(event: Any, stream: Any = None) -> None:
        record(event, stream)
        if event.is_timed:
            event.recorded_s = float(len(recorded))
            recorded.append(event)

    monkeypatch.setattr(strict_cuda.Event, "record", counted)
    return recorded


def test_operations_have_the_times_of_their_events(numbered: list[Any]) -> None:
    trace = sp.launch(train, **ON_GPU, record="full").trace
    assert trace.timed_by == "stand-in"
    computed = sorted(
        (e for e in trace.events if is_timed_by_gpu(e) and e.kind != "range"), key=lambda e: e.wall_start_ns
    )
    assert {event.kind for event in trace.events} >= DEVICE_KINDS
    # Begin and end of an operation are consecutive events, and those of marks lie around them.
    assert {e.wall_end_ns - e.wall_start_ns for e in computed} == {10**9}
    for mark in trace.select(kinds="range").events:
        inside = [e for e in computed if mark.wall_start_ns < e.wall_start_ns and e.wall_end_ns < mark.wall_end_ns]
        assert {e.step for e in inside} == {mark.step}
        assert mark.wall_end_ns - mark.wall_start_ns == (2 * len(inside) + 1) * 10**9
    # In the order of the program: as on the simulated clock.
    computed = [event for event in computed if event.kind != "collective"]
    assert computed == sorted(computed, key=lambda e: e.sim_start_ps)


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_trace_of_a_gpu_has_numpys_events(arrays: Any, transport: str) -> None:
    found = {}
    for name, settings in (("host", {}), ("gpu", arrays.run_settings)):
        before_ns = perf_counter_ns()
        results = sp.launch(train, world_size=2, transport=transport, record="full", **settings)
        found[name] = [(e.rank, e.name, e.kind, e.step, e.sim_start_ps, e.sim_end_ps) for e in results.trace.events]
        assert all(before_ns <= e.wall_start_ns <= e.wall_end_ns for e in results.trace.events)
        assert all(e.wall_end_ns <= perf_counter_ns() + 10**6 for e in results.trace.events)
        assert bool(results.trace.timed_by) is (name == "gpu")
    assert found["host"] == found["gpu"]


def watched_steps() -> list[str]:
    train(1)
    waits: list[str] = []
    own = {kind: kind.synchronize for kind in (strict_cuda.Event, strict_cuda.Stream)}
    for kind in own:
        kind.synchronize = lambda self: waits.append(type(self).__name__)  # type: ignore[method-assign]
    try:
        with strict.host_waits() as found:
            train(2)
    finally:
        for kind, synchronize in own.items():
            kind.synchronize = synchronize  # type: ignore[method-assign]
    return waits + found


def test_recording_adds_no_wait_to_a_step() -> None:
    """A step has as many host synchronizations with a recording as without."""
    (without,), (summary,), (full,) = (sp.launch(watched_steps, **ON_GPU, record=r) for r in ("off", "summary", "full"))
    assert without == summary == full


def test_events_are_used_again(monkeypatch: pytest.MonkeyPatch, numbered: list[Any]) -> None:
    monkeypatch.setattr(gpu_recorder, "_MOST_UNREAD", 16)
    trace = sp.launch(train, (40,), **ON_GPU, record="full").trace
    operations = [event for event in trace.events if is_timed_by_gpu(event)]
    assert len(numbered) == 2 * len(operations) + 1 > 500
    assert len(set(map(id, numbered))) < 2 * 16 + 10


def test_unread_events_of_a_slow_gpu_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU runs nothing until the program has ended, so reading earlier would need a wait."""
    monkeypatch.setattr(gpu_recorder, "_MOST_UNREAD", 4)
    expected = len(sp.launch(train, (20,), **ON_GPU, record="full").trace)
    is_slow = [True]
    done = strict_cuda.Event.done
    monkeypatch.setattr(strict_cuda.Event, "done", property(lambda event: not is_slow[0] and done.fget(event)))
    monkeypatch.setattr(Gpu, "synchronize", lambda gpu, what: is_slow.clear() or is_slow.append(False))
    assert len(sp.launch(train, (20,), **ON_GPU, record="full").trace) == expected


def test_long_run_keeps_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_recorder, "_MOST_UNREAD", 8)
    monkeypatch.setattr("simparallel.clock.recorder.EVENTS_PER_RUN", 100)
    monkeypatch.setattr("simparallel.clock.recorder.EVENTS_PER_RANK", 100)
    host, gpu = (sp.launch(train, (30,), **{**ON_GPU, "array": array}).trace for array in ("numpy", "cupy"))
    assert not host.is_whole
    assert not gpu.is_whole
    assert gpu.makespan_s == host.makespan_s
    assert [t.num_events for t in gpu.totals.values()] == [t.num_events for t in host.totals.values()]
    full = sp.launch(train, (30,), **ON_GPU, record="full").trace
    for step in gpu.steps:
        assert len(gpu.select(steps=step)) == len(full.select(steps=step))


def test_without_a_recording_there_are_no_events(numbered: list[Any]) -> None:
    trace = sp.launch(train, **ON_GPU, record="off").trace
    assert len(trace) == len(numbered) == 0


def fail_on_a_stuck_gpu() -> None:
    x = sp.functions.relu(sp.Tensor(np.ones(3, np.float32)))
    strict_cuda.Event.done = property(lambda event: False)  # type: ignore[method-assign]
    sp.functions.relu(x)
    raise ValueError("the program's own")


def test_failure_does_not_wait_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_cuda.Event, "done", strict_cuda.Event.done)
    with pytest.raises(sp.errors.RunFailedError, match="the program's own"):
        sp.launch(fail_on_a_stuck_gpu, **ON_GPU)


def trace_so_far() -> list[bool]:
    sp.functions.relu(sp.Tensor(np.ones(3, np.float32)))
    recorder, gpu = current_recorder(), running.device
    assert recorder is not None
    assert gpu is not None
    clock = recorder.clock  # type: ignore[attr-defined]
    clock.is_paused = True
    sp.functions.relu(sp.Tensor(np.ones(3, np.float32)))
    host_ns = recorder.now_ns()
    clock.is_paused = False
    with gpu.copies:
        moment = clock.now(gpu.copies)
    trace = sp.Trace.of_this_rank()
    return [
        len(trace) == 2, trace.timed_by == "stand-in", all(type(e.wall_end_ns) is int for e in trace.events),
        type(host_ns) is int, type(moment) is Moment, clock.read(moment) == clock.read(moment) < perf_counter_ns(),
    ]  # fmt: skip


def test_trace_of_a_running_program() -> None:
    """A paused clock is the host's; a moment of another stream is read like one of the compute stream."""
    assert sp.launch(trace_so_far, **ON_GPU)[0] == [True] * 6


def communicate() -> None:
    recorder, gpu = current_recorder(), running.device
    assert recorder is not None
    assert gpu is not None
    stream, clock = gpu.cuda.Stream(non_blocking=True), recorder.clock  # type: ignore[attr-defined]
    own = gpu.cuda.Event()
    own.record(stream)
    times = clock.at(own), clock.now(stream)
    recorder.communicate("all_reduce", "collective", "comm world", *times, 0, 1, 8, 8, (0,), 0)
    sp.functions.relu(sp.Tensor(np.ones(3, np.float32)))


def test_communication_has_the_times_of_its_stream(numbered: list[Any]) -> None:
    """A transport hands over moments, or events of its own."""
    trace = sp.launch(communicate, **ON_GPU).trace
    found = {event.name: event for event in trace.events}
    first_ns = found["all_reduce"].wall_start_ns
    assert found["all_reduce"].wall_end_ns - first_ns == 10**9
    assert found["ReLU"].wall_start_ns - first_ns == 2 * 10**9


@given(st.lists(st.floats(0, 5000), min_size=1, max_size=30))
def test_long_times_keep_their_precision(gaps_ms: list[float]) -> None:
    """CUDA rounds each difference to float32."""
    clock, passed_s = _clock(), 0.0
    start_s = clock._reference.recorded_s
    first_ns = clock._reference_ns
    for number, gap_ms in enumerate(gaps_ms, start=1):
        passed_s += gap_ms / 1e3
        moment = clock.now()
        moment.event.recorded_s = start_s + passed_s  # type: ignore[attr-defined]
        assert clock.read(moment) - first_ns == pytest.approx(1e9 * passed_s, abs=250.0 * number)


def _clock() -> Any:
    elapsed = strict_cuda.get_elapsed_time

    class Rounded:
        Event = strict_cuda.Event

        @staticmethod
        def get_elapsed_time(start: Any, end: Any) -> float:
            return float(np.float32(elapsed(start, end)))

    gpu = Gpu(0)
    found = gpu_recorder.GpuClock(gpu)
    found._cuda = Rounded
    return found


def test_clock_of_the_host_is_no_python() -> None:
    """A step of a run without a GPU runs no more functions than before."""
    assert Recorder.now_ns is perf_counter_ns


@pytest.mark.parametrize(("arrays", "transport"), array_backends.PLACES)
def test_trace_says_how_it_was_measured(arrays: Any, transport: str, tmp_path: Any) -> None:
    trace = sp.launch(train, world_size=1, transport=transport, **arrays.run_settings).trace
    trace.save(tmp_path / "trace.json")
    loaded = sp.Trace.load(tmp_path / "trace.json")
    assert loaded == trace
    assert loaded.timed_by == trace.timed_by != ""
    for text in (loaded.table(), loaded.html(), loaded.select(steps=0).from_zero().table()):
        assert f"measured on {trace.timed_by} by its events" in text
    assert "measured on this machine" in sp.launch(train, world_size=1, transport="inline").trace.table()


@needs_cupy
def test_events_of_cupy_have_these_names() -> None:
    cuda = pytest.importorskip("cupy", minversion="14.2").cuda
    assert {"record", "synchronize", "done"} <= own_names(cuda.Event)
    assert {"record", "wait_event", "synchronize"} <= own_names(cuda.Stream)
    assert callable(cuda.get_elapsed_time)
    assert callable(cuda.runtime.getDeviceProperties)
    assert "disable_timing (bool)" in cuda.Event.__doc__
    assert "Elapsed time in milliseconds" in cuda.get_elapsed_time.__doc__
