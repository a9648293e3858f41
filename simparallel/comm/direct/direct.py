"""The collectives on shared memory: the algorithm called `direct`.

Each body computes this rank's result straight from the payloads of all members.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.algorithms.reduction import identity, reduce_arrays, reduce_into
from simparallel.comm.blocks import Blocks
from simparallel.comm.call import Body, Nothing, into
from simparallel.comm.call_group import CallGroup
from simparallel.comm.direct.direct_adasum import LargeAdasum, SmallAdasum
from simparallel.comm.direct.direct_large import LargeAllReduce
from simparallel.comm.group import Factory, Group
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.memory.staging import Payloads, reduce_stack
from simparallel.comm.plan import Settings
from simparallel.comm.uneven import ANY, PartSpec, Uneven, read_table
from simparallel.comm.validate import native, own_piece, rows_of
from simparallel.comm.views import Place

# Up to PAIR_BYTES on two ranks, SMALL_BYTES on more, each rank reduces the whole array. Measured on two cores; with
# more ranks than cores pieces do not pay, because each wait costs a switch between ranks.
PAIR_BYTES, SMALL_BYTES = 1 << 20, 256 << 10
# Two ranks expose larger arrays in pieces. On two cores that share a cache, that took 0.7 of the time of exposing the
# whole at once for 8 MB, and 0.4 for 16 to 64 MB.
PIECE_BYTES = 2 << 20


class SmallAllReduce(Body):
    """all_reduce where every rank reduces the whole array: one wait less than sharing the work."""

    copied = True

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        target = x if out is None else out
        reduce_stack(self.rule, peers, target)
        return target


class PairAllReduce(SmallAllReduce):
    """all_reduce of larger arrays on two ranks: it reads this rank's own array instead of its staging copy."""

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        target = x if out is None else out
        # A copy if the target is not contiguous.
        flat = target.reshape(-1)
        sources = list(peers.flat)
        if out is None:
            # The target itself is the source: less memory traffic than reading the staging copy.
            sources[self.position] = flat
        reduce_into(self.rule, sources, flat)
        if not target.flags.c_contiguous:
            target[...] = flat.reshape(target.shape)
        return target


def all_reduce(group: Group, x: np.ndarray, settings: Settings) -> Body:
    if x.nbytes <= (SLOT_BYTES if group.size == 2 else SMALL_BYTES):
        # Larger than a slot: two ranks save memory traffic by reducing in blocks; more ranks read the staging copies.
        return SmallAllReduce(group, x, settings)
    if group.size == 2 and x.nbytes <= PAIR_BYTES:
        return PairAllReduce(group, x, settings)
    return LargeAllReduce(group, x, settings, PIECE_BYTES if group.size == 2 else None)


class AbstractToRoot(Body):
    """A collective whose root reads the payloads of all ranks."""

    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        # The root reads its own array, unless all payloads are rows of the slots, which one call reduces.
        self.others = [] if self.is_root and x.nbytes > SLOT_BYTES else None


class Reduce(AbstractToRoot):
    """reduce: the root reduces; it exposes its own payload only if one ufunc call reduces all slots."""

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        target = x if out is None else out
        if not self.is_root:
            return target
        if x.nbytes <= SLOT_BYTES:
            reduce_stack(self.rule, peers, target)
        # Flat and blockwise if the target is contiguous; else over the whole array with its strides.
        elif target.flags.c_contiguous:
            arrays = peers.with_own(self.position, x)
            reduce_into(self.rule, [array.reshape(-1) for array in arrays], target.reshape(-1))
        else:
            reduce_arrays(self.rule, peers.with_own(self.position, x), x.dtype, target)
        return target


class Broadcast(Body):
    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.others = None if self.is_root else []

    def result(self, peers: Payloads, x: np.ndarray, out: None) -> np.ndarray:
        if not self.is_root:
            # Every rank reads the root's pages itself, all at once: there is no chain and no second wait.
            x[...] = peers.one(self.settings.root)
        return x


class AllGather(Body):
    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return np.concatenate(peers.arrays, self.settings.dims[0], out)


class AbstractCut(Body):
    """A collective that gives each rank one part of every member's x; peers read all parts but the rank's own."""

    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.piece = own_piece(x, settings.dims[0], group, settings.sizes)
        # Peers need every part but this rank's own. A payload in a slot is copied whole.
        if x.nbytes > SLOT_BYTES:
            *before, own = self.piece
            others = [(*before, slice(0, own.start)), (*before, slice(own.stop, None))]
            # The first and the last rank have nothing before or after their own part.
            self.others = [part for part in others if x[part].size]


class ReduceScatter(AbstractCut):
    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.dtype = native(x.dtype)

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        parts = peers.pieces(self.piece, self.position, x)
        # A part along dim 0 is contiguous, so it can be reduced as a flat vector, block by block.
        if self.settings.dims[0] == 0 and (out is None or out.flags.c_contiguous):
            target = np.empty(parts[0].shape, self.dtype) if out is None else out
            reduce_into(self.rule, [part.reshape(-1) for part in parts], target.reshape(-1))
            return target
        return reduce_arrays(self.rule, parts, self.dtype, out)


class AllToAll(AbstractCut):
    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        return np.concatenate(peers.pieces(self.piece, self.position, x), self.settings.dims[1], out)


class Scan(Body):
    """scan, and exscan, which leaves this rank's own x out."""

    # x receives the result while peers still read: they read a copy.
    copied = True
    is_exclusive = False

    def __init__(self, group: Group, x: np.ndarray, settings: Settings) -> None:
        super().__init__(group, x, settings)
        # In the order of the group, like every reduction: the ranks up to this one, or before it.
        self.count = self.position + (not self.is_exclusive)
        self.first = identity(self.rule) if self.is_exclusive else None

    def result(self, peers: Payloads, x: np.ndarray, out: np.ndarray | None) -> np.ndarray:
        target = x if out is None else out
        if self.count:
            # Each rank reduces all payloads before its own by itself: more arithmetic than a chain, but no further
            # wait.
            reduce_arrays(self.rule, peers.with_own(self.position, x)[: self.count], x.dtype, target)
        else:
            target[...] = self.first
        return target


class Exscan(Scan):
    is_exclusive = True


class Gather(AbstractToRoot):
    def result(self, peers: Payloads, x: np.ndarray, out: Any) -> Any:
        if self.is_root:
            return copies(peers.with_own(self.position, x), out, is_native=x.dtype.isnative)
        return None


class DirectScatter(Body):
    """scatter: only the root knows the arrays; the other ranks read their description in its note."""

    copied = has_note = True

    def __init__(self, group: Group, x: np.ndarray | None, settings: Settings) -> None:
        super().__init__(group, x, settings)
        self.others = [position for position in range(group.size) if position != settings.root]

    def result(self, peers: Payloads, x: list[np.ndarray] | None, out: np.ndarray | None) -> np.ndarray:
        if x is not None:
            return into(out, x[self.settings.root])
        place = self.group.views.place_of(self.settings.root, self.group.seq & 1)
        shape, dtype, start = given(self.group, self.settings.root, out, place)
        return into(out, place(dtype, start, math.prod(shape)).reshape(shape))


def given(group: CallGroup, root: int, out: np.ndarray | None, place: Place) -> tuple[tuple[int, ...], np.dtype, int]:
    """Read the root's description of the running scatter.

    Args:
        group: the group.
        root: position of the root.
        out: this rank's array for the result.
        place: access to the root's payload for this rank.

    Returns:
        Shape, dtype and offset of this rank's part.

    Raises:
        CollectiveMismatchError: this rank's `out` has another shape or dtype.
    """
    note = group.views.note_of(root, group.seq & 1)
    shape, dtype = h.decode_given(*note[h.GIVEN_DTYPE - h.COMPARED :])
    if shape and shape[0] == ANY:
        shape, start = read_table(place).find(group.position, PartSpec(shape, dtype, 0), group.views)
    else:
        # Equal parts follow one another; on other transports the root sends this rank's part alone.
        start = group.position * math.prod(shape) * dtype.itemsize if group.views.is_shared else 0
    if out is not None and (out.shape, out.dtype) != (shape, dtype):
        site = group.transport.site_text(group.ranks[root], note[h.SITE - h.COMPARED])
        raise group.mismatch(
            f": out of rank {group.transport.rank} is {out.dtype} {out.shape}, but rank {group.ranks[root]} gives "
            f"{dtype} {shape} to each at {site}."
        )
    return shape, dtype, start


def adasum(group: Group, x: np.ndarray, settings: Settings) -> Body:
    return (SmallAdasum if x.nbytes <= SLOT_BYTES else LargeAdasum)(group, x, settings)


BODIES: Mapping[str, Factory] = {
    # A body may be a class or a function that chooses one by size.
    "all_reduce": all_reduce, "adasum": adasum, "reduce": Reduce, "broadcast": Broadcast, "all_gather": AllGather,
    "reduce_scatter": ReduceScatter, "all_to_all": AllToAll, "scan": Scan, "exscan": Exscan, "gather": Gather,
    "scatter": DirectScatter, "barrier": Nothing, "new_group": Nothing, "uneven": Uneven, "objects": Blocks,
}  # fmt: skip


def copies(arrays: Sequence[np.ndarray], out: Any, *, is_native: bool) -> Any:
    """Build the result of a gather: a list of new arrays, or `out` filled with them."""
    if out is None:
        # A gathered array in the other byte order is converted: new arrays are in this machine's order.
        return [array.copy() if is_native else array.astype(native(array.dtype), "C") for array in arrays]
    for row, array in zip(rows_of(out), arrays, strict=True):
        row[...] = array
    return out
