"""`Capture`: a step as a CUDA graph, and the host's part of its launches, see `captures`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from simparallel.arrays.captures import READ, refuse, running
from simparallel.backend import Array, random_state, set_reader_gate, set_upload, to_device_like
from simparallel.base.callsite import is_inside, place
from simparallel.errors import CaptureError, SimParallelError

_PRODUCTS = "Multiply Tensors; in an op of your own, multiply arrays by ctx.arrays.matmul or ctx.arrays.einsum."


class Capture:
    """A graph, and the host's part of its launches.

    Args:
        gpu: the rank's `device.Gpu`.

    Attributes:
        checks: functions to call after each launch; they read values, and may raise.
    """

    def __init__(self, gpu: Any) -> None:
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
        stream = self.gpu.compute
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
                way_out = _PRODUCTS if "cuBLAS" in str(error) else READ
                raise CaptureError(
                    f"{running.step}: a GPU cannot capture {line}, which raised {kind}: {error}. {way_out}",
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
