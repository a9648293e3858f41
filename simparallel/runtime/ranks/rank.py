"""Run a function as one rank: the same code for a device process and for a thread."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TextIO, TypeVar

from simparallel.backend import finish_checks, get_float32_matmul_precision, random_state, set_float32_matmul_precision
from simparallel.clock.recorder import Recorder, use_recorder
from simparallel.comm import Communicator, current, use_communicator
from simparallel.comm.communicator import SHARED_MEMORY
from simparallel.comm.fault_spec import Fault
from simparallel.comm.group import Medium
from simparallel.comm.memory.segment import DONE
from simparallel.comm.transport import DEFAULT_TIMEOUT_S, AbstractTransport
from simparallel.machine.cluster import ClusterSpec
from simparallel.rank_local import RankLocal, begin_run
from simparallel.runtime.reports import Outcome, failure_report
from simparallel.world.context import begin_settings
from simparallel.world.process import become_rank

T = TypeVar("T")
Tell = Callable[[dict[str, Any]], None]

# Arguments of the EOFError that `input()` raises.
_END_OF_INPUT = ("EOF when reading a line",)
# Interval of progress messages: one costs more than a small step, and users do not read faster.
PROGRESS_EVERY_S = 0.1


class _ToLauncher(RankLocal):
    tell: Tell | None = None


_to_launcher = _ToLauncher()


@dataclass
class RunSettings:
    """The settings of a run, the same on every rank.

    Attributes:
        cluster: the hardware that prices the ranks' work; its `world_size` is the number of ranks.
        record, timeout_s, algorithm, check, array, blas_threads: see `Cluster`.
        memory_bytes: capacity of each device; None for no limit.
        faults: faults to inject.
        seed: seed of the random numbers of every rank; by default that of the thread that makes the settings.
        matmul_precision: see `set_float32_matmul_precision`; by default that of the process that makes the settings.
    """

    cluster: ClusterSpec
    record: str = "summary"
    timeout_s: float = DEFAULT_TIMEOUT_S
    algorithm: str = "direct"
    check: str = "full"
    array: str = "numpy"
    blas_threads: int | None = None
    memory_bytes: int | None = None
    faults: Sequence[Fault] = ()
    seed: int = field(default_factory=lambda: random_state.seed)
    matmul_precision: str = field(default_factory=get_float32_matmul_precision)


def play_rank(
    call: Callable[[], Any],
    transport: AbstractTransport,
    settings: RunSettings,
    *,
    medium: Medium = SHARED_MEMORY,
    recorder_type: type[Recorder] = Recorder,
    is_process: bool = False,
    tell: Tell | None = None,
) -> tuple[Outcome, Communicator]:
    """Run `call()` as this transport's rank. Never raises: the outcome holds the failure.

    The rank starts with its own random state, its clocks at 0 and gradients enabled. `sys.exit(0)` is a normal end.

    Args:
        call: the user's function with its arguments.
        transport: connects the rank with the others.
        settings: the settings of the run.
        medium: how the payloads of collectives travel.
        recorder_type: class of the rank's recorder.
        is_process: the whole process is the rank, not only the calling thread. Threads share BLAS and the streams of
            `random` and `np.random`: for them `run_threads` limits it, and `Draws` seeds these.
        tell: sends a message to the launcher; None for none.

    Returns:
        The outcome and the rank's communicator.
    """
    if is_process:
        # It may be warm: restore everything that an earlier run may have changed. Ranks that are threads are new.
        begin_run()
        become_rank(transport.world_size, settings.blas_threads)
    random_state.seed = settings.seed
    set_float32_matmul_precision(settings.matmul_precision)
    begin_settings()
    _to_launcher.tell = tell
    memory_bytes = settings.memory_bytes
    on_device: Any = None
    if settings.array != "numpy":
        from simparallel.runtime.ranks.gpu import GpuRecorder, on_gpu  # few runs have GPUs

        recorder_type, on_device = GpuRecorder, on_gpu
    recorder = recorder_type(transport.rank, settings.cluster, record=settings.record, memory_bytes=memory_bytes)
    communicator = Communicator(transport, recorder, settings.algorithm, medium)
    outcome = Outcome(transport.rank)
    gpu = None
    # A process is the rank as a whole: threads that the program starts belong to it, too.
    joined = use_communicator(communicator, of_process=is_process)
    with use_recorder(recorder), joined, ExitStack() as stack:
        try:
            if on_device is not None:
                gpu = stack.enter_context(on_device(communicator, recorder, memory_bytes))
            with _ending_forks(), _normal_exit():
                outcome.value = call()
            finish(communicator)
        except BaseException as error:
            if is_process and isinstance(error, EOFError) and error.args == _END_OF_INPUT:
                error.add_note("Ranks have no keyboard: pass values as arguments, or read them before the launch.")
            # Publish the failure at once, so that ranks that wait for this one raise.
            outcome.report = failure_report(error, keep=not is_process)
            transport.fail(outcome.report, error)
            for calls in communicator.media.values():
                # The failure is published already; an error of NCCL's abort adds nothing.
                with suppress(Exception):
                    calls.abort()
        outcome.memory = recorder.memory_summary()
        if gpu is not None:
            outcome.memory["measured"] = gpu.memory.summary()
    outcome.kept_messages = communicator.kept_messages()
    outcome.recorded = recorder.recorded()
    outcome.metrics = recorder.metrics
    outcome.cluster = recorder.cluster
    return outcome, communicator


def finish(communicator: Communicator, reasons: str = "") -> None:
    """Finish the communication in progress, for which other ranks may wait, and then publish that this rank is done.

    `reasons`: of an early end, for the error of a rank that waits for this one.
    """
    # A collective that `sys.exit` interrupted raises SystemExit again here.
    with _normal_exit():
        communicator.finish()
    for calls in communicator.media.values():
        calls.finish()
    finish_checks()
    if reasons:
        communicator.transport.write_last_words(reasons)
    # Only after all collectives have ended: a rank that waits for one that is DONE raises.
    communicator.transport.set_state(DONE)


@contextmanager
def _normal_exit() -> Iterator[None]:
    """Let `sys.exit(0)` inside the block end the block only."""
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise


@contextmanager
def _ending_forks() -> Iterator[None]:
    """End forked processes at the end of the block: they are not the rank, and must not answer in its place."""
    pid, error = os.getpid(), None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        if os.getpid() != pid:
            _end_fork(error)


def _end_fork(error: BaseException | None) -> NoReturn:
    """Exit as Python's main thread does, but without the exit functions of the rank."""
    code = 1
    try:
        if error is None or isinstance(error, SystemExit) and error.code is None:
            code = 0
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code & 0xFF
        elif isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
    finally:
        flush_output()
        os._exit(code)


def flush_output(*more: TextIO) -> None:
    """Flush standard output, standard error and `more`; ignore every error."""
    for stream in (sys.stdout, sys.stderr, *more):
        # User code may have left None, a closed file, or any other object here.
        with suppress(Exception):
            stream.flush()


def progress(iterable: Iterable[T], description: str = "", total: int | None = None) -> Iterator[T]:
    """Iterate over `iterable` with a progress bar, which the launcher draws for rank 0.

    Args:
        iterable: the items.
        description: text in front of the bar.
        total: number of items; by default `len(iterable)` if it has a length.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    # One bar for the run: rank 0 reports. Outside of a run tqdm draws it here.
    tell = _to_launcher.tell
    if tell is None and current().world_size == 1:
        from tqdm import tqdm

        iterable = tqdm(iterable, desc=description, total=total)
    if tell is None or current().rank != 0:
        yield from iterable
        return
    done = reported = 0
    reported_s = -PROGRESS_EVERY_S
    for item in iterable:
        yield item
        done += 1
        if time.monotonic() - reported_s >= PROGRESS_EVERY_S:
            tell({"kind": "progress", "description": description, "done": done, "total": total})
            reported, reported_s = done, time.monotonic()
    # The last items may have come within the interval.
    if reported < done:
        tell({"kind": "progress", "description": description, "done": done, "total": total})
