"""The article's PyTorch listings run twice: under the front here, and under PyTorch itself with gloo."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from run_listing import launch, text_of

pytest.importorskip("torch")
from oracles_listings import difference

pytestmark = [pytest.mark.documents, pytest.mark.process]

# Lines for the framework and its front alike: data, weights drawn by NumPy, and a list of losses.
START = """
import numpy as np
import torch
from torch import nn
rng = np.random.default_rng(3)
def drawn(module):
    values = {name: rng.uniform(-0.5, 0.5, tuple(p.shape)).astype("f4") for name, p in module.named_parameters()}
    module.load_state_dict({name: torch.tensor(array) for name, array in values.items()}, strict=False)
    return module
samples, labels = rng.standard_normal((256, 8)).astype("f4"), rng.integers(0, 4, 256)
dataset = torch.utils.data.TensorDataset(torch.tensor(samples), torch.tensor(labels))
dataloader = torch.utils.data.DataLoader(dataset, batch_size=32)
entropy, losses = nn.CrossEntropyLoss(), []
def loss_fn(preds, labels):
    loss = entropy(preds, labels)
    losses.append(loss.item())
    return loss
"""
NETWORK = """
model = drawn({})
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
network, loss_function, optim = model, loss_fn, optimizer
"""
DENSE = START + NETWORK.format("nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))")
EPOCHS = """
for epoch in range(2):
    for inputs, labels in dataloader:
        optimizer.zero_grad()
        loss = {}
        loss.backward()
        optimizer.step()
"""
# The article's functions with its arguments. Every rank has different elements; small integers, so sums are exact.
COLLECTIVES = """
import math
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank, values = dist.get_rank(), []
for dtype in (torch.float32, torch.float64, torch.int64):
    for shape in ((1,), (5,), (2, 3), (0, 2)):
        x = (torch.arange(math.prod(shape)) + rank - 1).reshape(shape).to(dtype)
        found = [torch.zeros(shape, dtype=dtype) for _ in range(dist.get_world_size())]
        dist.gather(x, found if rank == 1 else None, dst=1)
        values.append([y.tolist() for y in found])
        dist.all_gather(found, x)
        values.append([y.tolist() for y in found])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            y = x.clone()
            dist.reduce(y, 1, op)
            values += [y.tolist()] if rank == 1 else []
            y = x.clone()
            dist.all_reduce(y, op)
            values.append(y.tolist())
"""


class Program(NamedTuple):
    """A text, the numbers of ranks here and under PyTorch, and the devices of each rank here."""

    text: str
    ranks: int = 1
    theirs: int = 1
    devices: int | None = None


def distributed() -> Program:
    """Return the listing and its continuation: the last losses on all ranks, with the missing parenthesis added."""
    reduced = text_of("torch_reduced_loss.txt").rstrip().replace("if args.local_rank==0:", "if True:") + ")\n"
    total = "losses += [loss_tensor.item()] if args.local_rank == 0 else []\n"
    return Program(DENSE + text_of("torch_distributed.txt") + reduced + total, 4, 4)


def data_parallel() -> Program:
    wrapped = text_of("torch_data_parallel.txt").replace("loss = ...", "loss = loss_fn(model(*samples), labels)")
    samples = "*samples, labels = dataset[:]\n"
    return Program(DENSE + samples + wrapped + EPOCHS.format("loss_fn(model(inputs), labels)"), devices=2)


def split() -> Program:
    text = text_of("torch_split.txt").replace("self.module1 = ...", "self.module1 = nn.Linear(8, 16)")
    text = text.replace("self.module2 = ...", "self.module2 = nn.Linear(16, 4)")
    text = START + text + NETWORK.format("Network(split_gpus=True)")
    return Program(text + EPOCHS.format("loss_fn(model(inputs), labels.cuda(1))"), devices=2)


def sync_batch_norm() -> Program:
    """Two ranks with half of each batch here; one with all under PyTorch, whose SyncBatchNorm needs GPUs."""
    network = "drawn(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))"
    part = "dist.get_rank()::dist.get_world_size()"
    return Program(
        "import argparse\nimport torch.distributed as dist\n"
        + START
        + "dist.init_process_group('nccl')\nargs = argparse.Namespace(local_rank=dist.get_rank())\n"
        + text_of("torch_sync_batch_norm.txt").replace("network = ....", f"network = {network}")
        + "optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)\n"
        + EPOCHS.format(f"loss_fn(ddp_network(inputs[{part}]), labels[{part}])")
        + "total = torch.tensor(losses)\ndist.all_reduce(total)\n"
        + "losses = (total / dist.get_world_size()).tolist()\n",
        ranks=2,
    )


PIPELINES = """
import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, ScheduleZBVZeroBubble, SplitPoint, pipeline
)
dist.init_process_group('nccl')
rank, device, losses, network = dist.get_rank(), torch.device('cpu'), [], nn.ModuleList()
inputs, targets = torch.tensor(samples), torch.tensor(labels)

def train(schedule, stages):
    trained = [p for stage in stages for p in stage.submod.parameters()]
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    args = [inputs] if any(stage.is_first for stage in stages) else []
    last = any(stage.is_last for stage in stages)
    for _ in range(3):
        optimizer.zero_grad()
        found = []
        y = schedule.step(*args, **({"target": targets, "losses": found} if last else {}))
        losses.append(sum(loss.item() for loss in found) + (y.sum().item() if last else 0.0))
        optimizer.step()
    network.extend([stage.submod for stage in stages])

whole = drawn(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)))
pipe = pipeline(whole, mb_args=(inputs[:64],), split_spec={"2": SplitPoint.BEGINNING})
for scale_grads in (True, False):
    stage = pipe.build_stage(rank, device)
    train(Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.CrossEntropyLoss(), scale_grads=scale_grads), [stage])
for schedule, other in ((ScheduleInterleaved1F1B, rank + 2), (ScheduleZBVZeroBubble, 3 - rank)):
    own = tuple(drawn(nn.Linear(8 if i == 0 else 16, 4 if i == 3 else 16)) for i in range(4))
    stages = tuple(PipelineStage(own[i], i, 4, device) for i in (rank, other))
    train(schedule(list(stages), n_microbatches=4, loss_fn=nn.CrossEntropyLoss()), stages)
"""

PROGRAMS = {
    "accumulation": Program(DENSE + text_of("torch_accumulate.txt")),
    "collectives": Program(COLLECTIVES, 3, 3),
    "data parallel": data_parallel(),
    "distributed": distributed(),
    "pipelines": Program(START + PIPELINES, ranks=2, theirs=2),
    "split": split(),
    "sync batch norm": sync_batch_norm(),
}


@pytest.fixture(scope="module")
def under_torch(tmp_path_factory):
    """Return the results of every rank of each program under PyTorch."""
    folder = tmp_path_factory.mktemp("torch")
    texts = {name: (program.text, program.theirs) for name, program in PROGRAMS.items()}
    (folder / "programs").write_bytes(pickle.dumps(texts))
    runner = Path(__file__).parents[1] / "torch_ranks.py"
    ended = subprocess.run(
        [sys.executable, runner, folder / "programs", folder / "left"], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    return pickle.loads((folder / "left").read_bytes())


@pytest.mark.parametrize("name", PROGRAMS)
def test_listings_agree_with_torch(under_torch, name):
    """Losses, weights and results of collectives are PyTorch's, on every rank."""
    program = PROGRAMS[name]
    ours = launch("torch", program.text, program.ranks, devices_per_rank=program.devices)
    theirs = under_torch[name] * (program.ranks // program.theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.get("values") == other.get("values")
        if name != "collectives":
            assert difference([one["losses"]], [other["losses"]]) < 1e-5
            assert one["state"].keys() == other["state"].keys()
            assert difference(one["state"].values(), other["state"].values()) < 1e-5
