"""Fits of measured times, their errors, and the facts on which times depend, for calibrations of hosts and GPUs.

An error is the log of measured over predicted time. Each case is predicted without its own measurement: a shape of an
operation without the correction for that shape, a program from the operations of the other programs, a collective of
one size from the sizes around it.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import exp, inf, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from simparallel.base import blas
from simparallel.base.system import usable_cores
from simparallel.machine.cluster import ClusterSpec, Curve, LinkSpec, Segment
from simparallel.machine.device import Measured, OpCost
from simparallel.predict.measuring import Sample

# A relative error from which on a time counts as an outlier: its weight falls with the error (Huber 1964).
_OUTLIER = 0.1
_ITERATIONS = 12
# Errors below this are noise, and do not justify another segment.
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
    columns, numbers = columns / scale, range(columns.shape[1])
    subsets = [list(chosen) for size in range(1, len(numbers) + 1) for chosen in combinations(numbers, size)]
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
    """Fit latency and bandwidth to size [bytes] -> time [s], in segments of sizes.

    The segments minimise the Bayesian information criterion (Schwarz 1978); each has two sizes or more.
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


# --- facts and texts ---------------------------------------------------------------------------


def facts(machine: dict[str, Any], **errors: Iterable[float]) -> dict[str, Any]:
    """Return what is known about a calibration: its date, now, the machine, and the quantiles of each kind of error."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    residuals = {kind: quantiles(found) for kind, found in errors.items()}
    return {"date": date, "machine": machine, "residuals": residuals}


def fingerprint() -> dict[str, Any]:
    """Return the facts on which the times of this machine depend."""
    model = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": model,
        "cores": usable_cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "blas": " ".join(blas.core()),
    }


def residual_lines(spec: ClusterSpec) -> list[str]:
    """Return the quantiles of a calibration's errors as lines; errors of nothing are left out."""
    return ["measured / predicted - 1, for data left out of the fit:"] + [
        f"  {kind:12}" + "  ".join(f"{name} {exp(value) - 1:+7.1%}" for name, value in each.items())
        for kind, each in spec.calibration["residuals"].items()
        if any(each.values())
    ]
