"""Groups of ranks by the names that MindSpore's `create_group` gives them."""

from __future__ import annotations

from typing import Any

from simparallel.comm import current
from simparallel.errors import InputError


def groups() -> dict[str, Any]:
    """Return this run's groups by their names; None stands for all ranks."""
    everyone: dict[str, Any] = dict.fromkeys(("hccl_world_group", "nccl_world_group", "mccl_world_group"))
    return current().kept.setdefault(groups, everyone)  # type: ignore[call-overload]


def group_of(name: Any) -> Any:
    """Return the group that `create_group` made under this name; a group itself, or None for all ranks, as it is.

    Raises:
        InputError: there is no such group.
    """
    if not isinstance(name, str):
        return name
    if name not in groups():
        raise InputError(f"group={name!r} was not made by create_group; there are {', '.join(groups())}.")
    return groups()[name]
