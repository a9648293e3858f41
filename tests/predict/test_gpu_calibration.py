"""The calibration of a GPU: known times of a synthetic device are found, and the steps of four models are predicted."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from refusals import refused

import simparallel as sp
from benchmarks.gpu_step import TASKS
from benchmarks.step import our_step, tokens
from simparallel.backend import has_data
from simparallel.base.dry_arrays import without_data
from simparallel.base.system import without_huge_pages
from simparallel.cli.main import main
from simparallel.errors import ClusterError, InputError
from simparallel.machine.cluster import ClusterSpec, describe, load_cluster, this_gpu_file
from simparallel.machine.device import COPY, READ, DeviceSpec, DeviceWork, OpCost
from simparallel.machine.presets import calibration_file
from simparallel.predict import gpu_calibration, gpu_measuring
from simparallel.predict.calibration import calibrate
from simparallel.predict.fitting import fingerprint
from simparallel.predict.gpu_calibration import changed, describe_gpu, gpu_fingerprint, program_errors
from simparallel.predict.gpu_measuring import PROGRAMS, GpuStopwatch, Measurement, Timed, measured, step_s, timed
from simparallel.predict.measuring import Sample, Workload, dense, training

pytestmark = pytest.mark.matrices

FLOPS_PER_S, BYTES_PER_S, KERNEL_S = 50e12, 2.5e12, 3e-6
# Operations of the synthetic device in which the interpreter reads values.
WAITING = {"Embedding", "CrossEntropy"}


def host_s(name: str, results: int) -> float:
    """Return the interpreter's time for an operation: 20 to 60 us, and 8 us for each parameter of an optimizer."""
    each_s = 8e-6 * results if name.endswith(".step") else 0.0
    return (20 + zlib.crc32(name.encode()) % 41) * 1e-6 + each_s


def device_s(name: str, flops: int, size_bytes: int, results: int) -> float:
    """Return the time on the device: nothing for views, and a kernel for each parameter of an optimizer."""
    if not flops and not size_bytes:
        return 0.0
    kernels = results if name.endswith(".step") else 1
    return KERNEL_S * kernels + max(flops / FLOPS_PER_S, size_bytes / BYTES_PER_S)


class Event:
    """An event of the synthetic device, which has passed once the host's clock is that far."""

    def __init__(self, gpu: SyntheticGpu) -> None:
        self._gpu, self.at_s = gpu, max(gpu.device_s, gpu.host_s)

    @property
    def done(self) -> bool:
        return self._gpu.host_s >= self.at_s

    def synchronize(self) -> None:
        self._gpu.host_s = max(self._gpu.host_s, self.at_s)


class SyntheticGpu:
    """A GPU with two clocks that operations advance by known times, on arrays without data."""

    number, compute = 0, None

    def __init__(self, noise: float = 0.0) -> None:
        self.host_s = self.device_s = 0.0
        self._noise, self._generator = noise, np.random.default_rng(0)
        self.xp = SimpleNamespace(ones=np.ones, empty=np.empty, matmul=lambda *_, **__: self.run(5e-6, 300e-6))
        self.cuda = SimpleNamespace(get_elapsed_time=lambda first, last: 1e3 * (last.at_s - first.at_s))

    def run(self, host_s: float, device_s: float, *, waits: bool = False) -> None:
        host_s, device_s = (t * (1 + self._noise * self._generator.uniform(-1, 1)) for t in (host_s, device_s))
        if waits:
            self.synchronize("")
        self.device_s = max(self.device_s, self.host_s) + device_s
        self.host_s += host_s

    def mark(self, stream: Any, *, timed: bool = False) -> Event:
        return Event(self)

    def synchronize(self, what: str) -> None:
        self.host_s = max(self.host_s, self.device_s)

    def home(self, array: Any, requires_grad: bool) -> Any:
        return without_data(array) if requires_grad and has_data(array) else array


class SyntheticStopwatch(GpuStopwatch):
    """A stopwatch whose operations advance the clocks of a synthetic device."""

    def __init__(self, gpu: Any) -> None:
        super().__init__(gpu)
        self.gpu = gpu
        self.now_ns = lambda: round(gpu.host_s * 1e9)

    def compute(self, name: str, kind: str, start_ns: int, end_ns: int, price: Any, layer: str = "") -> None:
        _, flops, size_bytes, results = price.measured
        self.gpu.run(host_s(name, results), device_s(name, flops, size_bytes, results), waits=name in WAITING)
        super().compute(name, kind, start_ns, end_ns, price, layer)

    def read_loss(self, loss: Any) -> None:
        self.gpu.synchronize("")
        self.gpu.host_s += 25e-6
        super().read_loss(loss)


def synthetic(program: Workload, noise: float = 0.0) -> Measurement:
    gpu: Any = SyntheticGpu(noise)
    with without_huge_pages():
        return measured(program, gpu, SyntheticStopwatch(gpu))


@pytest.fixture(scope="module")
def few_steps() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_measuring, "WARM_STEPS", 1)
        patch.setattr(gpu_measuring, "STEPS", 3)
        patch.setattr(gpu_measuring, "HEAD_SIZE", 8)
        yield


@pytest.fixture(scope="module")
def calibrated(few_steps: None) -> ClusterSpec:
    """The calibration of the synthetic device by all programs, with 3 % of noise."""
    with pytest.MonkeyPatch.context() as patch:
        # Checked by a test of its own, on fewer programs.
        patch.setattr(gpu_calibration, "program_errors", lambda programs: [])
        programs = [synthetic(program, noise=0.03) for program in PROGRAMS]
        return describe_gpu(programs, [Sample(COPY, 0, 1000, 1, 1e-5)], 1 << 36, {"gpu": "synthetic"})


def program_of(task: Any) -> Workload:
    if task.batch is tokens:
        length, vocabulary = task.shape
        return Workload(task.ours, (task.batch_size, length), vocabulary)
    return Workload(task.ours, (task.batch_size, *task.shape))


def predicted_s(task: Any, cluster: ClusterSpec) -> float:
    def program() -> None:
        step = our_step(task.ours(), task.batch(task.batch_size, *task.shape))
        for _ in range(3):
            step()

    return float(sp.dry_run(program, cluster=cluster, unknown=0.0).step_time_s)


def slower(cost: OpCost) -> OpCost:
    """Return a cost of 1.5 times the time."""
    return OpCost(
        *(1.5 * part for part in (cost.launch_s, cost.s_per_flop, cost.s_per_byte, cost.s_per_result)), cost.shapes
    )


@pytest.fixture(scope="module")
def truths(few_steps: None) -> dict[str, float]:
    """The time of each model's step on the synthetic device [s]."""
    return {task.title: synthetic(program_of(task)).step_s for task in TASKS}


@pytest.mark.matrices
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.title.split()[0])
def test_steps_of_known_times_are_predicted(task: Any, calibrated: ClusterSpec, truths: dict[str, float]) -> None:
    truth = truths[task.title]
    assert predicted_s(task, calibrated) == pytest.approx(truth, rel=0.05)
    # Red control: another interpreter and another device.
    fields = "host_costs", "op_costs"
    others = {name: {op: slower(cost) for op, cost in getattr(calibrated.device, name).items()} for name in fields}
    slow = replace(calibrated, device=replace(calibrated.device, **others))
    assert predicted_s(task, slow) == pytest.approx(1.5 * truth, rel=0.05)


def test_one_clock_alone_is_wrong(calibrated: ClusterSpec, truths: dict[str, float]) -> None:
    """Red control: small steps take the interpreter's time, and the times of the device alone miss it."""
    task = TASKS[0]
    device = replace(calibrated.device, host_costs={}, host_waits=())
    assert predicted_s(task, replace(calibrated, device=device)) < 0.7 * truths[task.title]


def names_of(program: Workload) -> set[str]:
    """Return the names of the operations in a step of a program, which runs without data."""
    return {event.name for event in sp.dry_run(lambda: training(program)(), unknown=0.0).trace.events}


def test_programs_have_all_operations_of_the_models() -> None:
    known = set().union(*map(names_of, PROGRAMS))
    for task in TASKS:
        assert names_of(program_of(task)) <= known, task.title
    # Red control: an operation that no program has.
    assert "Exp" not in known


@pytest.mark.matrices
def test_waiting_operations_are_found(calibrated: ClusterSpec) -> None:
    assert set(calibrated.device.host_waits) == WAITING


def test_an_unknown_operation_has_the_rates_of_others(calibrated: ClusterSpec) -> None:
    """The stated fallback: the interpreter's median time, and a roofline without a constant."""
    device = calibrated.device
    assert device.host_s(DeviceWork("Exp")) == device.launch_s == pytest.approx(40e-6, rel=0.5)
    size = 1 << 30
    assert device.device_s(DeviceWork("Exp", 0, size)) == pytest.approx(size / BYTES_PER_S, rel=0.2)
    # A view starts no kernel.
    assert device.device_s(DeviceWork("Exp")) == 0.0


def test_times_of_both_clocks_are_found(few_steps: None) -> None:
    """Waits for the device are no time of the interpreter, and waits for the interpreter none of the device."""
    program = Workload(partial(dense, (4096, 4096, 10)), (4096, 4096))
    for op in synthetic(program).ops:
        name, flops, size_bytes, results = op.work
        assert op.waits is (name in WAITING or name == READ)
        assert op.host_s == pytest.approx(25e-6 if name == READ else host_s(name, results), rel=0.05), name
        if name not in WAITING and name != READ:
            assert op.device_s == pytest.approx(device_s(name, flops, size_bytes, results), rel=0.05, abs=1e-7), name


def test_errors_are_of_programs_left_out() -> None:
    ops = [Timed(("op", 10**i, 0, 0), 1e-5, 10**i * 1e-9, False) for i in range(3, 8)]
    same = Measurement(ops, step_s(ops))
    assert program_errors([same, same, same]) == pytest.approx([0, 0, 0], abs=1e-3)
    # Red control: a step that took twice as long.
    assert program_errors([Measurement(ops, 2 * step_s(ops)), same, same])[0] == pytest.approx(np.log(2), abs=1e-2)


def device(**costs: Any) -> ClusterSpec:
    spec = DeviceSpec("bare", {4: 1e12}, 1e12, 1 << 36, 1e-6, **costs)
    return replace(describe(1, "a100"), device=spec, name="bare")


@pytest.mark.parametrize(("host", "device_time", "total"), [(1e-3, 0.0, 1e-2), (0.0, 1e-3, 1e-2), (1e-3, 2e-3, 2e-2)])
def test_longer_clock_counts(host: float, device_time: float, total: float) -> None:
    def program() -> None:
        x = sp.Tensor(np.ones(4, np.float32))
        for _ in range(10):
            x = x + 1

    # A time for each operation, or one for all.
    for interpreter in ({"host_costs": {"Add": OpCost(host)}}, {"op_start_s": host or 1e-6}):
        cluster = device(op_costs={"Add": OpCost(device_time)}, **interpreter)
        # The last operation begins when its interpreter does, and the copy of `x` takes a start.
        assert sp.dry_run(program, cluster=cluster).makespan_s == pytest.approx(total, abs=2.1e-3)


@pytest.mark.parametrize("reads", [True, False])
def test_read_waits_for_all_before(reads: bool) -> None:
    """Without the read, the interpreter's second part is hidden behind the device's first one."""
    cluster = device(op_costs={"Add": OpCost(1.0), "Mul": OpCost(0.0)}, host_costs={"Mul": OpCost(0.5)})

    def program() -> None:
        x = sp.nn.Parameter(np.ones(4, np.float32))
        y = (x + 1).sum()
        if reads:
            y.item()
        for _ in range(2):
            y = y * 2.0

    expected = {True: 1.5, False: 1.0}[reads]
    assert sp.dry_run(program, cluster=cluster).makespan_s == pytest.approx(expected, abs=1e-3)


def waiting_steps() -> None:
    """Train with copies in, labels that are checked, and losses that are read."""
    model = sp.nn.Sequential(sp.nn.Embedding(10, 16), sp.nn.Flatten(), sp.nn.ReLU(), sp.nn.Linear(32, 10))
    optimizer = sp.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        loss = sp.functions.cross_entropy(model(np.arange(8).reshape(4, 2)), np.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()


def test_run_on_a_gpu_has_both_clocks() -> None:
    """Real events are dry events, at the same times."""
    names = [
        "Embedding",
        "ReLU",
        "Linear",
        "CrossEntropy",
        "CrossEntropy.backward",
        "Linear.backward",
        "ReLU.backward",
        "SGD",
    ]
    device_costs = {name: OpCost(1e-4 * number) for number, name in enumerate(names)}
    host_costs = {**{name: OpCost(5e-5) for name in names}, READ: OpCost(1e-5), COPY: OpCost(2e-5)}
    cluster = device(op_costs=device_costs, host_costs=host_costs, host_waits=("CrossEntropy",))
    settings = {"world_size": 1, "transport": "inline", "array": "cupy", "record": "full"}
    real = sp.launch(waiting_steps, **settings, device=cluster).trace.events
    dry = sp.dry_run(waiting_steps, cluster=cluster, unknown=0.0).trace.events
    assert [(e.name, e.sim_start_ps, e.sim_end_ps) for e in real] == [
        (e.name, e.sim_start_ps, e.sim_end_ps) for e in dry
    ]


def test_median_of_steps_counts() -> None:
    row = gpu_measuring._Execution(0, ("op", 1, 1, 1), 2000, 0, 0.0, 1e-6, False)
    other = row._replace(work=("view", 0, 0, 0), last=2e-7)
    rows = [each._replace(step=step) for step in range(3) for each in (row, other)]
    odd = [rows[0]._replace(host_ns=10**9, last=1.0), *rows[1:]]
    (op, view) = timed(odd, odd)
    assert (op.host_s, view.device_s) == (pytest.approx(2e-6), 0.0)
    # The two events of a view are 0.2 us apart, which counts for no operation.
    assert op.device_s == pytest.approx(8e-7)


@pytest.fixture
def configured(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.usefixtures("configured")
def test_this_gpu_needs_a_calibration() -> None:
    with refused(ClusterError, key="device"):
        describe(1, "this-gpu")


@pytest.mark.usefixtures("configured")
def test_this_gpu_is_one_rank() -> None:
    this_gpu_file().parent.mkdir()
    device().save(this_gpu_file())
    assert load_cluster("this-gpu") == device()
    with refused(ClusterError, key="world_size"):
        describe(2, "this-gpu")


@pytest.mark.usefixtures("configured", "few_steps")
def test_command_calibrates_the_stand_in(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_measuring, "PROGRAMS", [Workload(partial(dense, (n, 16, 10)), (8, n)) for n in (24, 48)])
    assert main(["calibrate", "--array", "cupy"]) == 0
    assert f"written: {this_gpu_file()}" in capsys.readouterr().out
    spec = describe(1, "this-gpu")
    assert ClusterSpec.load(this_gpu_file()) == spec
    assert {"Linear", "CrossEntropy.backward", "SGD.step"} <= set(spec.device.op_costs)
    assert {READ, COPY, "Linear"} <= set(spec.device.host_costs)

    def program() -> None:
        training(Workload(partial(dense, (32, 16, 10)), (8, 32)))()

    prediction = sp.dry_run(program, cluster="this-gpu", unknown=0.0)
    assert prediction.step_time_s > 0
    assert prediction.interval_s is not None


def test_quick_is_refused_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--quick", "--array", "cupy"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("simparallel: calibrate: ")
    assert not printed.out


@pytest.mark.parametrize("name", ["this-host", "this-gpu"])
@pytest.mark.parametrize("is_stale", [True, False])
@pytest.mark.usefixtures("configured")
def test_predict_notes_a_stale_calibration(
    name: str, is_stale: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = fingerprint() if name == "this-host" else gpu_fingerprint(sp.arrays.cuda.device.gpu_of_rank(0))
    spec = replace(device(), name=name, calibration={"machine": machine | {"python": "2.7"} if is_stale else machine})
    calibration_file(name).parent.mkdir()
    spec.save(calibration_file(name))
    script = tmp_path / "script.py"
    script.write_text("import simparallel as sp\nsp.init()\nsp.Tensor([1.0]) + 1\n")
    assert main(["predict", "-n", "1", "--cluster", name, str(script)]) == 0
    assert ("python was 2.7" in capsys.readouterr().err) is is_stale


def test_unknown_arrays_are_refused() -> None:
    with refused(InputError):
        calibrate(array="torch")


@pytest.mark.usefixtures("configured")
def test_stale_calibration_is_noticed() -> None:
    machine = gpu_fingerprint(sp.arrays.cuda.device.gpu_of_rank(0))
    spec = replace(device(), calibration={"machine": machine})
    assert not changed(spec, machine)
    spec = replace(device(), calibration={"machine": {**machine, "driver": 1}})
    assert changed(spec, machine) == f"driver was 1, is {machine['driver']}"
    assert {"gpu", "memory_bytes", "driver", "cuda", "cupy", "products"} <= set(machine)
