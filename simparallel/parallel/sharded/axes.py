"""The ranks of a sharded group: those that share slices, and those that hold the same ones."""

from __future__ import annotations

from typing import Any

from simparallel.comm import Group, current
from simparallel.errors import InputError
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh, shared_mesh
from simparallel.layout.sharding import Placement, placement
from simparallel.parallel.operator.interpreter import sharder


class Axes:
    """The axes of a mesh over which a group is sharded and replicated.

    Args:
        mesh: all ranks of the run; None for one axis of all of them.
        axis: name of the axis of slices, or the pair (axis of replicas, axis of slices).
        shards: whether the last axis cuts; else it is one more axis of replicas.

    Attributes:
        size: number of slices; `rank`: the number of this rank's.
        part: which part of the batch this rank has, and how many there are.
        shard, replicas, everyone: the ranks with which this one shares slices, those with the same slice, and all of
            them; None for no others.

    Raises:
        InputError: an axis that the mesh lacks, or a mesh of other ranks.

    Collective: yes.
    """

    def __init__(self, mesh: Mesh | None, axis: Any, shards: bool) -> None:
        communicator = current()
        names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, (tuple, list)) else ()
        if len(names) not in (1, 2) or not all(isinstance(name, str) for name in names):
            raise InputError(f"fully_shard: axis={axis!r} must be a name, or a pair such as ('replicate', 'shard').")
        if mesh is None and len(names) == 2:
            raise InputError(
                f"fully_shard: axis={axis!r} names two axes; give their sizes by mesh=Mesh((2, 2), {names!r})."
            )
        mesh = mesh or shared_mesh((communicator.world_size,), names)
        missing = [name for name in names if name not in mesh.axis_names]
        if missing or sorted(mesh.ranks) != list(range(communicator.world_size)):
            raise InputError(
                f"fully_shard: {mesh!r} must have the axes {', '.join(map(repr, names))}, and all "
                f"{communicator.world_size} ranks of the run."
            )
        self.mesh, self._names, self._axis = mesh, names, names[-1]
        cut, equal = ((names[-1],), names[:-1]) if shards else ((), names)
        self.shard, self.replicas, self.everyone = self._group(cut), self._group(equal), self._group(names)
        self.size = self.shard.size if self.shard else 1
        self.rank = _rank_in(self.shard)
        replicas = self.replicas.size if self.replicas else 1
        self.part = _rank_in(self.replicas) * self.size + self.rank, replicas * self.size

    def _group(self, names: tuple[str, ...]) -> Group | None:
        if not names or len(self.mesh.groups(names)[0]) == 1:
            return None
        return sharder().groups.mine(self.mesh.groups(names))

    def placement(self, shape: tuple[int, ...]) -> Placement:
        """Return the placement of a tensor of which each rank has its chunk of rows."""
        return placement(Layout.of_mesh(self.mesh)(self._axis, *["None"] * (len(shape) - 1)), shape)

    def partial(self, shape: tuple[int, ...]) -> Placement:
        """Return the placement of a tensor of which each rank has an addend."""
        return placement(Layout.of_mesh(self.mesh)(*["None"] * len(shape)).with_partial(self._names), shape)


def _rank_in(group: Group | None) -> int:
    return 0 if group is None else group.rank or 0
