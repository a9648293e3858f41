"""Collectives of arrays without data: calls are compared and priced as ever, and no payload travels."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import cloudpickle
import numpy as np

import simparallel.comm.call_header as h
from simparallel.backend import has_data
from simparallel.base import pickling
from simparallel.base.dry_arrays import DryArray, DryScalar, UnknownNumber, dried, empty, without_data
from simparallel.base.units import format_bytes
from simparallel.clock.recorder import Recorder
from simparallel.comm.blocks import Blocks
from simparallel.comm.call import Body, Call, Nothing
from simparallel.comm.collective import COLLECTIVES
from simparallel.comm.communicator import current
from simparallel.comm.direct.direct import SmallAllReduce, given
from simparallel.comm.direct.direct_adasum import SmallAdasum
from simparallel.comm.dry.folding import FoldedSegment, FoldedViews, between
from simparallel.comm.group import Factory, Group
from simparallel.comm.plan import Settings
from simparallel.comm.shm.medium import SHARED_MEMORY
from simparallel.comm.uneven import UnevenParts
from simparallel.comm.validate import native
from simparallel.comm.work import Steps
from simparallel.errors import ClusterError
from simparallel.machine.cluster import Traffic

# The most bytes of objects that a rank of a dry run may receive in a call.
_MOST_BYTES = 1 << 30


class DryBody:
    """The body of a collective in a dry run: if any member's payload has no data, none moves, and the result has none.

    Args:
        body: runs the call if all payloads have data.
    """

    def __init__(self, body: Body) -> None:
        self.body = body

    def expose(self, call: DryCall) -> tuple[int, int]:
        if _has_data(call.x):
            return self.body.expose(call)
        found = 0, call.plan.payload_bytes
        if self._needs_tables(call):
            found = self.body.expose(call)
        call.exposure = h.NO_DATA
        return found

    def run(self, call: DryCall) -> Steps:
        if not call.lacks_data():
            return (yield from self.body.run(call))
        if self._needs_tables(call):
            result = yield from self.body.run(call)
            return _without_data(result)
        return self._result(call)

    def price(self, call: DryCall, recorder: Recorder) -> tuple[int, Traffic]:
        return self.body.price(call, recorder)

    def _needs_tables(self, call: DryCall) -> bool:
        """Return whether the body itself has to run: ranks exchange sizes, or messages that are priced one by one."""
        return self.body.by_messages or isinstance(call.x, UnevenParts)

    def _result(self, call: DryCall) -> Any:
        x, op, group, position, settings = call.x, call.plan.op, call.group, self.body.position, self.body.settings
        what = COLLECTIVES[op]
        if op == "gather":
            if position != settings.root:
                return None
            return [empty(x.shape, native(x.dtype)) for _ in range(group.size)] if call.out is None else call.out
        if op == "scatter":
            shape, dtype, _ = given(group, settings.root, call.out, group.views.place_of(settings.root, call.seq & 1))
            return empty(shape, dtype) if call.out is None else without_data(call.out)
        if what.in_place:
            is_written = what.writes(position, settings.root)
            return without_data(call.target) if is_written else call.target
        if call.out is not None:
            return without_data(call.out)
        shape = what.result_shape(x, position, group.size, settings.dims, settings.sizes)
        return empty(shape, native(x.dtype))


class DryCall(Call):
    """A collective in a dry run."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.body: Any = DryBody(self.plan.body)
        recorder = self.group.recorder
        if recorder is not None and recorder.launcher is None:
            self._issued_ps = recorder.moment()

    def lacks_data(self) -> bool:
        """Return whether the payload of any member has no data."""
        group = self.group
        return h.NO_DATA in group.views.offsets[self.seq & 1].exposures(group.transport.words)

    def seen(self, part: np.ndarray) -> np.ndarray:
        return without_data(part) if self.lacks_data() else part

    def payloads(self) -> Any:
        return None if isinstance(self.plan.body, Nothing) else super().payloads()


def _has_data(x: Any) -> bool:
    if isinstance(x, (list, UnevenParts)):
        return all(map(has_data, x.arrays if isinstance(x, UnevenParts) else x))
    return has_data(x)


def _without_data(result: Any) -> Any:
    if isinstance(result, list):
        return [_without_data(one) for one in result]
    return dried(result) if isinstance(result, np.ndarray) else result


# --- objects: as many bytes as in a real run, where an array has elements -------------------------------


class _Pickler(pickling.Pickler):
    """A pickler that counts how many more bytes the real run's pickle would have, for numbers that are unknown here.

    Attributes:
        missing_bytes: these additional bytes.
    """

    missing_bytes = 0

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, UnknownNumber):
            self.missing_bytes += 6  # a float takes 9 bytes, its stand-in 3
            return 0
        return None


class _Real(_Pickler):
    """A pickler that writes arrays without data as real ones, to count the bytes."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DryArray):
            return value.view(np.ndarray).__reduce_ex__(cloudpickle.DEFAULT_PROTOCOL)
        if isinstance(value, DryScalar):
            return np.zeros((), value.dtype)[()].__reduce__()
        return super().reducer_override(value)


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, number: Any) -> Any:
        return UnknownNumber()


def _bytes(kind: type[_Pickler], value: Any) -> tuple[bytes, int]:
    file = io.BytesIO()
    pickler = kind(file, protocol=cloudpickle.DEFAULT_PROTOCOL)
    pickler.dump(value)
    found = file.getvalue()
    return found, len(found) + pickler.missing_bytes


def _pack(value: Any) -> np.ndarray:
    text, _ = _bytes(_Pickler, value)
    _, size_bytes = _bytes(_Real, value)
    packed = np.zeros(size_bytes, np.uint8)
    packed[: len(text)] = np.frombuffer(text, np.uint8)
    return packed


def _unpack(data: np.ndarray) -> Any:
    return _Unpickler(io.BytesIO(data.data)).load()


_last: list[tuple[bytes, Any]] = [(b"", None)]


def _unpack_alike(data: np.ndarray) -> Any:
    """Return the object; of equal bytes one after another the same one, if it cannot change."""
    text, (before, value) = data.tobytes(), _last[0]
    if text != before:
        value = _unpack(data)
        if _is_constant(value):
            _last[0] = text, value
    return value


def _is_constant(value: Any) -> bool:
    # Exact types: an object of a subclass may have attributes, which can change.
    return type(value) in (str, bytes, int, float, bool, type(None)) or (
        type(value) is tuple and all(map(_is_constant, value))
    )


# --- the two media ------------------------------------------------------------------------------------


def _choose_folded(name: str, group: Group, x: Any, settings: Settings) -> Body:
    needed: Sequence[int] = ()
    segment = group.transport.segment
    assert isinstance(segment, FoldedSegment)
    if name == "uneven":
        # Any member may have another size, whatever sizes those have that run.
        needed = () if current().purpose in segment.known else group.ranks
    elif name not in COLLECTIVES or COLLECTIVES[name].root:
        # No other rank has the root's payload, so it has to run.
        needed = group.ranks[settings.root : settings.root + 1]
    elif COLLECTIVES[name].divides and settings.sizes is not None:
        # The first member of each row of equal parts.
        size_of = dict(zip(group.ranks, settings.sizes, strict=True))
        needed = [next(members) for _, members in groupby(group.ranks, size_of.get)]
    segment.need(needed)
    body = _WHOLE.get(name, SHARED_MEMORY.bodies[name])(group, x, settings)
    if x is not None:
        # Members that share a representative read its payload at their own places, so it is shown whole.
        body.others = None
    return body


class _FoldedBlocks(Blocks):
    """Objects, whose sizes tell which ranks have to run."""

    def run(self, call: Call) -> Steps:
        segment, sizes = self.group.transport.segment, call.notes(h.NBYTES)
        assert isinstance(segment, FoldedSegment)
        run = set(segment.ranks)
        known = {rank: size for rank, size in zip(self.group.ranks, sizes, strict=True) if rank in run}
        # Of a broadcast only the root's object is read.
        if call.plan.op != "broadcast":
            segment.need(between(self.group.ranks, known))
        taken = [size for sender, size in enumerate(sizes) if self.receives(call.plan.op, self.position, sender)]
        if sum(taken) > _MOST_BYTES:
            raise ClusterError(
                f"{call.plan.op}_object: a rank gets {len(taken):,} objects of {format_bytes(sum(taken))} in all, and "
                f"each rank of a dry run makes its own; more than {format_bytes(_MOST_BYTES)} is refused. Send smaller "
                "objects, or predict a smaller world.",
                world_size=segment.world_size,
                most=_MOST_BYTES,
            )
        return (yield from super().run(call))


# Bodies that divide the work among the members need all of them.
_WHOLE: Mapping[str, Factory] = {"all_reduce": SmallAllReduce, "adasum": SmallAdasum, "objects": _FoldedBlocks}
_FOLDED: Mapping[str, Factory] = {name: partial(_choose_folded, name) for name in SHARED_MEMORY.bodies}


DRY = SHARED_MEMORY._replace(call=DryCall, pack=_pack, unpack=_unpack)
FOLDED = DRY._replace(views=FoldedViews, bodies=_FOLDED, unpack=_unpack_alike)
