"""The commands that the seed documents print, as printed, with the installed wheel in an empty folder.

The programs are the listings in `tests/listings` (see test_listings.py), on small files. `eval` of one line gives the
shell the names msrun, mpirun, python and pytest. The trees of `examples/` have their own file.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest
from run_listing import AROUND_AUTO_PARALLEL, LISTINGS, text_of, torch_names

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))
import make_data  # noqa: E402

pytestmark = [pytest.mark.documents, pytest.mark.process]
MINDSPORE = 'eval "$(python -m simparallel.compat mindspore)"'
TORCH = 'eval "$(python -m simparallel.compat torch)"'


def losses(log: Path) -> list[float]:
    return [float(found) for found in re.findall(r"loss is ([\d.]+)", log.read_text())]


@pytest.mark.parametrize(
    "command",
    [
        "msrun --worker_num=8 --local_worker_num=8 --master_port=8118 --log_dir=log_output --join=True "
        "--cluster_time_out=300 distributed_data_parallel.py",
        "mpirun -n 8 --output-filename log_output --merge-stderr-to-stdout python distributed_data_parallel.py",
    ],
)
def test_data_parallel(command, bash, tmp_path):
    """Source 000: both launchers leave log_output/1/rank.N/stdout."""
    make_data.write_mnist(tmp_path / "MNIST", samples=256)
    (tmp_path / "distributed_data_parallel.py").write_text(text_of("data_parallel.txt"))
    (tmp_path / "run.sh").write_text(f"#!/bin/bash\n{command}\n")
    bash(MINDSPORE, "bash run.sh", DATA_PATH=tmp_path / "MNIST")
    found = [losses(tmp_path / "log_output" / "1" / f"rank.{rank}" / "stdout") for rank in range(8)]
    assert [len(each) for each in found] == [10] * 8
    assert len({tuple(each) for each in found}) == 8  # each has its own part of the data
    assert all(each[-1] < each[0] for each in found)
    assert (tmp_path / "log_output" / "worker_7.log").exists()


def test_eight_pytests_with_a_rank_table(bash, tmp_path):
    """Source 003: `init` stands under `__main__`, which pytest does not run, and still eight ranks train together."""
    make_data.write_cifar10(tmp_path / "cifar", samples=128)
    for name in ("run.sh", "rank_table.json"):
        shutil.copy(LISTINGS / name, tmp_path)
    text = text_of("resnet50_auto_parallel.txt")
    assert 'if __name__ == "__main__":' in text
    (tmp_path / "resnet50_distributed_training.py").write_text(AROUND_AUTO_PARALLEL + text)
    bash(MINDSPORE, "(source ./run.sh; wait)", DATA_PATH=tmp_path / "cifar")
    logs = [tmp_path / f"device{device}" / f"train.log{device}" for device in range(8)]
    assert all("1 passed" in log.read_text() for log in logs), logs[0].read_text()
    found = [losses(log) for log in logs]
    assert len(found[0]) == 10
    assert found == [found[0]] * 8
    # Both splits have 256 images together, one step of 8 x 32. A rank that trains alone makes eight.
    assert "epoch: 10 step: 1, loss is" in logs[0].read_text()
    assert "trains alone" not in "".join(log.read_text() for log in logs)


def test_torch_distributed_launch(bash, tmp_path):
    """Source 001: the commands of both nodes, and the second one's slip; the tree has the command of a single node."""
    (tmp_path / "train.py").write_text(
        torch_names() + text_of("torch_distributed.txt") + "\nprint('steps', len(dataloader))\n"
    )
    launch = "python -m torch.distributed.launch --nproc_per_node=4"
    first = f'{launch} --nnodes=1 --node_rank=0 --master_addr="192.168.1.1" --master_port=1234 train.py'
    assert bash(TORCH, first).count("steps 16") == 4
    slip = bash(TORCH, f"! {first.replace('node_rank=0', 'node_rank=1')}")
    assert "--nnodes 2" in slip
    node = f'{launch} --nnodes=2 --node_rank={{}} --master_addr="127.0.0.1" --master_port=1234 train.py'
    both = bash(TORCH, f"({node.format(0)} & {node.format(1)}; wait)")
    assert both.count("steps 8") == 8


def test_torch_data_parallel(bash, tmp_path):
    """Source 001: DataParallel on as many devices as the command gives the process."""
    wrap = text_of("torch_data_parallel.txt").replace("loss = ...", "loss = loss_fn(model(batch), labels)")
    batch = "batch, labels = map(torch.as_tensor, dataset[:])\n"
    told = "print('loss', loss.item(), 'on', len(model.device_ids))\n"
    (tmp_path / "dp.py").write_text(torch_names() + batch + wrap + told)
    one, two = (bash(TORCH, f"torchrun {flags} dp.py") for flags in ("", "--devices-per-rank 2"))
    assert "one replica" in one
    assert "one replica" not in two
    (one, count), (two, counts) = (re.search(r"loss ([\d.]+) on (\d)", text).groups() for text in (one, two))
    assert (count, counts) == ("1", "2")
    assert float(one) == pytest.approx(float(two), rel=1e-6)
