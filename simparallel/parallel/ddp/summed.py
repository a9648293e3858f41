"""Who sums the gradient of a parameter over the parts of the batch.

Ops on slices sum along the axes that cut them, by their rules, so afterwards the ranks of a stage have gradients of
their part of the batch. These are summed along the axes of data parallelism, and among the stages that use the
parameter: by the group of `fully_shard` that has it along the axes of that group, by a `Pipeline` along all others, by
`DistributedDataParallel` over the ranks of its group.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import NamedTuple

from simparallel.autograd import Tensor
from simparallel.comm import current
from simparallel.layout.mesh import Mesh


class Along(NamedTuple):
    """Axes of a mesh along which a group sums gradients."""

    mesh: Mesh
    axes: tuple[str, ...]


class Summed:
    """The parameters of this rank that groups have."""

    def __init__(self) -> None:
        # id of a parameter -> the parameter, and where its group sums.
        self._along: dict[int, tuple[weakref.ref[Tensor], Along]] = {}

    def add(self, parameters: Iterable[Tensor], along: Along) -> None:
        """Note where a group sums the gradients of these parameters."""
        self._along |= {id(p): (weakref.ref(p), along) for p in parameters}

    def along(self, parameter: Tensor) -> Along | None:
        """Return the axes along which a group sums the gradient of a parameter; None if no group has it."""
        found = self._along.get(id(parameter))
        return None if found is None or found[0]() is not parameter else found[1]


def summed() -> Summed:
    """Return the parameters of this rank that groups have."""
    found: Summed = current().kept.setdefault(Summed, Summed())
    return found
