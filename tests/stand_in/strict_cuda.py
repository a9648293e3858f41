"""The stand-in for `cupy.cuda`: streams and events that find races, captures, shared device memory.

Operations of all streams run at once, so a program that forgets to wait for a stream would get the right
values here, but wrong ones on a GPU. Therefore each stream has a vector clock (Fidge 1988, Mattern 1989):
an operation that touches memory which another stream has written, or writes memory which another stream still reads,
raises `StreamRaceError` unless events order the two. Events and streams of other processes have no clocks here.

Names, arguments and results follow CuPy 14.2. A test compares them with CuPy where it is installed.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from simparallel.comm import current
from simparallel.comm.transport import Condition
from stand_in import strict_memory

memory = strict_memory
alloc_pinned_memory = memory.PinnedMemory
Memory, MemoryPool, using_allocator = memory.Memory, memory.MemoryPool, memory.using_allocator
Clock = dict[int, int]
# Called with the name of each operation that starts, see `strict.launches`.
launch_listeners: list[Callable[[str], None]] = []
_ids = itertools.count(1)


class CUDARuntimeError(RuntimeError):
    """An error of CUDA, by its number."""

    def __init__(self, status: int) -> None:
        super().__init__(f"CUDA error {status}")
        self.status = status


class StreamRaceError(RuntimeError):
    """Two streams use the same memory, one of them writes it, and no event orders them."""


class _Thread(threading.local):
    """The host's thread: its device and stream, and whether it has started work since it last waited for the device."""

    def __init__(self) -> None:
        self.device = Device(0)
        self.stream: Stream | None = None
        self.has_work = True


class Device:
    """A device; `with Device(1):` makes it the current one of this thread.

    Args:
        id: its number; None for the current device.
    """

    def __init__(self, id: int | None = None) -> None:
        self.id: int = _thread.device.id if id is None else id
        self._outer: list[Device] = []

    def use(self) -> None:
        _thread.device = self

    def synchronize(self) -> None:
        refuse_in_capture("synchronize()")
        for stream in list(_streams.values()):
            if stream.device_id == self.id and not stream.is_foreign():
                stream.synchronize()

    def __enter__(self) -> Device:
        self._outer.append(_thread.device)
        _thread.device = self
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.device = self._outer.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.id == self.id

    # As in CuPy.
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"


def note_work() -> None:
    """Note that this thread starts an operation."""
    _thread.has_work = True


def has_waited() -> bool:
    """Note that this thread waits for the device; return whether there was nothing to wait for."""
    had_work, _thread.has_work = _thread.has_work or bool(get_current_stream().waits_for), False
    return not had_work


def current_device() -> Device:
    return _thread.device


class Operation:
    """An operation that ends later, such as a collective that waits for other ranks.

    Attributes:
        finish: tries to end it; returns whether it has ended.
    """

    def __init__(self, finish: Callable[[], bool]) -> None:
        self.finish: Callable[[], bool] | None = finish

    def is_done(self) -> bool:
        if self.finish is not None and self.finish():
            self.finish = None
        return self.finish is None


class Stream:
    """A queue of operations. `with stream:` makes it the current one of this thread.

    Attributes:
        ptr: number of the stream, as the handle that CuPy passes to libraries.
        clock: for each stream, how many of its operations have ended before the next operation of this one.
    """

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = next(_ids)
        self.device_id, self.is_non_blocking = _thread.device.id if not null else 0, non_blocking
        self.clock: Clock = {self.ptr: 0}
        # Unfinished operations; the stream's next operation runs after them.
        self.waits_for: list[Operation] = []
        self._outer: list[Stream | None] = []
        self._pid = os.getpid()
        self.graph: Graph | None = None
        _streams[self.ptr] = self

    def is_foreign(self) -> bool:
        """Return whether the stream was made in a process that this one was forked from."""
        return self._pid != os.getpid()

    def use(self) -> Stream:
        _thread.stream = self
        return self

    def __enter__(self) -> Stream:
        self._outer.append(_thread.stream)
        _thread.stream = self
        return self

    def __exit__(self, *exc: object) -> None:
        _thread.stream = self._outer.pop()

    def begin(self) -> Clock:
        """Start an operation; return its clock: the operations that have ended before it, and itself."""
        _merge(self.clock, _known)
        self.clock[self.ptr] += 1
        return self.clock

    @property
    def done(self) -> bool:
        refuse_in_capture("done", self)
        self.waits_for = [operation for operation in self.waits_for if not operation.is_done()]
        return not self.waits_for

    def synchronize(self) -> None:
        refuse_in_capture("synchronize()", self)
        finish_all(self)
        _merge(_known, self.clock)

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        if event.graph is not None and self.graph is None:
            # The stream joins the capture, until a stream of the capture waits for it.
            self.graph = event.graph
            self.graph.forks.add(self.ptr)
        elif self.graph is not event.graph:
            raise self.graph.failure("Isolation", "the event was recorded outside of the capture")  # type: ignore[union-attr]
        if self.graph is not None:
            self.graph.forks.discard(event.stream)
            return
        _merge(self.clock, event.clock)
        self.waits_for += event.waits_for

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr == Stream.null.ptr:
            raise RuntimeError("cannot capture on the default (legacy) stream")
        if self.graph is not None:
            raise self.graph.failure("Unsupported", "the stream is capturing already")
        self.graph = Graph(self.ptr)

    def is_capturing(self) -> bool:
        return self.graph is not None

    def end_capture(self) -> Graph:
        graph = self.graph
        if graph is None:
            raise RuntimeError("cudaErrorIllegalState: the stream is not capturing")
        if graph.origin != self.ptr:
            raise graph.failure("Unmatched", "another stream began the capture")
        for stream in list(_streams.values()):
            if stream.graph is graph:
                stream.graph = None
        if graph.is_invalid:
            raise graph.failure("Invalidated", "an earlier call was not allowed in a capture")
        if graph.forks:
            raise graph.failure("Unjoined", "another stream takes part, and the first one does not wait for it")
        return graph

    null: Stream


class Graph:
    """The operations of a capture; `launch` repeats them on the same memory.

    Attributes:
        origin: the stream that began the capture.
        forks: streams that have joined it, and that no other one has waited for since.
    """

    def __init__(self, origin: int) -> None:
        self.origin = origin
        self.forks: set[int] = set()
        self.is_invalid = False
        self._operations: list[Callable[[], None]] = []

    def add(self, operation: Callable[[], None]) -> None:
        self._operations.append(operation)

    def failure(self, name: str, why: str) -> RuntimeError:
        """Return the error of a call that ends the capture."""
        self.is_invalid = True
        return RuntimeError(f"cudaErrorStreamCapture{name}: {why}")

    def launch(self, stream: Stream | None = None) -> None:
        stream = get_current_stream() if stream is None else stream
        note_work()
        for note in launch_listeners:
            note("graph")
        # A GPU raises no floating-point errors.
        with stream, np.errstate(all="ignore"):
            stream.begin()
            for operation in self._operations:
                operation()

    def upload(self, stream: Stream | None = None) -> None:
        pass


def captured_graph() -> Graph | None:
    """Return the graph that the current stream is capturing, or None."""
    return None if _thread.stream is None else _thread.stream.graph


def refuse_in_capture(what: str, stream: Stream | None = None) -> None:
    """Raise RuntimeError if a stream, by default the current one, is capturing: the host may not wait for it."""
    graph = captured_graph() if stream is None else stream.graph
    if graph is not None:
        raise graph.failure("Unsupported", f"{what} waits for a stream that is capturing")


class Event:
    """A point of a stream. An event that was never recorded has passed."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        if interprocess and not disable_timing:
            raise ValueError("cudaErrorInvalidValue: an event between processes needs disable_timing=True")
        self.ptr, self.is_timed = next(_ids), not disable_timing
        self.clock: Clock = {}
        self.waits_for: list[Operation] = []
        self.recorded_s: float | None = None
        # The capture in which it was recorded, and by which stream.
        self.graph: Graph | None = None
        self.stream = 0
        _events[self.ptr] = self

    def record(self, stream: Stream | None = None) -> None:
        stream = get_current_stream() if stream is None else stream
        self.graph, self.stream = stream.graph, stream.ptr
        if stream.graph is not None:
            return
        stream.begin()
        self.clock, self.recorded_s = dict(stream.clock), time.perf_counter()
        self.waits_for = list(stream.waits_for)

    @property
    def done(self) -> bool:
        self._check_not_captured()
        self.waits_for = [operation for operation in self.waits_for if not operation.is_done()]
        if not self.waits_for:
            # The host has seen the event, so what it starts from now on runs later.
            _merge(_known, self.clock)
        return not self.waits_for

    def synchronize(self) -> None:
        self._check_not_captured()
        finish_all(self)
        _merge(_known, self.clock)

    def _check_not_captured(self) -> None:
        if self.graph is not None:
            raise self.graph.failure("Unsupported", "an event of a capture has no time")


def get_current_stream(device_id: int | None = None) -> Stream:
    return Stream.null if _thread.stream is None else _thread.stream


def get_elapsed_time(start_event: Event, end_event: Event) -> float:
    """Return the milliseconds between two events, by the host's clock."""
    if not (start_event.is_timed and end_event.is_timed):
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event has no time")
    if start_event.recorded_s is None or end_event.recorded_s is None:
        raise RuntimeError("cudaErrorInvalidResourceHandle: an event was not recorded")
    return 1e3 * (end_event.recorded_s - start_event.recorded_s)


def _merge(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if clock.get(stream, 0) < count:
            clock[stream] = count


LONGEST_WAIT_S = 60.0


def _give_way() -> None:
    """Let other ranks run while an operation of this one waits for theirs: a GPU would wait, not its host."""
    communicator = current()
    communicator.transport.looked(Condition((), (), 0), lambda: "an operation on the GPU", 0.0)
    # A GPU would not stop the host here, so the rank would go on to the collectives that others wait for; but not to
    # one that it is in the middle of.
    for lane in tuple(communicator.lanes):
        if not any(getattr(work._steps, "gi_running", False) for work in tuple(lane._queue)[:1]):
            lane.advance()


def stream_at(ptr: int) -> Stream:
    """Return the stream with this handle; 0 is the default stream."""
    return _streams[ptr] if ptr else Stream.null


def finish_all(of: Stream | Event) -> None:
    """Wait until all operations before this point have ended."""
    until_s = time.monotonic() + LONGEST_WAIT_S
    # Poll all of them in each round: a send ends after its receive, whose rank may be waiting for its own sends.
    while of.waits_for:
        of.waits_for = [operation for operation in of.waits_for if not operation.is_done()]
        if not of.waits_for:
            return
        if time.monotonic() > until_s:
            raise RuntimeError("the stand-in's GPU has waited too long: a rank does not take part")
        _give_way()


def catch_up(stream: Stream | None = None) -> None:
    """Wait for the operations that the next operation of a stream (by default the current one) runs after."""
    stream = get_current_stream() if stream is None else stream
    if stream.waits_for:
        finish_all(stream)


# --- races ---------------------------------------------------------------------------------------------------


class _Memory:
    """The last uses of a piece of memory.

    Attributes:
        written: (stream, number of its operation) of the last write.
        reads: stream -> number of its last operation that read it since.
    """

    __slots__ = ("reads", "written")

    def __init__(self) -> None:
        self.written: tuple[int, int] | None = None
        self.reads: Clock = {}


_memories: dict[int, _Memory] = {}


def _memory_of(array: np.ndarray) -> _Memory:
    while isinstance(array.base, np.ndarray):
        array = array.base
    key = id(array)
    found = _memories.get(key)
    if found is None:
        found = _memories[key] = _Memory()
        weakref.finalize(array, _memories.pop, key, None)
    return found


def is_watching() -> bool:
    """Return whether streams besides the default one exist, so that there can be races."""
    return len(_streams) > 1


def use(array: np.ndarray, *, is_written: bool, stream: Stream | None = None) -> None:
    """Note that the next operation of a stream (by default the current one) reads or writes memory.

    Raises:
        StreamRaceError: another stream uses it, and no event orders the two.
    """
    stream = get_current_stream() if stream is None else stream
    clock, memory = stream.begin(), _memory_of(array)
    others = [memory.written] if memory.written is not None else []
    if is_written:
        others += memory.reads.items()
    for other, number in others:
        if other != stream.ptr and clock.get(other, 0) < number:
            other_wrote = (other, number) == memory.written
            here, there = ("writes" if is_written else "reads"), ("writing" if other_wrote else "reading")
            raise StreamRaceError(
                f"stream {stream.ptr} {here} an array of shape {array.shape} that stream {other} may still be {there}; "
                "record an event there and wait for it here."
            )
    if is_written:
        memory.written, memory.reads = (stream.ptr, clock[stream.ptr]), {}
    else:
        memory.reads[stream.ptr] = clock[stream.ptr]


# --- memory by address ---------------------------------------------------------------------------------------

# Address -> the array that begins there: from `runtime.malloc`, or an array whose pointer was read.
_at_address: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_allocated: dict[int, tuple[np.ndarray, int, bool]] = {}  # address -> (bytes, descriptor, whether it is another's)


class _Bytes(np.ndarray):
    """Memory that allows weak references, and is the base of its views."""


def address_of(array: np.ndarray) -> int:
    """Return the address of an array's first element, and remember the array by it."""
    address = array.__array_interface__["data"][0]
    _at_address[address] = array
    return int(address)


def array_at(address: int) -> np.ndarray:
    """Return the array at an address that `address_of` has returned."""
    return _at_address[address]


# File -> stand-in for a library of CUDA. CuPy has no such dict: `ctypes` loads the library that CuPy uses.
libraries: dict[str, Any] = {}


def bytes_at(address: int, size: int) -> np.ndarray:
    """Return device memory at an address, as a view of bytes, so that `use` finds its owner.

    Raises:
        RuntimeError: no array begins there, and no allocation has these bytes.
    """
    array = _at_address.get(address)
    if array is not None and array.flags.c_contiguous and array.nbytes >= size:
        return array.reshape(-1).view(np.uint8)[:size]
    for start, (memory, _, _) in _allocated.items():
        if start <= address and address + size <= start + memory.nbytes:
            return memory[address - start : address - start + size]
    raise RuntimeError(f"cudaErrorIllegalAddress: {size} bytes at {address:#x} are no device memory")


class UnownedMemory:
    """Memory at an address, which `owner` keeps alive."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, device_id


class MemoryPointer:
    """An address inside of memory."""

    def __init__(self, mem: UnownedMemory, offset: int) -> None:
        self.mem, self.ptr = mem, mem.ptr + offset


def _map(fd: int, size: int, is_foreign: bool) -> int:
    memory = np.frombuffer(mmap.mmap(fd, size), np.uint8).view(_Bytes)
    address = address_of(memory)
    _allocated[address] = memory, fd, is_foreign
    return address


def _malloc(size: int) -> int:
    fd = os.memfd_create("strict")
    os.ftruncate(fd, size)
    return _map(fd, size, is_foreign=False)


def _free(ptr: int) -> None:
    _, fd, is_foreign = _allocated.pop(ptr)
    _at_address.pop(ptr, None)
    os.close(fd)
    if is_foreign:
        raise RuntimeError("cudaErrorInvalidValue: memory of another process is closed, not freed")


def _ipc_get_memory(ptr: int) -> bytes:
    memory, fd, _ = _allocated[ptr]
    return f"{os.getpid()} {fd} {memory.nbytes}".encode().ljust(64, b"\0")


def _ipc_open_memory(handle: bytes, flags: int = 1) -> int:
    pid, fd, size = map(int, handle.rstrip(b"\0").split())
    if pid == os.getpid():
        raise RuntimeError("cudaErrorDeviceUninitialized: a process cannot open its own memory")
    return _map(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size, is_foreign=True)


def _ipc_close_memory(ptr: int) -> None:
    _, fd, is_foreign = _allocated.pop(ptr)
    _at_address.pop(ptr, None)
    os.close(fd)
    if not is_foreign:
        raise RuntimeError("cudaErrorInvalidValue: memory of this process is freed, not closed")


def _create_event(flags: int) -> int:
    event = Event(disable_timing=bool(flags & runtime.eventDisableTiming))
    _kept_events[event.ptr] = event
    return event.ptr


def _open_event(handle: bytes) -> int:
    # The other process has started all that comes before the event, and here operations end when they start.
    event = Event(disable_timing=True)
    _kept_events[event.ptr] = event
    return event.ptr


def _copy(dst: int, src: int, size: int, kind: int, stream: int = 0) -> None:
    queue = stream_at(stream)
    target, source = (
        bytes_at(address, size) if is_device else _host_bytes(address, size)
        for address, is_device in ((dst, kind in (1, 3)), (src, kind in (2, 3)))
    )
    if kind in (2, 3):
        use(source, is_written=False, stream=queue)
    if kind in (1, 3):
        use(target, is_written=True, stream=queue)
    target[...] = source


def _host_bytes(address: int, size: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


# --- ranges of profilers ---------------------------------------------------------------------------------------

range_listeners: list[Callable[[str], None]] = []


def _push(message: str, id_color: int = -1) -> None:
    for note in range_listeners:
        note(message)


nvtx = SimpleNamespace(available=True, RangePush=_push, RangePop=lambda: _push(""))
# Devices of this machine, as many as the environment says.
_peers: set[tuple[int, int]] = set()


def _enable_peer_access(peer: int) -> None:
    if (_thread.device.id, peer) in _peers:
        raise CUDARuntimeError(704)
    _peers.add((_thread.device.id, peer))


num_devices = int(os.environ.get("SIMPARALLEL_STAND_IN_DEVICES", "1"))
_streams: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
_kept_events: dict[int, Event] = {}
_thread = _Thread()
# What the host has waited for. That has ended, whichever thread waited; later operations of any thread run after it.
_known: Clock = {}
Stream.null = Stream(null=True)

device = SimpleNamespace(get_cublas_handle=lambda: 1 + threading.get_ident())
runtime = SimpleNamespace(
    eventDisableTiming=2,
    eventInterprocess=4,
    memcpyHostToDevice=1,
    memcpyDeviceToHost=2,
    memcpyDeviceToDevice=3,
    getDevice=lambda: _thread.device.id,
    getDeviceCount=lambda: num_devices,
    getDeviceProperties=lambda device: {"name": b"stand-in", "totalGlobalMem": 64 << 30},
    driverGetVersion=lambda: 12090,
    runtimeGetVersion=lambda: 12090,
    deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
    deviceCanAccessPeer=lambda device, peer: int(device != peer),
    malloc=_malloc,
    free=_free,
    memcpyAsync=_copy,
    hostRegister=lambda ptr, size, flags: None,
    hostUnregister=lambda ptr: None,
    ipcGetMemHandle=_ipc_get_memory,
    ipcOpenMemHandle=_ipc_open_memory,
    ipcCloseMemHandle=_ipc_close_memory,
    ipcGetEventHandle=lambda event: str(event).encode().ljust(64, b"\0"),
    ipcOpenEventHandle=_open_event,
    eventCreateWithFlags=_create_event,
    eventDestroy=lambda event: _kept_events.pop(event),
    eventRecord=lambda event, stream: _events[event].record(stream_at(stream)),
    eventQuery=lambda event: 0 if _events[event].done else 600,
    CUDARuntimeError=CUDARuntimeError,
    deviceEnablePeerAccess=lambda peer: _enable_peer_access(peer),
    streamWaitEvent=lambda stream, event, flags=0: stream_at(stream).wait_event(_events[event]),
)
