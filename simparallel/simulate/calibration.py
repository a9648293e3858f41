"""The calibration of this host: measured times become a `ClusterSpec`, with what is known about its errors.

`calibrate` measures (`measuring`) and writes; all fits are functions of the measured times alone. Errors are logs of
measured over predicted time, in cases that the fit has not seen: an operation without its own shape, a program without
its own operations, a collective of a size between the sizes of the fit.
"""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from simparallel.base import blas
from simparallel.base.system import memory_size_bytes, usable_cores
from simparallel.hardware.cluster import ClusterSpec, Curve, DeviceSpec, LinkSpec, Segment, this_host_file
from simparallel.hardware.device import Measured, OpCost
from simparallel.runtime.launcher.launch import Cluster
from simparallel.simulate import measuring
from simparallel.simulate.measuring import OPS, PROGRAMS, Sample

RANKS = (2, 4, 8)
# (op, number of ranks) -> size of the vector [bytes] -> time [s].
Collectives = dict[tuple[str, int], dict[int, float]]
# A relative error from which on a time counts as an outlier: its weight falls with the error (Huber 1964).
_OUTLIER = 0.1
_ITERATIONS = 12
# Rounds, and seconds of each measurement.
_QUICK, _WHOLE = (1, 0.3), (5, 0.4)
# Errors below this are noise: they do not pay for another segment.
_NOISE = 0.03
_MOST_SEGMENTS = 4

# --- fits ----------------------------------------------------------------------------------------


def _nonnegative(columns: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return coefficients of 0 or more with a small relative error, shape (columns,); outliers count less.

    Args:
        columns: shape (times, columns); few columns, because every subset of them is tried.
        times: shape (times,), above 0.
    """
    scale = np.maximum(columns.max(axis=0), 1e-300)
    columns, subsets = columns / scale, [*_subsets(columns.shape[1])]
    weights, best, expected = np.ones(len(times)), np.zeros(columns.shape[1]), times
    # The error of a time is its log; near the fit, that is the difference over the fitted time.
    for _ in range(_ITERATIONS):
        rows, targets = columns * (weights / expected)[:, None], times * weights / expected
        least = inf
        for chosen in subsets:
            found = np.linalg.lstsq(rows[:, chosen], targets, rcond=None)[0]
            error = float(np.sum((rows[:, chosen] @ found - targets) ** 2))
            if (found >= 0).all() and error < least * (1 - 1e-9):
                least, best = error, np.zeros(columns.shape[1])
                best[chosen] = found
        expected = np.maximum(columns @ best, times / 1e3)
        weights = np.sqrt(np.minimum(1, _OUTLIER / np.maximum(np.abs(np.log(expected / times)), 1e-12)))
    return best / scale


def _subsets(count: int) -> Iterator[list[int]]:
    for size in range(1, count + 1):
        yield from map(list, combinations(range(count), size))


def fit_op(samples: Iterable[Sample]) -> OpCost:
    """Fit the cost of an operation to samples of it: one or more, of any shapes."""
    by_shape: dict[tuple[int, int, int], list[float]] = {}
    for sample in samples:
        by_shape.setdefault((sample.flops, sample.size_bytes, sample.results), []).append(sample.time_s)
    times = {shape: median(found) for shape, found in sorted(by_shape.items())}
    columns = np.array([(1.0, *shape) for shape in times])
    launch_s, s_per_flop, s_per_byte, s_per_result = map(float, _nonnegative(columns, np.array(list(times.values()))))
    plain = OpCost(launch_s, s_per_flop, s_per_byte, s_per_result)
    shapes = (Measured(*shape, time_s / plain.plain_s(*shape)) for shape, time_s in times.items())
    return replace(plain, shapes=tuple(shapes))


def fit_ops(samples: Iterable[Sample]) -> dict[str, OpCost]:
    """Fit the cost of each operation, by name."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    return {name: fit_op(found) for name, found in sorted(by_name.items())}


def fit_link(times: Mapping[int, float]) -> LinkSpec:
    """Fit latency and bandwidth to size [bytes] -> time [s], in as many segments of sizes as pay for themselves.

    The segments are those with the smallest Bayesian information criterion (Schwarz 1978); each has two sizes or more.
    """
    sizes = sorted(times)
    count = len(sizes)
    fits = {
        (i, j): _fit_line(sizes[i:j], [times[size] for size in sizes[i:j]])
        for i, j in combinations(range(count + 1), 2)
        if j - i > 1 or count == 1
    }
    # Divisions of the first j sizes into k segments: (error, starts).
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {(0, 0): (0.0, ())}
    for k, j in product(range(1, _MOST_SEGMENTS + 1), range(1, count + 1)):
        found = [
            (best[k - 1, i][0] + fits[i, j][2], (*best[k - 1, i][1], i))
            for i in range(j)
            if (k - 1, i) in best and (i, j) in fits
        ]
        if found:
            best[k, j] = min(found)
    criteria = [
        (count * log(best[k, count][0] / count + _NOISE**2) + 3 * k * log(count + 1), k)
        for k in range(1, _MOST_SEGMENTS + 1)
        if (k, count) in best
    ]
    starts = best[min(criteria)[1], count][1]
    segments = []
    for i, j in pairwise((*starts, count)):
        latency_s, seconds_per_byte, _ = fits[i, j]
        # Sizes between two segments belong to the nearer one, in log scale.
        begin = round((sizes[i - 1] * sizes[i]) ** 0.5) if i else 0
        segments.append(Segment(begin, latency_s, 1 / max(seconds_per_byte, 1e-23)))
    return LinkSpec(
        *segments[0][1:],
        segments=tuple(segments[1:]),
        sources=dict.fromkeys(("latency_s", "bandwidth_bytes_per_s", "segments"), "measured"),
    )


def _fit_line(sizes: Sequence[int], times: Sequence[float]) -> tuple[float, float, float]:
    """Return latency [s], seconds per byte, and the sum of the squared logs of errors."""
    columns = np.array([(1.0, size) for size in sizes])
    latency_s, seconds = _nonnegative(columns, np.array(times))
    errors = np.log(columns @ (latency_s, seconds) / times)
    return float(latency_s), float(seconds), float(errors @ errors)


def fit_sharing(slowdowns: Mapping[int, float]) -> Curve:
    """Fit the fraction of its speed that a rank has, to number of ranks -> slowdown; more ranks are never faster."""
    points, least = [(1.0, 1.0)], 1.0
    for count, slowdown in sorted(slowdowns.items()):
        least = min(least, 1 / slowdown)
        points.append((float(count), least))
    most, fraction = points[-1]
    # All further ranks share the same cores.
    return Curve((*points, (most * 1e6, fraction / 1e6)))


# --- errors --------------------------------------------------------------------------------------


def quantiles(errors: Iterable[float]) -> dict[str, float]:
    """Return p10, p50 and p90 of logs of measured over predicted time; zeros for none."""
    found = list(errors) or [0.0]
    return {f"p{part}": float(np.quantile(found, part / 100)) for part in (10, 50, 90)}


def op_errors(samples: Iterable[Sample], costs: Mapping[str, OpCost]) -> list[float]:
    """Return the error of each shape of each operation, without the shape's own correction."""
    times: dict[tuple[Any, ...], list[float]] = {}
    for sample in samples:
        times.setdefault(sample[:4], []).append(sample.time_s)
    errors = []
    for (name, *shape), found in times.items():
        others = tuple(each for each in costs[name].shapes if list(each[:3]) != shape)
        if others:
            errors.append(log(median(found) / replace(costs[name], shapes=others).time_s(*shape)))
    return errors


def program_errors(programs: Sequence[Sequence[Sample]]) -> list[float]:
    """Return the error of each program's step, predicted from all others; operations that only it has are left out."""
    errors = []
    for number, program in enumerate(programs):
        costs = fit_ops(sample for other, found in enumerate(programs) if other != number for sample in found)
        known = [sample for sample in program if sample.name in costs]
        predicted = sum(costs[sample.name].time_s(*sample[1:4]) for sample in known)
        if known:
            errors.append(log(sum(sample.time_s for sample in known) / predicted))
    return errors


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
    costs = fit_ops(samples)
    measured: dict[str, dict[int, LinkSpec]] = {}
    collective_errors = []
    for (op, count), times in collectives.items():
        sizes = sorted(times)
        held = sizes[2::3]
        blind = fit_link({size: times[size] for size in sizes if size not in held})
        collective_errors += [log(times[size] / blind.time_s(size)) for size in held]
        measured.setdefault(op, {})[count] = fit_link(times)
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
        fit_link(messages),
        name="this-host",
        sharing=fit_sharing(mean),
        measured=measured,
        calibration={
            "date": calibrated_at(),
            "machine": fingerprint(),
            "residuals": {
                "operation": quantiles(op_errors(samples, costs)),
                "program": quantiles(program_errors(programs)),
                "sharing": quantiles(log(each / mean[count]) for count, found in slowdowns.items() for each in found),
                "collective": quantiles(collective_errors),
            },
        },
    )


def calibrated_at() -> str:
    """Return the present time, for a calibration."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def fingerprint() -> dict[str, Any]:
    """Return the facts on which the times of this machine depend."""
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": model,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": " ".join(blas.core()),
    }


# --- measuring -----------------------------------------------------------------------------------


def calibrate(
    out: str | os.PathLike[str] | None = None, *, quick: bool = False, tell: Callable[[str], object] = print
) -> ClusterSpec:
    """Measure this host, and write the description that `cluster="this-host"` then names.

    Each rank computes in one BLAS thread. All is measured in several rounds, of which the quietest counts: other
    programs on the machine can only slow it down.

    Args:
        out: the file; None for that of "this-host" (`this_host_file`).
        quick: one round of shorter measurements, in less than a minute; otherwise about five.
        tell: called with lines about the progress.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(this_host_file() if out is None else out)
    path.parent.mkdir(parents=True, exist_ok=True)
    rounds, seconds = _QUICK if quick else _WHOLE
    sizes = [*(8 << shift for shift in range(0, 23, 6 if quick else 2)), 64 << 20]
    samples: list[list[list[Sample]]] = [[] for _ in PROGRAMS]
    times: list[dict[Key, float]] = []
    with ExitStack() as stack:
        clusters = {count: stack.enter_context(Cluster(count, blas_threads=1)) for count in (1, *RANKS)}
        for number in range(rounds):
            told = f"round {number + 1} of {rounds}"
            tell(f"{told}: operations of {len(PROGRAMS)} programs")
            for program, found in zip(PROGRAMS, samples, strict=True):
                found.append(clusters[1].run(_operations, program, seconds)[0])
            tell(f"{told}: shared cores, {len(OPS)} collectives of {len(sizes)} sizes")
            times.append(_times(clusters, sizes, seconds))
    programs = [min(found, key=lambda step: sum(sample.time_s for sample in step)) for found in samples]
    spec = describe_host(programs, *summed_up(times))
    spec.save(path)
    tell(table(spec))
    tell(f"written: {path}")
    return spec


# Large and small steps: of linear layers, of convolutions, of attention.
_SHARED = tuple(PROGRAMS[number] for number in (2, 9, 12, 20))
# Short steps: the wait for late ranks is the difference of two step times.
_JOINED = tuple(PROGRAMS[number] for number in (0, 7, 8, 2))

# A measurement: its kind, the number of ranks, and a program, or an operation and a size.
Key = tuple[Any, ...]


def _times(clusters: Mapping[int, Cluster], sizes: Sequence[int], seconds: float) -> dict[Key, float]:
    """Measure once: programs on ranks that share the cores, collectives, messages."""
    times: dict[Key, float] = {}
    for count, cluster in clusters.items():
        for i, program in enumerate(_SHARED):
            times["shared", count, i] = float(np.mean(list(cluster.run(measuring.shared_step_s, program, seconds))))
        if count == 1:
            continue
        for i, program in enumerate(_JOINED):
            each = list(cluster.run(measuring.free_and_joined_s, program, seconds))
            times["free", count, i], times["joined", count, i] = map(max, zip(*each, strict=True))
        for op in OPS:
            asked = [0] if op == "barrier" else sizes
            # The slowest rank.
            slowest = map(max, zip(*cluster.run(_collectives, op, asked, seconds / 8), strict=True))
            times |= {("collective", count, op, size): time_s for size, time_s in zip(asked, slowest, strict=True)}
    found = clusters[min(RANKS)].run(_messages, sizes, seconds / 8)[0]
    return times | {("message", 2, size): time_s for size, time_s in zip(sizes, found, strict=True)}


def summed_up(rounds: Sequence[Mapping[Key, float]]) -> tuple[dict[int, list[float]], Collectives, dict[int, float]]:
    """Return slowdowns, collectives and messages for `describe_host` from the times of each round.

    Of each time the shortest counts. The wait for ranks that still compute is added to collectives, because calls in a
    row do not show it.
    """
    times = {key: min(each[key] for each in rounds) for key in rounds[0]}
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


def _operations(program: measuring.Program, seconds: float) -> list[Sample]:
    return measuring.op_samples(lambda: measuring.repeat(measuring.training(program), seconds))


def _collectives(op: str, sizes: Sequence[int], seconds: float) -> list[float]:
    return [measuring.collective_s(op, size, seconds) for size in sizes]


def _messages(sizes: Sequence[int], seconds: float) -> list[float]:
    return [measuring.message_s(size, seconds) for size in sizes]


def table(spec: ClusterSpec) -> str:
    """Return the calibration as text: what was measured, and the quantiles of its errors."""
    told = spec.calibration
    shapes = sum(len(cost.shapes) for cost in spec.device.op_costs.values())
    sharing = ", ".join(f"{1 / spec.sharing(count):.2f} x on {count}" for count in RANKS) if spec.sharing else "-"
    lines = [
        f"{spec.name}, {told['date']}: " + ", ".join(f"{key} {value}" for key, value in told["machine"].items()),
        f"{len(spec.device.op_costs)} operations in {shapes} shapes; time of a rank that shares the cores: {sharing}",
        *residual_lines(spec),
    ]
    return "\n".join(lines)


def residual_lines(spec: ClusterSpec) -> list[str]:
    """Return the quantiles of a calibration's errors as lines; errors of nothing are left out."""
    return ["measured / predicted - 1, for data left out of the fit:"] + [
        f"  {kind:12}" + "  ".join(f"{name} {exp(value) - 1:+7.1%}" for name, value in each.items())
        for kind, each in spec.calibration["residuals"].items()
        if any(each.values())
    ]
