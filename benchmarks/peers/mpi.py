"""An MPI library through mpi4py: `mpiexec -n RANKS python mpi.py DIRECTORY`.

Buffers are allocated before the clock starts, and reductions are in place where MPI supports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from exchange import Call, Exchange  # type: ignore[import-not-found]
from mpi4py import MPI
from serve import AbstractPeer, serve  # type: ignore[import-not-found]
from vhdd import Vhdd  # type: ignore[import-not-found]


class MpiPeer(AbstractPeer):
    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.rank, self.ranks = self.world.rank, self.world.size
        self.version = _version()

    def call(self, exchange: Exchange) -> Call:
        world, sent, received = self.world, exchange.sent, exchange.received
        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            # Each entry makes its call once: no argument is built while the clock runs.
            "all_reduce": lambda: partial(world.Allreduce, MPI.IN_PLACE, sent),
            "broadcast": lambda: partial(world.Bcast, sent),
            "reduce": lambda: (
                partial(world.Reduce, sent, None) if self.rank else partial(world.Reduce, MPI.IN_PLACE, sent)
            ),
            "all_gather": lambda: partial(world.Allgather, sent, received),
            "reduce_scatter": lambda: partial(world.Reduce_scatter_block, sent, received),
            "all_to_all": lambda: partial(world.Alltoall, sent, received),
            "gather": lambda: partial(world.Gather, sent, received),
            "scatter": lambda: partial(world.Scatter, sent, received),
            "barrier": lambda: world.Barrier,
            "adasum": lambda: partial(Vhdd(world, MPI.SUM), sent),
        }
        return calls[exchange.op]()

    def barrier(self) -> None:
        self.world.Barrier()

    def gather(self, value: Any) -> list[Any] | None:
        return self.world.gather(value)


def _version() -> str:
    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}"


if __name__ == "__main__":
    serve(MpiPeer(), sys.argv[1])
