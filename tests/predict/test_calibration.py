"""Calibration: fits recover the constants of synthetic times, and predictions of this host use the file."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import log

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.cli.main import main
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.errors import ClusterError, InputError
from simparallel.machine.cluster import ClusterSpec, Curve, LinkSpec, describe, this_host_file
from simparallel.machine.device import DeviceSpec, OpCost
from simparallel.predict import calibration, measuring
from simparallel.predict.calibration import describe_host, summed_up
from simparallel.predict.fitting import fit_link, fit_op, fit_sharing, op_errors, program_errors, quantiles
from simparallel.predict.measuring import OperationSpan, Sample

BARE = DeviceSpec("bare", {4: 1e9}, 1e9, 1 << 30, 1e-6)


@st.composite
def costs(draw):
    """Draw a cost of which each part counts for some of the shapes, and these shapes."""
    launch_s = draw(st.floats(1e-6, 1e-4))
    shapes = [(0, 0, 0), *((10**i, 10**j, 10**k) for i in range(3, 10, 2) for j in range(3, 8) for k in range(1, 8, 3))]
    rates = (st.floats(1e-12, 1e-9), st.floats(1e-11, 1e-8), st.floats(1e-11, 1e-8))
    return OpCost(launch_s, *map(draw, rates)), shapes


def sampled(cost, shapes, name="op"):
    return [Sample(name, *shape, cost.plain_s(*shape)) for shape in shapes]


@given(costs())
def test_constants_of_an_operation_are_found(drawn):
    cost, shapes = drawn
    found = fit_op(sampled(cost, shapes))
    for name in ("launch_s", "s_per_flop", "s_per_byte", "s_per_result"):
        assert getattr(found, name) == pytest.approx(getattr(cost, name), rel=1e-6)
    for shape in (*shapes, (12345, 678, 90), (3 * 10**8, 5 * 10**6, 10**5)):
        assert found.time_s(*shape) == pytest.approx(cost.plain_s(*shape), rel=1e-6)


@given(costs(), st.sampled_from([0.2, 5.0]))
def test_outliers_hardly_move_the_constants(drawn, factor):
    cost, shapes = drawn
    samples = sampled(cost, shapes)
    for number in range(3, len(samples), 9):
        samples[number] = samples[number]._replace(time_s=samples[number].time_s * factor)
    found = fit_op(samples)
    errors = [abs(log(found.plain_s(*shape) / cost.plain_s(*shape))) for shape in shapes]
    assert np.median(errors) < 0.1


def test_measured_shapes_have_their_own_time():
    samples = [Sample("op", 10**i, 10**i, 10**i, time_s) for i, time_s in enumerate((3e-6, 9e-6, 2e-5, 1e-3), 3)]
    found = fit_op([*samples, samples[0]._replace(time_s=3e-6)])
    for sample in samples:
        assert found.time_s(*sample[1:4]) == pytest.approx(sample.time_s, rel=0.02)
    # Far from all shapes, the correction fades.
    far = 10**20, 10**20, 10**20
    assert found.time_s(*far) == pytest.approx(found.plain_s(*far), rel=0.05)


def test_results_tell_equal_flops_and_bytes_apart():
    """A product with a short inner dim runs far below the rate of a long one of the same flops and bytes."""
    long, short = Sample("product", 10**6, 10**5, 10**2, 1e-4), Sample("product", 10**6, 10**5, 10**4, 5e-4)
    found = fit_op([long, short])
    for sample in (long, short):
        assert found.time_s(*sample[1:4]) == pytest.approx(sample.time_s, rel=0.02)


def test_one_sample_is_a_constant():
    assert fit_op([Sample("view", 0, 0, 7, 5e-6)]).time_s(0, 0, 7) == pytest.approx(5e-6)
    assert fit_op([Sample("sum", 0, 1000, 1, 5e-6)]).time_s(0, 1000, 1) == pytest.approx(5e-6)


@given(st.floats(1e-6, 1e-3), st.floats(1e6, 1e11))
def test_one_line_needs_one_segment(latency_s, bandwidth):
    link = fit_link({8 << shift: latency_s + (8 << shift) / bandwidth for shift in range(0, 24, 2)})
    assert link.segments == ()
    assert link.latency_s == pytest.approx(latency_s, rel=1e-4)
    for size in (8, 12345, 1 << 30):
        assert link.time_s(size) == pytest.approx(latency_s + size / bandwidth, rel=1e-3)


@given(st.floats(1e-6, 1e-4), st.integers(4, 9), st.floats(3, 30))
def test_another_protocol_is_another_segment(latency_s, position, factor):
    sizes = [8 << shift for shift in range(0, 26, 2)]
    small, large = LinkSpec(latency_s, 1e9), LinkSpec(latency_s * factor, 8e9)
    times = {size: (small if size < sizes[position] else large).time_s(size) for size in sizes}
    link = fit_link(times)
    for size in sizes:
        # A size takes no more time than any larger one, so a protocol that is too late counts less.
        assert link.time_s(size) <= times[size] * 1.1
    last = [size for size in sizes if size >= sizes[position]]
    assert [link.time_s(size) for size in last] == pytest.approx([times[size] for size in last], rel=0.1)


def test_a_single_size_is_a_latency():
    assert fit_link({0: 7e-6}).time_s(0) == pytest.approx(7e-6)


@given(st.dictionaries(st.integers(2, 64), st.floats(1, 100), min_size=1))
def test_more_ranks_are_never_faster(slowdowns):
    curve = fit_sharing(slowdowns)
    fractions = [curve(count) for count in range(1, 200)]
    assert fractions[0] == 1
    assert all(later <= before for before, later in zip(fractions, fractions[1:], strict=False))
    first = min(slowdowns)
    assert curve(first) == pytest.approx(1 / slowdowns[first])


def test_errors_are_of_what_the_fit_has_not_seen():
    cost = OpCost(1e-6, 1e-9)
    shapes = [(10**i, 0, 0) for i in range(3, 8)]
    programs = [sampled(cost, shapes), sampled(cost, shapes[1:4])]
    assert program_errors(programs) == pytest.approx([0, 0], abs=1e-6)
    # The red control: a program twice as slow as the others, by log 2.
    slow = [sample._replace(time_s=2 * sample.time_s) for sample in sampled(cost, shapes)]
    assert program_errors([slow, *programs])[0] == pytest.approx(log(2), abs=0.02)
    strange = [*sampled(cost, shapes), Sample("op", 5 * 10**5, 0, 0, 2 * cost.plain_s(5 * 10**5, 0))]
    errors = op_errors(strange, {"op": fit_op(strange)})
    assert max(errors) > 0.3
    assert quantiles([]) == {"p10": 0.0, "p50": 0.0, "p90": 0.0}
    # A program of operations that no other has says nothing.
    assert program_errors([programs[0], sampled(cost, shapes, "other")]) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=2, max_size=6), st.integers(0, 9))
def test_samples_add_up_to_the_step(spans, between):
    """Gaps and durations of a step's operations, and the gap between steps, in µs: all of them count."""
    found, now = [], 0
    for step in range(5):
        now += between * 1000
        for number, (gap, duration) in enumerate(spans):
            start = now + gap * 1000
            now = start + duration * 1000
            found.append(OperationSpan(step, start, now, (f"op {number}", number, 0, 0)))
    samples = measuring.samples_of(found)
    assert [sample.flops for sample in samples] == list(range(len(spans)))
    step_s = (between + sum(gap + duration for gap, duration in spans)) * 1e-6
    assert sum(sample.time_s for sample in samples) == pytest.approx(step_s)
    assert samples[1].time_s == pytest.approx(sum(spans[1]) * 1e-6 + (len(spans) == 2) * (between + spans[0][0]) * 1e-6)


def test_quietest_round_of_each_time_counts():
    quiet = {
        ("shared", 1, 0): 1.0, ("shared", 2, 0): 1.5, ("free", 2, 0): 1.5, ("joined", 2, 0): 1.75,
        ("collective", 2, "all_reduce", 8): 0.5, ("collective", 2, "barrier", 0): 0.125, ("message", 2, 8): 0.25,
    }  # fmt: skip
    # Another program slows a different time down in each round.
    rounds = [{**quiet, key: 10 * quiet[key]} for key in quiet]
    slowdowns, collectives, messages = summed_up(rounds)
    assert slowdowns == {2: [1.5]}
    # With the wait for late ranks, 0.25 - 0.125 over a barrier in a row.
    assert collectives == {("all_reduce", 2): {8: 0.625}, ("barrier", 2): {0: 0.25}}
    assert messages == {8: 0.25}


def test_stopwatch_sees_what_events_do_not_have():
    layer = sp.nn.Linear(3, 5)
    optimizer = sp.optim.SGD(layer.parameters(), lr=0.1)

    def train():
        for _ in range(4):
            layer(sp.Tensor(np.ones((2, 3), np.float32))).sum().backward()
            optimizer.step()

    samples = {sample.name: sample for sample in measuring.op_samples(train)}
    # Elements of the outputs, and tensors that the optimizer changes.
    assert {name: sample.results for name, sample in samples.items()} == {
        "Linear": 2 * 5, "Sum": 1, "Sum.backward": 1, "Linear.backward": 2 * 5, "SGD.step": 2,
    }  # fmt: skip
    assert samples["Linear"].flops == 2 * 2 * 5 * 3 + 2 * 5


def test_price_depends_on_results():
    """A view does no work, and a large one may still take longer than a small one."""
    device = replace(BARE, op_costs={"Slice": OpCost(0.0, s_per_result=1e-3)})
    recorder = Recorder(0, ClusterSpec(1, device, LinkSpec(1e-6, 1e9)))
    with use_recorder(recorder):
        sp.Tensor(np.ones(10, np.float32))[:7]
    assert recorder.now_ps == 7 * 10**9


def program():
    layer = sp.nn.Linear(4, 4)
    optimizer = sp.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(2):
        layer(sp.Tensor(np.ones((2, 4), np.float32))).sum().backward()
        if sp.get_world_size() > 1:
            sp.all_reduce(layer.weight.grad.data)
        optimizer.step()


def synthetic(slowdown=2.0):
    """Describe a host on which each operation takes 1 ms, and each collective 5 ms."""
    names = ("Linear", "Linear.backward", "Sum", "Sum.backward", "SGD.step")
    samples = [Sample(name, 0, 0, 0, 1e-3) for name in names]
    sizes = (8, 512, 32768)
    collectives = {("all_reduce", 2): dict.fromkeys(sizes, 5e-3)}
    return describe_host([samples, samples], {2: [slowdown]}, collectives, dict.fromkeys(sizes, 1e-3))


def test_predictions_use_the_calibration(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    spec = synthetic()
    this_host_file().parent.mkdir()
    spec.save(this_host_file())
    assert ClusterSpec.load(this_host_file()) == spec
    assert {"cpu", "cores", "numpy", "blas"} <= set(spec.calibration["machine"])
    assert "measured" in spec.table()
    one = sp.dry_run(program, cluster="this-host")
    assert one.step_time_s == pytest.approx(5e-3, rel=1e-3)
    two = sp.dry_run(program, world_size=2, cluster="this-host")
    assert two.step_time_s == pytest.approx(2 * 5e-3 + 5e-3, rel=1e-3)
    for prediction in (one, two):
        assert prediction.interval_s == pytest.approx([prediction.step_time_s] * 3, rel=1e-3)
    # A clock that has not been calibrated has no errors.
    assert sp.dry_run(program).interval_s is None


def test_interval_has_the_errors_of_its_parts():
    spec = synthetic()
    spread = {"p10": log(0.5), "p50": 0.0, "p90": log(2)}
    none = dict.fromkeys(spread, 0.0)
    errors = {"program": spread, "sharing": none, "collective": none}
    prediction = sp.dry_run(program, cluster=replace(spec, calibration={"residuals": errors}))
    step_s = prediction.step_time_s
    assert prediction.interval_s == pytest.approx((step_s / 2, step_s, 2 * step_s))
    both = replace(spec, world_size=2, nodes=(), calibration={"residuals": errors})
    shared = sp.dry_run(program, world_size=2, cluster=both)
    assert shared.interval_s == pytest.approx((5e-3 + 5e-3, 15e-3, 20e-3 + 5e-3), rel=1e-3)


def overlapped():
    x = np.ones(1000, np.float32)
    work = sp.all_reduce(x, async_op=True)
    for _ in range(3):
        sp.Tensor(np.ones(4, np.float32)) + 1
    work.wait()
    work.wait()


@pytest.mark.parametrize("shares", [True, False])
def test_shared_cores_do_not_overlap(shares):
    """A core that communicates does not compute meanwhile; on devices of their own, both go on at once."""
    device = replace(BARE, op_costs={"Add": OpCost(1e-3)})
    spec = ClusterSpec(
        2, device, LinkSpec(1e-6, 1e9), sharing=Curve(((1, 1.0), (2, 0.5))) if shares else None,
        measured={"all_reduce": {2: LinkSpec(4e-3, 1e20)}},
    )  # fmt: skip
    step_s = {True: 3 * 2e-3 + 4e-3, False: 4e-3}[shares]

    def clock():
        overlapped()
        return sp.clock.recorder.current_recorder().now_ps / 1e12

    for found in sp.launch(clock, world_size=2, device=spec, transport="inline"):
        assert found == pytest.approx(step_s)


def test_groups_that_share_cores_take_turns():
    by_ranks = {2: LinkSpec(1e-3, 1e20), 4: LinkSpec(3e-3, 1e20)}
    alone = ClusterSpec(4, BARE, LinkSpec(1e-6, 1e9), measured={"all_reduce": by_ranks})
    assert alone.collective("all_reduce", 8, (0, 1)).time_ps == 10**9
    shared = replace(alone, sharing=Curve(((1, 1.0), (4, 0.5))))
    assert shared.collective("all_reduce", 8, (0, 1)).time_ps == 3 * 10**9
    assert shared.collective("all_reduce", 8, (0,)).time_ps == 0


@pytest.mark.parametrize(
    ("key", "given"),
    [
        ("launch_s", {"launch_s": -1.0}),
        ("s_per_flop", {"launch_s": 0.0, "s_per_flop": float("nan")}),
        ("s_per_result", {"launch_s": 0.0, "s_per_result": -1.0}),
        ("shapes", {"launch_s": 0.0, "shapes": ((1, 1, 1, 0.0),)}),
        ("shapes", {"launch_s": 0.0, "shapes": ((1, 1, -1, 1.0),)}),
    ],
)
def test_costs_out_of_range_are_refused(key, given):
    with refused(ClusterError, key=key):
        OpCost(**given)


class Machine:
    """A machine on which each measurement takes a fixed time, and as long as it should."""

    def __init__(self, fixed_s, busy=1.0):
        self.now_s, self.busy, self.lines = 0.0, busy, []
        self.asked = {f"m{i}": [] for i in range(len(fixed_s))}
        self.measurements = {
            name: partial(self.measure, name, each) for name, each in zip(self.asked, fixed_s, strict=True)
        }

    def measure(self, name, fixed_s, seconds):
        self.asked[name].append(seconds)
        self.now_s += self.busy * (fixed_s + seconds)
        return len(self.asked[name])

    def run(self, rounds, seconds, limit_s):
        tell = self.lines.append
        return calibration.measured(self.measurements, rounds, seconds, limit_s, tell, lambda: self.now_s)


@given(
    st.lists(st.floats(0.01, 2.0), min_size=1, max_size=8), st.integers(1, 5), st.floats(0.1, 1.0), st.floats(1.0, 20.0)
)
def test_calibration_keeps_to_its_limit(fixed_s, rounds, seconds, busy):
    machine = Machine(fixed_s, busy)
    limit_s = 3 * len(fixed_s) * rounds
    try:
        results = machine.run(rounds, seconds, limit_s)
    except InputError:
        assert busy * (sum(fixed_s) + len(fixed_s) * seconds) > limit_s
        return
    assert machine.now_s <= limit_s + busy * (max(fixed_s) + seconds)
    for name, found in results.items():
        # Every measurement at least once; the last lines name those that were left out.
        assert found == list(range(1, len(found) + 1)) != []
        assert (len(found) < rounds) == any(name in line.split(": ")[-1].split(", ") for line in machine.lines[1:])
    if busy * (sum(fixed_s) + seconds * len(fixed_s)) * rounds * 1.5 < limit_s and rounds > 1:
        assert all(asked == [seconds] * rounds for asked in machine.asked.values())


def test_calibration_says_how_long_it_takes():
    machine = Machine([1.0, 4.0], busy=2.0)
    machine.run(3, 0.5, 24.0)
    assert machine.lines == [
        "2 measurements in 3 rounds: at most 24 s",
        "round 1 of 3 ends after 12 s",
        "round 2 of 3 ends after 15 s",
        "round 3 of 3 ends after 18 s",
        "1 of 3 rounds, as time was short: m1",
    ]


def test_machine_without_time_for_a_round_is_refused():
    with refused(InputError):
        Machine([1.0] * 5, busy=10.0).run(2, 0.5, 30.0)


@pytest.mark.process
def test_calibration_of_a_few_points(tmp_path, monkeypatch, capsys):
    """The whole way, with one program, two ranks and one collective."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(calibration, "PROGRAMS", measuring.PROGRAMS[:2])
    monkeypatch.setattr(calibration, "_SHARED", measuring.PROGRAMS[:1])
    monkeypatch.setattr(calibration, "_JOINED", measuring.PROGRAMS[:1])
    monkeypatch.setattr(calibration, "RANKS", (2,))
    monkeypatch.setattr(calibration, "OPS", ("all_reduce", "barrier"))
    monkeypatch.setattr(calibration, "_QUICK", (1, 0.001, 600.0))
    assert main(["calibrate", "--quick"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 measurements in 1 round: at most 600 s\n")
    assert f"written: {this_host_file()}" in out
    assert "p90" in out
    spec = describe(2, "this-host")
    assert {"Linear", "Linear.backward", "SGD.step", "Adam.step"} <= set(spec.device.op_costs)
    assert spec.collective("all_reduce", 1 << 20, (0, 1)).algorithm == "measured"
    assert sp.dry_run(program, world_size=2, cluster="this-host").step_time_s > 0
    other = tmp_path / "folder" / "other.json"
    spec.save(this_host_file())
    assert not other.exists()
