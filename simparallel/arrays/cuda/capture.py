"""Capture a step as a CUDA graph: refuse operations that a graph cannot repeat, and run the host's part of a launch.

A launch repeats the operations of the GPU, but nothing that Python did between them. So work of the host in a captured
step is either refused (`refuse`), or registered with the capture: arrays that the host makes (`from_host`), and checks
that read values (`check_after`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from simparallel.arrays.cuda.device import Gpu
from simparallel.arrays.cuda.products import capture_products
from simparallel.backend import (
    Array,
    check_when_read,
    random_state,
    set_reader_gate,
    set_upload,
    to_device_like,
    to_host,
)
from simparallel.base.attributes import setting
from simparallel.base.callsite import is_inside, place
from simparallel.errors import CaptureError, SimParallelError
from simparallel.rank_local import RankLocal


class _RunningStep(RankLocal):
    """The captured step that this rank runs.

    Attributes:
        step: its name, whether or not this call is captured or launched; "" outside of captured steps.
        modules: the modules that the step has called -> their `training`; None while they are not noted.
        capture: the capture in progress, or None.
    """

    step = ""
    modules: dict[Any, bool] | None = None
    capture: Capture | None = None


running = _RunningStep()


class Capture:
    """A graph, and the host's part of its launches.

    Attributes:
        checks: functions to call after each launch; they read values, and may raise.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        # The graph's arrays are allocated here, so nothing else gets their memory while the graph exists. This pool
        # allocates from the rank's, whose limit applies.
        self._pool = gpu.cuda.MemoryPool(gpu.memory.allocate)
        self._graph: Any = None
        self.checks: list[Callable[[], None]] = []
        self._inputs: list[tuple[Array, Callable[[], np.ndarray]]] = []
        self._first_calls = dict(random_state.calls)
        self._calls = self._first_calls

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the GPU's operations inside the block instead of running them.

        Raises:
            CaptureError: an operation cannot be captured. The GPU has run nothing.
        """
        stream, xp = self.gpu.compute, self.gpu.xp
        capture_products(xp)
        with ExitStack() as stack:
            stack.enter_context(self.gpu.cuda.using_allocator(self._pool.malloc))
            stack.callback(set_reader_gate, set_reader_gate(lambda: refuse("reads a value on the host", READ)))
            stack.callback(set_upload, set_upload(self._upload))
            if self.gpu.clock is not None:
                # An event that is captured has no time.
                self.gpu.clock.is_paused = True
                stack.callback(setattr, self.gpu.clock, "is_paused", False)
            running.capture = self
            stack.callback(setattr, running, "capture", None)
            stream.begin_capture()
            try:
                yield
            except BaseException as error:
                # CUDA has already invalidated the capture, and raises once more.
                with suppress(RuntimeError):
                    stream.end_capture()
                if not _is_of_capture(error):
                    raise
                line, kind = _line_of(error, self.gpu.xp), type(error).__name__
                raise CaptureError(
                    f"{running.step}: a GPU cannot capture {line}, which raised {kind}: {error}. {READ}",
                    step=running.step,
                ) from error
            self._graph = stream.end_capture()

    def _upload(self, host: np.ndarray) -> Array:
        if host.ndim == 0:
            # A number becomes an argument of a kernel, without a copy from host memory.
            return self.gpu.xp.full((), host.item(), host.dtype)
        refuse(f"copies an array of shape {host.shape} from the host", "Make it an argument of the step.")

    def draws_since(self, stream: str) -> int:
        """Return how many masks of a random stream were drawn between the captured call and this one."""
        return self._calls.get(stream, 0) - self._first_calls.get(stream, 0)

    def add_input(self, make: Callable[[], np.ndarray]) -> Array:
        """Return an array of the graph; each launch first copies the array of `make()` into it."""
        host = make()
        # Not from the graph's pool: an earlier operation of the graph may have had the memory, and would write there
        # after the launch has copied the input.
        with self.gpu.cuda.using_allocator(self.gpu.memory.allocate):
            array = self.gpu.xp.empty(host.shape, host.dtype)
        self._inputs.append((array, make))
        return array

    def launch(self) -> None:
        """Copy the inputs that the host makes into the graph, and launch it on the rank's compute stream."""
        self._calls = dict(random_state.calls)
        for array, make in self._inputs:
            array[...] = to_device_like(make(), array)
        self._graph.launch(self.gpu.compute)


READ = (
    "A step may not read a value (item(), numpy(), a mask, nonzero, a branch on a Tensor) or copy from the host: "
    "return the Tensor and read it after the step, or leave the step uncaptured."
)

HOOKS = (
    "Do its work after the step, with the gradients in `.grad`. DistributedDataParallel reduces gradients by hooks: "
    "use DistributedGradReducer after the step instead."
)


@contextmanager
def captured_step(name: str) -> Iterator[None]:
    """Refuse forbidden operations inside the block, in every call of a captured step, so that errors come early."""
    with setting(running, step=name):
        yield


def refuse(what: str, way_out: str, why: str = "a graph repeats only operations of the GPU") -> NoReturn:
    """Raise CaptureError: the captured step that runs in this thread does `what`."""
    raise CaptureError(f"{running.step}: the captured step {what}, but {why}. {way_out}", step=running.step)


def from_host(make: Callable[[], np.ndarray], like: Array) -> Array:
    """Return the array of `make()` on the device of `like`; in a capture, `make()` runs again for each launch."""
    capture = running.capture
    if capture is None or isinstance(like, np.ndarray):
        return to_device_like(make(), like)
    return capture.add_input(make)


def check_after(is_bad: Any, refuse: Callable[[], None]) -> None:
    """Call `refuse`, which raises an error, if `is_bad` is true: when the host next reads, or after each launch."""
    if running.capture is None:
        check_when_read(is_bad, refuse)
    else:
        running.capture.checks.append(lambda: check_when_read(bool(to_host(is_bad)), refuse))


def _is_of_capture(error: BaseException) -> bool:
    """Return whether CUDA or CuPy refused an operation because the stream is capturing."""
    is_of_library = isinstance(error, RuntimeError) and not isinstance(error, SimParallelError)
    return is_of_library and any(part in str(error) for part in ("StreamCapture", "capturing", "stream capture"))


def _line_of(error: BaseException, xp: Any) -> str:
    """Return "file:line" of the user's code that raised an error in `xp`, with the base name of the file."""
    library = xp.ndarray.__module__.partition(".")[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not is_inside(frame.filename) and library not in Path(frame.filename).parts]
    frame = (own or frames)[-1]
    return Path(place(frame.filename, frame.lineno or 0)).name
