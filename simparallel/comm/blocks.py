"""Collectives of bytes that carry objects; each rank has its own number of bytes.

The number is in the rank's note. The bytes are exposed block by block, so large objects take no more shared memory
than small ones: peers may still read the previous block in one of two places while the next is written to the other.
A receiving rank allocates the bytes of each other rank and nothing more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import simparallel.comm.call_header as h
from simparallel.comm.call import Call
from simparallel.comm.collective import ALL_GATHER, BROADCAST, Collective
from simparallel.comm.group import Algorithm, Group
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.plan import Settings
from simparallel.comm.transport import order
from simparallel.comm.uneven import Uneven
from simparallel.comm.validate import position_of
from simparallel.comm.views import PHASE
from simparallel.comm.work import Steps

BLOCK_BYTES = 1 << 20
_BYTE = np.dtype(np.uint8)
_NO_TABLE = np.empty(0, np.int64)


class Blocks(Uneven):
    """all_gather, gather or broadcast of bytes; x are this rank's bytes, uint8 (n,), n may be 0.

    Result: the bytes that this rank receives, by position in the group; its own bytes are not copied.
    """

    def expose(self, call: Call) -> tuple[int, int]:
        return self.show_block(call, 0), call.x.size

    def show_block(self, call: Call, start: int) -> int:
        """Expose the block that begins at this byte; return its offset."""
        data = call.x[start : start + BLOCK_BYTES]
        if not data.size or self.group.views.size == 1:
            return 0
        # The blocks of a large object are in two places alternately; the note has both offsets.
        return self.show(call, [data], _NO_TABLE, BLOCK_BYTES if call.x.size > SLOT_BYTES else 0)

    def run(self, call: Call) -> Steps:
        views, me, sizes = self.group.views, self.position, call.notes(h.NBYTES)
        found = {
            sender: call.x if sender == me else np.empty(size, _BYTE)
            for sender, size in enumerate(sizes)
            if self.receives(call.plan.op, me, sender)
        }
        # All members make as many steps as the largest object takes: each phase ends only once all have ended it.
        for step, start in enumerate(range(0, max(sizes), BLOCK_BYTES)):
            if start:
                # This place has the block before the last one. All ranks have read it: they have ended a phase since.
                self.show_block(call, start)
                yield views.end_phase()
                order()
            for sender, data in found.items():
                part = data[start : start + BLOCK_BYTES]
                # The peers' pages are read here; a rank already has its own bytes.
                if part.size and sender != me:
                    part[...] = views.place_of(sender, call.seq & 1, step)(_BYTE, 0, part.size)
            if start:
                views.forget(PHASE, views.phase)
        return found


def run_objects(what: Collective, direct: Algorithm, value: Any, root: int | None, purpose: str) -> list[Any]:
    """Run an all_gather, broadcast or gather of objects; return those that this rank receives, in order.

    Args:
        what: the collective.
        direct: the group's algorithm.
        value: this rank's object.
        root: rank of the root, if the collective has one.
        purpose: as in headers.
    """
    group, name = direct.group, f"{what.name}_object"
    is_receiver = what is BROADCAST and group.transport.rank != root
    data = np.empty(0, np.uint8) if is_receiver else group.medium.pack(value)
    position = position_of(name, group, root) if what.root else 0
    key = what.name, name, position, purpose
    if (plan := direct.plans.get(key)) is None:
        header = h.encode(name, root=root or 0)
        plan = direct.add_plan(key, header, Settings(root=position), purpose=purpose, body="objects")
    found: dict[int, np.ndarray] = group.run(plan, data)
    # The bytes of each object are freed before the next one is decoded.
    if what is BROADCAST and not is_receiver:
        return []
    return [group.medium.unpack(found.pop(position)) for position in list(found)]


def exchange_objects(group: Group, value: Any, purpose: str = "connecting GPUs") -> list[Any]:
    """Return every member's value, in the order of the group. Collective; records no event."""
    # Earlier calls record theirs.
    group.lane.finish()
    recorder, group.recorder = group.recorder, None
    try:
        return run_objects(ALL_GATHER, group.direct, value, None, purpose)
    finally:
        group.recorder = recorder
