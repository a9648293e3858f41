"""`mindspore.communication`."""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import simparallel as sp
from simparallel.clock.notes import note_once
from simparallel.clock.recorder import current_recorder
from simparallel.compat.front import refuse, unused
from simparallel.compat.groups import group_of, groups
from simparallel.machine.hccl import flaw_of
from simparallel.world import rank as _world
from simparallel.world.context import get_context


def _joining(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let a function join the run that the environment describes: in MindSpore 0.2 it may be called before `init`."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _world.init_if_described()
        return function(*args, **kwargs)

    return call


get_local_rank, get_local_rank_size = _joining(_world.get_local_rank), _joining(_world.get_local_world_size)


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
    recorder = current_recorder()
    # `init` warns of flaws of the rank table.
    if recorder is not None and get_context("device_target") == "Ascend" and "RANK_TABLE_FILE" not in os.environ:
        card = recorder.cluster.device_id
        if flaw := flaw_of((number, map(card, ranks)) for number, ranks in enumerate(recorder.cluster.nodes)):
            note_once(f"init: {flaw}")


def release() -> None:
    """End communication: a no-op, because communication ends with the process."""


@_joining
def create_group(group: str, rank_ids: list[int]) -> Any:
    """Create a group of these ranks under this name, see `sp.new_group`. Collective: over all ranks."""
    groups()[group] = made = sp.new_group(rank_ids)
    return made


@_joining
def get_rank(group: Any = None) -> int:
    """Return this rank, or its position in a group."""
    return sp.get_rank(group_of(group))


@_joining
def get_group_size(group: Any = None) -> int:
    """Return the number of ranks, or of the members of a group."""
    return sp.get_group_size(group_of(group))
