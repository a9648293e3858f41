"""Programs with all names, arguments and defaults of the programs that the seed documents link to.

They are in `tests/linked_programs`, with networks and images of small sizes. `docs/seeds.md` lists the names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from run_listing import launch

PROGRAMS = Path(__file__).parents[1] / "linked_programs"
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import make_data  # noqa: E402

pytestmark = [pytest.mark.documents, pytest.mark.process]


def losses(log: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in log.read_text().splitlines() if "loss is" in line]


def start(folder: Path, *program: object, **variables: object) -> Path:
    """Start a program as each rank of the rank table in `folder`; wait, and return the folder of the ranks' logs."""
    ranks = int(str(variables["RANK_SIZE"]))
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    usual |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "RANK_TABLE_FILE": str(folder / "rank_table.json")}
    usual |= {name: str(value) for name, value in variables.items()}
    command = [sys.executable, "-m", "simparallel.compat", "mindspore", *map(str, program)]
    started = []
    for rank in range(ranks):
        own = {"DEVICE_ID": str(rank % int(usual["DEVICE_NUM"])), "RANK_ID": str(rank)}
        with (folder / f"{rank}.log").open("w") as log:
            settings = {"cwd": folder, "env": {**usual, **own}, "stdout": log, "stderr": subprocess.STDOUT}
            started.append(subprocess.Popen(command, **settings))
    codes = [process.wait(timeout=100) for process in started]
    assert codes == [0] * ranks, (folder / "0.log").read_text()
    return folder


def make_table(folder: Path, *settings: str) -> None:
    command = [sys.executable, "-m", "simparallel", "rank-table", "make", *settings, "--out", "rank_table.json"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Return the data of the script for operator-level parallelism, its text, and what one device makes of it."""
    folder = tmp_path_factory.mktemp("one")
    environment = {"DATA_PATH": str(make_data.write_mnist(folder / "mnist", samples=64))}
    text = (PROGRAMS / "operator_parallel" / "advanced_distributed_operator_parallel.py").read_text()
    text += "\nwhole = [p.full_tensor().numpy() for p in net.parameters()]\n"
    text += "parts = [p.data.shape for p in net.parameters()]\n"
    alone = text.replace("SEMI_AUTO_PARALLEL", "STAND_ALONE")
    (one,) = launch("mindspore", alone, 1, log_dir=folder, environment=environment)
    return environment, text, one, losses(folder / "worker_0.log")


@pytest.mark.parametrize("form", ["jit", "plain"])
def test_operator_parallel_by_the_context(one_device, tmp_path, form):
    """Eight ranks that the semi-automatic context cuts train as one device does, and each holds its slices."""
    environment, text, one, expected = one_device
    text = text if form == "jit" else text.replace("@ms.jit\n", "")
    many = launch("mindspore", text, 8, log_dir=tmp_path, environment=environment)
    for rank in range(8):
        assert losses(tmp_path / f"worker_{rank}.log") == pytest.approx(expected, rel=1e-5)
    for found, whole in zip(many[0]["whole"], one["whole"], strict=True):
        np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-6)
    assert many[0]["parts"] == [(196, 32), (4, 32), (32, 10)]
    assert sum(event.sent_bytes for event in many.trace.events) > 0


def test_auto_parallel_of_0_2(tmp_path):
    """One pytest on each device; the ranks search for strategies, and print the same losses."""
    data = make_data.write_cifar10(tmp_path / "cifar", samples=40)
    make_table(tmp_path, "--devices", "2", "--server-id", "127.0.0.1")
    for name in ("resnet.py", "resnet50_distributed_training.py"):
        shutil.copy(PROGRAMS / "r0_2" / name, tmp_path)
    program = "-m", "pytest", "-s", "-v", "./resnet50_distributed_training.py"
    logs = start(tmp_path, *program, RANK_SIZE=2, DEVICE_NUM=2, DATA_PATH=data)
    first, second = (losses(logs / f"{rank}.log") for rank in range(2))
    assert len(first) == 20
    assert first == second
    assert np.mean(first[10:]) < np.mean(first[:10])
    assert "1 passed" in (logs / "0.log").read_text()


def test_adasum_with_the_model_zoo(tmp_path):
    """Two nodes of two devices; the parameters of norms and the biases are in the group without decay."""
    data = make_data.write_image_folder(tmp_path / "imagenet", samples=32)
    make_table(tmp_path, "--servers", "2", "--devices", "2", "--server-id", "127.0.0.1", "--server-id", "127.0.0.2")
    logs = start(tmp_path, PROGRAMS / "adasum" / "training.py", "--data_path", data, RANK_SIZE=4, DEVICE_NUM=2)
    told = [(logs / f"{rank}.log").read_text().splitlines() for rank in range(4)]
    for lines in told:
        assert len([line for line in lines if line.startswith("epoch: ")]) == 2
        (names,) = (line.split()[2:] for line in lines if line.startswith("without decay"))
        assert {name.rpartition(".")[2] for name in names} == {"gamma", "beta", "bias"}
        assert sum(name.endswith("gamma") for name in names) == 6
    # The cell sums the right predictions over the ranks, so all have one accuracy.
    assert len({line for lines in told for line in lines if line.startswith("accuracy: ")}) == 1
