"""Exchange through GPU memory: processes share it by CUDA's IPC handles, threads share it anyway.

Each rank has two staging buffers on its GPU, its rooms, and uses them alternately. A collective copies x into a room,
and the members read it there.

    1  copy x into the room, on the link's stream; record the event `shown`
    2  wait, on the host, until all members have started their copies (a phase of the call)
    3  let the stream wait for `shown` of all members; read the rooms; record the event `read`

A room is reused two collectives later. By then its owner has seen all members arrive at the collective in between, so
their `read` events are recorded, and the stream waits for them. The host waits for the GPU only to enlarge the rooms.
No stream waits for an event that is not recorded yet, so a dead rank blocks no stream.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from math import prod

import numpy as np

from simparallel.arrays.cuda.device import Gpu
from simparallel.backend import Array
from simparallel.comm.blocks import exchange_objects
from simparallel.comm.gpu.link import AbstractLink, GpuCall, fold
from simparallel.comm.gpu.watchdog import NOTHING
from simparallel.comm.group import Group
from simparallel.comm.memory.segment import SLOT_BYTES
from simparallel.comm.transport import order
from simparallel.comm.work import Steps

# From this size on, each of three or more ranks reduces one part, and copies the others' results.
SHARED_WORK_BYTES = 1 << 20
ROOMS = 2
# cudaErrorPeerAccessAlreadyEnabled
_ALREADY_ENABLED = 704


class IpcLink(AbstractLink):
    """The link of ranks that can access each other's GPU memory."""

    name = "shared GPU memory"

    def __init__(self, group: Group, gpu: Gpu) -> None:
        super().__init__(group, gpu)
        self.runtime = gpu.cuda.runtime
        self.room_bytes, self.turn = 0, 0
        self._own_rooms: list[int] = []
        self._opened: list[int] = []
        # [turn][position]: address of a member's room; the events `shown` and `read` likewise.
        self.rooms: list[list[int]] = []
        self._own_events = [[self._new_event() for _ in range(ROOMS)] for _ in range(2)]
        handles = [[(event, self.runtime.ipcGetEventHandle(event)) for event in events] for events in self._own_events]
        members = exchange_objects(group, (os.getpid(), gpu.number, *handles))
        self._reach({number for pid, number, *_ in members if pid == os.getpid()})
        open_event = self.runtime.ipcOpenEventHandle
        self.shown, self.read = (
            by_room([opened(events[kind], pid, open_event) for pid, _, *events in members]) for kind in range(2)
        )
        self._opened_events = [
            event
            for kind in (self.shown, self.read)
            for turn in kind
            for event, (pid, *_) in zip(turn, members, strict=True)
            if pid != os.getpid()
        ]

    def _reach(self, numbers: set[int]) -> None:
        """Let kernels of this GPU read the memory of others in this process; CUDA does so for opened handles."""
        for number in numbers - {self.gpu.number}:
            try:
                self.runtime.deviceEnablePeerAccess(number)
            except self.runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_ENABLED:
                    raise

    def _new_event(self) -> int:
        flags = self.runtime.eventDisableTiming | self.runtime.eventInterprocess
        return int(self.runtime.eventCreateWithFlags(flags))

    # --- rooms ----------------------------------------------------------------------------------------

    def _reserve(self, size_bytes: int) -> Steps:
        """Make the rooms of all members at least this large."""
        if size_bytes <= self.room_bytes:
            return
        runtime, me = self.runtime, os.getpid()
        self._close_rooms()
        # After this phase, no member has another's rooms open.
        yield self.group.views.end_phase()
        self._free_rooms()
        self.room_bytes = max(1 << 20, 1 << (size_bytes - 1).bit_length())
        for _ in range(ROOMS):
            self._own_rooms.append(self._new_room())
        handles = [(room, runtime.ipcGetMemHandle(room)) for room in self._own_rooms]
        found = yield from self._exchanged(handles)
        members = [(pid, opened(rooms, pid, runtime.ipcOpenMemHandle)) for pid, rooms in found]
        self.rooms = by_room([rooms for _, rooms in members])
        self._opened = [room for pid, rooms in members for room in rooms if pid != me]

    def _new_room(self) -> int:
        """Return memory outside of the pool: a handle is one of a whole allocation."""
        try:
            return int(self.runtime.malloc(self.room_bytes))
        except self.runtime.CUDARuntimeError:
            # The pool may keep what no array uses.
            self.gpu.memory.is_empty()
            return int(self.runtime.malloc(self.room_bytes))

    def _exchanged(self, handles: list[tuple[int, bytes]]) -> Steps:
        """Send (process id, [(address, handle) of each room]) to all members; return theirs, in the group's order."""
        views, text = self.group.views, json.dumps([os.getpid(), [(at, handle.hex()) for at, handle in handles]])
        slots = views.slots(self.group.seq & 1, SLOT_BYTES, np.dtype(np.uint8)).flat
        slots[self.group.position][...] = np.frombuffer(text.encode().ljust(SLOT_BYTES), np.uint8)
        yield views.end_phase()
        order()
        found = [json.loads(slot.tobytes()) for slot in slots]
        # Later collectives reuse the slots.
        yield views.end_phase()
        return [(pid, [(at, bytes.fromhex(handle)) for at, handle in pairs]) for pid, pairs in found]

    def _close_rooms(self) -> None:
        """Close the others' rooms, once the GPU has read them."""
        event, transport = self.gpu.mark(self.stream), self.group.transport
        # The stream waits for events only that other ranks have recorded, so no failure can keep it.
        while not self.gpu.has_passed(event):
            transport.looked(NOTHING, self.group.describe_running, 0.0)
        for room in self._opened:
            self.runtime.ipcCloseMemHandle(room)
        self._opened = []

    def _free_rooms(self) -> None:
        for room in self._own_rooms:
            self.runtime.free(room)
        self._own_rooms = []

    def finish(self) -> None:
        super().finish()
        # The owners free them when all ranks have ended.
        self._close_rooms()

    def release(self) -> None:
        super().release()
        for room in self._opened:
            self.runtime.ipcCloseMemHandle(room)
        self._free_rooms()
        for event in (*self._opened_events, *(event for events in self._own_events for event in events)):
            self.runtime.eventDestroy(event)
        self._opened, self._opened_events, self._own_events = [], [], []

    def room_of(self, position: int, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        """Return a member's room of the running collective, as an array of this shape and dtype."""
        cuda, size = self.gpu.cuda, prod(shape) * dtype.itemsize
        memory = cuda.UnownedMemory(self.rooms[self.turn][position], size, self, self.gpu.number)
        return self.xp.ndarray(shape, dtype, cuda.MemoryPointer(memory, 0))

    # --- exchanges ------------------------------------------------------------------------------------

    def gathered(self, call: GpuCall) -> Steps:
        x = call.x
        if not x.size:
            return [x] * self.group.size
        yield from self._reserve(x.nbytes)
        self.turn = (self.turn + 1) % ROOMS
        turn, me, stream = self.turn, self.group.position, self.stream
        for event in self.read[turn]:
            self.runtime.streamWaitEvent(stream.ptr, event)
        with stream:
            self.room_of(me, x.shape, x.dtype)[...] = x
        yield from self._show()
        return [self.room_of(position, x.shape, x.dtype) for position in range(self.group.size)]

    def _show(self) -> Steps:
        """Publish this rank's room, and let the stream wait for the others."""
        shown = self.shown[self.turn]
        self.runtime.eventRecord(shown[self.group.position], self.stream.ptr)
        # After this phase, every member's event is recorded.
        yield self.group.views.end_phase()
        order()
        for event in shown:
            self.runtime.streamWaitEvent(self.stream.ptr, event)

    def finish_reading(self) -> None:
        """Record that this rank has read the rooms of the running collective."""
        self.runtime.eventRecord(self.read[self.turn][self.group.position], self.stream.ptr)

    # --- collectives ----------------------------------------------------------------------------------

    def all_reduce(self, call: GpuCall) -> Steps:
        rooms = yield from self.gathered(call)
        group, views, x = self.group, self.group.views, call.x
        if group.size == 2 or x.nbytes < SHARED_WORK_BYTES:
            call.fold(rooms)
            return
        flats, parts = [room.reshape(-1) for room in rooms], [views.bounds(x.size, i) for i in range(group.size)]
        mine = parts[group.position]
        # Only this rank reads this part of the rooms, so its own room can hold the result.
        with self.stream:
            fold(self.xp, call.rule, [flat[mine] for flat in flats], flats[group.position][mine])
        yield from self._show()
        target = call.result_array
        with self.stream:
            whole = target.reshape(-1) if target.flags.c_contiguous else self.xp.empty(x.size, x.dtype)
            for flat, part in zip(flats, parts, strict=True):
                whole[part] = flat[part]
            if not target.flags.c_contiguous:
                target[...] = whole.reshape(target.shape)


def opened(pairs: list[tuple[int, bytes]], pid: int, open_handle: Callable[[bytes], int]) -> list[int]:
    """Return the addresses of a process's rooms, or its events, in this process.

    A process cannot open its own handles, and its threads share all addresses.
    """
    return [own if pid == os.getpid() else int(open_handle(handle)) for own, handle in pairs]


def by_room(of_members: list[list[int]]) -> list[list[int]]:
    """Turn lists by member into lists by room."""
    return [list(room) for room in zip(*of_members, strict=True)]
