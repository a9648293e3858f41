"""Train a classifier on two processes that the script spawns: `python -m simparallel.compat torch spawn.py`."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Waves(Dataset):
    """Points on sine waves; the label is the number of the wave."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        at = torch.arange(8, dtype=torch.float32)
        return torch.sin(at * (i % 3 + 1) + i).contiguous(), i % 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
        for k, p in enumerate(self.parameters()):
            with torch.no_grad():
                p.copy_(torch.sin(torch.arange(p.numel(), dtype=torch.float32) + k).view_as(p) / 4)

    def forward(self, x):
        return self.layers(x)


def train(rank, world_size, folder):
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29512")
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = StepLR(optimizer, 2, 0.5)
    data = Waves()
    sampler = DistributedSampler(data, shuffle=False)
    path = os.path.join(folder, "model.pt")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in DataLoader(data, batch_size=8, sampler=sampler):
            optimizer.zero_grad(set_to_none=True)
            scores = model(x)
            loss = F.cross_entropy(scores, y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total.add_(torch.stack([loss.detach() * len(y), scores.argmax(1).eq(y).float().sum()]))
        scheduler.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total[0].item() / len(data):.4f}, accuracy {total[1].item() / len(data):.2f}")
            torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
        dist.barrier()
    saved = torch.load(path, map_location="cpu", weights_only=True)
    again = Net()
    again.load_state_dict(saved["model"])
    assert all(a.eq(b).all() for a, b in zip(again.parameters(), model.parameters(), strict=True))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(2, folder), nprocs=2, join=True)
