"""`Gpu`: the GPU of a rank, with the streams on which it computes and copies; `GpuClock`: when it ran operations.

A rank computes on a stream of its own, so ranks that share a GPU run side by side, and a step can be captured. All
streams are non-blocking: only events order them. Nothing here names CuPy: `cuda` is `cupy.cuda`, or a stand-in's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from time import perf_counter_ns
from typing import Any

from simparallel.arrays.captures import running
from simparallel.arrays.cuda.capture import Capture
from simparallel.arrays.cuda.memory import GpuMemory, use_memory
from simparallel.arrays.cuda.uploads import Uploads
from simparallel.backend import Array, check_gpu_library, gpu_namespace, gpu_nccl, place, set_reader_gate

LONGEST_SETTLE_S = 0.5
# CUDA gives the time between two events as a float32 in milliseconds. Up to a second its resolution is below 0.1 us,
# so later times are measured from a later event.
_LONGEST_MS = 1000.0
_PASSED, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
# (is_done, what): wait until `is_done()`; errors quote `what`.
Wait = Callable[[Callable[[], bool], str], None]


class Gpu:
    """A rank's GPU.

    Args:
        number: number of the GPU on this machine, from 0.

    Attributes:
        xp: its array library.
        cuda: `cupy.cuda`, or a stand-in's.
        compute: the stream of the rank's operations.
        wait: function by which the host waits for the GPU; connected ranks watch each other meanwhile.
        clock: the clock of recorded operations; None if none are recorded.
        memory: the pool of its arrays, inside `use_gpu`.
        nvtx: `cupy.cuda.nvtx` if operations are shown as ranges, see `ranges`; else None.
    """

    memory: GpuMemory
    clock: GpuClock | None = None
    nvtx: Any = None

    def __init__(self, number: int) -> None:
        self.number = number
        self.xp: Any = gpu_namespace()
        self.cuda = self.xp.cuda
        self.cuda.Device(number).use()
        self.compute = self.cuda.Stream(non_blocking=True)
        # Operations that other threads have started are complete for this rank.
        self.cuda.Device(number).synchronize()
        self.wait: Wait = _poll

    @cached_property
    def nccl(self) -> Any:
        """CuPy's NCCL module; its `available` says whether the library exists."""
        return gpu_nccl()

    @cached_property
    def copies(self) -> Any:
        """The stream of copies from host memory that run beside the computation."""
        return self.cuda.Stream(non_blocking=True)

    @cached_property
    def uploads(self) -> Uploads:
        """Copies of host arrays on the stream `copies`."""
        return Uploads(self.xp, self.compute, self.copies)

    def home(self, array: Array, requires_grad: bool) -> Array:
        """Return a new array of the rank, moved to its GPU."""
        return place(array, self.number)

    def new_capture(self) -> Capture:
        """Return a capture of the compute stream that has recorded nothing."""
        return Capture(self)

    def mark(self, stream: Any, *, timed: bool = False) -> Any:
        """Record an event at the current end of a stream, and return it."""
        event = self.cuda.Event(disable_timing=not timed)
        event.record(stream)
        return event

    def has_passed(self, event: Any) -> bool:
        """Return whether the GPU has passed an event, without a wait.

        Raises:
            cupy.cuda.runtime.CUDARuntimeError: an operation before it has failed. `event.done` would be False for ever.
        """
        runtime = self.cuda.runtime
        status = runtime.eventQuery(event.ptr)
        if status not in (_PASSED, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return bool(status == _PASSED)

    def synchronize(self, what: str) -> None:
        """Wait on the host for all operations of the compute stream; errors quote `what`."""
        event = self.mark(self.compute)
        if not self.has_passed(event):
            self.wait(lambda: self.has_passed(event), what)

    def settle(self) -> None:
        """Wait briefly for the compute stream, also after an error, because other code will reuse its memory."""
        # After a CUDA error every call fails, and the run raises the error itself.
        with suppress(Exception):
            event, until_s = self.mark(self.compute), time.monotonic() + LONGEST_SETTLE_S
            while not self.has_passed(event) and time.monotonic() < until_s:
                time.sleep(0.001)


class Moment(int):
    """A point of a stream. As an integer it is the host's time [ns] at which its event was recorded.

    Attributes:
        event: the event, until it is read.
        wall_ns: when the GPU passed it [ns], on the host's clock, once it is read.
    """

    event: Any
    wall_ns: int


class GpuClock:
    """The clock of a rank's GPU, in nanoseconds of the host's clock.

    The host starts an operation long before it runs, so the host's clock does not tell when it ran. An event is
    recorded on the stream before and after the operation; once the GPU has passed both, their times are read, and the
    host waits for neither. The first event is recorded and passed on an idle stream, between two readings of the
    host's clock.

    Args:
        gpu: the GPU, whose compute stream is idle.

    Attributes:
        name: the GPU's name.
        is_paused: moments are only the host's times, such as while a graph is captured.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu, self._cuda, self._compute = gpu, gpu.cuda, gpu.compute
        self.name = gpu.cuda.runtime.getDeviceProperties(gpu.number)["name"].decode()
        self.is_paused = False
        # Events to reuse.
        self._free: list[Any] = []
        self._reference = self._cuda.Event()
        before_ns = perf_counter_ns()
        self._reference.record(self._compute)
        self._reference.synchronize()
        self._reference_ns = (before_ns + perf_counter_ns()) // 2

    def now(self, stream: Any = None) -> int:
        """Record a moment at the current end of a stream (None: the compute stream), and return it."""
        if self.is_paused:
            return perf_counter_ns()
        event = self._free.pop() if self._free else self._cuda.Event()
        event.record(self._compute if stream is None else stream)
        return self.at(event)

    def at(self, event: Any) -> Moment:
        """Return the moment of a recorded event with timing; the clock takes the event over, and reuses it."""
        moment = Moment(perf_counter_ns())
        moment.event = event
        return moment

    def read(self, moment: int) -> int | None:
        """Return the wall time [ns] of a moment; None if the GPU has not passed it. Other times are returned as is."""
        if not isinstance(moment, Moment):
            return moment
        event = moment.event
        if event is not None:
            if not self._gpu.has_passed(event):
                return None
            passed_ms = self._cuda.get_elapsed_time(self._reference, event)
            moment.wall_ns = self._reference_ns + round(1e6 * passed_ms)
            moment.event = None
            if passed_ms > _LONGEST_MS:
                self._reference, event, self._reference_ns = event, self._reference, moment.wall_ns
            self._free.append(event)
        return moment.wall_ns


def gpu_of_rank(local_rank: int) -> Gpu:
    """Return the GPU of a rank: number `local_rank` of its machine, modulo the number of GPUs.

    Raises:
        InputError: there is no GPU that CuPy can use.
    """
    check_gpu_library()
    return Gpu(local_rank % gpu_namespace().cuda.runtime.getDeviceCount())


def _poll(is_done: Callable[[], bool], what: str) -> None:
    while not is_done():
        pass


@contextmanager
def use_gpu(gpu: Gpu) -> Iterator[Gpu]:
    """Use a GPU for this thread's rank inside the block: its compute stream, and a memory pool on it."""
    before, running.device = running.device, gpu
    gate = set_reader_gate(lambda: gpu.synchronize("a value that the host reads"))
    try:
        with use_memory(gpu.cuda, gpu.number) as gpu.memory, gpu.compute:
            yield gpu
    finally:
        gpu.settle()
        running.device = before
        set_reader_gate(gate)
