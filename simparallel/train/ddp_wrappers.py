"""The wrappers of a network: the ranks that train it together, and the model inside."""

from __future__ import annotations

import warnings
from typing import Any

from simparallel import collectives
from simparallel.comm import Group
from simparallel.errors import InputError
from simparallel.nn import Module
from simparallel.parallel import DataParallel, DistributedDataParallel
from simparallel.world.rank import get_rank, get_world_size


def wrappers(network: Any) -> list[DistributedDataParallel]:
    """Return the wrappers in a network, or the network itself, that reduce gradients during backward."""
    if not isinstance(network, Module):
        return []
    return [module for module in network.modules() if isinstance(module, DistributedDataParallel)]


def group_of(network: Module) -> Group | None:
    """Return the ranks that train the network together; None for all.

    Raises:
        InputError: different ranks train parts of it.
    """
    groups = [wrapper.process_group for wrapper in wrappers(network)]
    if len({None if group is None else group.ranks for group in groups}) > 1:
        text = ", ".join("all" if group is None else str(list(group.ranks)) for group in groups)
        raise InputError(
            f"Model: parts of the network are trained by different ranks: {text}. There must be one loss and one end "
            "of the training for all: give the wrappers in it one process_group, or write the loop yourself."
        )
    return groups[0] if groups else None


def saving_group(network: Module, group: Group | None) -> Group | None:
    """Return the ranks that save the network together: `group`, or None for all if any tensor is sharded."""
    # Slices of a sharded tensor may be on all ranks, beyond the process group.
    is_cut = any(not x._is_whole for x in (*network.parameters(), *network.buffers()))
    return None if is_cut or group is None or group.size == get_world_size() else group


def of_first_rank(value: Any, group: Group | None) -> Any:
    """Broadcast the value of the group's first rank. Collective: yes."""
    return collectives.broadcast_object(value, group.ranks[0] if group else 0, group)


def warn(text: str, group: Group | None = None) -> None:
    """Warn once, on the first rank of the group."""
    if get_rank(group) == 0:
        warnings.warn(text, stacklevel=5)


def bare(value: Any) -> Any:
    """Unwrap a model, so that its names do not depend on the number of devices."""
    while isinstance(value, (DistributedDataParallel, DataParallel)):
        value = value.module
    return value


def hook_states(network: Module) -> dict[str, Any]:
    """Return name -> state of each communication hook that has a `state_dict()`."""
    states = {f"comm_hook.{i}": wrapper.comm_hook_state for i, wrapper in enumerate(wrappers(network))}
    return {name: state for name, state in states.items() if callable(getattr(state, "state_dict", None))}
