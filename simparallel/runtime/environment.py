"""Environment variables that tell a process its rank, under the names that scripts read.

The names are torchrun's and MindSpore's. Nothing listens at MASTER_ADDR: ranks meet in shared memory, or over MPI.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from simparallel.errors import InputError
from simparallel.machine.ranktable import RankTable, read_rank_table
from simparallel.world.rank import CHILD_VARIABLE

MASTER_ADDR, MASTER_PORT = "127.0.0.1", 29500


def variables(
    rank: int, nodes: Sequence[Sequence[int]], device_ids: Sequence[int] = (), common: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables for `os.environ` of `rank`, called in the rank's own process.

    Args:
        rank: the rank to describe.
        nodes: the ranks of each node.
        device_ids: number of each rank's device on its node; by default its local rank.
        common: variables that are the same on every rank; they may name another MASTER_ADDR and MASTER_PORT.
    """
    node_rank, node = next((number, node) for number, node in enumerate(nodes) if rank in node)
    local_rank, world_size = list(node).index(rank), sum(map(len, nodes))
    numbers = {
        "RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": len(node),
        "GROUP_RANK": node_rank, "NODE_RANK": node_rank, "MASTER_ADDR": MASTER_ADDR, "MASTER_PORT": MASTER_PORT,
        "RANK_ID": rank, "DEVICE_ID": device_ids[rank] if device_ids else local_rank, "RANK_SIZE": world_size,
        "DEVICE_NUM": len(node), "SERVER_ID": node_rank,
    }  # fmt: skip
    # The user's variables may replace the master's address and port, but not the rank's own numbers.
    own = {name: str(number) for name, number in numbers.items()}
    masters = {name: own.pop(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    values = {**masters, **(common or {}), **own}
    return {**values, CHILD_VARIABLE: f"{os.getpid()} {mark_of(values)}"}


def mark_of(values: Mapping[str, str]) -> str:
    """Return a string that identifies the rank and the job that the variables describe."""
    return " ".join(values.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


class Places(NamedTuple):
    """The placement of a run's ranks. For `nodes` see `cluster.describe`, for the rest `variables`."""

    nodes: int | Sequence[Sequence[int]]
    device_ids: tuple[int, ...]
    environment: dict[str, str]


def places(
    world_size: int,
    nodes: int | Sequence[Sequence[int]],
    rank_table: RankTable | str | os.PathLike[str] | None,
    environment: Mapping[str, str] | None,
) -> Places:
    """Return the placement from the rank table if there is one, otherwise from the arguments.

    Raises:
        RankTableError: the table breaks a rule.
        InputError: `rank_table` is neither a table nor the path of one.
        ClusterError: the table does not have `world_size` devices, or contradicts `nodes`.
    """
    if rank_table is None:
        return Places(nodes, (), dict(environment or {}))
    if not isinstance(rank_table, (RankTable, str, os.PathLike)):
        raise InputError(f"rank_table={rank_table!r} is neither a RankTable nor the path of one.")
    table = rank_table if isinstance(rank_table, RankTable) else read_rank_table(rank_table)
    values = {"RANK_TABLE_FILE": table.path, **(environment or {})}
    return Places(table.nodes_for(world_size, nodes), table.device_ids, values)
