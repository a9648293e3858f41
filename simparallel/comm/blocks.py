"""Collectives of bytes that carry objects; each rank has its own number of bytes.

The number is in the rank's note. The bytes are exposed block by block, so large objects take no more shared memory
than small ones: peers may still read the previous block in one of two places while the next is written to the other.
A receiving rank allocates the bytes of each other rank and nothing more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

import simparallel.comm.call_header as h
from simparallel.comm.call import Settings
from simparallel.comm.collective import Collective
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.transport import order
from simparallel.comm.uneven import Uneven
from simparallel.comm.validate import position_of
from simparallel.comm.work import Steps

if TYPE_CHECKING:
    from simparallel.comm.call import Call
    from simparallel.comm.group import Algorithm

BLOCK_BYTES = 1 << 20
_BYTE = np.dtype(np.uint8)


class Blocks(Uneven):
    """all_gather, gather or broadcast of bytes; x are this rank's bytes, uint8 (n,), n may be 0.

    Result: the bytes that this rank receives, by position in the group; its own bytes are not copied.
    """

    def takes(self, op: str, position: int, giver: int) -> bool:
        """Return whether the member at `position` receives the bytes of `giver`."""
        return op == "all_gather" or self.settings.root == (position if op == "gather" else giver)

    def expose(self, call: Call) -> tuple[int, int]:
        return self.show_block(call, 0), call.x.size

    def show_block(self, call: Call, start: int) -> int:
        """Expose the block that begins at this byte; return its offset."""
        views, data = self.group.views, call.x[start : start + BLOCK_BYTES]
        if not data.size or views.size == 1:
            return 0
        if call.x.size <= SLOT_BYTES:
            at = views.staging.slots[call.seq & 1]
        else:  # a place that no peer still reads, neither for the previous block nor for the last call
            at, call.other_offset = views.staging.next_piece(BLOCK_BYTES)
        views.arenas(_BYTE).one(self.position, at, data.size)[...] = data
        return at

    def fetch(self, call: Call, start: int, parts: Mapping[int, np.ndarray]) -> None:
        """Fill `parts`, by position, with these members' blocks that begin at this byte."""
        # Blocks alternate between the two places of the note. All notes are read at once, not member by member:
        # a dry run has thousands of them.
        offsets = call.notes((h.OFFSET, h.OTHER_OFFSET)[start // BLOCK_BYTES & 1])
        arenas = self.group.views.arenas(_BYTE)
        for position, part in parts.items():
            part[...] = arenas.one(position, offsets[position], part.size)

    def run(self, call: Call) -> Steps:
        me, sizes = self.position, call.notes(h.NBYTES)
        found = {
            giver: call.x if giver == me else np.empty(size, _BYTE)
            for giver, size in enumerate(sizes)
            if self.takes(call.plan.op, me, giver)
        }
        # All members take the steps of the longest one, because the end of a phase waits for all of them.
        for start in range(0, max(sizes), BLOCK_BYTES):
            if start:
                # The block before the last one was in this place; since then every rank has ended a phase, so all have
                # read it.
                self.show_block(call, start)
                yield self.group.views.end_phase()
                order()
            # The peers' pages are read here; a rank already has its own bytes.
            theirs = {giver: data[start : start + BLOCK_BYTES] for giver, data in found.items() if giver != me}
            self.fetch(call, start, {giver: part for giver, part in theirs.items() if part.size})
        return found


def run_blocks(
    what: Collective, direct: Algorithm, data: np.ndarray, root: int | None, asker: str
) -> dict[int, np.ndarray]:
    """Run a collective of bytes: plan it, or find the plan of earlier calls. `root`: rank of the root."""
    name = f"{what.name}_object"
    position = position_of(name, direct.group, root) if what.root else 0
    key = what.name, name, position, asker
    if (plan := direct.plans.get(key)) is None:
        header = h.encode(name, root=root or 0)
        plan = direct.add_plan(key, header, Settings(root=position), asker=asker, body="objects")
    found: dict[int, np.ndarray] = direct.group.run(plan, data)
    return found
