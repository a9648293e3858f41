"""Measurements of a GPU for `gpu_calibration`: training programs, by the clock of the interpreter and by device events.

The interpreter starts an operation, and the GPU runs it later. Two numbers give the time of a step: how long the
interpreter takes to start each operation, and how long the GPU takes to run it. They need two runs:

* In one, matrix products give the interpreter a head start, again whenever the GPU has caught up. Then an operation
  lasts from the event after the one before it to the event after itself, and no wait for the interpreter is in it.
  An operation after which the GPU has caught up reads a value: the interpreter has waited for all before.
* In the other, nothing but the program runs, and the interpreter's clock gives its own times.

All events are read at the end of a run, so that nothing waits for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from math import ceil
from time import perf_counter_ns
from typing import Any, NamedTuple

import numpy as np

from simparallel import models, optim
from simparallel.arrays.cuda.device import Gpu
from simparallel.arrays.host.windows import scratch
from simparallel.autograd import Tensor
from simparallel.clock.memory import NullAccount
from simparallel.clock.recorder import WorkPrice, use_recorder
from simparallel.machine.device import COPY, READ
from simparallel.predict import measuring
from simparallel.predict.measuring import Sample, Workload

# Rows and columns of the matrix products of a head start.
HEAD_SIZE = 2048
# Warm-up and measured steps of each run.
WARM_STEPS, STEPS = 3, 10
COPY_SIZES = tuple(1 << shift for shift in range(2, 27, 4))
# Times are fitted by relative errors, so none is 0. Events are read to half a microsecond.
LEAST_S = 1e-7


class Timed(NamedTuple):
    """An operation of a step, or the read of a value.

    Attributes:
        work: its name, flops, bytes and results.
        host_s: the interpreter's time to start it [s].
        device_s: its time on the GPU [s].
        waits: whether the interpreter waits for all operations before it.
    """

    work: tuple[str, int, int, int]
    host_s: float
    device_s: float
    waits: bool

    @property
    def host(self) -> Sample:
        return Sample(*self.work, max(self.host_s, LEAST_S))

    @property
    def device(self) -> Sample:
        return Sample(*self.work, max(self.device_s, LEAST_S))


class Measurement(NamedTuple):
    """The operations of a program's step, and the time of the step [s] by device events."""

    ops: list[Timed]
    step_s: float


class _Execution(NamedTuple):
    """One execution of an operation.

    Attributes:
        step: number of its step.
        work: see `Timed`.
        host_ns: the interpreter's time, from the end of the operation before it.
        gap_ns: the part of it before the operation began.
        first, last: the events between which the GPU ran it; None if none were recorded.
        is_late: whether the GPU had caught up with the interpreter.
    """

    step: int
    work: tuple[str, int, int, int]
    host_ns: int
    gap_ns: int
    first: Any
    last: Any
    is_late: bool


class GpuStopwatch(measuring.Stopwatch):
    """A stopwatch with the clocks of the interpreter and of a GPU. It records nothing before `start`.

    Args:
        gpu: the GPU of the thread.
    """

    # Tests replace the clock.
    now_ns: Callable[[], int] = staticmethod(perf_counter_ns)

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.memory = NullAccount()
        self.home = gpu.home
        self._gpu = gpu
        self._found: list[_Execution] | None = None
        self._head: Callable[[], object] | None = None
        self._last: Any = None
        self._resumed_ns = 0

    def start(self, head: Callable[[], object] | None) -> list[_Execution]:
        """Record operations from now on; return the list that gets them.

        Args:
            head: starts work that the GPU is busy with for longer than the interpreter is with a step; None records
                no events.
        """
        self._found, self._head = [], head
        if head is not None:
            self._give_head_start()
        self._resumed_ns = self.now_ns()
        return self._found

    def stop(self) -> None:
        self._found = None

    def compute(
        self, name: str, kind: str, wall_start_ns: int, wall_end_ns: int, price: WorkPrice, layer: str = ""
    ) -> None:
        if self._found is not None:
            # Not `wall_start_ns`, because the clock may be another one.
            self._note(price.measured, self._began_ns)

    def begin(self, name: str, plan: Any = None) -> int:
        self._began_ns = self.now_ns()
        return self._began_ns

    def read_loss(self, loss: Tensor) -> None:
        """Read a value, as an operation that waits."""
        began_ns = self.now_ns()
        loss.item()
        if self._found is not None:
            self._note((READ, 0, loss.dtype.itemsize, 1), began_ns)

    def _note(self, work: tuple[str, int, int, int], began_ns: int) -> None:
        now_ns, first, is_late = self.now_ns(), self._last, False
        if self._head is not None:
            is_late = first.done
            self._last = self._gpu.mark(self._gpu.compute, timed=True)
        assert self._found is not None
        gap_ns = max(0, began_ns - self._resumed_ns)
        self._found.append(_Execution(self.step, work, now_ns - self._resumed_ns, gap_ns, first, self._last, is_late))
        if is_late:
            self._give_head_start()
        # The stopwatch's own time counts for no operation.
        self._resumed_ns = self.now_ns()

    def _give_head_start(self) -> None:
        assert self._head is not None
        self._head()
        self._last = self._gpu.mark(self._gpu.compute, timed=True)
        if self._last.done:
            # A simulated device finishes its work before it returns, so the interpreter cannot run ahead of it.
            self._head = lambda: None


def measured(program: Workload, gpu: Gpu, watch: GpuStopwatch | None = None) -> Measurement:
    """Measure the training step of a program on a GPU, which is the one of this thread."""
    watch = watch or GpuStopwatch(gpu)
    with use_recorder(watch):
        step = measuring.training(program, read=watch.read_loss)
        _repeat(step, WARM_STEPS)
        step_s = elapsed_s(gpu, partial(_repeat, step, STEPS)) / STEPS
        plain = watch.start(None)
        _repeat(step, STEPS)
        ahead = watch.start(head_start(gpu, 2 * _host_s(plain)))
        _repeat(step, STEPS)
        watch.stop()
        gpu.synchronize("the end of a measurement")
    return Measurement(timed(plain, ahead, partial(_between_s, gpu)), step_s)


def _repeat(step: measuring.Step, count: int) -> None:
    for _ in range(count):
        step()


def _host_s(rows: Sequence[_Execution]) -> float:
    """Return the interpreter's time of a step [s]."""
    return sum(row.host_ns for row in rows) / STEPS / measuring.NS_PER_S


def _between_s(gpu: Gpu, first: Any, last: Any) -> float:
    return float(gpu.cuda.get_elapsed_time(first, last)) / 1e3


def elapsed_s(gpu: Gpu, work: Callable[[], object]) -> float:
    """Return the seconds that work takes on the compute stream of a GPU."""
    first = gpu.mark(gpu.compute, timed=True)
    work()
    last = gpu.mark(gpu.compute, timed=True)
    last.synchronize()
    return _between_s(gpu, first, last)


def head_start(gpu: Gpu, seconds: float) -> Callable[[], object]:
    """Return a function that keeps the GPU busy for at least some seconds, and returns at once."""
    xp = gpu.xp
    a, b = xp.ones((HEAD_SIZE, HEAD_SIZE), "float32"), xp.empty((HEAD_SIZE, HEAD_SIZE), "float32")

    def product() -> None:
        xp.matmul(a, a, out=b)

    product()
    product_s = min(elapsed_s(gpu, product) for _ in range(3))
    count = ceil(seconds / max(product_s, LEAST_S))
    return partial(_repeat, product, count)


# --- from rows to operations ---------------------------------------------------------------------


def timed(
    plain: Sequence[_Execution],
    ahead: Sequence[_Execution],
    between_s: Callable[[Any, Any], float] = lambda a, b: b - a,
) -> list[Timed]:
    """Return the operations of a step, with the medians of their times.

    Args:
        plain: the rows of steps in which nothing but the program ran.
        ahead: the rows of steps with head starts.
        between_s: returns the time [s] between two events.
    """
    steps, others = ([list(rows) for _, rows in groupby(found, key=lambda row: row.step)] for found in (plain, ahead))
    hosts = np.median([_host_times(rows) for rows in steps], axis=0) / measuring.NS_PER_S
    devices = np.median([[between_s(row.first, row.last) for row in rows] for rows in others], axis=0)
    late = np.mean([[row.is_late for row in rows] for rows in others], axis=0)
    # Also a view's events are some time apart.
    least_s = float(devices.min())
    ops = []
    for row, host_s, device_s, share in zip(steps[-1], hosts, devices, late, strict=True):
        is_read = row.work[0] == READ
        # While the host reads, the stream is idle.
        device_s = 0.0 if is_read else float(device_s) - least_s
        ops.append(Timed(row.work, float(host_s), device_s, bool(is_read or share > 0.5)))
    return without_waits(ops)


def _host_times(rows: Sequence[_Execution]) -> list[int]:
    """Return the interpreter's times [ns] of a step; the time between two steps belongs to the optimizer."""
    times = [row.host_ns for row in rows]
    times[0] -= rows[0].gap_ns
    times[-1] += rows[0].gap_ns
    return times


def without_waits(ops: Sequence[Timed]) -> list[Timed]:
    """Return operations whose interpreter's times are without the waits for the GPU."""
    device_s = host_s = 0.0
    found: list[Timed] = []
    # Twice: the first step begins with an idle GPU, the second one with the work that the first has left.
    for number, op in enumerate((*ops, *ops)):
        wait_s = max(0.0, device_s - host_s) if op.waits else 0.0
        if number >= len(ops):
            found.append(op._replace(host_s=max(op.host_s - wait_s, LEAST_S)))
        start_s = max(device_s, host_s)
        # An operation that waits ends no sooner than what it waits for.
        host_s = max(host_s + op.host_s, start_s if op.waits else 0.0)
        device_s = start_s + op.device_s
    return found


def step_s(ops: Sequence[Timed]) -> float:
    """Return the time [s] of a step of these operations, as `Recorder` finds it."""
    device_s = host_s = 0.0
    ends = []
    for _ in range(3):
        for op in ops:
            host_s = max(host_s, device_s) if op.waits else host_s
            if op.work[0] != READ:
                device_s = max(device_s, host_s) + op.device_s
            host_s += op.host_s
        ends.append(device_s)
    return ends[-1] - ends[-2]


def copies(gpu: Gpu, sizes: Sequence[int] = COPY_SIZES) -> list[Sample]:
    """Return the interpreter's time of a copy of a host array to the GPU, for some sizes [bytes]."""
    found = []
    for size in sizes:
        array, times = np.zeros(size, np.uint8), []
        for _ in range(7):
            gpu.synchronize("the copy before")
            start_ns = perf_counter_ns()
            gpu.home(array, False)
            times.append(perf_counter_ns() - start_ns)
        found.append(Sample(COPY, 0, size, 1, max(float(np.median(times)) / measuring.NS_PER_S, LEAST_S)))
    return found


def free_memory(gpu: Gpu) -> None:
    """Free the memory of arrays that no longer exist, and the work arrays of kernels."""
    scratch.clear()
    if hasattr(gpu.xp, "get_default_memory_pool"):
        gpu.xp.get_default_memory_pool().free_all_blocks()


# --- training programs ---------------------------------------------------------------------------

_ADAM, _ADAMW = partial(optim.Adam, lr=1e-6), partial(optim.AdamW, lr=1e-6)
_SGD, _MOMENTUM = partial(optim.SGD, lr=1e-6), partial(optim.SGD, lr=1e-6, momentum=0.9)


def _gpt(vocabulary: int, length: int, width: int, heads: int, layers: int, batch_size: int) -> Workload:
    make = partial(models.gpt, vocabulary, length, num_layers=layers, num_heads=heads, width=width)
    return Workload(make, (batch_size, length), vocabulary, _SGD)


# From steps that wait for the interpreter to steps of 0.1 s on an H100, in at most 16 GB.
PROGRAMS = (
    Workload(partial(measuring.dense, (784, 256, 10)), (64, 784), optimizer=_SGD),
    Workload(partial(measuring.dense, (512, 512, 512, 100)), (128, 512), optimizer=_ADAM),
    Workload(partial(measuring.dense, (1024, 2048, 1024, 10)), (512, 1024), optimizer=_MOMENTUM),
    Workload(partial(measuring.dense, (2048, 4096, 2048, 1000)), (2048, 2048), optimizer=_ADAMW),
    Workload(partial(measuring.dense, (4096, 8192, 4096, 100)), (8192, 4096), optimizer=_SGD),
    Workload(models.lenet5, (32, 1, 28, 28), optimizer=_SGD),
    Workload(models.lenet5, (512, 1, 28, 28), optimizer=_SGD),
    Workload(partial(measuring.filters, (3, 32, 64), 5, 256, 32), (128, 3, 32, 32), optimizer=_MOMENTUM),
    Workload(partial(measuring.filters, (1, 64, 128), 3, 512, 32), (1024, 1, 32, 32), optimizer=_ADAM),
    Workload(partial(measuring.residual, (3, 64, 128, 256, 512)), (16, 3, 64, 64), optimizer=_MOMENTUM),
    Workload(partial(measuring.residual, (3, 64, 128, 256)), (128, 3, 64, 64), optimizer=_SGD),
    Workload(partial(models.resnet18, 100), (32, 3, 160, 160), optimizer=_MOMENTUM),
    *(Workload(partial(models.resnet50, 100), (n, 3, side, side), optimizer=_SGD) for n, side in ((8, 128), (32, 224))),
    Workload(partial(measuring.Text, 512, 128, 4, 512, 2), (8, 64), 512, _ADAM),
    Workload(partial(measuring.Text, 1000, 768, 12, 3072, 2), (8, 256), 1000, _ADAMW),
    _gpt(256, 64, 128, 4, 4, 16),
    _gpt(256, 256, 512, 8, 3, 16),
    _gpt(512, 512, 768, 12, 3, 8),
    _gpt(1000, 512, 1024, 16, 2, 24),
    _gpt(256, 1024, 768, 12, 2, 8),
)
