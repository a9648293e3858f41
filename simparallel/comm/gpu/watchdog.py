"""`Watchdog`: aborts what waits on the GPU when another rank fails, while this rank's own thread cannot look.

A program that reads no value starts kernels until the GPU's queue is full. Its thread then waits inside of CUDA, behind
a collective that a dead rank has never started.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread

from simparallel.comm.transport import AbstractTransport, Condition
from simparallel.errors import CommError

NOTHING = Condition((), (), 0)
LOOK_EVERY_S = 0.1


class Watchdog:
    """A thread that looks for failed ranks.

    Args:
        transport: this rank's access to shared memory.
        abort: called once, in that thread, when another rank has failed.
    """

    def __init__(self, transport: AbstractTransport, abort: Callable[[], None]) -> None:
        self._transport, self._abort = transport, abort
        self._ended = Event()
        self._thread = Thread(target=self._run, name="GPU watchdog", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            try:
                self._transport.check_health(NOTHING, lambda: "a collective on the GPU")
            except CommError:
                self._abort()
                return

    def stop(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()
