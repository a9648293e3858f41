"""What a prediction tells: time that adds up, memory, bytes, other hardware; and its command."""

from __future__ import annotations

import io
import json
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from refusals import refused

import simparallel as sp
from simparallel.cli.main import main
from simparallel.errors import ClusterError, InputError, RunFailedError, UnknownValueError
from simparallel.machine.cluster import PS_PER_S, describe
from simparallel.machine.device import OpCost
from simparallel.predict import progress
from simparallel.trace.diff import diff


def train(steps: int = 2, width: int = 64) -> int:
    net = sp.parallel.DistributedDataParallel(sp.nn.Linear(32, width))
    optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(sp.Tensor(np.ones((8, 32), np.float32))).sum().backward()
        optimizer.step()
    return steps


@given(world_size=st.integers(1, 9), steps=st.integers(0, 3), slow=st.booleans())
def test_times_add_up_to_the_makespan(world_size: int, steps: int, slow: bool) -> None:
    cluster = replace(describe(world_size), stragglers={world_size - 1: 2.0} if slow else {})
    prediction = sp.dry_run(train, (steps,), world_size=world_size, cluster=cluster)
    assert sum(prediction.classes.values()) == world_size == len(prediction.stands_for)
    for row in prediction.summary():
        parts = row["compute_time_s"] + row["exposed_communication_s"] + row["idle_time_s"]
        assert round(parts * PS_PER_S) == round(prediction.makespan_s * PS_PER_S)
    assert prediction.step_time_s <= prediction.makespan_s
    assert set(prediction.values.values()) <= {steps}


def test_prediction_is_what_a_run_has() -> None:
    run = sp.launch(train, world_size=3, transport="inline", record="full")
    prediction = sp.dry_run(train, world_size=3, fold=False)
    assert prediction.trace.summary() == [
        {**row, "wall_compute_s": mine["wall_compute_s"], "wall_communication_s": mine["wall_communication_s"]}
        for row, mine in zip(run.trace.summary(), prediction.trace.summary(), strict=True)
    ]
    assert prediction.memory == run.memory
    assert prediction.peak_bytes == max(memory["peak_bytes"] for memory in run.memory.values())


def test_summary_has_the_memory_of_each_device() -> None:
    """By its number, whatever the order in which a program uses its devices."""

    def program() -> None:
        for number, size in ((2, 300), (1, 100)):
            x = sp.Tensor(np.ones(size, np.float32)).to(f"sim:{number}")
            x.requires_grad = True
            (x * x).sum().backward()

    prediction = sp.dry_run(program, world_size=1, cluster=replace(describe(1), devices_per_rank=3))
    peaks = {row["device"]: row["peak_bytes"] for row in prediction.summary()}
    devices = prediction.memory[0]["devices"]
    assert peaks[2] > peaks[1] > 0
    assert peaks == {number: devices[f"sim:{number}"]["peak_bytes"] for number in peaks}


def test_error_names_the_whole_world() -> None:
    def program() -> None:
        if sp.get_rank() == 63:
            raise ValueError("boo")

    with refused(RunFailedError, rank=63) as caught:
        sp.dry_run(program, world_size=64)
    assert str(caught.value).startswith("rank 63 of 64 failed")


def test_busy_rank_of_a_folded_run_is_named() -> None:
    def program() -> None:
        while sp.get_rank() == 63:
            pass
        sp.barrier()

    with refused(RunFailedError, rank=63) as caught:
        sp.dry_run(program, world_size=64, timeout_s=0.3)
    assert "rank 63 has not passed on its turn" in str(caught.value)


def test_utilisation_and_throughput() -> None:
    prediction = sp.dry_run(train, world_size=2)
    device, span_s = prediction.cluster.device, prediction.makespan_s
    flops = sum(event.flops for event in prediction.trace.events if event.rank == 0)
    assert prediction.utilisation(1) == pytest.approx(flops / (span_s * device.peak(4)), rel=1e-3)
    assert prediction.utilisation(model_flops=flops // 2) == pytest.approx(prediction.utilisation() / 2, rel=1e-3)
    assert prediction.throughput(6) == 6 / prediction.step_time_s
    assert sum(prediction.phases().values()) > 0


def blocks(dtype: str, width: int, recompute: bool, devices: int = 1) -> None:
    """Run forward and backward of two layers on each device."""
    for number in range(devices):
        with sp.device(f"sim:{number}"):
            net = sp.nn.Sequential(*(sp.nn.Linear(width, width, dtype=dtype) for _ in range(2)))
            x = sp.nn.initializer("zeros", (width, width), dtype)
            (sp.nn.checkpoint(net, x) if recompute else net(x)).sum().backward()


@given(
    dtype=st.sampled_from(["float16", "float32", "float64"]),
    preset=st.sampled_from(["dgx-h100", "ascend910b-8", "this-host", "measured"]),
    width=st.sampled_from([1, 64, 8192]),
    recompute=st.booleans(),
    devices=st.integers(1, 2),
)
def test_utilisation_is_that_of_own_dtypes(dtype: str, preset: str, width: int, recompute: bool, devices: int) -> None:
    cluster = describe(1, "a100" if preset == "measured" else preset)
    if preset == "measured":  # faster than the peak
        costs = {"Linear": OpCost(1e-12), "Linear.backward": OpCost(1e-12)}
        cluster = replace(cluster, device=replace(cluster.device, op_costs=costs))
    cluster = replace(cluster, devices_per_rank=devices)
    found = sp.dry_run(blocks, (dtype, width, recompute, devices), cluster=cluster)
    rows = found.summary()
    assert all(0 <= row["mfu"] <= row["hfu"] <= 1 + 1e-9 for row in rows)
    assert width == 1 or all((row["mfu"] < row["hfu"]) == recompute for row in rows)
    assert found.utilisation() == pytest.approx(sum(row["hfu"] for row in rows) / len(rows))
    if width == 8192 and preset == "dgx-h100" and devices == 1:
        assert rows[0]["hfu"] > 0.8
        assert rows[0]["mfu"] == pytest.approx(rows[0]["hfu"] * (3 / 4 if recompute else 1), rel=0.01)


def test_table_says_whether_it_fits() -> None:
    def program(width: int) -> None:
        sp.nn.Linear(width, width)(np.ones((1, width), np.float32)).sum().backward()

    cluster = describe(1, "dgx-h100")
    for width, fits, peak in ((1000, "fits", "8.01 MB"), (200_000, "does not fit", "320 GB")):
        prediction = sp.dry_run(program, (width,), cluster=cluster)
        assert f"\n{fits}: {peak} at the peak, a device has 80 GB\n" in prediction.table()
        assert prediction.fits == (fits == "fits")
    limited = sp.dry_run(program, (1000,), cluster=cluster, device_memory="10MB")
    assert "fits: " in limited.table()
    assert limited.capacity_bytes == 10**7


def test_sent_bytes_count_every_rank() -> None:
    few, whole = (sp.dry_run(train, world_size=16, nodes=2, fold=fold) for fold in (True, False))
    assert few.sent_bytes()["all_reduce"] == whole.sent_bytes()["all_reduce"]
    assert sum(whole.sent_bytes().values()) == sum(event.sent_bytes for event in whole.trace.events)
    for prediction in (few, whole):
        assert sum(prediction.sent_bytes().values()) == sum(prediction.sent_bytes("tier").values())
    with refused(InputError):
        few.sent_bytes("rank")


def test_other_hardware_is_a_new_prediction() -> None:
    prediction = sp.dry_run(train, world_size=4)
    link = sp.LinkSpec(1e-3, 1e6)
    slower = prediction.with_(link=link)
    assert slower.makespan_s > prediction.makespan_s
    same = sp.dry_run(train, world_size=4, cluster=replace(prediction.cluster, link=link))
    assert diff(slower.trace, same.trace).is_equal
    assert diff(prediction.with_().trace, prediction.trace).is_equal
    with refused(InputError):
        prediction.with_(cluster=describe(5))


def test_pictures_and_tables() -> None:
    prediction = sp.dry_run(train, world_size=4)
    lanes = [text.get_text() for text in prediction.timeline(steps=[1]).get_yticklabels()]
    assert len(lanes) == 2  # one rank for all: compute, communication
    assert prediction.memory_over_time(3).lines or prediction.memory_over_time(3).collections
    assert "1 class of ranks; 2 of 4 ranks were run" in prediction.table()
    shown = prediction._repr_html_()
    assert "1 class of ranks; 2 of 4 ranks were run" in shown
    # A head and a row; the timeline has one rank for all.
    assert shown.partition("<iframe")[0].count("<tr>") == 2
    assert "<iframe" in shown


def test_device_is_another_word_for_the_cluster() -> None:
    predictions = [sp.dry_run(sp.barrier, world_size=2, **{name: "dgx-h100"}) for name in ("cluster", "device")]
    assert [prediction.cluster.device.name for prediction in predictions] == ["h100", "h100"]


def test_clusters_that_do_not_fit_are_refused() -> None:
    with refused(ClusterError):
        sp.dry_run(train, world_size=4, cluster=describe(3))
    with refused(ClusterError):
        sp.dry_run(train, world_size=2, cluster="no-such-preset")
    with refused(InputError):
        sp.dry_run(train, world_size=2).utilisation(rank=2)


def test_memory_limit_is_refused_as_in_a_run() -> None:
    errors = []
    for start in (
        lambda: sp.launch(train, world_size=2, transport="inline", device_memory="12kB"),
        lambda: sp.dry_run(train, world_size=2, device_memory="12kB", fold=False),
    ):
        with pytest.raises(RunFailedError) as caught:
            start()
        errors.append(caught.value.__cause__)
    assert errors[0] == errors[1]


def large_data_parallel() -> None:
    """Train 160 GB of weights."""
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(200_000, 200_000))
    optimizer = sp.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(np.zeros((2, 200_000), np.float32)).sum().backward()
        optimizer.step()


def large_pipeline() -> None:
    """Train four times 40 GB of weights, on two replicas of two stages, with one array for all gradients of a stage."""
    model = sp.nn.Sequential(*(sp.nn.Linear(100_000, 100_000) for _ in range(4)))
    mesh = sp.Mesh((2, 2), ("dp", "pp"))
    pipeline = sp.parallel.Pipeline(model, sp.nn.MSELoss(), microbatches=2, mesh=mesh)
    optimizer = sp.optim.AdamW(pipeline.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.step(np.zeros((2, 100_000), np.float32), np.zeros((2, 100_000), np.float32))
        optimizer.step()


def large_others() -> None:
    """Make what fills parameters by other ways."""
    sp.nn.LSTM(100_000, 50_000)
    sp.nn.initializer("normal", (200_000, 100_000))
    sp.nn.Embedding(1_000_000, 20_000, padding_idx=0)


@pytest.mark.parametrize("program", [large_data_parallel, large_pipeline, large_others])
def test_parameters_take_no_memory(program: Any) -> None:
    tracemalloc.start()
    try:
        prediction = sp.dry_run(program, world_size=4)
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    assert prediction.peak_bytes > 100e9


class Terminal(io.StringIO):
    """A stream that says when it was written."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal, self.written = is_terminal, threading.Event()

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_run_shows_progress_on_a_terminal(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "QUIET_S", 0)
    monkeypatch.setattr(progress, "EVERY_S", 0.001)

    def program() -> None:
        train(1)
        assert stream.written.wait(10) if is_terminal else not stream.written.is_set()

    sp.dry_run(program, world_size=64)
    lines = stream.getvalue().split("\r")
    assert bool(lines[1:]) == is_terminal
    assert not is_terminal or lines[1].startswith("dry run: ")
    assert lines[-1] == ""
    assert all("of 64 ranks run" in line for line in lines[1:-2])


def test_short_run_shows_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal(True)
    monkeypatch.setattr("sys.stderr", stream)
    sp.dry_run(train, world_size=2)
    assert stream.getvalue() == ""


def test_decision_by_a_value_names_its_line() -> None:
    def decide() -> None:
        loss = (sp.nn.Linear(2, 1)(sp.Tensor(np.ones((1, 2), np.float32)))).sum()
        print(f"loss {loss.item():.3f}")
        if loss.item() > 1:
            loss.backward()

    with pytest.raises(RunFailedError) as caught:
        sp.dry_run(decide)
    cause = caught.value.__cause__
    assert isinstance(cause, UnknownValueError)
    assert cause.facts["place"].startswith("test_prediction.py:")


def average_of_losses() -> None:
    """Average the losses of all ranks in an array of numbers, in place, beside known numbers."""
    model = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 2))
    total = 0.0
    for _ in range(2):
        loss = model(np.ones((2, 4), np.float32)).sum()
        loss.backward()
        total += loss.item()
    mean = sp.all_reduce(np.array([total]), "mean")
    print(f"{mean[0]:.3f}", sp.all_reduce(np.asarray([[total, 2], (1.5, total)], np.float32, "C")))


def clipped_pipeline(norm_type: float) -> None:
    model = sp.nn.Sequential(sp.nn.Linear(4, 4), sp.nn.ReLU(), sp.nn.Linear(4, 4), sp.nn.Linear(4, 4))
    pipeline = sp.parallel.Pipeline(model, sp.nn.MSELoss(), microbatches=2)
    optimizer = sp.optim.SGD(pipeline.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        pipeline.step(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))
        pipeline.clip_grad_norm_(1.0, norm_type)
        optimizer.step()


@pytest.mark.parametrize(
    ("program", "args"), [(average_of_losses, ()), *((clipped_pipeline, (norm,)) for norm in (2.0, 3.0, float("inf")))]
)
def test_sums_of_unknown_numbers_have_real_events(program: Any, args: Any) -> None:
    dry = sp.dry_run(program, args, world_size=3, fold=False)
    assert diff(dry.trace, sp.launch(program, args, world_size=3, transport="inline", record="full").trace).is_equal


def array_of_unknown(then: Any) -> None:
    then(np.array([sp.nn.Linear(2, 1)(np.ones((1, 2), np.float32)).sum().item(), 1.0]))


@pytest.mark.parametrize(
    "decide", [lambda x: x[0] > 1 and 1, lambda x: 1 if sp.all_reduce(x).mean() > 1 else 2, lambda x: float(x[1])]
)
def test_arrays_of_unknown_numbers_decide_nothing(decide: Any) -> None:
    before = np.array, np.asarray
    with pytest.raises(RunFailedError) as caught:
        sp.dry_run(array_of_unknown, (decide,), world_size=2)
    assert isinstance(caught.value.__cause__, UnknownValueError)
    assert (np.array, np.asarray) == before


def test_arrays_of_unknown_numbers_have_numpy_shapes() -> None:
    """Also in a dry run inside of a dry run; outside of them, NumPy's functions are its own."""

    def program() -> None:
        unknown = sp.nn.Linear(2, 1)(np.ones((1, 2), np.float32)).sum().item()
        sp.dry_run(lambda: None)
        for make in (np.array, np.asarray):
            for like in (lambda x: x, lambda x: [x], lambda x: [[1, x], (x, 2.5)], lambda x: [[1, 2], [3, 4]]):
                found, real = make(like(unknown)), make(like(1.0))
                assert (found.shape, found.dtype) == (real.shape, real.dtype)
        assert np.array([unknown], "f4", ndmin=3).shape == (1, 1, 1)

    before = np.array, np.asarray
    sp.dry_run(program)
    assert (np.array, np.asarray) == before


SCRIPT = """
import sys
import numpy as np
import simparallel as sp

sp.init()
net = sp.parallel.DistributedDataParallel(sp.nn.Linear(4, int(sys.argv[1])))
optimizer = sp.optim.SGD(net.parameters(), lr=0.1)
loss = net(sp.Tensor(np.ones((2, 4), np.float32))).sum()
loss.backward()
optimizer.step()
print("loss", loss.item())
"""


def test_command_predicts_a_script(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    arguments = ["predict", "-n", "16", "--cluster", "dgx-a100", "--out", "p.json", "--picture=p.png", "train.py", "8"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert out.startswith("16 x a100 on 2 nodes: ")
    # Each line has its rank, and is there once, although ranks ran again.
    assert err == "[rank 0] loss ?\n[rank 15] loss ?\nwritten: p.json\nwritten: p.png\n"
    assert (tmp_path / "p.png").stat().st_size > 1000
    assert len(sp.Trace.load("p.json").ranks) == 2
    assert main(["predict", "-n", "2", "--json", "--all-ranks", "train.py", "8"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [row["ranks"] for row in told["ranks"]] == [2]
    assert told["fits"]
    assert told["peak_bytes"] < told["capacity_bytes"] == 80e9
    assert main(["trace", "diff", "p.json", "p.json"]) == 0
    assert "the same events" in capsys.readouterr().out
    for wrong in (["predict", "train.py", "8"], ["predict", "--nodes", "2", "train.py", "8"]):
        assert main(wrong) == 2
    for wrong in (["predict", "-n", "0", "train.py"], ["predict", "-n", "2", "nothing.py"], ["trace", "a", "b"]):
        assert main(wrong) == 2


REPEATS = """
import numpy as np, simparallel as sp
sp.init()
print("begins")
if sp.get_rank() == 0: sp.send(np.ones(3), 6)
if sp.get_rank() == 6: sp.recv(np.empty(3), 0)
print("ends")
"""


def test_output_of_ranks_that_ran_again_is_shown_once(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    """Ranks 0 and 7 run first; rank 0 then needs rank 6, and so on."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(REPEATS)
    assert main(["predict", "-n", "8", "--cluster", "dgx-a100", "train.py"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(set(told))
    assert {f"[rank {rank}] {word}" for rank in (0, 6) for word in ("begins", "ends")} <= set(told)


LAUNCHES = """
import numpy as np
import simparallel as sp


def step(width):
    (sp.nn.Linear(4, width)(sp.Tensor(np.ones((2, 4), np.float32)))).sum().backward()
    sp.barrier()
    return sp.get_rank()


if __name__ == "__main__":
    results = sp.launch(step, (3,), world_size=2)
    print(list(results), results.trace.ranks)
    with sp.Cluster(4, device="ascend910") as cluster:
        cluster.run(step, 5)
"""


def test_command_predicts_what_a_script_launches(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "predicted.py").write_text(LAUNCHES)
    assert main(["predict", "--cluster", "dgx-h100", "predicted.py"]) == 0
    out, err = capsys.readouterr()
    assert [line.split(":")[0] for line in out.splitlines() if "simulated" in line] == ["2 x h100", "4 x ascend910"]
    assert err == "[0, 1] [0, 1]\n"
    assert sp.Cluster.instead is None
