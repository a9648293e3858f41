"""The recorder: two clocks, events that follow one another, and prices from `work`."""

from __future__ import annotations

import inspect
from dataclasses import replace

import numpy as np
import pytest

from simparallel.autograd import Tensor, functions as F
from simparallel.clock.event import COMPUTE
from simparallel.clock.notes import forget_notes
from simparallel.clock.recorder import NullObserver, Recorder, current_recorder, observer_of, use_recorder
from simparallel.machine.cluster import describe, picoseconds
from simparallel.machine.device import DeviceWork
from simparallel.machine.products import MatrixProduct


def run_recorded(record="summary", rank=1, software=""):
    cluster = describe(4)
    if software:
        cluster = replace(cluster, device=replace(cluster.device, software=software))
    recorder = Recorder(rank, cluster, record=record)
    with use_recorder(recorder):
        assert current_recorder() is recorder
        x, w = Tensor(np.ones((8, 16), np.float32)), Tensor(np.ones((4, 16), np.float32), requires_grad=True)
        for _ in range(2):
            F.cross_entropy(F.linear(x, w, np.zeros(4, np.float32)).relu(), np.zeros(8, np.int64)).backward()
            recorder.next_step()
    assert current_recorder() is None
    return recorder


def test_events_are_contiguous_and_reproducible():
    """Events follow one another without gaps, are priced by `work`, and are the same in every run."""
    recorder = run_recorded()
    events, again = recorder.events, run_recorded().events
    device = recorder.cluster.device

    assert [event.name for event in events[:6]] == [
        "Linear",
        "ReLU",
        "CrossEntropy",
        "CrossEntropy.backward",
        "ReLU.backward",
        "Linear.backward",
    ]
    assert [(event.kind, event.step) for event in events[::3]] == [
        ("forward", 0),
        ("backward", 0),
        ("forward", 1),
        ("backward", 1),
    ]
    assert {(event.rank, event.stream, event.group, event.seq) for event in events} == {(1, COMPUTE, (), -1)}
    assert [event.sim_start_ps for event in events] == [0, *(event.sim_end_ps for event in events[:-1])]
    assert recorder.now_ps == events[-1].sim_end_ps
    # x (8, 16) by w (16, 4), and the gradient of w.
    products = {"Linear": MatrixProduct(1, 8, 4, 16), "Linear.backward": MatrixProduct(1, 16, 4, 8)}
    for event, twin in zip(events, again, strict=True):
        shape = products.get(event.name)
        work = DeviceWork("", event.flops, event.size_bytes, 4, 0, shape is not None, (shape,) if shape else ())
        duration_ps = picoseconds(device.device_s(work))
        assert event.sim_end_ps - event.sim_start_ps == duration_ps > 0
        assert event.wall_start_ns <= event.wall_end_ns
        assert event._replace(wall_start_ns=0, wall_end_ns=0) == twin._replace(wall_start_ns=0, wall_end_ns=0)
    assert events[0].flops == (2 * 16 + 1) * 8 * 4
    assert events[5].flops == events[0].flops  # dw alone; x wants no gradient


def test_compiled_kernels_are_priced_with_a_note(capsys):
    forget_notes()
    eager, fused = (run_recorded(rank=0, software=software) for software in ("eager", "fused"))
    assert fused.now_ps == eager.now_ps != run_recorded(rank=0, software="plain").now_ps
    assert capsys.readouterr().err.count("software='fused' is priced as 'eager'") == 1


def test_clock_runs_without_events():
    quiet, loud = run_recorded(record="off"), run_recorded()

    assert quiet.events == []
    assert quiet.now_ps == loud.now_ps > 0


def test_waiting_moves_the_clock_forward_only():
    recorder = Recorder(0, describe(2))
    recorder.join(500)
    recorder.join(200)
    recorder.communicate("all_reduce", "collective", "comm (0, 1)", 0, 1, 500, 900, 64, 64, (0, 1), 0)

    assert (recorder.now_ps, recorder.clock_ps["comm (0, 1)"]) == (500, 900)
    assert recorder.events[0].group == (0, 1)
    assert recorder.events[0].sent_bytes == 64
    recorder.join(900)
    assert recorder.now_ps == 900


def test_recorders_nest():
    """An error restores the outer recorder."""
    outer, inner = Recorder(0, describe(2)), Recorder(1, describe(2))

    def fail():
        with use_recorder(inner):
            assert current_recorder() is inner
            raise ZeroDivisionError

    with use_recorder(outer):
        with pytest.raises(ZeroDivisionError):
            fail()
        assert current_recorder() is outer
        with use_recorder(None):
            Tensor([1.0]) + 1
    assert outer.events == []


@pytest.mark.parametrize("name", [name for name, value in vars(NullObserver).items() if inspect.isfunction(value)])
def test_null_observer_is_called_like_a_recorder(name: str) -> None:
    assert inspect.signature(getattr(NullObserver, name)) == inspect.signature(getattr(Recorder, name))


def test_nothing_is_counted_outside_of_a_run():
    def step() -> int:
        x = Tensor(np.ones((8, 16)), requires_grad=True)
        y = F.relu(x)
        y.sum().backward()
        memory = observer_of(None).memory
        assert sum(memory.live.values()) == memory.total
        return memory.total

    assert step() == 0
    with use_recorder(Recorder(0, describe(1))):
        assert step() == 2 * 8 * 16 * 8  # y and the gradient of x
