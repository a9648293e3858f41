"""`GpuRecorder`: the recorder of a rank on a GPU. Wall times are those at which the GPU ran the operations."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from simparallel.arrays.cuda.device import Gpu, GpuClock, Moment
from simparallel.backend import Array
from simparallel.clock.event import WALL_END, WALL_START
from simparallel.clock.recorder import Recorder, WorkPrice
from simparallel.clock.recording import Recorded, Recording
from simparallel.machine.devices import Device

if TYPE_CHECKING:
    from simparallel.autograd.op import Context, Op, Plan

# Limit of unread events. A GPU's queue has room for about a thousand operations, so older ones have run.
_MOST_UNREAD = 2048


class GpuRecording(Recording):
    """A recording whose moments are read once the GPU has passed them, a few at a time.

    Args:
        read: the recording that receives the events once their times are read.
        clock: reads the moments.
    """

    def __init__(self, read: Recording, clock: GpuClock) -> None:
        super().__init__(_MOST_UNREAD)
        self._read, self._clock = read, clock

    def thin(self, step: int) -> None:
        """Read the two oldest events. `step` is the current one."""
        self._read_oldest(2)
        if len(self._read.rows) >= self._read.limit:
            self._read.thin(step)

    def recorded(self) -> Recorded:
        """Return the kept events, see `Recording.recorded`; leave out operations that have not run."""
        # After a CUDA error, which the rank has raised, events cannot be queried.
        with suppress(RuntimeError):
            self._read_oldest(len(self.rows))
        return self._read.recorded()._replace(timed_by=self._clock.name)

    def _read_oldest(self, count: int) -> None:
        number = 0
        for row in self.rows[:count]:
            start_ns, end_ns = self._clock.read(row[WALL_START]), self._clock.read(row[WALL_END])
            if start_ns is None or end_ns is None:
                break
            # Rounding may exchange the two.
            times = start_ns, max(start_ns, end_ns)
            self._read.rows.append((*row[:WALL_START], *times, *row[WALL_END + 1 :]))
            number += 1
        del self.rows[:number]


class GpuRecorder(Recorder):
    """The recorder of a rank on a GPU, after `start`.

    `communicate` receives the wall times of collectives and messages: times of the host, or moments of `clock` on the
    stream of the communication.

    Attributes:
        clock: the clock of the GPU; None if no events are recorded.
    """

    clock: GpuClock | None = None
    _nvtx: Any = None
    _is_computing = False

    def start(self, gpu: Gpu) -> None:
        """Time operations by the events of a GPU, and show its NVTX ranges; call it before the first operation."""
        self._gpu, self._nvtx = gpu, gpu.nvtx
        if self.is_recording:
            self.clock = gpu.clock = GpuClock(gpu)
            self._recording = GpuRecording(self._recording, self.clock)
            self._rows, self._limit = self._recording.rows, self._recording.limit

    def settle(self) -> None:
        """Wait for the compute stream, so that the times of all operations are known."""
        self._gpu.synchronize("the times of all operations")

    def limit_memory(self, limit_bytes: int) -> None:
        """Limit the counted memory and the pool of the GPU, see `Recorder.limit_memory`."""
        super().limit_memory(limit_bytes)
        self._gpu.memory.limit_to(limit_bytes)

    def now_ns(self) -> int:
        """Record a moment at the current end of the compute stream, and return it."""
        return super().now_ns() if self.clock is None else self.clock.now()

    def begin(self, name: str, plan: Plan | None = None) -> int:
        """Begin a computation, see `Recorder.begin`."""
        super().begin(name, plan)
        self._is_computing = True
        if self._nvtx is not None:
            self._nvtx.RangePush(name)
        return self.now_ns()

    def read(self, device: Device | None = None, *, is_check: bool = False) -> None:
        """Do nothing: every read of an array on the GPU comes to `note_read`."""

    def note_read(self) -> None:
        """Let the interpreter wait for the device and read a value. What an op reads is part of its own price."""
        if not self._is_computing:
            super().read()

    def _end_range(self) -> None:
        self._is_computing = False
        if self._nvtx is not None:
            self._nvtx.RangePop()

    # After an error here or earlier, `abandon` ends the range.

    def end_forward(self, op: Op, ctx: Context, inputs: Sequence[Array], y: Array, start_ns: int) -> None:
        """Note the forward of an op, see `Recorder.end_forward`."""
        super().end_forward(op, ctx, inputs, y, start_ns)
        self._end_range()

    def end_backward(self, op: Op, ctx: Context, start_ns: int) -> None:
        """Note the backward of an op."""
        super().end_backward(op, ctx, start_ns)
        self._end_range()

    def end_step(self, name: str, start_ns: int, work: dict[Device | None, list[int]]) -> None:
        """Note a step of an optimizer, see `Recorder.end_step`."""
        super().end_step(name, start_ns, work)
        self._end_range()

    def mark(self, name: str, depth: int, step: int, wall_start_ns: int, sim_start_ps: int) -> None:
        """Record a mark that ends now, see `Recorder.mark`."""
        super().mark(name, depth, step, wall_start_ns, sim_start_ps)
        self._end_range()

    def abandon(self) -> None:
        """End the range of a computation that has failed."""
        self._end_range()

    @property
    def takes_marks(self) -> bool:
        """Whether marks are recorded, or shown as ranges."""
        return self.is_recording or self._nvtx is not None

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: WorkPrice, layer: str = ""
    ) -> None:
        """Record work as `Recorder.compute`; if it began with a moment, it ends now on the compute stream."""
        if isinstance(wall_start_ns, Moment):
            wall_end_ns = self.now_ns()
        super().compute(name, kind, wall_start_ns, wall_end_ns, price, layer)
