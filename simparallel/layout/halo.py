"""Halos: overlapping boxes that ranks read beyond their slices, and the return of their gradients.

An op with sliding windows, cut along a dim that the windows slide over, needs some rows of its neighbours: the halo.
Each row comes once, from a rank that holds it. In backward the same boxes go back, and the owner of a row adds up
the gradients that return for it.

A rank asks the replica with its own number (see `boxes`). So the ranks form lines that exchange only within
themselves, each with the whole tensor, and the gradients that return within one line make one whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from simparallel.layout.boxes import Box, Moves
from simparallel.layout.layout import Layout
from simparallel.layout.mesh import Group


class Halo:
    """The halo exchange of a tensor of global `shape` in `layout`: each rank gets every missing element once.

    Attributes:
        needs: for each rank the box that it reads; boxes may overlap, and may leave out parts of slices.
        moves: the transfers of forward, own parts included.
    """

    def __init__(self, layout: Layout, needs: Mapping[int, Box], shape: tuple[int, ...]) -> None:
        self.layout, self.needs, self.shape = layout, needs, shape
        self.moves = Moves(layout, needs, shape)

    @property
    def groups(self) -> tuple[Group, ...]:
        """Groups of ranks that exchange elements, directly or through others; () if no rank does."""
        return self.moves.groups

    def received_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes that each rank receives in forward, in the order of the mesh."""
        return tuple(self.moves.received[rank] * itemsize for rank in self.layout.mesh.ranks)

    def returned_bytes(self, itemsize: int) -> tuple[int, ...]:
        """Return the bytes that each rank receives in backward: as many as it sent in forward."""
        return tuple(self.moves.given[rank] * itemsize for rank in self.layout.mesh.ranks)
