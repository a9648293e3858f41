"""`GpuClock`: the times at which a GPU ran operations, from events that the host does not wait for.

The host starts an operation long before it runs, so the host's clock does not tell when it ran. An event is recorded on
the stream before and after the operation; once the GPU has passed both, their times are read.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simparallel.gpu.device import Gpu

# CUDA gives the time between two events as a float32 in milliseconds. Up to a second its resolution is below 0.1 us,
# so later times are measured from a later event.
_LONGEST_MS = 1000.0


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

    The first event is recorded and passed on an idle stream, between two readings of the host's clock.

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
