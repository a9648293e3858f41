"""The plan that calls with equal arguments share, and the arguments besides the array."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

import numpy as np

import simparallel.comm.call_header as h
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.memory.staging import Payloads
from simparallel.machine.cluster import Traffic


class Settings(NamedTuple):
    """The arguments of a collective besides its array.

    Attributes:
        op: name of the reduction.
        root: position of the root in the group.
        dims: dims that are cut or joined.
        sizes: sizes of the parts of x: the layers of Adasum, the input_splits of a reduce_scatter; None for equal ones.
        rule: the `Reduction` that `op` is for the array's dtype; None if nothing, or Adasum, reduces.
    """

    op: str = "-"
    root: int = 0
    dims: tuple[int, ...] = ()
    sizes: Any = None
    rule: Any = None


class CallPlan:
    """The plan that calls with equal arguments share: header, body, views of the payloads, and the price once known.

    Args:
        op: name of the collective.
        header: header of the calls.
        body: its `call.Body`, which computes the result.
        x: an array like the payload that peers may read from this rank; None for no payload.
        vector_bytes: size that the network model prices; -1 if only the root knows it.

    Attributes:
        price: bytes of the vector and price of a call, once known.
        exposes: this rank has a payload that peers read.
        in_slot: the payload is in the group's slot, at an offset that every rank knows.
        place_bytes: size of its place in the staging ring; 0 if it is too large for the ring. Set by `Views.prepare`.
        expected: bytes of all members' headers in shared memory if every rank makes this call; set there, too.
        at_once: `fast_call` can run it; set by the group.
        writes: this rank's x is replaced by the result, if there is no `out`.
        own: this rank's place for its payload, by offset.
        payloads: those of all members, by their offsets (in slots: by parity).
    """

    __slots__ = (
        "at_once", "body", "copied", "dtype", "expected", "exposes", "has_note", "header", "in_slot", "op",
        "others", "own", "payload_bytes", "payloads", "place_bytes", "price", "root", "shape", "vector_bytes", "writes",
    )  # fmt: skip

    def __init__(self, op: str, header: array[int], body: Any, x: np.ndarray | None, vector_bytes: int) -> None:
        self.op, self.header, self.body = op, header, body
        self.root, self.vector_bytes = body.settings.root, vector_bytes
        self.price: tuple[int, Traffic] | None = None
        self.shape: tuple[int, ...] = () if x is None else x.shape
        self.dtype: Any = None if x is None else x.dtype
        self.payload_bytes = 0 if x is None else x.nbytes
        self.others = body.others
        self.exposes = x is not None and self.others != []
        self.has_note = body.has_note or header[h.PURPOSE] != 0
        # A body that waits may use the slot for values of its own (`Views.slots`), so its payload is stored elsewhere.
        self.in_slot = self.payload_bytes <= SLOT_BYTES and not body.waits()
        # Peers read a copy, even where they could read the user's array in place; step 7, `done`, is then unnecessary.
        self.copied = self.in_slot or body.copied
        self.place_bytes, self.expected = 0, b""
        self.at_once = self.writes = False
        # Places come round again, in the slots as in the staging ring, so their views are made once.
        self.own: dict[int, np.ndarray] = {}
        self.payloads: dict[Any, Payloads] = {}
