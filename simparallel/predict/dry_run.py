"""Dry runs: a program on shapes and dtypes alone, in one process, with the events of a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

from simparallel.backend import Array, has_data
from simparallel.base.attributes import setting
from simparallel.base.checks import check_seconds
from simparallel.base.dry_arrays import empty, given, without_data
from simparallel.base.dry_new import unknown_numbers
from simparallel.base.system import without_huge_pages
from simparallel.clock.memory import parse_bytes
from simparallel.clock.recorder import Recorder, current_recorder
from simparallel.clock.recording import join
from simparallel.comm import current
from simparallel.comm.dry.folding import FoldedSegment, alike, assigned, continued, first_guess, wanted
from simparallel.comm.dry.medium import DRY, FOLDED
from simparallel.comm.transport import DEFAULT_TIMEOUT_S
from simparallel.errors import ClusterError
from simparallel.machine.cluster import ClusterSpec, describe
from simparallel.predict.prediction import Prediction
from simparallel.predict.programs import ProgramRecorder, WorkRecorder
from simparallel.predict.progress import progress
from simparallel.runtime.launcher import settings as checked
from simparallel.runtime.launcher.launch import Cluster
from simparallel.runtime.launcher.settings import Described
from simparallel.runtime.ranks.rank import RunSettings
from simparallel.runtime.ranks.threads import run_threads
from simparallel.runtime.reports import Outcome, raise_failure

# Worlds up to this size can be run whole. Folding that takes more rounds than this finds few ranks that are alike.
MOST_RANKS, MOST_ROUNDS = 512, 32


def dry_run(
    fn: Callable[..., Any],
    args: tuple[Any, ...] | list[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    world_size: int = 1,
    cluster: str | ClusterSpec | None = None,
    *,
    fold: bool = True,
    device_memory: str | int | None = None,
    algorithm: str = "direct",
    timeout_s: float = DEFAULT_TIMEOUT_S,
    unknown: float | Callable[[], Any] | None = None,
    **described: Unpack[Described],
) -> Prediction:
    """Predict a run of `fn(*args, **kwargs)` on every rank of a described cluster, without its data.

    The program is the one of `launch`, unchanged. Its trained tensors have shapes and dtypes and no elements, so
    nothing is computed or sent, and the events are those of a run: names, shapes, bytes, groups, order, simulated
    times, memory. Data that the program feeds (batches, labels, NumPy arrays of collectives) stay real.

    Args:
        fn: any function.
        args, kwargs: its arguments.
        world_size: number of ranks.
        cluster: the described hardware: a `ClusterSpec`, the name of a preset or a file; None is the default device.
        fold: run ranks with the same program once, see `comm.dry.folding`. False runs every rank.
        device_memory: capacity of each device, such as "80GB", at which the program fails; None for no limit: then the
            prediction says whether it fits into the memory of the described device.
        algorithm, timeout_s: as for `Cluster`.
        unknown: the value of every number that the program asks for and a dry run does not know, such as a loss; a
            number, or a function that returns one. None makes a decision by such a number an error.
        described: nodes, link, node_link, devices_per_rank, dtype: as for `Cluster`; `device` in place of `cluster`.

    Raises:
        InputError, ClusterError: bad arguments, or a cluster of another size.
        RunFailedError: the program failed. `__cause__` is the error; `UnknownValueError` if it decides by a value that
            only a run with data has, with the line.

    Example:
        >>> def step():
        ...     sp.parallel.DistributedDataParallel(sp.nn.Linear(4, 2))(np.ones((8, 4), np.float32)).sum().backward()
        >>> prediction = sp.dry_run(step, world_size=16_384, cluster="dgx-h100")
        >>> prediction.classes
        {0: 16384}
    """
    checked.check_function("dry_run", fn)
    args, kwargs = checked.arguments(args, kwargs)
    checked.check_keywords(describe, described)
    described.setdefault("device", cluster)
    spec = describe(world_size, **described)
    timeout_s = check_seconds("dry_run", "timeout_s", timeout_s)
    memory_bytes = None if device_memory is None else parse_bytes(device_memory)
    settings = RunSettings(spec, "full", timeout_s, algorithm, memory_bytes=memory_bytes)
    return _predicted(partial(_with_unknown, unknown, partial(fn, *args, **kwargs)), settings, fold)[0]


@contextmanager
def predicted_launches(
    cluster: str | ClusterSpec | None, found: list[Prediction], dtype: str | None = None
) -> Iterator[None]:
    """Make every `launch` and `Cluster.run` inside the block a dry run of all its ranks.

    Args:
        cluster: the described hardware of launches that describe none; None for their own.
        found: gets the predictions.
        dtype: what the devices of all launches compute in, see `ClusterSpec`; None for their own.
    """

    def run(call: Callable[[], Any], given: RunSettings) -> list[Outcome]:
        spec = given.cluster
        if cluster is not None and spec.is_assumed:
            spec = describe(spec.world_size, cluster)
        spec = replace(spec, dtype=dtype or spec.dtype)
        settings = RunSettings(spec, "full", given.timeout_s, given.algorithm, memory_bytes=given.memory_bytes)
        prediction, outcomes = _predicted(call, settings, fold=False)
        found.append(prediction)
        return outcomes

    with setting(Cluster, instead=staticmethod(run)):
        yield


def _predicted(call: Callable[[], Any], settings: RunSettings, fold: bool) -> tuple[Prediction, list[Outcome]]:
    """Predict a run of `call()` on every rank; return the outcomes of the ranks, too."""
    spec = settings.cluster
    recorders: dict[int, WorkRecorder] = {}
    with without_huge_pages(), unknown_numbers(), progress(spec.world_size, recorders):
        # With jitter, no two ranks are alike.
        if fold and spec.world_size > 1 and spec.jitter is None:
            outcomes, stands_for = _folded(call, settings, recorders)
        else:
            outcomes, stands_for = _whole(call, settings, recorders)
    raise_failure(outcomes, world_size=spec.world_size)
    # The program may have chosen another device than the default.
    spec = next((outcome.cluster for outcome in outcomes if outcome.cluster is not None), spec)
    capacity_bytes = settings.memory_bytes or spec.device.memory_bytes

    def again(other: ClusterSpec) -> Prediction:
        return _predicted(call, replace(settings, cluster=other), fold)[0]

    return Prediction(outcomes, spec, stands_for, again, recorders, capacity_bytes), outcomes


def _dry(call: Callable[[], Any], recorders: dict[int, WorkRecorder]) -> Any:
    """Run the program on this rank, with new tensors that have no data if they are trained; keep its recorder."""
    recorder = current_recorder()
    assert isinstance(recorder, WorkRecorder)
    recorders[recorder.rank] = recorder
    recorder.home = partial(_home, recorder)
    given.new = partial(_new, recorder)
    return call()


def _whole(
    call: Callable[[], Any], settings: RunSettings, recorders: dict[int, WorkRecorder]
) -> tuple[list[Outcome], Sequence[int]]:
    """Run all ranks, and note their programs."""
    outcomes = run_threads(partial(_dry, call, recorders), settings, medium=DRY, recorder_type=ProgramRecorder)
    return outcomes, range(settings.cluster.world_size)


def _with_unknown(value: Any, call: Callable[[], Any]) -> Any:
    given.value = value
    return call()


def _home(recorder: Recorder, array: Array, requires_grad: bool) -> Array:
    if has_data(array):
        recorder.copy_in(array.nbytes)
    return without_data(array) if requires_grad else array


def _new(recorder: Recorder, shape: Any, dtype: Any) -> Array:
    array = empty(shape, dtype)
    recorder.copy_in(array.nbytes)
    return array


def _folded(
    call: Callable[[], Any], settings: RunSettings, recorders: dict[int, WorkRecorder]
) -> tuple[list[Outcome], Sequence[int]]:
    """Run representatives until no more are needed; return their outcomes, and the representative of every rank."""
    spec = settings.cluster
    run = first_guess(spec)
    for _ in range(MOST_ROUNDS):
        segment = FoldedSegment(spec.world_size, sorted(run))

        def grouped(segment: FoldedSegment = segment) -> Any:
            result = call()
            segment.groups |= dict.fromkeys(group.ranks for group in current().groups)
            return result

        program = partial(_dry, grouped, recorders)
        outcomes = run_threads(program, settings, medium=FOLDED, segment=segment, recorder_type=WorkRecorder)
        more = continued(segment.needed - run, run, spec.world_size)
        if not more:
            if any(outcome.report is not None for outcome in outcomes):
                return outcomes, []
            events, _ = join([outcome.recorded for outcome in outcomes])
            more = wanted(segment, alike(events, run)) - run
            if not more:
                return outcomes, assigned(segment)
        run |= more
        if len(run) > MOST_RANKS:
            break
    if spec.world_size <= MOST_RANKS:
        return _whole(call, settings, recorders)
    raise ClusterError(
        f"dry_run: {len(run)} of the {spec.world_size} ranks have programs of their own, and there may be more; only "
        f"ranks with the same program are run once for all. Use a world of at most {MOST_RANKS} ranks; fold=False runs "
        "any number, one thread each.",
        world_size=spec.world_size,
        most=MOST_RANKS,
    )
