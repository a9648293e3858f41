"""The calibration of this host: measured times become a `ClusterSpec`, with what is known about its errors.

`calibrate` measures (`measuring`) and writes; all fits (`fitting`) are functions of the measured times alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from math import exp, log
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from simparallel.backend import ARRAYS
from simparallel.base.system import memory_size_bytes
from simparallel.base.units import format_seconds
from simparallel.errors import InputError
from simparallel.machine.cluster import ClusterSpec, DeviceSpec, LinkSpec, this_gpu_file, this_host_file
from simparallel.machine.presets import THIS_GPU
from simparallel.predict import fitting, measuring
from simparallel.predict.measuring import OPS, PROGRAMS, Sample
from simparallel.runtime.launcher.launch import Cluster

T = TypeVar("T")
RANKS = (2, 4, 8)
# (op, number of ranks) -> size of the vector [bytes] -> time [s].
Collectives = dict[tuple[str, int], dict[int, float]]
# Rounds, seconds of each measurement, and the limit of all [s].
_QUICK, _WHOLE = (1, 0.3, 50.0), (5, 0.4, 270.0)

# --- the description -----------------------------------------------------------------------------


def describe_host(
    programs: Sequence[Sequence[Sample]],
    slowdowns: Mapping[int, Sequence[float]],
    collectives: Collectives,
    messages: Mapping[int, float],
) -> ClusterSpec:
    """Return the description of this host that fits its measured times.

    Args:
        programs: the operations of a step of each program.
        slowdowns: number of ranks -> how much slower each program is on as many ranks at once.
        collectives: (op, number of ranks) -> size of the vector [bytes] -> time [s].
        messages: size [bytes] -> time [s].
    """
    samples = [sample for program in programs for sample in program]
    costs = fitting.fit_ops(samples)
    measured: dict[str, dict[int, LinkSpec]] = {}
    collective_errors = []
    for (op, count), times in collectives.items():
        sizes = sorted(times)
        held = sizes[2::3]
        blind = fitting.fit_link({size: times[size] for size in sizes if size not in held})
        collective_errors += [log(times[size] / blind.time_s(size)) for size in held]
        measured.setdefault(op, {})[count] = fitting.fit_link(times)
    mean = {count: exp(float(np.mean(np.log(found)))) for count, found in slowdowns.items()}
    large = [sample for sample in samples if sample.size_bytes > 1 << 20]
    device = DeviceSpec(
        "this-host",
        # The rate of operations that were not measured, and the base of utilisations.
        {4: max(1.0, max(sample.flops / sample.time_s for sample in samples))},
        max(1.0, median(sample.size_bytes / sample.time_s for sample in large or samples)),
        memory_size_bytes(),
        median(cost.launch_s for cost in costs.values()),
        op_costs=costs,
        sources=dict.fromkeys(
            ("peak_flops_per_s", "memory_bandwidth_bytes_per_s", "launch_s", "op_costs", "memory_bytes"), "measured"
        ),
    )
    return ClusterSpec(
        1,
        device,
        fitting.fit_link(messages),
        name="this-host",
        sharing=fitting.fit_sharing(mean),
        measured=measured,
        calibration=fitting.facts(
            fitting.fingerprint(),
            operation=fitting.op_errors(samples, costs),
            program=fitting.program_errors(programs),
            sharing=(log(each / mean[count]) for count, found in slowdowns.items() for each in found),
            collective=collective_errors,
        ),
    )


# --- measuring -----------------------------------------------------------------------------------


def calibrate(
    out: str | os.PathLike[str] | None = None,
    *,
    quick: bool = False,
    array: str = "numpy",
    tell: Callable[[str], object] = print,
) -> ClusterSpec:
    """Measure this host, and write the description that `cluster="this-host"` then names; or its GPU: "this-gpu".

    Each rank computes in one BLAS thread. Everything is measured in several rounds, and the shortest time counts: other
    programs on the machine can only slow a measurement down. The time limit is printed first; on a slow machine the
    measurements are shorter and fewer, and the last lines say which.

    Args:
        out: the file; None for the file of "this-host" (`this_host_file`), or of "this-gpu".
        quick: one round of shorter measurements, within a minute; otherwise within five. Not for a GPU.
        array: "cupy" measures the first GPU on one rank, see `gpu_calibration.measured_gpu`.
        tell: called with lines about the progress.

    Raises:
        InputError: an unknown `array`, no GPU that CuPy can use, `quick` for a GPU, or a machine that is too slow.
        OSError: the file cannot be written.
    """
    if array not in ARRAYS:
        raise InputError(f"calibrate: array={array!r} is not one of {', '.join(ARRAYS)}.")
    file, measure = this_host_file(), partial(_measured_host, quick)
    if array == "cupy":
        if quick:
            raise InputError("calibrate: --quick is for the host; the measurements of a GPU are short. Leave it out.")
        # A calibration of the host needs no GPU.
        from simparallel.predict.gpu_calibration import measurement_of_gpu

        file, measure = this_gpu_file(), measurement_of_gpu()
    path = Path(file if out is None else out)
    path.parent.mkdir(parents=True, exist_ok=True)
    spec = measure(tell)
    spec.save(path)
    tell(table(spec))
    tell(f"written: {path}")
    return spec


def _measured_host(quick: bool, tell: Callable[[str], object]) -> ClusterSpec:
    """Measure this host, and return its description."""
    rounds, seconds, limit_s = _QUICK if quick else _WHOLE
    sizes = [*(8 << shift for shift in range(0, 23, 6 if quick else 2)), 64 << 20]
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(Cluster(count, blas_threads=1)) for count in (1, *RANKS)}
        steps: dict[str, Callable[[float], Any]] = {
            f"program {i}": partial(_operations, clusters[1], each) for i, each in enumerate(PROGRAMS, 1)
        }
        found = measured(steps | _times(clusters, sizes), rounds, seconds, limit_s, tell)
    programs = [min(found.pop(name), key=lambda step: sum(sample.time_s for sample in step)) for name in steps]
    return describe_host(programs, *summed_up([times for each in found.values() for times in each]))


def measured(
    measurements: Mapping[str, Callable[[float], T]],
    rounds: int,
    seconds: float,
    limit_s: float,
    tell: Callable[[str], object],
    clock_s: Callable[[], float] = time.monotonic,
) -> dict[str, list[T]]:
    """Run measurements in rounds, within a limit of time: on a slow machine they are shorter, and then fewer.

    Args:
        measurements: name -> function of the seconds that it should measure for, and may exceed.
        rounds: number of rounds.
        seconds: of each measurement, if there is time.
        limit_s: of all measurements.
        tell: called with lines about the progress.
        clock_s: the time.

    Returns:
        Name -> the result of each round; in the order of the measurements.

    Raises:
        InputError: not even one round is possible.
    """
    began_s, number = clock_s(), len(measurements)
    results: dict[str, list[T]] = {name: [] for name in measurements}
    took_s: dict[str, float] = {}
    tell(f"{number} measurements in {rounds} round{'s' * (rounds > 1)}: at most {format_seconds(limit_s)}")
    for done in range(rounds):
        for name, measure in measurements.items():
            start_s = clock_s()
            left_s = began_s + limit_s - start_s
            share = 1.0
            if done == 0 and took_s:
                # All others of the first round have to follow, at the pace so far.
                share = min(1.0, left_s / (number - len(took_s)) / (sum(took_s.values()) / len(took_s)))
            elif left_s < 1.5 * took_s.get(name, 0.0):
                continue
            if left_s <= 0:
                raise InputError(
                    f"calibrate: {len(took_s)} of {number} measurements took {format_seconds(limit_s)}, the limit of "
                    "all: the machine is too slow, or does other work. Nothing was written; try again when it is idle."
                )
            results[name].append(measure(seconds * share))
            took_s[name] = clock_s() - start_s
        tell(f"round {done + 1} of {rounds} ends after {format_seconds(clock_s() - began_s)}")
    for count in range(1, rounds):
        names = [name for name, found in results.items() if len(found) == count]
        if names:
            shown = names if len(names) < 9 else [f"{len(names)} from {names[0]} to {names[-1]}"]
            tell(f"{count} of {rounds} rounds, as time was short: {', '.join(shown)}")
    return results


# Large and small steps: of linear layers, of convolutions, of attention.
_SHARED = tuple(PROGRAMS[number] for number in (2, 9, 12, 20))
# Short steps: the wait for late ranks is the difference of two step times.
_JOINED = tuple(PROGRAMS[number] for number in (0, 7, 8, 2))

# A measurement: its kind, the number of ranks, and a program, or an operation and a size.
Key = tuple[Any, ...]


def _times(clusters: Mapping[int, Cluster], sizes: Sequence[int]) -> dict[str, Callable[[float], dict[Key, float]]]:
    """Return measurements by name: programs on ranks that share the cores, collectives, messages."""

    found: dict[str, Callable[[float], dict[Key, float]]] = {}

    def add(name: str, count: int, keys: list[Key], over: Callable[..., float], *call: Any) -> None:
        found[f"{name} on {count} rank{'s' * (count > 1)}"] = partial(_keyed, clusters[count], keys, over, *call)

    for count in clusters:
        for i, program in enumerate(_SHARED):
            add(f"shared cores {i}", count, [("shared", count, i)], np.mean, _shared, program)
        if count == 1:
            continue
        for i, program in enumerate(_JOINED):
            keys = [("free", count, i), ("joined", count, i)]
            add(f"late ranks {i}", count, keys, max, measuring.free_and_joined_s, program)
        for op in OPS:
            asked = [0] if op == "barrier" else sizes
            # The slowest rank.
            add(op, count, [("collective", count, op, size) for size in asked], max, _collectives, op, asked)
    add("messages", min(RANKS), [("message", 2, size) for size in sizes], itemgetter(0), _messages, sizes)
    return found


def _keyed(cluster: Cluster, keys: list[Key], over: Callable[..., float], *call: Any) -> dict[Key, float]:
    """Return each key with its time, over all ranks, of a call that returns a time for each."""
    each = zip(*cluster.run(*call), strict=True)
    return {key: float(over(times)) for key, times in zip(keys, each, strict=True)}


def summed_up(found: Iterable[Mapping[Key, float]]) -> tuple[dict[int, list[float]], Collectives, dict[int, float]]:
    """Return slowdowns, collectives and messages for `describe_host` from the times of all measurements.

    Of all rounds the shortest time counts. The wait for ranks that still compute is added to collectives, because
    calls in a row do not show it.
    """
    times: dict[Key, float] = {}
    for each in found:
        times |= {key: min(time_s, times.get(key, time_s)) for key, time_s in each.items()}
    slowdowns: dict[int, list[float]] = {}
    late: dict[int, list[float]] = {}
    collectives: Collectives = {}
    messages: dict[int, float] = {}
    for (kind, count, *rest), time_s in times.items():
        if kind == "shared" and count > 1:
            slowdowns.setdefault(count, []).append(max(1.0, time_s / times["shared", 1, *rest]))
        elif kind == "joined":
            late.setdefault(count, []).append(time_s - times["free", count, *rest])
        elif kind == "message":
            messages[rest[0]] = time_s
    for (kind, count, *rest), time_s in times.items():
        if kind == "collective":
            op, size = rest
            late_s = max(0.0, float(np.mean(late[count])) - times["collective", count, "barrier", 0])
            collectives.setdefault((op, count), {})[size] = time_s + late_s
    return slowdowns, collectives, messages


def _operations(cluster: Cluster, program: measuring.Workload, seconds: float) -> list[Sample]:
    return cluster.run(measuring.steps_of, program, seconds)[0]


def _shared(program: measuring.Workload, seconds: float) -> list[float]:
    return [measuring.shared_step_s(program, seconds)]


def _collectives(op: str, sizes: Sequence[int], seconds: float) -> list[float]:
    return [measuring.collective_s(op, size, seconds / 8) for size in sizes]


def _messages(sizes: Sequence[int], seconds: float) -> list[float]:
    return [measuring.message_s(size, seconds / 8) for size in sizes]


def table(spec: ClusterSpec) -> str:
    """Return the calibration as text: what was measured, and the quantiles of its errors."""
    known, device = spec.calibration, spec.device
    shapes = sum(len(cost.shapes) for cost in device.op_costs.values())
    sharing = ", ".join(f"{1 / spec.sharing(count):.2f} x on {count}" for count in RANKS) if spec.sharing else "-"
    ranks = f"; time of a rank that shares the cores: {sharing}"
    if spec.name == THIS_GPU:
        ranks = f", on one rank; the interpreter waits in: {', '.join(device.host_waits) or 'none'}"
    lines = [
        f"{spec.name}, {known['date']}: " + ", ".join(f"{key} {value}" for key, value in known["machine"].items()),
        f"{len(device.op_costs)} operations in {shapes} shapes{ranks}",
        *fitting.residual_lines(spec),
    ]
    return "\n".join(lines)
