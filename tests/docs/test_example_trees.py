"""The trees in `examples/`: each is started by its own run.sh on small files, with the installed wheel."""

from __future__ import annotations

import shutil
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
def trees(tmp_path):
    """Copy the trees: a reader has them in a folder of his own."""
    return shutil.copytree(EXAMPLES, tmp_path / "examples")


def losses(path: Path) -> list[float]:
    return [float(line.rpartition(" ")[2]) for line in path.read_text().splitlines() if "loss is" in line]


def falls(values: list[float]) -> bool:
    return len(values) >= 2 and values[-1] < values[0]


def test_data_parallel_tree(bash, trees, data, tmp_path):
    bash(
        f"bash {trees}/distributed_data_parallel/run.sh",
        DATA_PATH=data / "MNIST",
        DEVICE_NUM=2,
        EPOCHS=3,
        LOG_DIR=tmp_path / "log_output",
    )
    for rank in range(2):
        assert falls(losses(tmp_path / "log_output" / f"worker_{rank}.log"))
        assert (tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout").exists()
    assert (tmp_path / "log_output" / "scheduler.log").exists()


@pytest.mark.parametrize("script", ["run.sh", "run_advanced.sh"])
def test_operator_parallel_tree(bash, trees, data, tmp_path, script):
    bash(
        f"bash {trees}/distributed_operator_parallel/{script}",
        DATA_PATH=data / "MNIST",
        EPOCHS=3,
        LOG_DIR=tmp_path / "log_output",
    )
    first = losses(tmp_path / "log_output" / "worker_0.log")
    assert falls(first)
    assert all(losses(tmp_path / "log_output" / f"worker_{rank}.log") == first for rank in range(8))


def test_pytest_processes_tree(bash, trees, data, tmp_path):
    """Each device has its own pytest; the ranks meet by the rank table."""
    bash(
        "simparallel rank-table make --devices 2 --out rank_table.json",
        f"bash {trees}/distributed_training/run.sh",
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


def test_adasum_tree(bash, trees, data, tmp_path):
    """Each of two nodes is started by its own script; their ranks meet by the rank table."""
    settings = "--batch_size 4 --image_size 8 --num_classes 11 --blocks 1 1 1 1 --width 2 --epochs 2 --device_num 4"
    nodes = [f"bash {trees}/adasum/run_node{i}.sh {data / 'imagenet'} {settings}" for i in (1, 2)]
    bash(
        "simparallel rank-table make --devices 2 --out server.json",
        "simparallel rank-table merge server.json server.json --out rank_table.json",
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


def test_torch_tree(bash, trees):
    printed = bash(f"bash {trees}/torch_distributed/run.sh --epochs 2")
    found = [float(line.rpartition(" ")[2]) for line in printed.splitlines() if line.startswith("[rank 0] epoch")]
    assert falls(found)


def test_make_data(bash, trees, tmp_path):
    """All digits in the three formats."""
    bash(f"python {trees}/make_data.py data --samples 20")
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["MNIST", "cifar-10-batches-bin", "imagenet"]
