"""States in slices in PyTorch's names: runs under PyTorch over gloo, and under its front; prints the losses.

Arguments: a file for the ranks to meet in, and strategies of FullyShardedDataParallel, which PyTorch has on GPUs alone.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel as FSDP,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width + 1), nn.Linear(2 * width + 1, width)

    def forward(self, x):
        return x + self.down(F.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(7), Block(7))
        self.head = nn.Linear(7, 3)
        for k, p in enumerate(self.parameters()):
            with torch.no_grad():
                p.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float32) + k).view_as(p) / 4)

    def forward(self, x):
        return self.head(self.blocks(x))


def batch(rank, number):
    at = torch.arange(28, dtype=torch.float32).view(4, 7)
    return torch.sin(at + 5 * rank + number), torch.arange(4) % 3


def train(model, make_optimizer, rank, steps=3):
    """Return the losses of steps of two micro-batches, of which the first one is not synchronized."""
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(steps):
        total = 0.0
        for micro in range(2):
            x, y = batch(rank, step + micro)
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
            elif micro == 0:
                with model.no_sync():
                    loss = F.cross_entropy(model(x), y) / 2
                    loss.backward()
            else:
                loss = F.cross_entropy(model(x), y) / 2
                loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def divided(parameters):
    return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=0.05)


def fsdp2(rank, mesh=None, **settings):
    model = Net()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **settings)
    return train(fully_shard(model, mesh=mesh), adam, rank)


def fsdp1(rank, strategy):
    policy = ModuleWrapPolicy({Block})
    return train(FSDP(Net(), sharding_strategy=strategy, auto_wrap_policy=policy), adam, rank)


def run(rank, world_size, meeting, strategies):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = {
        "ddp": train(DDP(Net()), adam, rank),
        "zero": train(DDP(Net()), divided, rank),
        "fsdp2": fsdp2(rank),
        "kept": fsdp2(rank, reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(torch.float32)),
        "hsdp": fsdp2(rank, mesh),
    }
    for strategy in strategies:
        found[strategy] = fsdp1(rank, ShardingStrategy[strategy])
    if rank == 1:
        for name, losses in found.items():
            print("losses", name, *losses, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.spawn(run, args=(4, sys.argv[1], sys.argv[2:]), nprocs=4, join=True)
