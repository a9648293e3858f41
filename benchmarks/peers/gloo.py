"""torch.distributed with gloo, its transport between CPU processes: `python gloo.py RANKS DIRECTORY`.

Rank 0 starts the others: `python gloo.py RANKS DIRECTORY RANK`.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from exchange import Call, Exchange  # type: ignore[import-not-found]
from serve import AbstractPeer, serve  # type: ignore[import-not-found]


class GlooPeer(AbstractPeer):
    def __init__(self, rank: int, ranks: int, directory: str) -> None:
        self.rank, self.ranks = rank, ranks
        self.version = f"torch {torch.__version__}"
        # One thread for each rank, as for all contenders.
        torch.set_num_threads(1)
        # The loopback interface, so that it works without any network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{directory}/rendezvous",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )

    def call(self, exchange: Exchange) -> Call:
        sent: Any = None if exchange.sent is None else torch.from_numpy(exchange.sent)
        received: Any = None if exchange.received is None else torch.from_numpy(exchange.received)
        # The names since torch 2.13; the old ones warn.
        gather_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter_one = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls = {
            "all_reduce": lambda: partial(dist.all_reduce, sent),
            "broadcast": lambda: partial(dist.broadcast, sent, 0),
            "reduce": lambda: partial(dist.reduce, sent, 0),
            "all_gather": lambda: partial(gather_one, received, sent),
            "reduce_scatter": lambda: partial(scatter_one, received, sent),
            "all_to_all": lambda: partial(dist.all_to_all_single, received, sent),
            "gather": lambda: partial(dist.gather, sent, self._parts(received), 0),
            "scatter": lambda: partial(dist.scatter, received, self._parts(sent), 0),
            "barrier": lambda: dist.barrier,
        }
        return calls[exchange.op]()

    def _parts(self, whole: torch.Tensor | None) -> list[torch.Tensor] | None:
        return None if whole is None else list(whole.chunk(self.ranks))

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value: Any) -> list[Any] | None:
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value)
        return values if self.rank == 0 else None


def main(peer: type[GlooPeer], ranks: int, directory: str, rank: int = 0) -> None:
    """Run one rank; rank 0 also starts the others with the same script, and waits for them."""
    others = []
    if rank == 0:
        # gloo has no launcher of its own; the rank is the additional argument.
        command = [sys.executable, sys.argv[0], str(ranks), directory]
        null = subprocess.DEVNULL
        others = [subprocess.Popen([*command, str(r)], stdin=null, stdout=null) for r in range(1, ranks)]
    try:
        serve(peer(rank, ranks, directory), directory)
        dist.destroy_process_group()
    finally:
        for other in others:
            try:
                other.wait(10)
            except subprocess.TimeoutExpired:
                other.kill()


if __name__ == "__main__":
    main(GlooPeer, int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:]))
