"""`benchmarks step --array cupy`, run on the stand-in for a GPU: its steps, its floor and its refusal."""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_backends import ArrayBackend
from refusals import refused
from stand_in.strict import StrictArray, launches

from benchmarks import gpu_step
from benchmarks.__main__ import main
from benchmarks.step import chosen_tasks, our_step
from simparallel import backend
from simparallel.arrays.cuda.device import Gpu, use_gpu
from simparallel.backend import manual_seed, to_host
from simparallel.errors import InputError
from simparallel.machine.device import DeviceSpec
from simparallel.models import lenet5
from simparallel.predict import gpu_measuring
from simparallel.predict.measuring import Workload

pytestmark = pytest.mark.matrices


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(gpu_step, "CEILING_SIZE", 64)
    monkeypatch.setattr(gpu_measuring, "HEAD_SIZE", 16)
    monkeypatch.setattr(gpu_measuring, "STEPS", 2)
    monkeypatch.setattr(gpu_measuring, "PROGRAMS", [Workload(lenet5, (n, 1, 28, 28)) for n in (2, 4)])


@pytest.mark.usefixtures("small")
def test_command_prints_steps_and_floors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", "--array", "cupy", "--models", "lenet", "--rounds", "1", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"].startswith("LeNet-5")
    assert row["median_s"]["simparallel"] > 0 < row["floor_s"]
    assert row["predicted_s"] > 0
    assert row["median_s"]["simparallel, captured"] > 0


@pytest.mark.usefixtures("small")
def test_table_tells_the_floor(capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = gpu_step.main(names=["lenet"], rounds=1)
    printed = capsys.readouterr()
    assert "LeNet-5" in printed.out
    assert "simparallel / simparallel, captured" in printed.out
    assert "floor " in printed.out
    assert re.search(r"predicted [\d.]+ \ws \([+-]\d+%\)", printed.out)
    assert ("PyTorch" in result.times_s) is not ("no PyTorch with a GPU" in printed.err)


@pytest.mark.usefixtures("small")
def test_check_of_a_gpu_has_a_line_for_each_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = runpy.run_path(str(Path(__file__).parents[2] / "tools" / "gpu_programs.py"), run_name="tool")
    monkeypatch.setattr(gpu_step, "TASKS", [task for task in gpu_step.TASKS if "LeNet" in task.title])
    assert tool["steps"]()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("* ")]
    pattern = r"\* LeNet-5 28x28, batch 64: simparallel [\d.]+ \ws, .*captured [\d.]+ \ws; predicted [+-]\d+%; memory.*"
    assert len(lines) == 1
    assert re.fullmatch(pattern, lines[0])


@pytest.mark.usefixtures("small")
def test_stored_calibration_is_used_if_it_fits() -> None:
    told: list[str] = []
    spec = gpu_step.calibrated(False, told.append)
    assert any("there is no calibration" in line for line in told)
    told.clear()
    assert gpu_step.calibrated(False, told.append) == spec
    assert not told
    gpu_step.calibrated(True, told.append)
    assert any("asked for" in line for line in told)


def test_calibrate_is_refused_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shard", "--calibrate"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "simparallel: --calibrate is for step --array cupy.\n"
    assert not printed.out


def test_step_runs_on_the_gpu() -> None:
    (task,) = chosen_tasks(["lenet"], gpu_step.TASKS)
    step = gpu_step.on_gpu(task)
    with launches() as names:
        step()
    assert "matmul" in names


@pytest.mark.parametrize("name", ["MLP", "LeNet"])
def test_captured_step_is_the_step(name: str) -> None:
    (task,) = chosen_tasks([name], gpu_step.TASKS)
    weights = []
    for is_captured in (False, True):
        nets = []

        def made(nets: list[Any] = nets) -> Any:
            nets.append(task.ours())
            return nets[0]

        manual_seed(0)
        with use_gpu(Gpu(0)):
            step = gpu_step.on_gpu(replace(task, ours=made, batch_size=4), is_captured=is_captured)
            for _ in range(4):
                with launches() as names:
                    step()
            weights.append([to_host(parameter.data).copy() for parameter in nets[0].parameters()])
        assert ("graph" in names) is is_captured
    ArrayBackend("strict").assert_all_equal(*weights)


def test_floor_follows_the_ceilings() -> None:
    """Half the rates take twice the time, because a launch costs nothing."""
    (task,) = chosen_tasks(["MLP"], gpu_step.TASKS)
    times = [gpu_step.floor_s(task, DeviceSpec("gpu", {4: rate}, rate, 1 << 40, 0.0)) for rate in (2e12, 1e12)]
    assert times[1] == pytest.approx(2 * times[0], rel=1e-6)


def test_time_is_between_two_events() -> None:
    class Cuda:
        """A device whose clock the steps advance by two milliseconds."""

        now_ms = 0.0

        class Event:
            def record(self) -> None:
                self.at_ms = Cuda.now_ms

            def synchronize(self) -> None:
                self.is_done = True

        @staticmethod
        def get_elapsed_time(first: Any, last: Any) -> float:
            assert last.is_done
            return last.at_ms - first.at_ms

    def step() -> None:
        Cuda.now_ms += 2.0

    namespace = type("Namespace", (), {"cuda": Cuda})
    assert gpu_step.repeated(gpu_step.clock_of(namespace), step, 3) == pytest.approx(6e-3)


def test_without_a_gpu_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_stand_ins", list)
    monkeypatch.setattr(backend, "why_no_gpu", lambda: "there is no NVIDIA driver")
    with refused(InputError):
        gpu_step.main()


def test_models_are_those_of_torch() -> None:
    pytest.importorskip("torch")
    for task in gpu_step.TASKS:
        ours, theirs = (list(model.parameters()) for model in (task.ours(), task.theirs()))
        assert sum(p.size for p in ours) == sum(p.numel() for p in theirs), task.title


@pytest.mark.parametrize("name", ["MLP", "LeNet"])
def test_torch_takes_the_same_step(name: str) -> None:
    torch = pytest.importorskip("torch")
    from benchmarks.step import torch_step

    (task,) = chosen_tasks([name], gpu_step.TASKS)
    ours, theirs = task.ours(), task.theirs()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        other.data = torch.from_numpy(mine.data.copy())
    batch = task.batch(4, *task.shape)
    our_step(ours, batch)()
    torch_step(theirs, batch)()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(mine.data, other.detach().numpy(), rtol=1e-4, atol=1e-6)
    assert not isinstance(mine.data, StrictArray)
