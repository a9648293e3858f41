"""The trees in `examples/`: each is started by its own run.sh on small files, as a reader would start it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import make_data  # noqa: E402

pytestmark = [pytest.mark.documents, pytest.mark.process]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    make_data.write_mnist(folder / "MNIST", samples=128)
    make_data.write_cifar10(folder / "cifar", samples=40)
    make_data.write_image_folder(folder / "imagenet", samples=32)
    return folder


@pytest.fixture
def bash(tmp_path):
    """Run shell commands in an empty folder with these variables; return their output."""

    def run(*commands: str, **variables: object) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they double the start of the scripts' own pytests
        environment |= {name: str(value) for name, value in variables.items()}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        ended = subprocess.run(
            ["bash", "-c", " && ".join(commands)],
            cwd=tmp_path,
            env=environment,
            timeout=100,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run


def losses(path: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in path.read_text().splitlines() if "loss is" in line]


def falls(values: list[float]) -> bool:
    return len(values) >= 2 and values[-1] < values[0]


def test_data_parallel_tree(bash, data, tmp_path):
    bash(
        f"bash {EXAMPLES}/distributed_data_parallel/run.sh",
        DATA_PATH=data / "MNIST",
        DEVICE_NUM=2,
        EPOCHS=3,
        LOG_DIR=tmp_path / "log_output",
    )
    for rank in range(2):
        assert falls(losses(tmp_path / "log_output" / f"worker_{rank}.log"))
        assert (tmp_path / "log_output" / f"rank.{rank}" / "stdout").exists()
    assert (tmp_path / "log_output" / "scheduler.log").exists()


@pytest.mark.parametrize("script", ["run.sh", "run_advanced.sh"])
def test_operator_parallel_tree(bash, data, tmp_path, script):
    bash(
        f"bash {EXAMPLES}/distributed_operator_parallel/{script}",
        DATA_PATH=data / "MNIST",
        EPOCHS=3,
        LOG_DIR=tmp_path / "log_output",
    )
    first = losses(tmp_path / "log_output" / "worker_0.log")
    assert falls(first)
    assert all(losses(tmp_path / "log_output" / f"worker_{rank}.log") == first for rank in range(8))


def test_pytest_processes_tree(bash, data, tmp_path):
    """Each device has its own pytest; the ranks meet by the rank table."""
    bash(
        "simparallel rank-table make --devices 2 --server-id 127.0.0.1 -o rank_table.json",
        f"bash {EXAMPLES}/distributed_training/run.sh",
        DATA_PATH=data / "cifar",
        RANK_TABLE_FILE=tmp_path / "rank_table.json",
        RANK_SIZE=2,
        RESNET=18,
        IMAGE_SIZE=8,
        EPOCHS=2,
        BATCH_SIZE=10,
    )
    for device in range(2):
        log = tmp_path / f"device{device}" / f"train.log{device}"
        assert "1 passed" in log.read_text()
        assert falls(losses(log))
        assert f"DEVICE_ID={device}\n" in log.with_name(f"env{device}.log").read_text()


def test_adasum_tree(bash, data, tmp_path):
    """Each of two nodes is started by its own script; their ranks meet by the rank table."""
    settings = "--batch_size 4 --image_size 8 --num_classes 11 --blocks 1 1 1 1 --width 2 --epochs 2 --device_num 4"
    nodes = [f"bash {EXAMPLES}/adasum/run_node{i}.sh {data / 'imagenet'} {settings}" for i in (1, 2)]
    bash(
        "simparallel rank-table make --servers 2 --devices 2 --server-id 127.0.0.1 --server-id 127.0.0.2 "
        "-o rank_table.json",
        'eval "$(python -m simparallel.compat mindspore)"',
        f"({nodes[0]} & {nodes[1]}; wait)",
        RANK_TABLE_FILE=tmp_path / "rank_table.json",
        RANK_SIZE=4,
        DEVICE_NUM=2,
    )
    for rank in range(4):
        log = tmp_path / f"device{rank}" / f"train.log{rank}"
        assert len(losses(log)) == 2, log.read_text()
        assert "Starting Training" in log.read_text()


def test_torch_tree(bash):
    printed = bash(f"bash {EXAMPLES}/torch_distributed/run.sh --epochs 2")
    found = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("[rank 0] epoch")]
    assert falls(found)


def test_make_data(bash, tmp_path):
    """All digits in the three formats."""
    bash(f"python {EXAMPLES}/make_data.py data --samples 20")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["MNIST", "cifar-10-batches-bin", "imagenet"]


def test_printed_shell_script(bash, data, tmp_path):
    """The shell script of the tutorial on automatic parallelism, as printed, with a program of two lines."""
    shutil.copy(Path(__file__).parents[1] / "listings" / "run.sh", tmp_path)
    shutil.copy(Path(__file__).parents[1] / "listings" / "rank_table.json", tmp_path)
    (tmp_path / "resnet50_distributed_training.py").write_text(
        "import mindspore\nfrom mindspore.communication.management import init, get_rank\n"
        "def test_rank():\n    init()\n    print('rank', get_rank())\n"
    )
    bash('eval "$(python -m simparallel.compat mindspore)"', "(source ./run.sh; wait)")
    for device in range(8):
        log = (tmp_path / f"device{device}" / f"train.log{device}").read_text()
        assert f"rank {device}" in log
        assert "1 passed" in log
