"""Captured steps, on the host's side: what runs now, and the refusals of work that a graph cannot repeat.

A launch of a graph repeats the operations of the GPU, but nothing that Python did between them. So work of the host in
a captured step is either refused (`refuse`), or registered with the capture: arrays that the host makes, and checks
that read values (`check_after`). The refusals are the same in host memory, where every call runs the step itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from simparallel.backend import check_when_read, to_host
from simparallel.base.attributes import setting
from simparallel.errors import CaptureError
from simparallel.rank_local import RankLocal


class _RunningStep(RankLocal):
    """The captured step that this rank runs.

    Attributes:
        device: the GPU of the rank, a `cuda.device.Gpu`, whose operations can be captured; None in host memory.
        step: its name, whether or not this call is captured or launched; "" outside of captured steps.
        modules: the modules that the step has called -> their `training`; None while they are not noted.
        capture: the capture in progress, a `cuda.capture.Capture`; None outside of one.
    """

    device: Any = None
    step = ""
    modules: dict[Any, bool] | None = None
    capture: Any = None


running = _RunningStep()

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


def check_after(is_bad: Any, refuse: Callable[[], None]) -> None:
    """Call `refuse`, which raises an error, if `is_bad` is true: when the host next reads, or after each launch."""
    if running.capture is None:
        check_when_read(is_bad, refuse)
    else:
        running.capture.checks.append(lambda: check_when_read(bool(to_host(is_bad)), refuse))
