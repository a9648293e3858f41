"""The ranks of a sharded group: those that share slices, and those that hold the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from simparallel.autograd import Tensor
from simparallel.backend import Array
from simparallel.comm import current
from simparallel.errors import InputError
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Mesh, shared_mesh
from simparallel.layout.sharding import Placement, placement
from simparallel.parallel.operator.interpreter import group_along, implicit_replication
from simparallel.parallel.operator.op_call import mode


class Axes:
    """The axes of a mesh over which a group is sharded and replicated.

    Args:
        mesh: all ranks of the run; None for one axis of all of them.
        axis: name of the axis of slices, or the pair (axis of replicas, axis of slices).
        shards: whether the last axis cuts; else it is one more axis of replicas.
        parameters: of the group; ops on those that are cut run on the ranks of their mesh.

    Attributes:
        names: of the axes along which the ranks have different parts of the batch.
        ranks: those that compute with the same part of the batch, on slices of the parameters; None for this one alone.
        size: number of slices; `rank`: the number of this rank's.
        part: which part of the batch this rank has, and how many there are.
        shard, replicas, everyone: the ranks with which this one shares slices, those with the same slice, and all of
            them; None for no others.
        has_others: other ranks have other parameters, such as stages.

    Raises:
        InputError: an axis that the mesh lacks, or a mesh of other ranks; parameters that are cut along no axis of it,
            or over different ranks.

    Collective: yes.
    """

    def __init__(self, mesh: Mesh | None, axis: Any, shards: bool, parameters: Sequence[Tensor]) -> None:
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
        self.mesh, self.names, self._axis = mesh, names, names[-1]
        computing = {p.placement.layout.mesh: p for p in parameters if p.placement is not None}
        own = [name for mesh in computing for name in self._checked(mesh, computing[mesh].name, communicator.rank)]
        self.ranks = next((mesh.ranks for mesh in computing), None)
        if len({frozenset(mesh.ranks) for mesh in computing}) > 1:
            names_text = " and ".join(p.name for p in computing.values())
            raise InputError(f"fully_shard: {names_text} are cut over different ranks; a group computes on the same.")
        cut, equal = ((names[-1],), names[:-1]) if shards else ((), names)
        self.shard, self.replicas, self.everyone = (group_along(mesh, axes) for axes in (cut, equal, names))
        of_slices, of_parts = mesh.group(cut, communicator.rank), mesh.group(names, communicator.rank)
        self.size, self.rank = len(of_slices), of_slices.index(communicator.rank)
        self.part = of_parts.index(communicator.rank), len(of_parts)
        # The ranks that have the same parameters, slices or not.
        self._holders = mesh.part([name for name in mesh.axis_names if name in {*names, *own}], communicator.rank)
        self.has_others = self._holders.size < mesh.size

    def _checked(self, computing: Mesh, name: str, rank: int) -> list[str]:
        """Return the axes of the mesh of a cut parameter; they are axes of the mesh of the group, too."""
        own, mesh = [axis for axis in computing.axis_names if computing.axis_size(axis) > 1], self.mesh
        if any(
            axis in self.names or axis not in mesh.axis_names or computing.group(axis, rank) != mesh.group(axis, rank)
            for axis in own
        ):
            raise InputError(
                f"fully_shard: {name or 'a parameter'} is cut over {computing!r}, and the axes of the group are "
                f"{', '.join(map(repr, self.names))} of {mesh!r}. Cut it along the others, over the ranks of this one: "
                "mesh.part(axes, rank)."
            )
        return own

    def running(self) -> AbstractContextManager[None]:
        """Run ops on the ranks that compute with the same part of the batch, inside the block."""
        return nullcontext() if self.ranks is None else implicit_replication(self.ranks)

    def addend(self, gradient: Array) -> Array:
        """Return the addend of this part of the batch in a mean over all parts; weighted losses have a sum instead."""
        return gradient * self.part[1] if mode.weighted and self.part[1] > 1 else gradient

    def stored(self, p: Tensor) -> Placement | None:
        """Return the placement of a parameter of which each rank has its chunk of rows of what it computes with."""
        if self.shard is None and p.placement is None:
            return None
        layout = self._layout(p.placement, p.ndim)
        return placement(layout.cut_slices(self._axis) if self.shard else layout, p.shape)

    def partial(self, computed: Placement | None, shape: tuple[int, ...]) -> Placement:
        """Return the placement of what a rank computes with, if each has an addend of it."""
        return placement(self._layout(computed, len(shape)).with_partial(self.names), shape)

    def _layout(self, computed: Placement | None, ndim: int) -> Layout:
        dims = [()] * ndim if computed is None else computed.layout.axes_by_dim
        return Layout.of_mesh(self._holders)(*(axes or "None" for axes in dims))
