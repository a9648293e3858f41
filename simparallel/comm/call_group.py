"""`CallGroup`: what a call, its body and the checks of its arguments need of their group."""

from __future__ import annotations

from typing import Protocol

from simparallel.clock.recorder import Recorder
from simparallel.comm.plan import CallPlan
from simparallel.comm.transport import AbstractTransport
from simparallel.comm.views import Views
from simparallel.comm.work import Lane
from simparallel.errors import CollectiveMismatchError
from simparallel.machine.cluster import Traffic


class CallGroup(Protocol):
    """The part of a `Group` that the files below it use; see there."""

    ranks: tuple[int, ...]
    rank: int | None
    position: int
    size: int
    slot: int
    name: str
    seq: int
    stream: str
    lane: Lane
    transport: AbstractTransport
    recorder: Recorder | None
    views: Views

    def price(self, plan: CallPlan, parity: int) -> tuple[int, Traffic]: ...

    def describe(self, plan: CallPlan, seq: int, site: int) -> str: ...

    def header_error(self, parity: int) -> CollectiveMismatchError: ...

    def mismatch(self, text: str) -> CollectiveMismatchError: ...
