"""The environment variables that tell a process which rank it is, under the names that scripts read.

torchrun's names, and MindSpore's. Nothing listens at MASTER_ADDR: ranks meet in shared memory, or over MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

MASTER_ADDR, MASTER_PORT = "127.0.0.1", 29500


def variables(
    rank: int, nodes: Sequence[Sequence[int]], device_ids: Sequence[int] = (), common: Mapping[str, str] | None = None
) -> dict[str, str]:  # fmt: skip
    """What `os.environ` gets on `rank`.

    Args:
        rank: which one.
        nodes: the ranks of each node.
        device_ids: number of each rank's device on its node; by default that of the rank on its node.
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
    own = {name: str(number) for name, number in numbers.items()}
    masters = {name: own.pop(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    return {**masters, **(common or {}), **own}
