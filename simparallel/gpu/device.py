"""`Gpu`: the GPU of a rank, with the streams on which it computes and copies.

A rank computes on a stream of its own, so ranks that share a GPU run side by side, and a step can be captured. All
streams are non-blocking: only events order them. Nothing here names CuPy: `cuda` is `cupy.cuda`, or a stand-in's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from simparallel.backend import Array, check_gpu_library, gpu_namespace, gpu_nccl, place, set_reader_gate
from simparallel.gpu.memory import GpuMemory, use_memory
from simparallel.gpu.uploads import Uploads
from simparallel.rank_local import RankLocal

if TYPE_CHECKING:
    from simparallel.gpu.clock import GpuClock

LONGEST_SETTLE_S = 0.5
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


class _CurrentGpu(RankLocal):
    gpu: Gpu | None = None


_current = _CurrentGpu()


def current_gpu() -> Gpu | None:
    """Return the GPU of the rank that runs in this thread; None if its arrays are in host memory."""
    return _current.gpu


@contextmanager
def use_gpu(gpu: Gpu) -> Iterator[Gpu]:
    """Use a GPU for this thread's rank inside the block: its compute stream, and a memory pool on it."""
    before, _current.gpu = _current.gpu, gpu
    gate = set_reader_gate(lambda: gpu.synchronize("a value that the host reads"))
    try:
        with use_memory(gpu.cuda, gpu.number) as gpu.memory, gpu.compute:
            yield gpu
    finally:
        gpu.settle()
        _current.gpu = before
        set_reader_gate(gate)
