"""A program for type checkers, which `mypy` checks with the package: the types of results, and mistakes that it finds.

An ignored error that is not found is an error, too.
"""

from typing import Any, assert_type

import numpy as np

import simparallel as sp


def count(start: int, name: str = "") -> str:
    return name * start


def rank() -> int:
    return sp.get_rank()


def main(array: np.ndarray[Any, np.dtype[np.float32]], tensor: sp.Tensor, unknown: Any, cluster: sp.Cluster) -> None:
    # What a run returns.
    assert_type(sp.launch(rank, world_size=4)[0], int)
    assert_type(sp.launch(rank), sp.Results[int])
    assert_type(sp.launch(count, (1,), {"name": "x"}, 2, timeout_s=3.0, device="a100")[0], str)
    assert_type(list(cluster.run(count, 1, name="x")), list[str])
    for value in sp.launch(rank, world_size=2, nodes=[[0], [1]], devices_per_rank=2):
        assert_type(value, int)

    # What a collective returns.
    assert_type(sp.all_reduce(array), np.ndarray[Any, np.dtype[np.float32]])
    assert_type(sp.all_reduce(tensor, "mean", algorithm="ring"), sp.Tensor)
    assert_type(sp.all_reduce([tensor, tensor]), list[sp.Tensor])
    assert_type(sp.broadcast(tensor, 1), sp.Tensor)
    assert_type(sp.recv(array, 0), np.ndarray[Any, np.dtype[np.float32]])
    assert_type(sp.all_reduce(tensor, "sum", async_op=True), sp.Work)
    assert_type(sp.all_gather(tensor, uneven=True), np.ndarray)
    assert_type(sp.reduce_scatter(array, async_op=True), sp.Work)
    assert_type(sp.functions.all_reduce(tensor), sp.Tensor)
    sp.all_reduce(unknown, out=unknown).get()

    sp.launch(rank, worldsize=4)  # type: ignore[call-arg]
    sp.launch(rank, world_size="4")  # type: ignore[arg-type]
    sp.launch(rank, world_size=4, timeout=3)  # type: ignore[call-arg]
    sp.launch(rank, world_size=4, timeout_s="3")  # type: ignore[arg-type]
    sp.Cluster(4, transprot="inline")  # type: ignore[call-arg]
    cluster.run(count, 1, nme="x")  # type: ignore[call-arg]
    cluster.run(count)  # type: ignore[call-arg]
    sp.dry_run(rank, worldsize=4)  # type: ignore[call-arg]
    sp.dry_run(rank, world_size=4, node=2)  # type: ignore[call-arg]
    sp.all_reduce(tensor, opp="mean")  # type: ignore[call-overload]
    sp.all_reduce(tensor, group=3)  # type: ignore[call-overload]
    sp.broadcast(tensor, source=1)  # type: ignore[call-overload]
    sp.lanch(rank)  # type: ignore[attr-defined]
    sp.nn.Liner(1, 2)  # type: ignore[attr-defined]
    sp.optim.Adm([])  # type: ignore[attr-defined]
    sp.functions.relue(tensor)  # type: ignore[attr-defined]
    sp.parallel.DistributedDataParalel(None)  # type: ignore[attr-defined]
    tensor.backwrd()  # type: ignore[attr-defined]
