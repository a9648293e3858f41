"""`mindspore.communication`."""

from typing import Any

import simparallel as sp
from simparallel.compat.front import refuse, unused
from simparallel.world.rank import get_group_size, get_local_rank, get_local_world_size, get_rank

get_local_rank_size = get_local_world_size


class GlobalComm:
    """The name of the world group, for the `group` argument of MindSpore's collectives."""

    BACKEND = "hccl"
    # None means all ranks in our collectives.
    WORLD_COMM_GROUP = None


def init(backend_name: str | None = None) -> None:
    """Join as a rank, see `sp.init`. "hccl", "nccl" and "mccl" are accepted and have no effect."""
    if backend_name not in (None, "hccl", "nccl", "mccl"):
        refuse("init", "leave it out", backend_name=backend_name)
    unused("init", backend_name=backend_name)
    sp.init()


def release() -> None:
    """End communication: a no-op, because communication ends with the process."""


def create_group(group: str, rank_ids: list[int]) -> Any:
    """Create a group of these ranks, see `sp.new_group`. Collective: over all ranks."""
    return sp.new_group(rank_ids)
