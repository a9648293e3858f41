"""Run programs for CUDA and NCCL under PyTorch itself, each rank a process on CPUs: python torch_ranks.py IN OUT.

IN is a pickled dict of (text, number of ranks) by name; OUT becomes a dict of each rank's results, see `execute`.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # optimizers import it; imported here once for all processes
import torch.distributed  # not an attribute of torch before its import
from run_listing import execute

from simparallel.backend import random_permutation


def staying(to: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `to` of tensors and modules: they stay on the CPU instead of moving to a GPU."""

    def here(self: Any, place: Any, *more: Any, **settings: Any) -> Any:
        to_gpu = isinstance(place, torch.device) and place.type == "cuda"
        return self if to_gpu else to(self, place, *more, **settings)

    return here


class Replicated(torch.nn.parallel.DistributedDataParallel):
    """Takes and ignores the numbers of GPUs."""

    def __init__(self, module: torch.nn.Module, device_ids: Any, output_device: Any) -> None:
        super().__init__(module)


def permutation(size: int, *, generator: torch.Generator) -> torch.Tensor:
    """Return simparallel's shuffle order for this seed, which differs from PyTorch's."""
    return torch.from_numpy(random_permutation(generator.initial_seed(), "sampler", size))


def put_on_cpu(rank: int, ranks: int, directory: str) -> None:
    """Redirect CUDA to the CPU and NCCL to gloo."""
    for owner in (torch.Tensor, torch.nn.Module):
        owner.cuda = lambda self, device=None: self
        owner.to = staying(owner.to)
    init = torch.distributed.init_process_group
    meeting = {"init_method": f"file://{directory}/rendezvous", "rank": rank, "world_size": ranks}
    torch.distributed.init_process_group = lambda backend: init("gloo", **meeting)
    torch.nn.parallel.DistributedDataParallel = Replicated
    torch.randperm = permutation
    # PyTorch has it for GPUs only. In one process with the whole batch, the statistics equal a batch norm's.
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = lambda module: module


def run(text: str, ranks: int, directory: str, rank: int) -> dict:
    torch.set_num_threads(1)
    put_on_cpu(rank, ranks, directory)
    return execute(text, rank)


def run_all(text: str, ranks: int) -> list[dict]:
    """Run all ranks: each waits in `init_process_group` for the others, so no process of the pool plays two."""
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(ranks, get_context("fork")) as pool:
        return list(pool.map(partial(run, text, ranks, directory), range(ranks)))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # works without any network
    programs = pickle.loads(Path(sys.argv[1]).read_bytes())
    left = {name: run_all(text, ranks) for name, (text, ranks) in programs.items()}
    Path(sys.argv[2]).write_bytes(pickle.dumps(left))
